"""What an exit point does with its tokens: score them, decide who leaves, and count who remains."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from tide_jax.compat import result_of_call
from tide_jax.kernels import registry
from tide_jax.kernels.norm import Norm, check_norm, check_operand, normed

TARGET = "tide_exit_route_v1"

# Up to so many rows the kernel runs; above, the dot is XLA's, with norm and decision fused around it. CPU: measured
# (benchmarks/kernels.py, README). CUDA: not measured yet.
MAX_ROWS = {"cpu": 16, "cuda": 256}


class Gate(NamedTuple):
    """What is known of each token before an exit point.

    Attributes:
        threshold: it leaves where its score is above this; minus infinity: whatever its score.
        live: tokens that the exit point is for; the others stay as they are, and are not counted.
        exited: tokens that left earlier.
        depth: layers after which each token left or will leave.
    """

    threshold: Float32[Array, "*rows"]
    live: Bool[Array, "*rows"]
    exited: Bool[Array, "*rows"]
    depth: Int32[Array, "*rows"]


class Route(NamedTuple):
    """What became of each token.

    Attributes:
        score: the router's probability, 0 … 1.
        exited: tokens that left here or earlier.
        depth: the layers of this exit point for those that left here; else as before.
        remaining: how many live tokens have not left.
    """

    score: Float32[Array, "*rows"]
    exited: Bool[Array, "*rows"]
    depth: Int32[Array, "*rows"]
    remaining: Int32[Array, ""]


def decide(score: Float32[Array, "*rows"], gate: Gate, *, layers: int) -> Route:
    """The decision alone, for scores that come from elsewhere.

    Args:
        score: of each token.
        gate: what is known of it.
        layers: layers run at this exit point.

    Example:
        >>> import jax.numpy as jnp
        >>> ones = jnp.ones(3, bool)
        >>> gate = Gate(jnp.full(3, 0.5), ones, ~ones, jnp.full(3, 30))
        >>> route = decide(jnp.array([0.4, 0.6, 0.9]), gate, layers=8)
        >>> route.depth.tolist(), route.remaining.item()
        ([30, 8, 8], 1)
    """
    fires = (score > gate.threshold) | (gate.threshold == -jnp.inf)
    leaves = gate.live & ~gate.exited & fires
    return Route(
        score=score,
        exited=gate.exited | leaves,
        depth=jnp.where(leaves, jnp.int32(layers), gate.depth),
        remaining=jnp.sum(gate.live & ~gate.exited & ~leaves, dtype=jnp.int32),
    )


def reference(
    x: Float[Array, "*rows d"],
    scale: Float32[Array, " d"],
    bias: Float32[Array, " d"] | None,
    down: Float32[Array, "d r"],
    up: Float32[Array, " r"],
    gate: Gate,
    *,
    norm: Norm,
    layers: int,
) -> Route:
    """The specification, in jnp, on every platform: score = sigmoid(up · silu(norm(x) @ down)), in float32.

    The score has a gradient; that of `exit_route` has none where the compiled kernel runs. Arguments are those of
    `exit_route`.
    """
    # HIGHEST: an accelerator would otherwise round the operands, and a threshold is compared with the result.
    dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    score = jax.nn.sigmoid(dot(jax.nn.silu(dot(normed(x, scale, bias, norm), down)), up))
    return decide(score, gate, layers=layers)


def _call(
    x: Array, scale: Array, bias: Array | None, down: Array, up: Array, gate: Gate, *, norm: Norm, layers: int
) -> Route:
    # The handler takes rows in one dimension, and checks ranks, dimensions and dtypes.
    shape, flat = x.shape[:-1], (math.prod(x.shape[:-1]),)
    bias = jnp.zeros(0, jnp.float32) if bias is None else bias
    result = functools.partial(result_of_call, operand=x)
    results = [result(flat, jnp.float32), result(flat, jnp.bool_), result(flat, jnp.int32), result((), jnp.int32)]
    call = jax.ffi.ffi_call(TARGET, results, vmap_method="broadcast_all")
    rows = [part.reshape(flat) for part in gate]
    score, exited, depth, remaining = call(
        x.reshape(*flat, x.shape[-1]), scale, bias, down, up, *rows, **norm.attributes, layers=np.int32(layers)
    )
    return Route(score.reshape(shape), exited.reshape(shape), depth.reshape(shape), remaining)


def exit_route(
    x: Float[Array, "*rows d"],
    scale: Float32[Array, " d"],
    bias: Float32[Array, " d"] | None,
    down: Float32[Array, "d r"],
    up: Float32[Array, " r"],
    gate: Gate,
    *,
    norm: Norm,
    layers: int,
    use_kernels: bool | None = None,
) -> Route:
    """Score every token by its router, let those above their threshold leave, and count who remains.

    TIDE, arXiv 2603.21365, section 3; the formula is that of `reference`, and results agree to float32 rounding. On a
    CPU and on CUDA one compiled kernel does all of it for few rows (`MAX_ROWS`) where the extension is there (see
    `status`); otherwise XLA compiles the reference. Leading dimensions are the batch: give them as they are rather than
    through `vmap`, which copies the weights for every mapped element. There is no gradient; train through `reference`.
    On sharded arrays call it inside `jax.shard_map`, or XLA gathers the operands first; `remaining` then counts one
    shard.

    Args:
        x: hidden states, float32, bfloat16 or float16, d >= 1.
        scale: of the norm.
        bias: of a LayerNorm, else None.
        down: projection, input by hidden.
        up: read-out.
        gate: thresholds, masks and depths of the same tokens.
        norm: applied to x first.
        layers: layers run at this exit point.
        use_kernels: None: the kernel where it wins; True: it must be there, and runs whatever the number of rows;
            False: the reference.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
        TypeError: a dtype is not supported; the message names the argument.
        InputError: `use_kernels=True` and there are none, or `TIDE_KERNELS` has an unknown value.

    Example:
        >>> import jax.numpy as jnp
        >>> gate = Gate(jnp.array([0.4, 0.6]), jnp.ones(2, bool), jnp.zeros(2, bool), jnp.full(2, 30))
        >>> x, ones = jnp.ones((2, 4)), jnp.ones(4)
        >>> route = exit_route(x, ones, None, jnp.ones((4, 3)), jnp.zeros(3), gate, norm=Norm(eps=1e-5), layers=8)
        >>> route.score.tolist(), route.depth.tolist(), route.remaining.item()
        ([0.5, 0.5], [8, 30], 1)
    """
    _check(x, scale, bias, down, up, gate, norm)
    specification = functools.partial(reference, norm=norm, layers=layers)
    kernel = functools.partial(_call, norm=norm, layers=layers)
    platforms = registry.platforms(TARGET, use_kernels)
    if use_kernels is None:
        platforms = [name for name in platforms if math.prod(x.shape[:-1]) <= MAX_ROWS[name]]
    return registry.dispatch(platforms, kernel, specification, x, scale, bias, down, up, gate)


def _check(x: Array, scale: Array, bias: Array | None, down: Array, up: Array, gate: Gate, norm: Norm) -> None:
    check_norm(x, scale, bias, norm)
    d, rows = x.shape[-1], x.shape[:-1]
    if down.ndim != 2 or down.shape[0] != d or down.shape[1] < 1:
        raise ValueError(f"`down` must have shape [d, r] = [{d}, r] to go with `x`, r >= 1, got {list(down.shape)}.")
    check_operand("down", down, down.shape)
    check_operand("up", up, down.shape[1:])
    for name, dtype in (("threshold", jnp.float32), ("live", jnp.bool_), ("exited", jnp.bool_), ("depth", jnp.int32)):
        check_operand(name, getattr(gate, name), rows, dtype)
