"""Rows put back where `compact` took them from."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from tide_jax.compat import result_of_call
from tide_jax.kernels import registry
from tide_jax.kernels.norm import check_operand

TARGET = "tide_scatter_rows_v1"

# Only CUDA has a kernel: on a CPU it never won over XLA, which also writes in place (0.6 to 1.0 times as fast at 8 to
# 512 rows of 576 and 4,096 features). On CUDA it is not measured yet.


def reference(
    base: Float[Array, "rows d"], rows: Float[Array, "bucket d"], index: Int32[Array, " bucket"]
) -> Float[Array, "rows d"]:
    """The specification, in jnp, on every platform. Arguments are those of `scatter_rows`."""
    # Negative numbers would count from the end.
    return base.at[jnp.where(index < 0, base.shape[0], index)].set(rows, mode="drop")


def _call(base: Array, rows: Array, index: Array) -> Array:
    # In place where XLA may overwrite `base`.
    call = jax.ffi.ffi_call(
        TARGET,
        result_of_call(base.shape, base.dtype, base),
        vmap_method="broadcast_all",
        input_output_aliases={0: 0},
    )
    return call(base, rows, index)


def scatter_rows(
    base: Float[Array, "rows d"],
    rows: Float[Array, "bucket d"],
    index: Int32[Array, " bucket"],
    *,
    use_kernels: bool | None = None,
) -> Float[Array, "rows d"]:
    """Return `base` with row `index[m]` replaced by `rows[m]`, for every place m of the bucket.

    Args:
        base: float32, bfloat16 or float16; overwritten in place where it is not needed afterwards.
        rows: of the same dtype.
        index: no row twice; an index outside `base` drops its row.
        use_kernels: None: the kernel where there is one; True: it must be there; False: the reference.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
        TypeError: a dtype is not supported; the message names the argument.
        InputError: `use_kernels=True` and there are none, or `TIDE_KERNELS` has an unknown value.

    Example:
        >>> import jax.numpy as jnp
        >>> scatter_rows(jnp.zeros((3, 1)), jnp.array([[1.0], [2.0]]), jnp.array([2, 3]))[:, 0].tolist()
        [0.0, 0.0, 1.0]
    """
    if base.ndim != 2:
        raise ValueError(f"`base` must have shape [rows, d], got {list(base.shape)}.")
    if base.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"`base` must be float32, bfloat16 or float16, got {base.dtype}.")
    check_operand("index", index, index.shape[:1], jnp.int32)
    check_operand("rows", rows, (*index.shape, base.shape[1]), base.dtype)
    return registry.dispatch(registry.platforms(TARGET, use_kernels), _call, reference, base, rows, index)
