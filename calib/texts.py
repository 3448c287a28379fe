"""Where calibration text comes from. Nothing is ever substituted: what is asked for and not there is said."""

import dataclasses
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from tide_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Text:
    """One calibration text.

    Attributes:
        text: what is tokenized.
        document: texts of one document never fall on two sides of a split.
    """

    text: str
    document: str


def read_texts(source: str | Path, *, limit: int = 400, seed: int = 0) -> list[Text]:
    """Texts from a file or, for `-`, from standard input.

    `.jsonl` (or input that begins with `{`): one object a line with `text` and, optionally, `document`. Anything else:
    plain text, paragraphs separated by blank lines, each its own document. Blank paragraphs and wiki headings
    (` = Title = `) are not usable.

    Args:
        source: path, or `-`.
        limit: texts wanted; more are sampled down, fewer are reported with a warning.
        seed: of the sampling.

    Raises:
        InputError: the file cannot be read, a line is not what it should be, or no text is usable.

    Example:
        >>> texts = read_texts("news.txt", limit=100)
    """
    if limit < 1:
        raise InputError(f"{limit} texts were asked for; calibration needs at least 1.")
    name = "standard input" if str(source) == "-" else str(source)
    try:
        content = sys.stdin.read() if str(source) == "-" else Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read as UTF-8 text ({error}). Give a .txt or .jsonl file.") from error
    jsonl = str(source).endswith(".jsonl") or content.lstrip().startswith("{")
    found = list(_json_lines(content, name) if jsonl else _paragraphs(content))
    return usable_texts(found, limit=limit, seed=seed, name=name)


def usable_texts(texts: Iterable[Text], *, limit: int, seed: int = 0, name: str = "the data") -> list[Text]:
    """At most `limit` of the usable texts, sampled evenly, in their order.

    Raises:
        InputError: none is usable.
    """
    texts = list(texts)
    usable = [text for text in texts if text.text.strip() and not re.fullmatch(r"\s*=+[^=]*=+\s*", text.text)]
    if not usable:
        raise InputError(
            f"{name} holds no usable text: {len(texts)} found, all blank or headings. Give a file with running text."
        )
    if len(usable) < limit:
        warnings.warn(
            f"{limit} calibration texts were asked for, {name} holds {len(usable)} usable ones: using those.",
            stacklevel=3,
        )
        return usable
    chosen = np.random.default_rng(seed).choice(len(usable), limit, replace=False)
    return [usable[index] for index in sorted(chosen)]


def _json_lines(content: str, name: str) -> Iterator[Text]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"{name}, line {number}: not JSON ({error}).") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise InputError(f'{name}, line {number}: expected an object with a string "text", got {line:.60}.')
        yield Text(row["text"], str(row.get("document", number)))


def _paragraphs(content: str) -> Iterator[Text]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", content)):
        yield Text(paragraph.strip("\n"), str(number))
