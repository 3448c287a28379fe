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
    $ tide-jax convert Qwen2.5-0.5B qwen --dry-run
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
    dry_run: Annotated[bool, arg(help="Say which tensor would go where, and write nothing.")] = False
    json: Json = False

    def run(self) -> None:
        """Convert, and say what came of it."""
        from tide_jax.cli.inspect import described, words
        from tide_jax.convert import convert

        began = time.perf_counter()
        dtype = None if self.dtype == "auto" else self.dtype
        if self.dry_run:
            self._show_plan(dtype)
            return
        convert(self.source, self.target, dtype=dtype, overwrite=self.overwrite)
        facts = {**described(self.target), "seconds": round(time.perf_counter() - began, 2)}
        if self.json:
            output.emit(facts)
        else:
            output.show(words(facts))

    def _show_plan(self, dtype: str | None) -> None:
        """Every tensor, its parameters, shape and dtype."""
        from rich.table import Table

        from tide_jax.checkpoint import check_target
        from tide_jax.convert.conversion import make_plan

        check_target(self.target, overwrite=self.overwrite)
        plan = make_plan(self.source, dtype=dtype)
        rows = [
            {
                "tensor": plan.found[tensor.name],
                "shape": list(tensor.shape),
                "stored": plan.origin.dtypes[plan.found[tensor.name]],
                "part": tensor.part,
                "parameters": list(tensor.weight.paths),
            }
            for tensor in plan.placed.values()
        ]
        if self.json:
            output.emit({"config": plan.config.to_json(), "dtype": plan.dtype, "tensors": rows})
            return
        table = Table("tensor", "shape", "stored", "part", "parameters", box=None, pad_edge=False)
        for row in rows:
            shape, names = " × ".join(map(str, row["shape"])), ", ".join(row["parameters"])
            table.add_row(row["tensor"], shape, row["stored"], row["part"], names)
        output.show(table)
        output.show(f"{len(rows)} tensors would be written to {self.target} in {plan.dtype}; nothing was.")
