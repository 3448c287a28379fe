"""Labels: is the state at an exit point good enough? Like is compared with like."""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

from calib.collect import States
from calib.projections import predictions
from tide_jax.exits import Projection
from tide_jax.model import Model

Label = Literal["agreement", "cosine"]
COSINE = 0.98  # TIDE, arXiv 2603.21365
FEWEST = 16  # positives under which a router would learn noise


def labels(
    kind: Label, model: Model, projection: Projection | None, states: States, index: int
) -> Bool[np.ndarray, " tokens"]:
    """One label per token for the candidate depth number `index`.

    `agreement`: projection, final norm and LM head say what the full model says. `cosine`: the projected state has a
    cosine above 0.98 with the last layer's state, both before the final norm.
    """
    if kind == "agreement":
        return predictions(model, projection, states.x[index]) == states.predicted
    x = states.x[index].astype(np.float32)
    if projection is not None:
        x = x @ projection.kernel + projection.bias
    return cosine(x, states.last.astype(np.float32)) > COSINE


def cosine(x: Float[np.ndarray, "tokens embed"], y: Float[np.ndarray, "tokens embed"]) -> Float[np.ndarray, " tokens"]:
    """Cosine of each pair of rows."""
    return (x * y).sum(axis=1) / np.maximum(np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1), 1e-30)


def degenerate(label: Bool[np.ndarray, " tokens"]) -> bool:
    """Too few positives to learn from: such a router must never fire."""
    return int(label.sum()) < max(FEWEST, 0.002 * len(label))
