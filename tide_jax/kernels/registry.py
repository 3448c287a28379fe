"""Load the compiled extension once and register its targets with XLA.

Nothing happens at import. The first use of a kernel, or `status()`, loads `tide_jax._xla_ffi`; the answer
holds for the life of the process, because XLA keeps registrations for as long.
"""

import dataclasses
import importlib
import importlib.util
import logging
import os
import threading
import warnings

import jax
import jaxlib

from tide_jax.errors import InputError

EXTENSION = "tide_jax._xla_ffi"
SWITCH = "TIDE_KERNELS"

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_status: "KernelStatus | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelStatus:
    """What became of the compiled extension in this process.

    Attributes:
        available: True if its kernels are registered and will be used.
        path: the file it was loaded from, or that failed to load; None if there is none.
        reason: one sentence that says why `available` is what it is.
        targets: the registered XLA target names, sorted; empty if not available.
        jax: version of jax.
        jaxlib: version of jaxlib, whose headers and runtime the extension must agree with.
    """

    available: bool
    path: str | None
    reason: str
    targets: tuple[str, ...] = ()
    jax: str = jax.__version__
    jaxlib: str = jaxlib.__version__


def status() -> KernelStatus:
    """Return the state of the compiled kernels, loading them if no one has yet.

    An extension that was never built is logged once as a warning. One that is there and cannot be used is a
    broken install: that is a `RuntimeWarning` with the file and the cause. In both cases the jnp path runs.

    Raises:
        InputError: the environment variable `TIDE_KERNELS` is neither unset, `auto` nor `off`.

    Example:
        >>> from tide_jax.kernels import status
        >>> isinstance(status().reason, str)
        True
    """
    global _status
    with _lock:
        if _status is None:
            _status = _load()
        return _status


def registered(target: str) -> bool:
    """Return whether the XLA target of this name can be called in this process.

    Raises:
        InputError: see `status`.
    """
    return target in status().targets


def _load() -> KernelStatus:
    switch = os.environ.get(SWITCH, "auto")
    if switch not in ("auto", "off"):
        raise InputError(f"{SWITCH} must be 'auto' or 'off', got {switch!r}.")
    if switch == "off":
        reason = f"switched off by {SWITCH}=off; the jnp path runs"
        return KernelStatus(available=False, path=None, reason=reason)

    spec = importlib.util.find_spec(EXTENSION)
    if spec is None:
        reason = (
            f"{EXTENSION} is not part of this install (no C++ compiler when it was built?);"
            " the jnp path runs, with the same results"
        )
        _logger.warning("Native kernels are not available: %s.", reason)
        return KernelStatus(available=False, path=None, reason=reason)

    # Whatever goes wrong from here on (a missing symbol, another Python, an FFI version that this jaxlib
    # refuses), the user needs the same facts, and a reference path that works must not be lost to it.
    try:
        targets = importlib.import_module(EXTENSION).registrations()
        for name, capsule in targets.items():
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    except Exception as error:
        reason = (
            f"{spec.origin} cannot be used with jax {jax.__version__} and jaxlib {jaxlib.__version__}"
            f" ({type(error).__name__}: {error}); install tide-jax again to rebuild it, or set {SWITCH}=off"
            " to silence this; the jnp path runs"
        )
        warnings.warn(f"Native kernels are broken: {reason}.", RuntimeWarning, stacklevel=3)
        return KernelStatus(available=False, path=spec.origin, reason=reason)
    return KernelStatus(available=True, path=spec.origin, reason="loaded", targets=tuple(sorted(targets)))
