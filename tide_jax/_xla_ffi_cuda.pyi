"""Native kernels of tide_jax for CUDA as XLA FFI handlers. Importing it needs no GPU and no driver."""

from typing import Any

def registrations() -> dict[str, Any]:
    """Return {target name: capsule} of every handler compiled into this module."""

def device_error() -> str:
    """Return why the kernels cannot run on this process's device, or an empty string."""

def cuda_version() -> str:
    """Return the version of the CUDA toolkit that it was compiled with, such as "13.0"."""

def architectures() -> str:
    """Return the GPU architectures that it was compiled for, as CMake writes them, such as "80-real,90"."""
