"""Native kernels, one file per operation.

Every file has three parts in this order: `reference`, the specification in jnp; `_call`, the XLA FFI call of
the compiled kernel; and the public function of the same name as the file, which picks one of the two when a
program is lowered for a platform. Without the compiled extension, on a platform it has no kernel for, or with
`TIDE_KERNELS=off` in the environment, the reference runs.

    >>> from tide_jax.kernels import status
    >>> isinstance(status().available, bool)
    True
"""

from tide_jax.kernels.compact import Compacted, compact
from tide_jax.kernels.exit_route import Gate, Route, decide, exit_route
from tide_jax.kernels.norm import Norm
from tide_jax.kernels.registry import KernelStatus, register_cuda, require, status
from tide_jax.kernels.scatter_rows import scatter_rows

__all__ = [
    "Compacted", "Gate", "KernelStatus", "Norm", "Route", "compact", "decide", "exit_route", "register_cuda", "require",
    "scatter_rows", "status",
]  # fmt: skip
