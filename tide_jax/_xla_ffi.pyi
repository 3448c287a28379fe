"""Native kernels of tide_jax as XLA FFI handlers."""

from typing import Any

def registrations() -> dict[str, Any]:
    """Return {target name: capsule} of every CPU handler compiled into this module."""
