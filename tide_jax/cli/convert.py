"""`tide-jax convert`."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from tide_jax.cli import output
from tide_jax.cli.options import Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert a Hugging Face checkpoint or a GGUF file into a directory for the other verbs.

    The directory appears under its name only when it is whole.

    $ tide-jax convert SmolLM2-135M-Instruct.gguf smollm2
    """

    source: Positional[
        Annotated[
            Path,
            arg(
                metavar="SRC",
                help="Directory with config.json, safetensors and tokenizer.json, or a .gguf file.",
            ),
        ]
    ]
    target: Positional[Annotated[Path, arg(metavar="DST", help="Directory to make.")]]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        arg(help="Of the stored weights. auto: as in the source; float32 for a quantised GGUF file."),
    ] = "auto"
    overwrite: Annotated[bool, arg(help="Replace a converted model of that name.")] = False
    json: Json = False

    def run(self) -> None:
        """Convert, and say what came of it."""
        from tide_jax.cli.inspect import described, words
        from tide_jax.convert import convert

        began = time.perf_counter()
        dtype = None if self.dtype == "auto" else self.dtype
        convert(self.source, self.target, dtype=dtype, overwrite=self.overwrite)
        facts = {**described(self.target), "seconds": round(time.perf_counter() - began, 2)}
        if self.json:
            output.emit(facts)
        else:
            output.show(words(facts))
