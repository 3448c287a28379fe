"""Score of an exit router: how sure it is that a hidden state is already good enough."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from tide_jax.kernels import registry

_TARGET = "tide_router_score_v1"
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# Up to this many rows the kernel runs, above it XLA's matrix product. Microseconds a call, kernel against
# XLA, with d 576 and r 128 on two cores of an AMD EPYC, weights in cache: 1 row 5.9 against 3.5, 8 rows 48
# against 13, 64 rows 392 against 122; weights out of cache, 1 row 48 against 40. A portable wheel has SSE2
# only while XLA compiles for the host, so the kernel does not win; at one row the loss is a few microseconds.
_MAX_ROWS = 1


def reference(
    x: Float[Array, "*batch d"],
    norm_weight: Float32[Array, " d"],
    down: Float32[Array, "d r"],
    up: Float32[Array, " r"],
    *,
    eps: float,
) -> Float32[Array, "*batch"]:
    """Return `sigmoid(up . silu(rmsnorm(x) @ down))`: the specification, differentiable, on every platform.

    `rmsnorm(x) = x * rsqrt(mean(x**2) + eps) * norm_weight`, all of it in float32. It has a gradient;
    `router_score` gives the same numbers but has none where the compiled kernel runs.

    Args:
        x: hidden states, float32, bfloat16 or float16.
        norm_weight: scale of the RMS norm.
        down: projection, input by hidden.
        up: read-out.
        eps: added to the mean square.

    Example:
        >>> import jax.numpy as jnp
        >>> reference(jnp.ones((2, 4)), jnp.ones(4), jnp.ones((4, 3)), jnp.zeros(3), eps=1e-5).tolist()
        [0.5, 0.5]
    """
    x = x.astype(jnp.float32)
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * norm_weight
    # HIGHEST: an accelerator would otherwise round the operands, and a threshold is compared with the result.
    dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return jax.nn.sigmoid(dot(jax.nn.silu(dot(normed, down)), up))


def _call(x: Array, norm_weight: Array, down: Array, up: Array, *, eps: float) -> Array:
    # The handler checks ranks, dimensions and dtypes. Attributes are typed exactly: a Python float is an f64.
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32), vmap_method="broadcast_all")
    return call(x, norm_weight, down, up, eps=np.float32(eps))


def router_score(
    x: Float[Array, "*batch d"],
    norm_weight: Float32[Array, " d"],
    down: Float32[Array, "d r"],
    up: Float32[Array, " r"],
    *,
    eps: float,
) -> Float32[Array, "*batch"]:
    """Return the router score of every hidden state, a number from 0 to 1.

    The formula is that of `reference`. On the CPU the compiled kernel scores a single state if it is there
    (see `status`); for more states, and on other platforms, XLA compiles the reference. Results agree to
    float32 rounding.

    Leading dimensions of `x` are the batch: give them as they are rather than through `vmap`, which has to
    copy the weights for every mapped element. There is no gradient; train through `reference`. On sharded
    arrays call it inside `jax.shard_map`, or XLA gathers the operands first.

    Args:
        x: hidden states, float32, bfloat16 or float16, d >= 1.
        norm_weight: scale of the RMS norm.
        down: projection, input by hidden, row-major: one row per input feature.
        up: read-out.
        eps: added to the mean square; a Python float, part of the compiled program.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
        TypeError: a dtype is not supported; the message names the argument.
        InputError: `TIDE_KERNELS` has an unknown value.

    Example:
        >>> import jax.numpy as jnp
        >>> from tide_jax.kernels import router_score
        >>> router_score(jnp.ones((2, 4)), jnp.ones(4), jnp.ones((4, 3)), jnp.zeros(3), eps=1e-5).tolist()
        [0.5, 0.5]
    """
    _check(x, norm_weight, down, up)
    specification = functools.partial(reference, eps=eps)
    if math.prod(x.shape[:-1]) > _MAX_ROWS or not registry.registered(_TARGET):
        return specification(x, norm_weight, down, up)
    return jax.lax.platform_dependent(
        x, norm_weight, down, up, cpu=functools.partial(_call, eps=eps), default=specification
    )


def _check(x: Array, norm_weight: Array, down: Array, up: Array) -> None:
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"`x` must have shape [..., d] with d >= 1, got {list(x.shape)}.")
    d = x.shape[-1]
    if norm_weight.shape != (d,):
        raise ValueError(f"`norm_weight` must have shape [d] = [{d}] to go with `x`, got {list(norm_weight.shape)}.")
    if down.ndim != 2 or down.shape[0] != d or down.shape[1] < 1:
        raise ValueError(f"`down` must have shape [d, r] = [{d}, r] to go with `x`, r >= 1, got {list(down.shape)}.")
    if up.shape != down.shape[1:]:
        raise ValueError(f"`up` must have shape [r] = [{down.shape[1]}] to go with `down`, got {list(up.shape)}.")
    if x.dtype not in _DTYPES:
        raise TypeError(f"`x` must be float32, bfloat16 or float16, got {x.dtype}.")
    for name, weight in (("norm_weight", norm_weight), ("down", down), ("up", up)):
        if weight.dtype != jnp.float32:
            raise TypeError(f"`{name}` must be float32, got {weight.dtype}.")
