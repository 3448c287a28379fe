"""Writing arrays to safetensors files safely."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], header: Mapping[str, str]) -> None:
    """Write tensors beside `path` and rename, so that a reader never sees half a file.

    Arrays are made contiguous and little-endian first: safetensors 0.8 writes the raw memory of a transposed array
    under its logical shape, which comes back scrambled.
    """
    from safetensors.numpy import save_file

    ordered = {}
    for name, value in tensors.items():
        value = np.asarray(value)
        ordered[name] = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False))
    beside = path.with_name(path.name + ".part")
    save_file(ordered, beside, metadata=dict(header))
    beside.replace(path)
