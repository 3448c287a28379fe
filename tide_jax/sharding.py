"""Models on several devices: logical axes, and the one table that says over which axes of the mesh each is cut.

Modules name the axes of their parameters and of what they compute, and know nothing of devices. Where a program is
traced for a mesh, XLA cuts arrays as the table says and adds the sums over devices; elsewhere the names do nothing.

A user asks for devices along `data`, over which rows are cut, and along `model`, over which heads, feed-forward layer
and vocabulary are (Megatron-LM, arXiv 1909.08053, section 3). Where those along `model` are more than there are K/V
heads, several hold the same head: so the mesh has a third axis, `copies`, over which everything but K/V is cut.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from tide_jax.compat import auto_mesh, current_mesh
from tide_jax.errors import InputError

Axes = PartitionSpec | tuple[str | None, ...]

# Axes that are not here, such as the channels of a hidden state, are whole on every device.
RULES = {
    "batch": ("data",),
    "heads": ("model", "copies"),
    "kv_heads": ("model",),
    "mlp": ("model", "copies"),
    "vocab": ("model", "copies"),
}
AXES = ("data", "model")
_NAMES = {"heads": "query heads", "kv_heads": "K/V heads", "mlp": "feed-forward channels"}


def make_mesh(sizes: object, counts: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh for a model over the first of the devices.

    Args:
        sizes: a mapping: devices along `data`, `model` or both.
        counts: what the model has along each logical axis.
        devices: those to choose from; None: all that JAX sees.

    Raises:
        InputError: not such a mapping, another axis, a size that is no count, more devices than there are, several
            processes, or devices along `model` that cannot share the model evenly.

    Example:
        >>> dict(make_mesh({"model": 1}, {"heads": 9, "kv_heads": 3, "mlp": 1536, "vocab": 49152}).shape)
        {'data': 1, 'model': 1, 'copies': 1}
    """
    if not isinstance(sizes, Mapping) or not sizes:
        raise InputError(f"mesh is {sizes!r}, expected devices by axis, such as {{'data': 2, 'model': 4}}.")
    if unknown := [name for name in sizes if name not in AXES]:
        raise InputError(f"mesh axis {unknown[0]!r} is unknown: the axes are {' and '.join(AXES)}.")
    if wrong := [size for size in sizes.values() if not _is_count(size)]:
        raise InputError(f"mesh {dict(sizes)!r}: {wrong[0]!r} is not a number of devices of 1 or more.")
    sizes = {axis: int(size) for axis, size in sizes.items()}
    name, wanted = describe(sizes), math.prod(sizes.values())
    devices = jax.devices() if devices is None else devices
    if jax.process_count() > 1:
        raise InputError(f"mesh {name}: several processes cannot share a model yet. Start one.")
    if wanted > len(devices):
        pretend = " On a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=8 pretends to have 8."
        raise InputError(
            f"mesh {name} needs {wanted} devices, and there are {len(devices)} ({devices[0].platform}). Use fewer."
            f"{pretend if devices[0].platform == 'cpu' else ''}"
        )
    data, model = (sizes.get(axis, 1) for axis in AXES)
    if (uneven := _uneven(counts, model)) is not None:
        fitting = [str(number) for number in range(1, counts["heads"] + 1) if _uneven(counts, number) is None]
        raise InputError(
            f"mesh {name}: this model's {counts[uneven]:,} {_NAMES[uneven]} cannot be shared evenly by {model} "
            f"devices. For it, model can be {', '.join(fitting[:-1])}{' or ' * (len(fitting) > 1)}{fitting[-1]}."
        )
    copies = max(model // counts["kv_heads"], 1)
    return auto_mesh({"data": data, "model": model // copies, "copies": copies}, devices)


def _is_count(size: object) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size >= 1)


def mesh_of(params: Any) -> Mesh | None:
    """The mesh from `make_mesh` that shares these parameters; None: they are on one device, or nowhere."""
    placed = getattr(jax.tree.leaves(params)[0], "sharding", None)
    named = isinstance(placed, NamedSharding) and set(placed.mesh.axis_names) == {*AXES, "copies"}
    return placed.mesh if named else None


def _uneven(counts: Mapping[str, int], model: int) -> str | None:
    """The first logical axis that so many devices along `model` cannot share; None: they can share the model.

    Several devices can hold the same K/V head, but none parts of two. A vocabulary that cannot be cut evenly (many have
    an odd number of tokens) is whole on every device.
    """
    parts = {"heads": model, "kv_heads": 1 if model % counts["kv_heads"] == 0 else model, "mlp": model}
    return next((axis for axis, number in parts.items() if counts[axis] % number), None)


def describe(sizes: Mapping[str, int]) -> str:
    """Sizes as they are written on the command line; also those of a mesh."""
    asked = {"data": sizes.get("data", 1), "model": sizes.get("model", 1) * sizes.get("copies", 1)}
    return ",".join(f"{name}={size}" for name, size in asked.items() if size > 1) or "model=1"


def check_rows(mesh: Mesh | None, rows: int) -> None:
    """Refuse a batch that the mesh does not cut evenly.

    Raises:
        InputError: it does not.
    """
    if mesh is not None and rows % mesh.shape["data"]:
        parts = mesh.shape["data"]
        raise InputError(
            f"mesh {describe(mesh.shape)}: a batch of {rows} cannot be shared evenly by {parts} devices. Give a "
            f"multiple of {parts} rows, or use fewer devices along data and more along model."
        )


def spec(mesh: Mesh | AbstractMesh, axes: Axes, counts: Sequence[int]) -> PartitionSpec:
    """How an array with these logical axes is cut: where the mesh divides what there is along the axis.

    Args:
        mesh: devices.
        axes: a logical axis, or None, for each dimension; those left out at the end are whole.
        counts: what there is along each.
    """
    cuts = []
    for axis, count in zip(axes, counts, strict=False):
        over = RULES.get(axis, ())
        known = bool(over) and set(over) <= mesh.shape.keys()  # someone else's mesh has other axes
        cuts.append(over if known and count % math.prod(mesh.shape[name] for name in over) == 0 else None)
    return PartitionSpec(*cuts)


def named_sharding(mesh: Mesh | None, axes: Axes, counts: Sequence[int]) -> NamedSharding | None:
    """How an array with these logical axes is cut (see `spec`), and over which devices; None: there is no mesh."""
    return None if mesh is None else NamedSharding(mesh, spec(mesh, axes, counts))


def parameter_shardings(params: nnx.State, mesh: Mesh, counts: Mapping[str, int]) -> nnx.State:
    """Where each parameter lies: a tree of shardings, by the axes that the parameters name.

    A dimension of heads is cut between heads, so `counts`, and not its size, says whether it is cut at all.
    """

    def of(variable: nnx.Variable) -> nnx.Variable:
        sizes = [counts.get(axis, size) for axis, size in zip(variable.axes, variable.shape, strict=True)]
        return variable.replace(named_sharding(mesh, variable.axes, sizes))

    return jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def place(tree: Any, axes: Any, mesh: Mesh | None) -> Any:
    """The arrays on the devices of the mesh, cut by their logical axes; None: on one device.

    Args:
        tree: arrays, of the host or of devices.
        axes: a `PartitionSpec` of logical axes for each array, or for whole branches of the tree.
        mesh: devices.
    """
    if mesh is None:
        return jax.tree.map(jnp.asarray, tree)

    def put(axes: PartitionSpec, branch: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, named_sharding(mesh, axes, np.shape(leaf))), branch)

    return jax.tree.map(put, axes, tree)


def constrain(x: Array, *axes: str | None) -> Array:
    """x, cut by its logical axes where the program is traced for a mesh; otherwise x itself."""
    mesh = current_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec(mesh, axes, x.shape))


def on_each(function: Callable[[Array], Array], x: Array, *axes: str | None) -> Array:
    """`function` of x, which keeps its shape and works on every device's own part; without a mesh, on all of x."""
    mesh = current_mesh()
    if mesh is None:
        return function(x)
    cut = spec(mesh, axes, x.shape)
    return jax.shard_map(function, in_specs=cut, out_specs=cut)(x)


def look_up(table: Float[Array, "vocab embed"], tokens: Int[Array, "batch cols"]) -> Float[Array, "batch cols embed"]:
    """table[tokens], each device looking up in its own part of the table (left to itself, XLA may gather the parts)."""
    mesh = current_mesh()
    over = None if mesh is None else spec(mesh, ("vocab",), table.shape)[0]
    if over is None:
        return table[tokens]

    def local(table: Array, tokens: Array) -> Array:
        index = tokens - jax.lax.axis_index(over) * table.shape[0]
        here = (index >= 0) & (index < table.shape[0])
        return jax.lax.psum(jnp.where(here[..., None], table[jnp.where(here, index, 0)], 0), over)

    rows = spec(mesh, ("batch",), tokens.shape)
    return jax.shard_map(local, in_specs=(PartitionSpec(over), rows), out_specs=rows)(table, tokens)
