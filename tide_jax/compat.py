"""What depends on versions of orbax, or on the platform's C library."""

import ctypes
import gc
import logging
from pathlib import Path
from typing import Any


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


def release_free_memory() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc).

    Compiling a program, or restoring layers in threads, leaves a hundred megabytes in reference cycles and in free
    blocks that glibc keeps, and that the next program compiled cannot always use.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
