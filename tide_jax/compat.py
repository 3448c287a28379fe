"""The few calls whose names or defaults move between versions of jax and orbax."""

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
    checkpointer.save(path.absolute(), tree)


def restore_tree(checkpointer: Any, path: Path) -> Any:
    """The tree of numpy arrays saved at an absolute path."""
    return checkpointer.restore(path.absolute())
