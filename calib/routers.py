"""Training the routers of all depths jointly, with Optax, as one compiled epoch."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from tide_jax.exits import Router
from tide_jax.models.blocks import Normalization

BOTTLENECK = 128  # TIDE, arXiv 2603.21365
_BATCH = 256


class RouterInput(NamedTuple):
    """What makes the state a router sees at run time, the normed one, of a unit-RMS state.

    Attributes:
        scale: of the final norm, 1 included where the norm adds it.
        bias: of the final norm; 0 where it has none.
        centred: the norm takes the mean away first (LayerNorm).
    """

    scale: Float[Array | np.ndarray, " embed"]
    bias: Float[Array | np.ndarray, " embed"]
    centred: bool | Bool[Array, ""]

    @classmethod
    def of(cls, norm: Normalization) -> "RouterInput":
        """That of a final norm."""
        scale, bias = norm.parameters()
        kind = norm.norm.kind
        bias = jnp.zeros_like(scale) if bias is None else bias
        return cls(np.asarray(1 + scale if kind == "rms_one_plus" else scale), np.asarray(bias), kind == "layer")

    def __call__(self, x: Float[Array | np.ndarray, "*rows embed"]) -> Float[Array, "*rows embed"]:
        """The normed states, float32."""
        x = jnp.asarray(x, jnp.float32)
        apart = x - x.mean(axis=-1, keepdims=True)
        apart = apart * jax.lax.rsqrt(jnp.mean(jnp.square(apart), axis=-1, keepdims=True) + 1e-12)
        return jnp.where(self.centred, apart, x) * self.scale + self.bias


def train_routers(
    x: Float[np.ndarray, "depths tokens embed"],
    norm: RouterInput,
    label: Bool[np.ndarray, "depths tokens"],
    held_out: Bool[np.ndarray, " tokens"],
    *,
    seed: int,
    progress: Callable,
    epochs: int = 10,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.1,
) -> tuple[list[Router], list[float]]:
    """Fit one router per depth to its labels by binary cross-entropy; each keeps its best epoch on the held-out tokens.

    Args:
        x: unit-RMS states.
        norm: makes of them what the router sees at run time.
        label: what to predict.
        held_out: tokens that choose the epoch and train nothing.
        seed: of initial weights and batch order.
        progress: wraps the epochs in a progress bar.
        epochs: passes over the tokens, at most; the learning rate falls to 0 along a cosine.
        learning_rate: of AdamW.
        weight_decay: of AdamW.

    Returns:
        The routers, and each one's cross-entropy on the held-out tokens, nats.
    """
    depths, _, width = x.shape
    inside, outside = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    size = min(_BATCH, len(inside))
    batches = len(inside) // size
    keys = jax.random.split(jax.random.key(seed))
    params = Router(
        down=jax.random.normal(keys[0], (depths, width, BOTTLENECK)) * width**-0.5,
        up=jax.random.normal(keys[1], (depths, BOTTLENECK)) * BOTTLENECK**-0.5,
    )
    schedule = optax.cosine_decay_schedule(learning_rate, epochs * batches)
    optimizer = optax.adamw(schedule, weight_decay=weight_decay)
    state = optimizer.init(params)
    x, label, norm = jnp.asarray(x), jnp.asarray(label), jax.tree.map(jnp.asarray, norm)
    epoch = jax.jit(functools.partial(_epoch, optimizer), donate_argnums=(0, 1))
    losses = jax.jit(_losses)
    rng = np.random.default_rng(seed)
    best, best_loss = jax.tree.map(jnp.copy, params), np.full(depths, np.inf)
    for _ in progress(range(epochs)):
        order = rng.permutation(inside)[: batches * size].reshape(batches, size)
        params, state = epoch(params, state, x, norm, label, jnp.asarray(order))
        loss = np.asarray(losses(params, x[:, outside], norm, label[:, outside]))
        best = _where(jnp.asarray(loss < best_loss), params, best)
        best_loss = np.minimum(loss, best_loss)
    best = jax.tree.map(np.asarray, best)
    return [Router(best.down[i], best.up[i]) for i in range(depths)], best_loss.tolist()


def scores(router: Router, norm: RouterInput, x: Float[np.ndarray, "tokens embed"]) -> np.ndarray:
    """The router's probabilities of unit-RMS states, float32 [tokens]."""
    hidden = np.asarray(norm(x)) @ router.down
    return 1 / (1 + np.exp(-((hidden / (1 + np.exp(-hidden))) @ router.up)))


def _where(chosen: Bool[Array, " depths"], new: Router, old: Router) -> Router:
    """Depth by depth, the new parameters where chosen."""
    return jax.tree.map(lambda n, o: jnp.where(chosen.reshape(-1, *[1] * (n.ndim - 1)), n, o), new, old)


def _losses(
    params: Router,
    x: Float[Array, "depths tokens embed"],
    norm: RouterInput,
    label: Bool[Array, "depths tokens"],
) -> Float[Array, " depths"]:
    hidden = jax.nn.silu(jnp.einsum("ntd,ndr->ntr", norm(x), params.down))
    logits = jnp.einsum("ntr,nr->nt", hidden, params.up)
    return optax.sigmoid_binary_cross_entropy(logits, label.astype(jnp.float32)).mean(axis=1)


def _epoch(
    optimizer: optax.GradientTransformation,
    params: Router,
    state: optax.OptState,
    x: Float[Array, "depths tokens embed"],
    norm: RouterInput,
    label: Bool[Array, "depths tokens"],
    order: Int[Array, "batches size"],
) -> tuple[Router, optax.OptState]:
    def one(carry, chosen):
        params, state = carry
        loss = lambda p: _losses(p, x[:, chosen], norm, label[:, chosen]).sum()  # noqa: E731
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(one, (params, state), order)[0]
