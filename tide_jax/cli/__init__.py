"""The command line: `tide-jax VERB …`."""

from tide_jax.cli.main import main

__all__ = ["main"]
