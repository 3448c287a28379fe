"""The decoder: embedding, layers, final norm, LM head, as Flax modules without any decoding logic."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from tide_jax.models.blocks import KV, MLP, Attendable, Attention, Linear, Normalization, Views
from tide_jax.models.config import DecoderConfig, LayerKind
from tide_jax.models.rope import rotation
from tide_jax.sharding import constrain, look_up


class DecoderLayer(nnx.Module):
    """One transformer layer: what attention and MLP make is added to the states, normed before, after, or both."""

    def __init__(self, config: DecoderConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        def norm(present: bool) -> Normalization | None:
            return Normalization(*config.norm_of(config.hidden_size), dtype=dtype) if present else None

        self.kind = config.kind_of(index)
        self.sequential = config.residual == "sequential"
        self.residual_scale = config.residual_scale
        self.attention_norm = norm(config.norms != "post")
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.attention_post_norm = norm(config.norms != "pre")
        # What comes through the one norm of both is normed once.
        self.mlp_norm = norm(config.norms != "post" and config.residual != "shared")
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        self.mlp_post_norm = norm(config.norms != "pre")

    def project_kv(self, x: Float[Array, "batch cols embed"], views: Views) -> KV:
        """The K/V rows this layer makes from the states x that enter it, without running it."""
        return self.attention.project_kv(_through(self.attention_norm, x), views[self.kind])

    def __call__(
        self, x: Float[Array, "batch cols embed"], rows: KV, past: KV | None, views: Views
    ) -> Float[Array, "batch cols embed"]:
        """The states after this layer.

        Args:
            x: the states that enter it.
            rows: K/V rows of the columns at this layer: `project_kv(x, views)`, or what a cache already holds for them.
            past: the cache of this layer, which is only read.
            views: who may attend to whom.
        """
        view, entered = views[self.kind], _through(self.attention_norm, x)
        mixed = self.attention.attend(self.attention.query(entered, view), rows, past, view)
        mixed = _through(self.attention_post_norm, mixed)
        if self.sequential:
            x = self._add(x, mixed)
            return self._add(x, _through(self.mlp_post_norm, self.mlp(_through(self.mlp_norm, x))))
        read = entered if self.mlp_norm is None else self.mlp_norm(x)
        return self._add(x, mixed + _through(self.mlp_post_norm, self.mlp(read)))

    def _add(
        self, x: Float[Array, "batch cols embed"], made: Float[Array, "batch cols embed"]
    ) -> Float[Array, "batch cols embed"]:
        """x and what a block has made."""
        return constrain(x + (made if self.residual_scale == 1 else self.residual_scale * made), "batch", None, None)


def _through(norm: Normalization | None, x: Float[Array, "batch cols embed"]) -> Float[Array, "batch cols embed"]:
    """x, normed where there is a norm."""
    return x if norm is None else norm(x)


class Decoder(nnx.Module):
    """A decoder-only language model; every family is a config and a weight table over this module."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        d = config.hidden_size
        table = jax.random.normal(rngs.params(), (config.vocab_size, d), dtype)
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))
        rows = config.learned_positions
        self.position_embedding = (
            nnx.Param(jax.random.normal(rngs.params(), (rows, d), dtype), axes=(None, "embed")) if rows else None
        )
        self.layers = nnx.List(
            [DecoderLayer(config, index, dtype=dtype, rngs=rngs) for index in range(config.num_layers)]
        )
        self.final_norm = Normalization(*config.norm_of(d), dtype=dtype)
        self.lm_head = (
            None
            if config.tied_head
            else Linear(d, config.vocab_size, axes=("embed", "vocab"), bias=False, dtype=dtype, rngs=rngs)
        )

    def embed(
        self, tokens: Int[Array, "batch cols"], positions: Int[Array, "batch cols"]
    ) -> Float[Array, "batch cols embed"]:
        """Embeddings of tokens at their positions: the states before the first layer."""
        x = look_up(self.embedding[...], tokens)
        if self.config.embedding_scale != 1:
            # In the dtype of the model, to which its authors rounded the factor (Gemma: √hidden_size).
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.position_embedding is not None:
            # Columns that do not exist may lie beyond the table.
            rows = jnp.minimum(positions + self.config.position_offset, self.config.learned_positions - 1)
            x = x + self.position_embedding[...][rows]
        return constrain(x, "batch", None, None)

    def logits(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """Final norm, once, then the LM head, in float32."""
        x = self.final_norm(x)
        if self.lm_head is not None:
            logits = jnp.matmul(x, self.lm_head.kernel[...], preferred_element_type=jnp.float32)
        else:
            logits = jnp.einsum("...d,vd->...v", x, self.embedding[...], preferred_element_type=jnp.float32)
        if self.config.logit_divisor != 1:
            logits = logits / self.config.logit_divisor
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def view(
        self,
        positions: Int[Array, "batch cols"],
        valid: Bool[Array, "batch cols"],
        past: Int[Array, "batch slots"] | None = None,
    ) -> Views:
        """Who may attend to whom: a column sees itself, valid columns before it, and the past, as far as a window goes.

        Args:
            positions: of the columns.
            valid: columns that exist.
            past: the position in each slot of a cache, −1 where there is none to attend to.
        """
        order = jnp.arange(positions.shape[1])
        before = ((order[None, :] < order[:, None]) & valid[:, None, :]) | jnp.eye(len(order), dtype=bool)

        def seen(kind: LayerKind) -> Attendable:
            now, slots = before, None
            if past is not None:
                slots = jnp.broadcast_to(past[:, None, :] >= 0, (past.shape[0], len(order), past.shape[1]))
            if kind.window is not None:
                oldest = positions[:, :, None] - kind.window
                now = now & (positions[:, None, :] > oldest)
                slots = None if slots is None else slots & (past[:, None, :] > oldest)
            angles = (None, None) if kind.rope is None else rotation(kind.rope, self.config.head_dim, positions)
            return Attendable(*angles, valid, now, slots)

        return tuple(seen(kind) for kind in self.config.kinds)

    def hidden_states(
        self, ids: Int[Array, "batch cols"], mask: Bool[Array, "batch cols"]
    ) -> Float[Array, "depths batch cols embed"]:
        """Raw states after the embedding and after 1 … L layers, [L + 1, batch, cols, embed], without a cache."""
        positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        states = [self.embed(ids, positions)]
        views = self.view(positions, mask)
        for layer in self.layers:
            x = states[-1]
            states.append(layer(x, layer.project_kv(x, views), None, views))
        return jnp.stack(states)

    def __call__(
        self, ids: Int[Array, "batch cols"], mask: Bool[Array, "batch cols"]
    ) -> Float[Array, "batch cols vocab"]:
        """Float32 logits of every column, at full depth, without a cache."""
        return self.logits(self.hidden_states(ids, mask)[-1])
