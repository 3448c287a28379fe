"""What depends on versions of jax or orbax, or on the platform's C library."""

import ctypes
import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np


def layer_checkpointer() -> Any:
    """A checkpointer for one small tree of host arrays: plain files, uncompressed.

    The defaults (OCDBT, zstd) hold several copies of the data and write at a quarter of the speed (orbax 0.12).
    """
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False))


def save_tree(checkpointer: Any, path: Path, tree: Any) -> None:
    """Save a tree of numpy arrays at an absolute path."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # orbax warns at every save without OCDBT that there is nothing of OCDBT to merge
    try:
        checkpointer.save(path.absolute(), tree)
    finally:
        logger.setLevel(level)


def restore_tree(checkpointer: Any, path: Path) -> Any:
    """The tree of numpy arrays saved at an absolute path."""
    return checkpointer.restore(path.absolute())


def result_of_call(shape: Sequence[int], dtype: Any, operands: Any) -> Any:
    """The type of a result of an FFI call: inside `jax.shard_map` it varies over the mesh axes its operands vary over.

    A call does not find out by itself. jax 0.10.2 and later keep the axes as `manual_axis_type`, before it was `vma`.
    """

    def axes(type_: Any) -> frozenset[str]:
        kept = getattr(type_, "manual_axis_type", getattr(type_, "vma", ()))
        return frozenset(getattr(kept, "varying", kept))

    most = max(map(jax.typeof, jax.tree.leaves(operands)), key=lambda type_: len(axes(type_)))
    if axes(most):
        return most.update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False)
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def release_free_memory() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc).

    Compiling a program, or restoring layers in threads, leaves a hundred megabytes in reference cycles and in free
    blocks that glibc keeps, and that the next program compiled cannot always use.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
