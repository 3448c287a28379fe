"""Decoding: state, step, loops, engine, and what users call."""

from tide_jax.decode.compare import Report, Yardstick, compare
from tide_jax.decode.control import StepTimes
from tide_jax.decode.engine import Engine
from tide_jax.decode.generate import generate
from tide_jax.decode.output import Drafts, Output, Stats
from tide_jax.decode.proposers import Ngram
from tide_jax.decode.sampling import Sampling
from tide_jax.decode.verify import Verify
from tide_jax.decode.warmup import warmup

__all__ = [
    "Drafts", "Engine", "Ngram", "Output", "Report", "Sampling", "Stats", "StepTimes", "Verify", "Yardstick", "compare",
    "generate", "warmup",
]  # fmt: skip
