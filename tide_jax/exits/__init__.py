"""When a token leaves (rules), through what (heads), and what stands in for the rest (remainders)."""

from tide_jax.exits.heads import ExitHead, ExitHeads, Projection, Router
from tide_jax.exits.remainders import Deferred, ProjectKV, Remainder
from tide_jax.exits.rules import ExitRule, FixedDepth, Never, NoScorer, RouterExit, RouterScorer, Scorer

__all__ = [
    "Deferred", "ExitHead", "ExitHeads", "ExitRule", "FixedDepth", "Never", "NoScorer", "ProjectKV", "Projection",
    "Remainder", "Router", "RouterExit", "RouterScorer", "Scorer",
]  # fmt: skip
