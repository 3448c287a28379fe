"""Choosing the next token from logits, per row."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from tide_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 picks the most likely token; otherwise logits are divided by it and a token is drawn.
    """

    temperature: float = 0.0

    def __post_init__(self):
        number = isinstance(self.temperature, int | float)
        if not (number and math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(
                f"Sampling: temperature {self.temperature!r} is not a finite number of 0 or more (0 is greedy)."
            )


def choose(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, " batch"],
    positions: Int[Array, " batch"],
    temperature: Float[Array, " batch"],
) -> Int[Array, " batch"]:
    """The next token of each row: the argmax, or a draw at the row's temperature.

    The noise of a draw depends on the row's key and the token's position alone, so a row's text does not depend on the
    batch around it. A batch of greedy rows makes no noise at all.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        own = jax.vmap(jax.random.fold_in)(keys, positions)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(own)
        warm = jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)[:, None]
        top = logits.max(axis=-1, keepdims=True)
        drawn = jnp.argmax((logits - top) / warm + noise, axis=-1).astype(jnp.int32)
        return jnp.where(temperature > 0, drawn, greedy)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)
