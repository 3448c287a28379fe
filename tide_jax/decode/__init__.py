"""Decoding: state, step, engine, and what users call."""

from tide_jax.decode.compare import Report, Yardstick, compare
from tide_jax.decode.engine import Engine
from tide_jax.decode.generate import Output, Stats, generate
from tide_jax.decode.sampling import Sampling

__all__ = ["Engine", "Output", "Report", "Sampling", "Stats", "Yardstick", "compare", "generate"]
