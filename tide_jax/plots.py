"""Pictures of what a run did."""

import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tide_jax.errors import InputError

_DPI = 100
_WIDTH = 1200  # pixels
_MARGIN = 28
_TEXT_SIZE = 12.5  # points
_CELL = _TEXT_SIZE / 72 * _DPI * 0.602  # advance of DejaVu Sans Mono, which matplotlib ships
_LINE = 28
_LEGEND = 5  # entries in a row of the legend


def exit_depths(tokens: Sequence[str], depths: Sequence[int], *, num_layers: int, path: Path, title: str) -> None:
    """Draw one answer as text, each token on the colour of the depth it ran, as a PNG 1200 pixels wide.

    Args:
        tokens: the text of each token, as `Tokenizer.token_text` gives it (a space is ␣).
        depths: layers run by each.
        num_layers: depth of the model.
        path: the file to write.
        title: says what was run.

    Raises:
        InputError: no token, lists of different lengths, a depth that does not exist, or no matplotlib.

    Example:
        >>> exit_depths(["The", "␣sky"], [16, 30], num_layers=30, path=Path("depths.png"), title="router")
    """
    if not tokens or len(tokens) != len(depths):
        raise InputError(f"a picture needs tokens and a depth for each; got {len(tokens)} and {len(depths)}.")
    if wrong := [depth for depth in depths if not 1 <= depth <= num_layers]:
        raise InputError(f"depth {wrong[0]} is not between 1 and the model's {num_layers} layers.")
    try:
        from matplotlib import colormaps, font_manager
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError("Pictures need matplotlib: pip install 'tide-jax[plot]'.") from error

    mono, sans = (
        font_manager.FontProperties(fname=str(Path(font_manager.findfont(name))))
        for name in ("DejaVu Sans Mono", "DejaVu Sans")
    )
    known = frozenset(map(chr, font_manager.get_font(mono.get_file()).get_charmap()))
    counts = Counter(depths)
    colours = _colours(sorted(counts), num_layers, colormaps["viridis"])
    lines = _wrapped([_visible(token, known) for token in tokens], depths)
    head = 92 + 26 * -(-len(counts) // _LEGEND)
    height = head + _LINE * len(lines) + _MARGIN
    figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    axes.axis("off")

    def write(x, y, text, colour="#1a1a1a", **style):
        axes.text(x, y, text, color=colour, va="center_baseline", parse_math=False, **style)

    shown = "".join(c if c in known else "□" for c in title)
    write(_MARGIN, 26, shown, fontproperties=sans, fontsize=15)
    mean = sum(depths) / len(depths)
    summary = f"{len(tokens)} tokens · {mean:.1f} of {num_layers} layers on average"
    write(_WIDTH - _MARGIN, 26, summary, "#555555", fontproperties=sans, fontsize=11.5, ha="right")
    _histogram(axes, write, counts, colours, sans)
    for row, line in enumerate(lines):
        top = head + _LINE * row
        for column, piece, depth in line:
            left = _MARGIN + column * _CELL
            axes.add_patch(_box(left, top, len(piece) * _CELL - 1.2, _LINE - 4, colours[depth]))
            write(
                left,
                top + _LINE / 2 - 2,
                piece,
                _ink(colours[depth]),
                fontproperties=mono,
                fontsize=_TEXT_SIZE,
            )
    FigureCanvasAgg(figure).print_figure(path, format="png", dpi=_DPI)


def _colours(depths: Sequence[int], num_layers: int, colormap) -> dict[int, tuple[float, ...]]:
    """A colour per depth that occurs, evenly spaced in order; the full depth is the lightest."""
    steps = len(depths) - 1 + (depths[-1] != num_layers)
    return {depth: colormap(0.1 + 0.86 * (index / steps if steps else 1.0)) for index, depth in enumerate(depths)}


def _ink(colour: tuple[float, ...]) -> str:
    """Text colour on this background: the one with the higher contrast (WCAG relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#111111" if luminance > 0.179 else "#ffffff"


def _visible(token: str, known: frozenset[str]) -> str:
    """The token as drawn: line ends are ↵, a token of spaces alone shows them, what has no glyph is □."""
    text = token.replace("␣", " ").replace("\r", "").replace("\\n", "\n")
    if not text.strip(" "):
        text = text.replace(" ", "␣")
    text = text.replace("\n", "↵").replace("\t", "⇥")
    return "".join(c if c in known and not unicodedata.category(c).startswith("C") else "□" for c in text) or "□"


def _wrapped(texts: Sequence[str], depths: Sequence[int]) -> list[list[tuple[int, str, int]]]:
    """Lines of (column, text, depth): a new one where a token does not fit, and after every line end."""
    width = int((_WIDTH - 2 * _MARGIN) / _CELL)
    lines: list[list[tuple[int, str, int]]] = [[]]
    column = 0
    for text, depth in zip(texts, depths, strict=True):
        for segment in re.findall("[^↵]*↵+|[^↵]+", text):
            for piece in textwrap.wrap(segment, width, drop_whitespace=False, break_on_hyphens=False):
                if column and column + len(piece) > width:
                    lines.append([])
                    column = 0
                lines[-1].append((column, piece, depth))
                column += len(piece)
            if segment.endswith("↵"):
                lines.append([])
                column = 0
    return [line for line in lines if line]


def _histogram(axes, write, counts: Counter, colours: dict[int, tuple[float, ...]], font) -> None:
    """One bar, cut in proportion to the tokens of each depth, with the legend below it."""
    total, left = sum(counts.values()), _MARGIN
    for depth in sorted(counts):
        width = (_WIDTH - 2 * _MARGIN) * counts[depth] / total
        axes.add_patch(_box(left, 48, max(width - 1, 1), 14, colours[depth]))
        left += width
    for index, depth in enumerate(sorted(counts)):
        row, column = divmod(index, _LEGEND)
        left, top = _MARGIN + column * (_WIDTH - 2 * _MARGIN) / _LEGEND, 75 + 26 * row
        axes.add_patch(_box(left, top, 16, 16, colours[depth]))
        legend = f"{depth} layers: {counts[depth]} ({100 * counts[depth] / total:.0f} %)"
        write(left + 24, top + 8, legend, fontproperties=font, fontsize=11)


def _box(left, top, width, height, colour):
    from matplotlib.patches import Rectangle

    return Rectangle((left, top), width, height, facecolor=colour, edgecolor="none", linewidth=0)
