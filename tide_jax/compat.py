"""What depends on versions of jax or orbax, or on the platform's C library."""

import contextlib
import ctypes
import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
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


def auto_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """A mesh over the first devices, over whose axes XLA cuts programs by itself (jax 0.9 made another the default)."""
    shape, names, auto = tuple(sizes.values()), tuple(sizes), (jax.sharding.AxisType.Auto,) * len(sizes)
    wanted = math.prod(shape)
    if wanted == len(devices):
        return jax.make_mesh(shape, names, auto, devices=devices)
    # jax.make_mesh puts neighbours together, but on TPUs only takes chips that fill a box.
    return jax.sharding.Mesh(np.array(devices[:wanted]).reshape(shape), names, axis_types=auto)


def use_mesh(mesh: jax.sharding.Mesh | None) -> contextlib.AbstractContextManager:
    """What is traced inside is traced for this mesh; None: for one device."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def current_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh that is traced for; None: one device, or code that `jax.shard_map` runs on each."""
    mesh = jax.sharding.get_abstract_mesh()
    auto = jax.sharding.AxisType.Auto
    return mesh if mesh.axis_types and all(kind == auto for kind in mesh.axis_types) else None


def in_default_layout(x: jax.Array) -> jax.Array:
    """x itself, kept in the layout in which programs are given such an array.

    That is the order of its dimensions; but on a TPU, whose registers have 128 lanes, one dimension that is no multiple
    of that changes places with the one before it.
    """
    from jax.experimental.layout import Layout, with_layout_constraint

    def kept(order: tuple[int, ...]) -> Callable:
        return lambda x: with_layout_constraint(x, Layout(order))

    rows = tuple(range(x.ndim))
    lanes = rows if x.shape[-1] % 128 == 0 else (*rows[:-2], rows[-1], rows[-2])
    return jax.lax.platform_dependent(x, cuda=kept(rows), tpu=kept(lanes), default=lambda x: x)


def mesh_axes(type_: Any) -> frozenset[str]:
    """The mesh axes over which a value of this type varies inside `jax.shard_map`.

    jax 0.10.2 and later keep them as `manual_axis_type`, before it was `vma`.
    """
    kept = getattr(type_, "manual_axis_type", getattr(type_, "vma", ()))
    return frozenset(getattr(kept, "varying", kept))


def varying_alike(operands: Any) -> Any:
    """The same arrays, all of them varying over every mesh axis that one of them varies over."""
    axes = frozenset().union(*(mesh_axes(jax.typeof(leaf)) for leaf in jax.tree.leaves(operands)))

    def widened(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - mesh_axes(jax.typeof(leaf))))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(widened, operands)


def result_of_call(shape: Sequence[int], dtype: Any, operand: Any) -> Any:
    """The type of a result of an FFI call: it varies over the mesh axes that the operand varies over.

    A call does not find out by itself. All its operands are expected to be `varying_alike`.
    """
    type_ = jax.typeof(operand)
    if mesh_axes(type_):
        return type_.update(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False)
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
