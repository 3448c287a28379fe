"""Exit projections: one closed-form affine map per depth, and the predictions made through them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from tide_jax.exits import Projection
from tide_jax.exits.heads import project
from tide_jax.model import Model

_CHUNK = 1024


def ridge(
    x: Float[np.ndarray, "tokens embed"], y: Float[np.ndarray, "tokens outputs"], strength: float = 0.003
) -> Projection:
    """The affine map that carries unit-RMS states x nearest to unit-RMS final states y, least squares with a ridge.

    Args:
        x: states at the exit point.
        y: states after the last layer, of the same tokens.
        strength: added to the diagonal of the mean x·xᵀ, whose own diagonal averages 1.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(500, 3))
        >>> np.round(ridge(x, 2 * x + 1, strength=0.0).bias, 3).tolist()
        [1.0, 1.0, 1.0]
    """
    width = x.shape[1]
    gram, cross = np.zeros((width + 1, width + 1)), np.zeros((width + 1, y.shape[1]))
    for begin in range(0, len(x), _CHUNK):
        block = x[begin : begin + _CHUNK].astype(np.float64)
        block = np.concatenate([block, np.ones((len(block), 1))], axis=1)
        gram += block.T @ block
        cross += block.T @ y[begin : begin + _CHUNK].astype(np.float64)
    gram[np.arange(width), np.arange(width)] += strength * len(x)
    solved = np.linalg.solve(gram, cross).astype(np.float32)
    return Projection(kernel=solved[:-1], bias=solved[-1])


def predictions(
    model: Model, projection: Projection | None, x: Float[np.ndarray, "tokens embed"]
) -> Int[np.ndarray, " tokens"]:
    """The token that final norm and LM head make of states x, through the projection if there is one."""
    made = []
    for begin in range(0, len(x), _CHUNK):
        block = x[begin : begin + _CHUNK]
        padded = np.zeros((_CHUNK, x.shape[1]), np.float16)  # one shape, one compilation
        padded[: len(block)] = block
        made.append(np.asarray(_predict(model.graphdef, model.params, projection, padded))[: len(block)])
    return np.concatenate(made) if made else np.zeros(0, np.int32)


@functools.partial(jax.jit, static_argnames="graphdef")
def _predict(graphdef, params, projection: Projection | None, x: Float[Array, "tokens embed"]) -> Int[Array, " tokens"]:
    decoder = nnx.merge(graphdef, params)
    x = x.astype(jnp.float32)
    if projection is not None:
        x = project(projection, x, decoder.config.norm_eps)
    return jnp.argmax(decoder.logits(x.astype(decoder.embedding[...].dtype)), axis=-1).astype(jnp.int32)
