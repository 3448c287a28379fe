"""What a person sees while something takes more than a moment; all of it on standard error."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def track(items: Iterable[Item], *, total: int | None = None, description: str) -> Iterator[Item]:
    """Yield the items behind a progress bar; without a terminal, one line at the end."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(file=sys.stderr)
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        yield from progress.track(items, total=total, description=description)


@contextlib.contextmanager
def status(description: str) -> Iterator[None]:
    """Show that work of unknown length goes on: a spinner; without a terminal, one line at its start.

    No progress bar may run inside it.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        print(f"{description} …", file=sys.stderr, flush=True)
        yield
        return
    with console.status(f"{escape(description)} …"):
        yield
