"""`tide-jax export`."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from tide_jax.cli import output
from tide_jax.cli.options import Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write a converted model as a Hugging Face directory that `transformers` loads.

    $ tide-jax export smollm2 smollm2-hf
    """

    source: Positional[Annotated[Path, arg(metavar="DST", help="What `tide-jax convert` made.")]]
    target: Positional[Annotated[Path, arg(metavar="OUT", help="Directory to make.")]]
    json: Json = False

    def run(self) -> None:
        """Export, and say what was written."""
        from tide_jax.convert import export

        facts = export(self.source, self.target)
        if self.json:
            output.emit(facts)
        else:
            files = ", ".join(facts["files"])
            output.show(
                f"{facts['path']}: {facts['tensors']} tensors in {facts['dtype']} ({files}), config, tokenizer."
            )
