"""The blocks a decoder layer is made of: norm, linear map, attention over a cache and the rows of this call, MLP."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float

from tide_jax.kernels.norm import Norm, normed
from tide_jax.models.config import DecoderConfig
from tide_jax.models.rope import rotate
from tide_jax.sharding import Axes, constrain


class KV(NamedTuple):
    """Keys and values of some positions at one layer: the rows of this call, or a whole cache."""

    k: Float[Array, "batch kv_heads slots head_dim"]
    v: Float[Array, "batch kv_heads slots head_dim"]


class Attendable(NamedTuple):
    """What the columns of a call may see, shared by all layers of one kind.

    Attributes:
        cos: cosines of the rotary angles of the columns; None: these layers know no positions.
        sin: sines of the same.
        valid: columns that exist.
        now: column t may attend to column u of this call.
        past: column t may attend to slot s of the cache; None when there is no cache.
    """

    cos: Float[Array, "batch cols half"] | None
    sin: Float[Array, "batch cols half"] | None
    valid: Bool[Array, "batch cols"]
    now: Bool[Array, "batch cols cols"]
    past: Bool[Array, "batch cols slots"] | None


Views = tuple[Attendable, ...]
"""What the columns of a call may see, for each of the config's kinds of layers."""


class Linear(nnx.Module):
    """x @ kernel (+ bias), kernel [in, out]: the orientation that reads weights once, in order, for few rows.

    `axes` are the logical axes of the kernel.
    """

    def __init__(self, inputs: int, outputs: int, *, axes: Axes, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        scale = inputs**-0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (inputs, outputs), dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype), axes=axes[1:]) if bias else None

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...]


class Normalization(nnx.Module):
    """The norm of `tide_jax.kernels.Norm` with its parameters, in float32, cast to the dtype of x at the end."""

    def __init__(self, size: int, norm: Norm, *, dtype: DTypeLike):
        self.norm = norm
        # A scale that 1 is added to is 0 where it changes nothing.
        neutral = jnp.zeros if norm.kind == "rms_one_plus" else jnp.ones
        self.scale = nnx.Param(neutral((size,), dtype), axes=("embed",))
        self.bias = nnx.Param(jnp.zeros((size,), dtype), axes=("embed",)) if norm.kind == "layer" else None

    def parameters(self) -> tuple[Float[Array, " size"], Float[Array, " size"] | None]:
        """Scale, and bias if there is one, in float32."""
        return self.scale[...].astype(jnp.float32), None if self.bias is None else self.bias[...].astype(jnp.float32)

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        return normed(x, *self.parameters(), self.norm).astype(x.dtype)


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """down(act(gate(x)) · up(x)) (arXiv 2002.05202), or down(act(up(x))) without a gate."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d, f, bias = config.hidden_size, config.ffn_size, config.mlp_bias
        self.activation = config.activation
        wide = functools.partial(Linear, d, f, axes=("embed", "mlp"), bias=bias, dtype=dtype, rngs=rngs)
        self.gate = wide() if config.gated else None
        self.up = wide()
        self.down = Linear(f, d, axes=("mlp", "embed"), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "batch cols embed"]) -> Float[Array, "batch cols embed"]:
        act = _ACTIVATIONS[self.activation]
        return self.down(act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x))


class Attention(nnx.Module):
    """Grouped-query attention; never writes a cache, only returns the rows of its columns."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d, hd, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.head_dim = hd
        self.scale = hd**-0.5 if config.attention_scale is None else config.attention_scale
        self.softcap = config.attention_softcap
        queries, keys = config.num_heads * hd, config.num_kv_heads * hd
        self.q = Linear(d, queries, axes=("embed", "heads"), bias=bias, dtype=dtype, rngs=rngs)
        self.k = Linear(d, keys, axes=("embed", "kv_heads"), bias=bias, dtype=dtype, rngs=rngs)
        self.v = Linear(d, keys, axes=("embed", "kv_heads"), bias=bias, dtype=dtype, rngs=rngs)
        self.o = Linear(queries, d, axes=("heads", "embed"), bias=config.o_bias, dtype=dtype, rngs=rngs)
        self.normed_together = config.qk_norm == "heads"
        sizes = {"none": None, "head": (hd, hd), "heads": (queries, keys)}[config.qk_norm]
        self.q_norm, self.k_norm = (
            (None, None) if sizes is None else (Normalization(*config.norm_of(size), dtype=dtype) for size in sizes)
        )

    def project_kv(self, x: Float[Array, "batch cols embed"], view: Attendable) -> KV:
        """The K/V rows of states x as this block gets them: all that a layer not run still owes to later tokens.

        A column that does not exist has the value 0, whatever its state: a masked score still multiplies its value in
        the attention sum, and 0 · NaN is NaN.
        """
        k = self._heads(self.k(x), self.k_norm, view)
        v = self.v(x).reshape(*x.shape[:2], -1, self.head_dim)
        v = jnp.where(view.valid[..., None, None], v, 0)
        return KV(*(constrain(rows.swapaxes(1, 2), "batch", "kv_heads", None, None) for rows in (k, v)))

    def query(self, x: Float[Array, "batch cols embed"], view: Attendable) -> Float[Array, "batch heads cols head_dim"]:
        """Queries of states x as this block gets them."""
        q = self._heads(self.q(x), self.q_norm, view)
        return constrain(q.swapaxes(1, 2), "batch", "heads", None, None)

    def _heads(
        self, x: Float[Array, "batch cols channels"], norm: Normalization | None, view: Attendable
    ) -> Float[Array, "batch cols heads head_dim"]:
        """Projected states cut into heads, normed and rotated where this is done."""
        if norm is not None and self.normed_together:
            x = norm(x)
        x = x.reshape(*x.shape[:2], -1, self.head_dim)
        if norm is not None and not self.normed_together:
            x = norm(x)
        return x if view.cos is None else rotate(x, view.cos, view.sin)

    def attend(
        self, q: Float[Array, "batch heads cols head_dim"], rows: KV, past: KV | None, view: Attendable
    ) -> Float[Array, "batch cols embed"]:
        """Attention of the columns over the past cache and the rows of this call, through the output projection."""
        mixed = attention(q, rows, past, view, scale=self.scale, softcap=self.softcap)
        return self.o(mixed.swapaxes(1, 2).reshape(mixed.shape[0], mixed.shape[2], -1))


def attention(
    q: Float[Array, "batch heads cols head_dim"],
    rows: KV,
    past: KV | None,
    view: Attendable,
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "batch heads cols head_dim"]:
    """softmax(scale · q·kᵀ)·v over two sources, merged as partial softmaxes, so that neither is copied.

    With `softcap` a score is cap · tanh(score / cap), before the mask: after it, −∞ would become −cap, which is seen.
    The softmax is float32; a column always sees itself, so no row of the softmax is empty. A column is not finite where
    one that it may see is not; others it does not touch, although 0 · NaN is NaN.
    """
    batch, heads, cols, head_dim = q.shape
    kv_heads = rows.k.shape[1]
    # One dimension for all queries of a K/V head: with two, XLA on a CPU transposes the keys, which is a copy of the
    # cache, where batch or K/V heads are 1.
    grouped = q.reshape(batch, kv_heads, -1, head_dim)

    def scores(query: jax.Array, keys: jax.Array, mask: jax.Array) -> jax.Array:
        raw = jnp.einsum("bkqh,bksh->bkqs", query, keys, preferred_element_type=jnp.float32)
        raw = scale * raw.reshape(batch, kv_heads, -1, cols, keys.shape[2])
        if softcap is not None:
            raw = softcap * jnp.tanh(raw / softcap)
        return jnp.where(mask[:, None, None], raw, -jnp.inf)

    sound = jnp.isfinite(rows.v).all(axis=(1, 3))
    values = jnp.where(sound[:, None, :, None], rows.v, 0)
    touched = (view.now & ~sound[:, None, :]).any(axis=-1)
    parts = [(scores(grouped, rows.k, view.now), values)]
    if past is not None:
        # XLA merges two products of one operand into one, by concatenating the others: here, by copying the cache.
        apart = jax.lax.optimization_barrier(grouped)
        parts.append((scores(apart, past.k, view.past), past.v))
    top = jnp.stack([s.max(axis=-1) for s, _ in parts]).max(axis=0)[..., None]
    weights = [jnp.exp(s - top) for s, _ in parts]
    total = sum(w.sum(axis=-1, keepdims=True) for w in weights)

    def mix(w: jax.Array, values: jax.Array) -> jax.Array:
        flat = w.astype(values.dtype).reshape(batch, kv_heads, -1, values.shape[2])
        return jnp.einsum("bkqs,bksh->bkqh", flat, values, preferred_element_type=jnp.float32)

    mixed = sum(mix(w, values) for w, (_, values) in zip(weights, parts, strict=True))
    mixed = mixed.reshape(*total.shape[:-1], head_dim)
    mixed = jnp.where(touched[:, None, None, :, None], jnp.nan, mixed / total)
    return mixed.astype(q.dtype).reshape(batch, heads, cols, head_dim)
