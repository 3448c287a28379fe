"""What a converter reads from: every form of file is presented as a Hugging Face checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tide_jax.errors import InputError
from tide_jax.tokenizer import Tokenizer


@runtime_checkable
class Source(Protocol):
    """A checkpoint with Hugging Face names and orientations.

    Attributes:
        config: the content of its `config.json`, as data.
        shapes: shape of every tensor, by Hugging Face name.
        dtypes: dtype of what `read` returns for every tensor: `float32`, `bfloat16`, `float16`, or another
            numpy name for tensors that are no parameters.
        provenance: where it came from, for `tide.json`.
    """

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    provenance: Mapping[str, object]

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the orientation of the Hugging Face checkpoint.

        Raises:
            InputError: it cannot be read.
        """
        ...

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer.

        Raises:
            InputError: it is missing, or of a kind that cannot be rebuilt.
        """
        ...

    def eos_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Every id that ends a text, from every place the source names one.

        Raises:
            InputError: what the source names is not an id.
        """
        ...


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        InputError: missing, not JSON, or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing. Is {path.parent} a complete Hugging Face checkpoint?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a JSON {type(data).__name__}, expected an object. Download it again.")
    return data


def id_list(value: Any, where: str) -> list[int]:
    """Token ids from a value that may be null, one id, or a list.

    Raises:
        InputError: something in it is not an integer; `where` names the place.

    Example:
        >>> id_list([2, None, 7], "config.json")
        [2, 7]
    """
    items = value if isinstance(value, list) else [value]
    ids = [item for item in items if item is not None]
    if wrong := [item for item in ids if isinstance(item, bool) or not isinstance(item, int)]:
        raise InputError(f"{where} is {wrong[0]!r}, expected a token id or a list of them. Correct the file.")
    return ids
