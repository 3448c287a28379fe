"""Emitting tokens: what a final state becomes in the buffers of its row."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tide_jax.decode.sampling import choose
from tide_jax.decode.state import DecodeState
from tide_jax.models import Decoder


def choices(
    decoder: Decoder, state: DecodeState, x: Float[Array, "batch cols embed"], at: Int[Array, "batch cols"]
) -> Int[Array, "batch cols"]:
    """The token that each final state says for its position `at`, through the LM head."""
    batch, cols, _ = x.shape
    logits = decoder.logits(x.reshape(batch * cols, -1))
    keys, temperature = jnp.repeat(state.keys, cols), jnp.repeat(state.temperature, cols)
    return choose(logits, keys, at.reshape(-1), temperature).reshape(batch, cols)


def followed(state: DecodeState, choice: Int[Array, "batch cols"], at: Int[Array, "batch cols"]) -> Array:
    """The tokens that really follow: the choices, or those known in advance."""
    known = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, at.shape[1]))(state.tokens, at[:, 0])
    return jnp.where(at < state.given[:, None], known, choice)


def is_stop(state: DecodeState, token: Int[Array, "batch cols"]) -> Bool[Array, "batch cols"]:
    """Tokens that end their row."""
    return (token[..., None] == state.stops[:, None, :]).any(axis=-1)


def emit(
    state: DecodeState,
    count: Int[Array, " batch"],
    first: Int[Array, " batch"],
    choice: Int[Array, "batch cols"],
    depth: Int[Array, "batch cols"],
    x: Float[Array, "batch cols embed"],
) -> DecodeState:
    """Write `count` tokens of each row from position `first` on, and end rows at a stop id or at their limit.

    Nothing may follow a stop id or the limit within `count`.
    """
    cols = choice.shape[1]
    at = first[:, None] + jnp.arange(cols)
    written = jnp.arange(cols) < count[:, None]
    token = followed(state, choice, at)

    def put(target: jax.Array, value: jax.Array) -> jax.Array:
        """target[row, at[row, col]] = value[row, col] where written, in place."""

        def one(target: jax.Array, value: jax.Array, written: jax.Array, start: jax.Array) -> jax.Array:
            old = jax.lax.dynamic_slice_in_dim(target, start, cols)
            new = jnp.where(written.reshape(-1, *[1] * (target.ndim - 1)), value, old)
            return jax.lax.dynamic_update_slice_in_dim(target, new, start, axis=0)

        return jax.vmap(one)(target, value, written, first)

    ends = (written & (is_stop(state, token) | (at + 1 >= state.limit[:, None]))).any(axis=1)
    return dataclasses.replace(
        state,
        tokens=put(state.tokens, token),
        choices=put(state.choices, choice),
        depths=put(state.depths, depth),
        states=None if state.states is None else put(state.states, x),
        live=state.live & ~ends,
    )
