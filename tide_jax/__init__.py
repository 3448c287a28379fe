"""Token-informed depth execution: decoder-only language models that leave layers out, honestly measured."""

from tide_jax.convert import convert
from tide_jax.decode import Engine, Output, Report, Sampling, Yardstick, compare, generate
from tide_jax.errors import InputError
from tide_jax.exits import FixedDepth, Never, ProjectKV, RouterExit
from tide_jax.model import Model, load

__all__ = [
    "Engine", "FixedDepth", "InputError", "Model", "Never", "Output", "ProjectKV", "Report", "RouterExit", "Sampling",
    "Yardstick", "compare", "convert", "generate", "load",
]  # fmt: skip
