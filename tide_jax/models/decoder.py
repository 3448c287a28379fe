"""The decoder: embedding, layers, final norm, LM head, as Flax modules without any decoding logic."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from tide_jax.models.blocks import KV, Attendable, Attention, GatedMLP, Linear, RMSNorm
from tide_jax.models.config import DecoderConfig
from tide_jax.models.rope import rotation
from tide_jax.sharding import constrain, look_up


class DecoderLayer(nnx.Module):
    """One pre-norm transformer layer: x + attention(norm(x)), then + MLP(norm(x))."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)

    def project_kv(self, x: Float[Array, "batch cols embed"], view: Attendable) -> KV:
        """The K/V rows this layer makes from the states x that enter it, without running it."""
        return self.attention.project_kv(self.attention_norm(x), view)

    def __call__(
        self, x: Float[Array, "batch cols embed"], rows: KV, past: KV | None, view: Attendable
    ) -> Float[Array, "batch cols embed"]:
        """The states after this layer.

        Args:
            x: the states that enter it.
            rows: K/V rows of the columns at this layer: `project_kv(x, view)`, or what a cache already holds for them.
            past: the cache of this layer, which is only read.
            view: who may attend to whom.
        """
        query = self.attention.query(self.attention_norm(x), view)
        x = constrain(x + self.attention.attend(query, rows, past, view), "batch", None, None)
        return constrain(x + self.mlp(self.mlp_norm(x)), "batch", None, None)


class Decoder(nnx.Module):
    """A decoder-only language model; every family is a config and a weight table over this module."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), dtype)
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tied_head
            else Linear(
                config.hidden_size, config.vocab_size, axes=("embed", "vocab"), bias=False, dtype=dtype, rngs=rngs
            )
        )

    def embed(self, tokens: Int[Array, "batch cols"]) -> Float[Array, "batch cols embed"]:
        """Token embeddings: the states before the first layer."""
        return look_up(self.embedding[...], tokens)

    def logits(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """Final norm, once, then the LM head, in float32."""
        x = self.final_norm(x)
        if self.lm_head is not None:
            return jnp.matmul(x, self.lm_head.kernel[...], preferred_element_type=jnp.float32)
        return jnp.einsum("...d,vd->...v", x, self.embedding[...], preferred_element_type=jnp.float32)

    def view(
        self,
        positions: Int[Array, "batch cols"],
        valid: Bool[Array, "batch cols"],
        past: Bool[Array, "batch slots"] | None = None,
    ) -> Attendable:
        """Who may attend to whom: a column sees itself, valid columns before it, and the slots marked in `past`."""
        cos, sin = rotation(self.config.rope, self.config.head_dim, positions)
        cols = positions.shape[1]
        order = jnp.arange(cols)
        before = (order[None, :] < order[:, None]) & valid[:, None, :]
        now = before | jnp.eye(cols, dtype=bool)
        if past is not None:
            past = jnp.broadcast_to(past[:, None, :], (past.shape[0], cols, past.shape[1]))
        return Attendable(cos, sin, valid, now, past)

    def hidden_states(
        self, ids: Int[Array, "batch cols"], mask: Bool[Array, "batch cols"]
    ) -> Float[Array, "depths batch cols embed"]:
        """Raw states after the embedding and after 1 … L layers, [L + 1, batch, cols, embed], without a cache."""
        states = [self.embed(ids)]
        view = self.view(jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0), mask)
        for layer in self.layers:
            x = states[-1]
            states.append(layer(x, layer.project_kv(x, view), None, view))
        return jnp.stack(states)

    def __call__(
        self, ids: Int[Array, "batch cols"], mask: Bool[Array, "batch cols"]
    ) -> Float[Array, "batch cols vocab"]:
        """Float32 logits of every column, at full depth, without a cache."""
        return self.logits(self.hidden_states(ids, mask)[-1])
