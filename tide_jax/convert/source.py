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
        dtype: parameter dtype to store, `float32`, `bfloat16` or `float16`.
        provenance: where it came from, for `tide.json`.
    """

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    provenance: Mapping[str, object]

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the orientation of the Hugging Face checkpoint."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        ...

    def eos_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Every id that ends a text, from every place the source names one."""
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
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a JSON {type(data).__name__}, expected an object.")
    return data


def id_list(value: Any) -> list[int]:
    """Token ids from a config value that may be null, one id, or a list."""
    if value is None:
        return []
    return [int(item) for item in (value if isinstance(value, list) else [value]) if item is not None]
