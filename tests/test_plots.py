"""The picture is written, has its size, and says nothing on the side."""

import struct
import sys
import warnings

import pytest

from tide_jax.errors import InputError
from tide_jax.plots import _ink, _visible, _wrapped, exit_depths

TOKENS = [
    "The",
    "␣sky",
    "␣is",
    "␣$x^2$",
    "\\n",
    "\\n",
    "東京",
    "😀",
    "<0xE6>",
    "␣␣␣",
    "\t",
    "{",
    "\\",
    "мир",
    "\x1b",
    "",
]


def size(path) -> tuple[int, int]:
    """Width and height of a PNG in pixels."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


def draw(path, tokens, depths, **changes):
    options = {"num_layers": 30, "path": path, "title": "router $1 東"} | changes
    exit_depths(tokens, depths, **options)
    return size(path)


@pytest.mark.parametrize("depths", [[30], [16], [16, 24, 30], range(1, 31)])
def test_a_picture_of_any_text_draws_without_a_warning(tmp_path, depths, recwarn):
    tokens = (TOKENS * 16)[:200]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        width, height = draw(tmp_path / "out.png", tokens, [depths[i % len(depths)] for i in range(len(tokens))])
    assert width == 1200
    assert 300 < height < 2000
    assert not recwarn.list


def test_more_text_makes_a_higher_picture(tmp_path):
    _, short = draw(tmp_path / "short.png", ["word␣"] * 10, [30] * 10)
    _, long = draw(tmp_path / "long.png", ["word␣"] * 200, [30] * 200)
    assert long > short + 100


def test_what_cannot_be_seen_is_made_visible():
    known = frozenset("The sky□↵␣⇥\n")
    assert _visible("␣sky", known) == " sky"
    assert _visible("␣␣", known) == "␣␣"
    assert _visible("\\n", known) == _visible("\n", known) == "↵"
    assert _visible("\t", known) == "⇥"
    assert _visible("東", known) == _visible("\x1b", known) == _visible("", known) == "□"


def test_lines_end_where_the_text_says_so_and_where_the_page_does():
    lines = _wrapped(["ab", "c:↵", "  d", "↵", "x" * 300], [1, 2, 3, 4, 5])
    assert [(column, text) for line in lines[:2] for column, text, _ in line] == [
        (0, "ab"),
        (2, "c:↵"),
        (0, "  d"),
        (3, "↵"),
    ]
    rest = [text for line in lines[2:] for _, text, _ in line]
    assert "".join(rest) == "x" * 300 and len(rest) == len(lines[2:]) > 1


def test_ink_contrasts_with_its_ground():
    assert _ink((1.0, 1.0, 0.8, 1.0)) == "#111111"
    assert _ink((0.2, 0.0, 0.3, 1.0)) == "#ffffff"


@pytest.mark.parametrize(
    ("tokens", "depths", "words"),
    [
        ([], [], "got 0 and 0"),
        (["a"], [1, 2], "got 1 and 2"),
        (["a"], [0], "depth 0"),
        (["a"], [31], "depth 31"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, tokens, depths, words):
    with pytest.raises(InputError, match=words):
        draw(tmp_path / "out.png", tokens, depths)


def test_a_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"tide-jax\[plot\]"):
        draw(tmp_path / "out.png", ["a"], [1])
