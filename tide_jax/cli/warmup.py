"""`tide-jax warmup`."""

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from tide_jax.cli import output
from tide_jax.cli.options import Directory, Dtype, Json, MeshSizes, load_model
from tide_jax.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from tide_jax.decode import StepTimes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warmup:
    """Measure what passes of 1, 4 and 8 columns cost on this machine, and keep it beside the model.

    `--verify auto` chooses the width of every round from these times. They hold for this device, this dtype and these
    batch sizes; between batch sizes they are interpolated.

    $ tide-jax warmup smollm2
    $ tide-jax warmup smollm2 --batches 1,4,16 --json
    """

    model: Directory
    batches: Annotated[
        str | None, arg(metavar="N,N,…", help="Batch sizes to measure at. None: 1,8, or multiples of data in --mesh.")
    ] = None
    dtype: Dtype = "auto"
    mesh: MeshSizes = None
    json: Json = False

    def run(self) -> None:
        """Measure, store, and print."""
        try:
            batches = self.batches and [int(batch) for batch in self.batches.split(",")]
        except ValueError as error:
            raise InputError(f"--batches {self.batches!r} is not a list of batch sizes. Write 1,8.") from error
        model = load_model(self.model, self.dtype, exits=False, mesh=self.mesh)
        if not os.access(self.model, os.W_OK):
            raise InputError(f"{self.model} is not writable, and step times are stored there. Change its permissions.")

        from tide_jax.decode import warmup
        from tide_jax.decode.control import FILE_NAME, device_name
        from tide_jax.progress import track

        tables = warmup(model, batches=batches, progress=functools.partial(track, description="batch sizes"))
        if self.json:
            output.emit(
                {
                    "device": device_name(model.mesh),
                    "dtype": model.dtype.name,
                    "seconds": {batch: dataclasses.asdict(times) for batch, times in tables.items()},
                }
            )
            return
        output.show(table(tables, model.config.num_layers, f"{device_name(model.mesh)}, {model.dtype.name}"))
        output.note(f"stored in {self.model / FILE_NAME}")


def table(tables: "dict[int, StepTimes]", num_layers: int, title: str) -> "Table":
    """Milliseconds of whole passes, and how they compare with one column."""
    from rich.table import Table

    from tide_jax.exits.remainders import WIDTHS

    rows = Table(title=title, title_justify="left")
    rows.add_column("batch", justify="right")
    for width in WIDTHS:
        rows.add_column(f"{width} column{'s' * (width > 1)}", justify="right")
    for batch, times in sorted(tables.items()):
        seconds = [num_layers * layer + head for layer, head in zip(times.layer, times.head, strict=True)]
        rows.add_row(str(batch), *(f"{1e3 * one:.1f} ms ({one / seconds[0]:.2f}×)" for one in seconds))
    return rows
