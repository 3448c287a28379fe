"""The container format GGUF: a header of typed keys and values, a table of tensors, and their bytes.

`gguf.GGUFReader` trusts the counts and lengths in the header (a damaged one makes it loop for hours) and
keeps an array object for every string; here each length is checked against the file before it is used. The
format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tide_jax.errors import InputError

# Numbers of the specification: uint8, int8, uint16, int16, uint32, int32, float32, bool, and the 64-bit ones.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


class GGUFTensor(NamedTuple):
    """One tensor as it lies in the file.

    Attributes:
        kind: a `gguf.GGMLQuantizationType`.
        shape: outermost dimension first.
        rows: its bytes, uint8 [product of all dimensions but the last, bytes of a row], mapped from the file.
    """

    kind: Any
    shape: tuple[int, ...]
    rows: np.ndarray

    def dequantized(self, begin: int, end: int) -> np.ndarray:
        """Rows begin … end − 1 as float32 [end − begin, last dimension].

        Raises:
            NotImplementedError: gguf cannot decode this kind.
        """
        from gguf import dequantize

        return dequantize(self.rows[begin:end], self.kind).reshape(end - begin, self.shape[-1])


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata (arrays as lists) and tensors of a GGUF file of version 2 or 3, little-endian.

    Raises:
        InputError: not GGUF, another version, truncated, or damaged.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise InputError(
                f"{path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'. Give a GGUF file "
                "or a Hugging Face directory."
            )
        cursor = _Cursor(path, np.memmap(path, np.uint8, "r").view(np.ndarray))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error}). Check the path and its permissions.") from error
    version = cursor.scalar("<u4")
    if version not in (2, 3):
        raise InputError(
            f"{path} is GGUF version {version}, supported are 2 and 3 in little-endian order. Convert it "
            "with a current llama.cpp."
        )
    tensors, keys = cursor.scalar("<u8"), cursor.scalar("<u8")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.string()
        if key in metadata:
            raise cursor.damaged(f"the key {key!r} appears twice")
        metadata[key] = cursor.value()
    infos: dict[str, tuple[Any, tuple[int, ...], int]] = {}
    for _ in range(tensors):
        name, *info = cursor.tensor_info()
        if name in infos:
            raise cursor.damaged(f"the tensor {name!r} appears twice")
        infos[name] = tuple(info)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"general.alignment is {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    return metadata, {name: cursor.tensor(name, *info, start) for name, info in infos.items()}


class _Cursor:
    """Reads one thing after the other; `offset` is where the next one begins."""

    def __init__(self, path: Path, data: np.ndarray):
        self._path, self._data, self.offset = path, data, 4

    def damaged(self, what: str) -> InputError:
        return InputError(
            f"{self._path} cannot be read as GGUF: {what} (at byte {self.offset} of {len(self._data)}). It "
            "is truncated or damaged: download it again."
        )

    def take(self, size: int) -> np.ndarray:
        if size > len(self._data) - self.offset:
            raise self.damaged(f"{size} more bytes are needed")
        taken = self._data[self.offset : self.offset + size]
        self.offset += size
        return taken

    def scalar(self, kind: str) -> int | float | bool:
        return self.take(np.dtype(kind).itemsize).view(kind)[0].item()

    def string(self) -> str:
        begin = self.offset
        try:
            return self.take(self.scalar("<u8")).tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"the string at byte {begin} is not UTF-8 ({error.reason})") from error

    def value(self) -> Any:
        kind = self.scalar("<u4")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"a value has type {kind}")
        kind = self.scalar("<u4")
        if kind == _STRING:
            return [self.string() for _ in range(self.scalar("<u8"))]
        if kind not in _SCALARS:
            raise self.damaged(f"an array has elements of type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return self.take(self.scalar("<u8") * dtype.itemsize).view(dtype).tolist()

    def tensor_info(self) -> tuple[str, Any, tuple[int, ...], int]:
        """Name, kind, shape and offset from the start of the data."""
        from gguf import GGMLQuantizationType

        name, dimensions = self.string(), self.scalar("<u4")
        if not 1 <= dimensions <= 4:
            raise self.damaged(f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.scalar("<u8") for _ in range(dimensions))[::-1]
        number = self.scalar("<u4")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise self.damaged(f"the tensor {name!r} has type {number}, which gguf does not know") from error
        return name, kind, shape, self.scalar("<u8")

    def tensor(self, name: str, kind: Any, shape: tuple[int, ...], offset: int, start: int) -> GGUFTensor:
        from gguf import GGML_QUANT_SIZES

        block, size = GGML_QUANT_SIZES[kind]
        *outer, inner = shape
        if inner % block or 0 in shape:
            raise self.damaged(f"the tensor {name!r} of type {kind.name} has shape {list(shape)}")
        rows, width = math.prod(outer), inner // block * size
        self.offset = start + offset
        if self.offset > len(self._data):
            raise self.damaged(f"the tensor {name!r} lies beyond the end")
        return GGUFTensor(kind, shape, self.take(rows * width).reshape(rows, width))
