"""Choosing exit points and thresholds: the largest saving that keeps the agreement asked for."""

import itertools
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float

from tide_jax.exits.rules import STAY

_GRID = 48  # thresholds tried per exit point, at quantiles of its scores


def choose(
    scores: Mapping[int, Float[np.ndarray, " tokens"]],
    good: Mapping[int, Bool[np.ndarray, " tokens"]],
    *,
    num_layers: int,
    agreement: float,
    most: int = 3,
) -> tuple[dict[int, float], float, float]:
    """Thresholds for at most `most` exit points.

    Every set of points is tried; for each, thresholds are improved one at a time until none of them can save more
    layers while at least the share `agreement` of all tokens still gets the full model's token.

    Args:
        scores: router scores by depth, of the same tokens.
        good: whether a token that leaves there gets the full model's token.
        num_layers: depth L of the model.
        agreement: share of all tokens, exited or not; tokens that stay count as agreeing.
        most: exit points at most.

    Returns:
        Thresholds by depth (only points that fire), layers saved per token, and the agreement on these tokens.
    """
    best: tuple[dict[int, float], float, float] = ({}, 0.0, 1.0)
    grids = {depth: np.unique(np.quantile(values, np.linspace(0.2, 1.0, _GRID))) for depth, values in scores.items()}
    for size in range(1, most + 1):
        for points in itertools.combinations(sorted(scores), size):
            current = dict.fromkeys(points, STAY)
            saved, kept = simulate(current, scores, good, num_layers)
            for _ in range(4):
                before = saved
                for depth in points:
                    for value in grids[depth]:
                        tried = {**current, depth: float(value)}
                        more, agrees = simulate(tried, scores, good, num_layers)
                        if agrees >= agreement and more > saved:
                            current, saved, kept = tried, more, agrees
                if saved == before:
                    break
            if saved > best[1] + 1e-9:
                best = ({depth: value for depth, value in current.items() if value < STAY}, saved, kept)
    return best


def simulate(
    thresholds: Mapping[int, float],
    scores: Mapping[int, Float[np.ndarray, " tokens"]],
    good: Mapping[int, Bool[np.ndarray, " tokens"]],
    num_layers: int,
) -> tuple[float, float]:
    """Layers saved per token and share of tokens that agree, when each leaves at its first point that fires."""
    depths = sorted(thresholds)
    fires = np.stack([scores[depth] > thresholds[depth] for depth in depths])
    left = fires.any(axis=0)
    first = fires.argmax(axis=0)
    saved = np.where(left, num_layers - np.asarray(depths)[first], 0)
    right = np.stack([good[depth] for depth in depths])[first, np.arange(first.size)]
    return float(saved.mean()), float(np.where(left, right, True).mean())


def curve(score: Float[np.ndarray, " tokens"], good: Bool[np.ndarray, " tokens"]) -> list[dict[str, float | None]]:
    """Coverage and precision of one exit point over a grid of thresholds.

    Returns:
        Rows of `threshold`, `coverage` (share of tokens that leave), `precision` (share of those that get the full
        model's token; None when none leaves) and `agreement` (share of all tokens that do).
    """
    rows = []
    for threshold in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98):
        leaves = score > threshold
        rows.append({
            "threshold": threshold,
            "coverage": float(leaves.mean()),
            "precision": float(good[leaves].mean()) if leaves.any() else None,
            "agreement": float(np.where(leaves, good, True).mean()),
        })  # fmt: skip
    return rows
