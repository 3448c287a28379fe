"""Native kernels of tide_jax for the CPU as XLA FFI handlers."""

from typing import Any

def registrations() -> dict[str, Any]:
    """Return {target name: capsule} of every handler compiled into this module."""
