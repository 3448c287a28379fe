"""Rotary position embedding, always in float32."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tide_jax.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies, radians per position, float32 [head_dim / 2].

    Plain RoPE (Su et al., arXiv 2104.09864, section 3.2.2), stretched as `config.kind` says. Computed on the host in
    float64 and rounded once, so that they are constants of the program.

    Example:
        >>> inverse_frequencies(RopeConfig(theta=100.0), 4).tolist()
        [1.0, 0.10000000149011612]
    """
    plain = config.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.kind == "linear":
        plain = plain / config.factor
    elif config.kind == "llama3":
        wavelength = 2 * np.pi / plain
        low, high = config.low_freq_factor, config.high_freq_factor
        keep = np.clip((config.original_max_positions / wavelength - low) / (high - low), 0.0, 1.0)
        plain = keep * plain + (1 - keep) * plain / config.factor
    return plain.astype(np.float32)


def rotation(
    config: RopeConfig, head_dim: int, positions: Int[Array, "batch cols"]
) -> tuple[Float[Array, "batch cols half"], Float[Array, "batch cols half"]]:
    """Cosine and sine of every angle, float32 [batch, cols, head_dim / 2] each."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "batch cols heads head_dim"],
    cos: Float[Array, "batch cols half"],
    sin: Float[Array, "batch cols half"],
) -> Float[Array, "batch cols heads head_dim"]:
    """Rotate the two halves of each head (the Hugging Face row order) by the angles; result in the dtype of x."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
