"""Rows gathered by a mask into a bucket of fixed size."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from tide_jax.compat import result_of_call
from tide_jax.kernels import registry
from tide_jax.kernels.norm import Norm, check_norm, check_operand, normed

TARGET = "tide_compact_v1"

# On a CPU the kernel wins at every size that was measured, by 1.5 to 3 times (benchmarks/kernels.py, README): there is
# no switch point. On CUDA it is not measured yet.


class Compacted(NamedTuple):
    """The kept rows, in their order, in the first places of a bucket.

    Attributes:
        rows: the rows, zeros after the last.
        index: the row that each place holds; the number of rows of the input after the last.
        count: rows that the mask keeps, which may be more than the bucket has places.
    """

    rows: Float[Array, "bucket d"]
    index: Int32[Array, " bucket"]
    count: Int32[Array, ""]


def reference(
    x: Float[Array, "rows d"],
    keep: Bool[Array, " rows"],
    scale: Float32[Array, " d"] | None = None,
    bias: Float32[Array, " d"] | None = None,
    *,
    bucket: int,
    norm: Norm | None = None,
) -> Compacted:
    """The specification, in jnp, on every platform. Arguments are those of `compact`."""
    rows = x.shape[0]
    place = jnp.where(keep, jnp.cumsum(keep, dtype=jnp.int32) - 1, bucket)
    index = jnp.full(bucket, rows, jnp.int32).at[place].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
    # There is nothing to take from no rows.
    kept = jnp.take(x, index, axis=0, mode="fill", fill_value=0) if rows else jnp.zeros((bucket, x.shape[1]), x.dtype)
    if norm is not None:
        kept = jnp.where((index < rows)[:, None], normed(kept, scale, bias, norm).astype(x.dtype), 0)
    return Compacted(kept, index, jnp.sum(keep, dtype=jnp.int32))


def _call(
    x: Array, keep: Array, scale: Array | None, bias: Array | None, *, bucket: int, norm: Norm | None
) -> Compacted:
    scale, bias = (jnp.zeros(0, jnp.float32) if part is None else part for part in (scale, bias))
    attributes = {"norm": np.int32(-1), "eps": np.float32(0)} if norm is None else norm.attributes
    result = functools.partial(result_of_call, operand=x)
    results = [result((bucket, x.shape[1]), x.dtype), result((bucket,), jnp.int32), result((), jnp.int32)]
    return Compacted(
        *jax.ffi.ffi_call(TARGET, results, vmap_method="broadcast_all")(x, keep, scale, bias, **attributes)
    )


def compact(
    x: Float[Array, "rows d"],
    keep: Bool[Array, " rows"],
    scale: Float32[Array, " d"] | None = None,
    bias: Float32[Array, " d"] | None = None,
    *,
    bucket: int,
    norm: Norm | None = None,
    use_kernels: bool | None = None,
) -> Compacted:
    """Gather the rows that a mask keeps, normed on the way if asked; `scatter_rows` puts them back.

    Rows beyond the bucket are left out, and `count` says so.

    Args:
        x: rows, float32, bfloat16 or float16, d >= 1.
        keep: rows to gather.
        scale: of the norm, if there is one.
        bias: of a LayerNorm, else None.
        bucket: places in the result; static.
        norm: applied to the gathered rows, in float32, and rounded to the dtype of x.
        use_kernels: None: the kernel where there is one; True: it must be there; False: the reference.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
        TypeError: a dtype is not supported; the message names the argument.
        InputError: `use_kernels=True` and there are none, or `TIDE_KERNELS` has an unknown value.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[1.0], [2.0], [3.0]])
        >>> kept = compact(x, jnp.array([True, False, True]), bucket=4)
        >>> kept.rows[:, 0].tolist(), kept.index.tolist(), kept.count.item()
        ([1.0, 3.0, 0.0, 0.0], [0, 2, 3, 3], 2)
    """
    if x.ndim != 2:
        raise ValueError(f"`x` must have shape [rows, d], got {list(x.shape)}.")
    if bucket < 0:
        raise ValueError(f"bucket is {bucket}; it must be 0 or more.")
    if norm is None and (scale is not None or bias is not None):
        raise ValueError("`scale` and `bias` were given without a `norm`.")
    check_norm(x, jnp.zeros(x.shape[1:], jnp.float32) if norm is None else scale, bias, norm or Norm(eps=0.0))
    check_operand("keep", keep, x.shape[:1], jnp.bool_)
    static = {"bucket": bucket, "norm": norm}
    platforms = registry.platforms(TARGET, use_kernels)
    return registry.dispatch(
        platforms, functools.partial(_call, **static), functools.partial(reference, **static), x, keep, scale, bias
    )
