"""Load the compiled extensions once, register their targets with XLA, and choose between kernel and reference.

Nothing happens at import. The first use of a kernel, or `status()`, loads `tide_jax._xla_ffi`; the CUDA extension,
`tide_jax._xla_ffi_cuda`, is loaded only where JAX has a CUDA backend, or by `register_cuda()`. The answer holds for the
life of the process, because XLA keeps registrations for as long.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jaxlib

from tide_jax.compat import varying_alike
from tide_jax.errors import InputError

SWITCH = "TIDE_KERNELS"
Platform = Literal["cpu", "cuda"]

_EXTENSIONS = {"cpu": "tide_jax._xla_ffi", "cuda": "tide_jax._xla_ffi_cuda"}
_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA"}
_NOT_BUILT = {
    "cpu": "no C++ compiler when it was built?",
    "cuda": "built without -DTIDE_CUDA=ON? README, section Kernels",
}

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_statuses: dict[str, "KernelStatus"] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelStatus:
    """What became of a compiled extension in this process.

    Attributes:
        available: True if its kernels are registered and will be used.
        path: the file it was loaded from, or that failed to load; None if there is none.
        reason: one sentence that says why `available` is what it is.
        targets: the registered XLA target names, sorted; empty if not available.
        versions: of everything that must go together: jax, jaxlib, JAX's CUDA plugin if installed, and the CUDA toolkit
            that the extension was compiled with if it is the CUDA one.
    """

    available: bool
    path: str | None
    reason: str
    targets: tuple[str, ...] = ()
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


def status(platform: Platform = "cpu") -> KernelStatus:
    """Return the state of the compiled kernels for a platform, loading them if no one has yet.

    An extension that was never built is logged once as a warning. One that is there and cannot be used is a
    broken install: that is a `RuntimeWarning` with the file and the cause. In both cases the jnp path runs.

    Args:
        platform: `cpu` or `cuda`.

    Raises:
        InputError: the environment variable `TIDE_KERNELS` is neither unset, `auto` nor `off`.

    Example:
        >>> from tide_jax.kernels import status
        >>> isinstance(status().reason, str)
        True
    """
    with _lock:
        if platform not in _statuses:
            if platform == "cuda" and not _has_cuda():
                # Not kept: register_cuda() may come later.
                reason = "this process has no CUDA backend; `register_cuda()` registers the kernels all the same"
                return KernelStatus(available=False, path=None, reason=reason, versions=_versions())
            _statuses[platform] = _load(platform)
        return _statuses[platform]


def register_cuda() -> KernelStatus:
    """Register the CUDA kernels although this process may have no GPU, as compiling for an absent one needs.

    Functions that were traced before keep what they found then: call it first.

    Raises:
        InputError: they cannot be registered; the message says why.

    Example:
        >>> from tide_jax.kernels import register_cuda
        >>> register_cuda().targets  # doctest: +SKIP
        ('tide_compact_v1', 'tide_exit_route_v1', 'tide_scatter_rows_v1')
    """
    with _lock:
        if "cuda" not in _statuses:
            _statuses["cuda"] = _load("cuda")
    state = _statuses["cuda"]
    if not state.available:
        raise InputError(f"The CUDA kernels cannot be registered: {state.reason}.")
    return state


def platforms(target: str, use_kernels: bool | None = None) -> list[Platform]:
    """The platforms on which the XLA target of this name can be called in this process.

    Args:
        target: name of the target.
        use_kernels: True insists that the platform that programs run on by default is among them; False: none is.

    Raises:
        InputError: it is not, or see `status`.
    """
    if use_kernels is False:
        return []
    found = [name for name in ("cpu", "cuda") if target in status(name).targets]
    if use_kernels and require() not in found:
        raise InputError(
            f"use_kernels=True, and {target} has no kernel for this platform, where XLA's own code is as fast: leave "
            "it out."
        )
    return found


def require() -> Platform:
    """Return the platform that programs run on by default, insisting that there are kernels for it.

    Raises:
        InputError: there are none.
    """
    backend = jax.default_backend()
    platform = {"gpu": "cuda"}.get(backend, backend)
    if platform not in _EXTENSIONS:
        raise InputError(f"use_kernels=True, and there are no kernels for the platform {backend!r}: leave it out.")
    state = status(platform)
    if not state.available:
        versions = ", ".join(f"{name} {version}" for name, version in state.versions.items())
        raise InputError(f"use_kernels=True, and the kernels are not available: {state.reason} ({versions}).")
    return platform


def dispatch(on: Sequence[Platform], kernel: Callable, reference: Callable, *operands: Any) -> Any:
    """Call the kernel where the program is lowered for one of these platforms, and the reference elsewhere."""
    if not on:
        return reference(*operands)
    operands = varying_alike(operands)
    return jax.lax.platform_dependent(*operands, default=reference, **dict.fromkeys(on, kernel))


def _has_cuda() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def _versions() -> dict[str, str]:
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    for plugin in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            versions[plugin] = importlib.metadata.version(plugin)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _load(platform: Platform) -> KernelStatus:
    name, versions = _EXTENSIONS[platform], _versions()
    switch = os.environ.get(SWITCH, "auto")
    if switch not in ("auto", "off"):
        raise InputError(f"{SWITCH} must be 'auto' or 'off', got {switch!r}.")
    if switch == "off":
        reason = f"switched off by {SWITCH}=off; the jnp path runs"
        return KernelStatus(available=False, path=None, reason=reason, versions=versions)

    spec = importlib.util.find_spec(name)
    if spec is None:
        reason = (
            f"{name} is not part of this install ({_NOT_BUILT[platform]}); the jnp path runs, with the same results"
        )
        _logger.warning("Native kernels are not available: %s.", reason)
        return KernelStatus(available=False, path=None, reason=reason, versions=versions)

    # Whatever goes wrong from here on (a missing symbol, another Python, an FFI version that this jaxlib
    # refuses), the user needs the same facts, and a reference path that works must not be lost to it.
    try:
        extension = importlib.import_module(name)
        if platform == "cuda":
            versions["CUDA of the extension"] = extension.cuda_version()
            if _has_cuda() and (error := extension.device_error()):
                raise RuntimeError(f"{error}; it was built for the architectures {extension.architectures()}")
        targets = extension.registrations()
        for target, capsule in targets.items():
            jax.ffi.register_ffi_target(target, capsule, platform=_XLA_NAMES[platform])
    except Exception as error:
        found = ", ".join(f"{package} {version}" for package, version in versions.items())
        reason = (
            f"{spec.origin} cannot be used with {found} ({type(error).__name__}: {error}); install tide-jax again to "
            f"rebuild it, or set {SWITCH}=off to silence this; the jnp path runs"
        )
        warnings.warn(f"Native kernels are broken: {reason}.", RuntimeWarning, stacklevel=3)
        return KernelStatus(available=False, path=spec.origin, reason=reason, versions=versions)
    return KernelStatus(
        available=True, path=spec.origin, reason="loaded", targets=tuple(sorted(targets)), versions=versions
    )
