"""Token-informed depth execution: decoder-only language models that leave layers out, honestly measured."""

import importlib

from tide_jax.convert import convert, export
from tide_jax.errors import InputError

__all__ = [
    "Deferred", "Engine", "FixedDepth", "InputError", "Model", "Never", "Ngram", "Output", "ProjectKV", "Report",
    "RouterExit", "Sampling", "Verify", "Yardstick", "compare", "convert", "export", "generate", "load", "warmup",
]  # fmt: skip

# Imported when first asked for, so that the command line answers --help without waiting for jax.
_HOMES = {
    "tide_jax.decode": (
        "Engine",
        "Ngram",
        "Output",
        "Report",
        "Sampling",
        "Verify",
        "Yardstick",
        "compare",
        "generate",
        "warmup",
    ),
    "tide_jax.exits": ("Deferred", "FixedDepth", "Never", "ProjectKV", "RouterExit"),
    "tide_jax.model": ("Model", "load"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
