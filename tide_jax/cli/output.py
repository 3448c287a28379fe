"""What the verbs print: one JSON object or something for people, and errors as a paragraph."""

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tide_jax.decode import Drafts

Jsonable = object


def emit(data: Mapping[str, Jsonable]) -> None:
    """One JSON object on standard output. Numbers that JSON does not have (NaN, infinities) become null."""
    print(json.dumps(_finite(data), ensure_ascii=False, allow_nan=False))


def _finite(value: Jsonable) -> Jsonable:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(*renderables: object) -> None:
    """Rich tables or text on standard output, at the width of the terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, markup=False)
    with console.capture() as captured:  # rich would end the process itself when the reader has left
        for renderable in renderables:
            console.print(renderable)
    print(captured.get(), end="")


def note(text: str) -> None:
    """A line for people on standard error."""
    print(text, file=sys.stderr, flush=True)


def fail(message: str) -> None:
    """The error paragraph on standard error."""
    width = max(40, min(shutil.get_terminal_size().columns, 100))
    paragraph = textwrap.fill(f"error: {message}", width, break_long_words=False, break_on_hyphens=False)
    print(paragraph, file=sys.stderr, flush=True)


def shortened(text: str, width: int = 160) -> str:
    """The beginning of a text on one line, with an ellipsis where something is left out."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def histogram_text(histogram: Mapping[int, int]) -> str:
    """Tokens by depth in one line.

    Example:
        >>> histogram_text({16: 25, 30: 75})
        '16: 25 %, 30: 75 %'
    """
    total = sum(histogram.values()) or 1
    return ", ".join(f"{depth}: {count / total:.0%}".replace("%", " %") for depth, count in sorted(histogram.items()))


def drafts_text(drafts: "Drafts") -> str:
    """What drafting and settling did, in one line."""
    passes = sum(drafts.passes.values()) or 1
    shares = ", ".join(f"{width}: {count / passes:.0%}".replace("%", " %") for width, count in drafts.passes.items())
    said = ""
    if sum(drafts.proposed):
        said = (
            f"{sum(drafts.accepted)} of {sum(drafts.proposed)} drafted tokens accepted, {drafts.corrected} corrected; "
        )
    layers = (drafts.draft_layers + drafts.settle_layers) / max(drafts.tokens, 1)
    return (
        f"{said}{drafts.tokens_per_round:.2f} tokens a round, {layers:.1f} layers executed a token; "
        f"passes by columns: {shares}"
    )
