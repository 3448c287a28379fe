"""The norm that a kernel applies to a state before it uses it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Float32

_CODES = {"rms": 0, "rms_one_plus": 1, "layer": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """Which norm, and its epsilon: static, part of the compiled program.

    Attributes:
        kind: `rms`: x / sqrt(mean(x²) + eps) · scale (arXiv 1910.07467). `rms_one_plus`: the same with 1 + scale.
            `layer`: (x − mean) / sqrt(variance + eps) · scale + bias (arXiv 1607.06450).
        eps: added under the root.

    Raises:
        ValueError: an unknown kind, or an eps that is not a number of 0 or more.
    """

    kind: str = "rms"
    eps: float

    def __post_init__(self):
        if self.kind not in _CODES:
            raise ValueError(f"norm kind {self.kind!r} is not one of {', '.join(_CODES)}.")
        if not self.eps >= 0:
            raise ValueError(f"norm eps is {self.eps!r}; it must be 0 or more.")

    @property
    def attributes(self) -> dict[str, np.generic]:
        """The attributes of an FFI call, in the widths its handler expects."""
        return {"norm": np.int32(_CODES[self.kind]), "eps": np.float32(self.eps)}


def normed(
    x: Float[Array, "*rows d"], scale: Float32[Array, " d"], bias: Float32[Array, " d"] | None, norm: Norm
) -> Float32[Array, "*rows d"]:
    """The normed states, in float32.

    Example:
        >>> import jax.numpy as jnp
        >>> normed(jnp.array([3.0, -3.0]), jnp.ones(2), None, Norm(eps=0.0)).tolist()
        [1.0, -1.0]
    """
    x = x.astype(jnp.float32)
    if norm.kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    unit = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm.eps)
    if norm.kind == "layer":
        return unit * scale + bias
    return unit * (1 + scale if norm.kind == "rms_one_plus" else scale)


def check_norm(x: Array, scale: Array | None, bias: Array | None, norm: Norm) -> None:
    """Refuse states [..., d] and parameters [d] that do not go together.

    Raises:
        ValueError: a shape does not fit, or a bias is missing or too much; the message names the argument.
        TypeError: a dtype is not supported; the message names the argument.
    """
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"`x` must have shape [..., d] with d >= 1, got {list(x.shape)}.")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"`x` must be float32, bfloat16 or float16, got {x.dtype}.")
    if (bias is not None) != (norm.kind == "layer"):
        raise ValueError(f"`bias` belongs to the norm kind 'layer', and this is {norm.kind!r} with bias {bias!r}.")
    if scale is None:
        raise ValueError(f"`scale` of shape {list(x.shape[-1:])} is missing.")
    check_operand("scale", scale, x.shape[-1:])
    if bias is not None:
        check_operand("bias", bias, x.shape[-1:])


def check_operand(name: str, value: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> None:
    """Refuse an operand of another shape or dtype.

    Raises:
        ValueError: another shape.
        TypeError: another dtype.
    """
    if value.shape != shape:
        raise ValueError(f"`{name}` must have shape {list(shape)} to go with `x`, got {list(value.shape)}.")
    if value.dtype != dtype:
        raise TypeError(f"`{name}` must be {jnp.dtype(dtype).name}, got {value.dtype}.")
