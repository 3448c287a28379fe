"""Native kernels, one file per operation.

Every file has three parts in this order: `reference`, the specification in jnp; `_call`, the XLA FFI call of
the compiled kernel; and the public function of the same name as the file, which picks one of the two when a
program is lowered for a platform. Without the compiled extension, on a platform it has no kernel for, or with
`TIDE_KERNELS=off` in the environment, the reference runs.

    >>> from tide_jax.kernels import status
    >>> isinstance(status().available, bool)
    True
"""

from tide_jax.kernels.registry import KernelStatus, status
from tide_jax.kernels.router_score import router_score

__all__ = ["KernelStatus", "router_score", "status"]
