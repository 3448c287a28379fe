"""The blocks a decoder layer is made of: norm, linear map, attention over a cache and the rows of this call, MLP."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float

from tide_jax.models.config import DecoderConfig
from tide_jax.models.rope import rotate
from tide_jax.sharding import Axes, constrain


class KV(NamedTuple):
    """Keys and values of some positions at one layer: the rows of this call, or a whole cache."""

    k: Float[Array, "batch kv_heads slots head_dim"]
    v: Float[Array, "batch kv_heads slots head_dim"]


class Attendable(NamedTuple):
    """What the columns of a call may see, shared by all layers of the call.

    Attributes:
        cos: cosines of the rotary angles of the columns.
        sin: sines of the same.
        valid: columns that exist.
        now: column t may attend to column u of this call.
        past: column t may attend to slot s of the cache; None when there is no cache.
    """

    cos: Float[Array, "batch cols half"]
    sin: Float[Array, "batch cols half"]
    valid: Bool[Array, "batch cols"]
    now: Bool[Array, "batch cols cols"]
    past: Bool[Array, "batch cols slots"] | None


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


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · scale in float32, cast to the dtype of x at the end (arXiv 1910.07467)."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((size,), dtype), axes=("embed",))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows embed"]:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * inverse * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) · up(x)) (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d, f, bias = config.hidden_size, config.ffn_size, config.mlp_bias
        self.gate = Linear(d, f, axes=("embed", "mlp"), bias=bias, dtype=dtype, rngs=rngs)
        self.up = Linear(d, f, axes=("embed", "mlp"), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Linear(f, d, axes=("mlp", "embed"), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "batch cols embed"]) -> Float[Array, "batch cols embed"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; never writes a cache, only returns the rows of its columns."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        d, hd, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = hd
        self.q = Linear(d, config.num_heads * hd, axes=("embed", "heads"), bias=bias, dtype=dtype, rngs=rngs)
        self.k = Linear(d, config.num_kv_heads * hd, axes=("embed", "kv_heads"), bias=bias, dtype=dtype, rngs=rngs)
        self.v = Linear(d, config.num_kv_heads * hd, axes=("embed", "kv_heads"), bias=bias, dtype=dtype, rngs=rngs)
        self.o = Linear(config.num_heads * hd, d, axes=("heads", "embed"), bias=bias, dtype=dtype, rngs=rngs)

    def project_kv(self, x: Float[Array, "batch cols embed"], view: Attendable) -> KV:
        """The K/V rows of normed states x: all that a layer that is not run still owes to later tokens.

        A column that does not exist has the value 0, whatever its state: a masked score still multiplies its value in
        the attention sum, and 0 · NaN is NaN.
        """
        split = (*x.shape[:2], -1, self.head_dim)
        k = rotate(self.k(x).reshape(split), view.cos, view.sin)
        v = jnp.where(view.valid[..., None, None], self.v(x).reshape(split), 0)
        return KV(*(constrain(rows.swapaxes(1, 2), "batch", "kv_heads", None, None) for rows in (k, v)))

    def query(self, x: Float[Array, "batch cols embed"], view: Attendable) -> Float[Array, "batch heads cols head_dim"]:
        """Rotated queries of normed states x."""
        q = self.q(x).reshape(*x.shape[:2], -1, self.head_dim)
        return constrain(rotate(q, view.cos, view.sin).swapaxes(1, 2), "batch", "heads", None, None)

    def attend(
        self, q: Float[Array, "batch heads cols head_dim"], rows: KV, past: KV | None, view: Attendable
    ) -> Float[Array, "batch cols embed"]:
        """Attention of the columns over the past cache and the rows of this call, through the output projection."""
        mixed = attention(q, rows, past, view)
        return self.o(mixed.swapaxes(1, 2).reshape(mixed.shape[0], mixed.shape[2], -1))


def attention(
    q: Float[Array, "batch heads cols head_dim"], rows: KV, past: KV | None, view: Attendable
) -> Float[Array, "batch heads cols head_dim"]:
    """softmax(q·kᵀ/√head_dim)·v over two sources, merged as partial softmaxes, so that neither is copied.

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
        raw = raw.reshape(batch, kv_heads, -1, cols, keys.shape[2])
        return jnp.where(mask[:, None, None], raw * head_dim**-0.5, -jnp.inf)

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
