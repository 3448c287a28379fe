"""Rotary position embedding, always in float32."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tide_jax.models.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies, radians per position, float32 [rotated channels / 2].

    Plain RoPE (Su et al., arXiv 2104.09864, section 3.2.2), stretched as `config.kind` says. Computed on the host in
    float64 and rounded once, so that they are constants of the program.

    Example:
        >>> inverse_frequencies(RopeConfig(theta=100.0), 4).tolist()
        [1.0, 0.10000000149011612]
    """
    rotated = int(head_dim * config.share)
    plain = config.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if config.kind == "linear":
        plain = plain / config.factor
    elif config.kind == "factors":
        plain = plain / np.array(config.factors)
    elif config.kind in ("llama3", "yarn"):
        keep = _kept(config, plain, rotated)
        plain = keep * plain + (1 - keep) * plain / config.factor
    return plain.astype(np.float32)


def _kept(config: RopeConfig, plain: np.ndarray, rotated: int) -> np.ndarray:
    """How far each frequency is kept as it is, 0 … 1."""
    if config.kind == "llama3":
        turns = config.original_max_positions * plain / (2 * np.pi)
        low, high = config.low_freq_factor, config.high_freq_factor
        return np.clip((turns - low) / (high - low), 0.0, 1.0)
    # The channel whose frequency turns so often within the original context.
    turns = np.array([config.beta_fast, config.beta_slow])
    ends = rotated * np.log(config.original_max_positions / (turns * 2 * np.pi)) / (2 * np.log(config.theta))
    first, last = (np.floor(ends[0]), np.ceil(ends[1])) if config.truncate else ends
    first, last = max(first, 0.0), min(last, rotated - 1.0)
    width = last - first if last != first else 0.001
    return 1 - np.clip((np.arange(rotated // 2) - first) / width, 0.0, 1.0)


def rotation(
    config: RopeConfig, head_dim: int, positions: Int[Array, "batch cols"]
) -> tuple[Float[Array, "batch cols half"], Float[Array, "batch cols half"]]:
    """Cosine and sine of every angle, float32 [batch, cols, rotated channels / 2] each."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config, head_dim)
    return config.gain * jnp.cos(angles), config.gain * jnp.sin(angles)


def rotate(
    x: Float[Array, "batch cols heads head_dim"],
    cos: Float[Array, "batch cols half"],
    sin: Float[Array, "batch cols half"],
) -> Float[Array, "batch cols heads head_dim"]:
    """Rotate the two halves of the first channels of each head, as many as there are angles for (the Hugging Face row
    order); result in the dtype of x.
    """
    half = cos.shape[-1]
    first, second = (x[..., start : start + half].astype(jnp.float32) for start in (0, half))
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = (part.astype(x.dtype) for part in (first * cos - second * sin, second * cos + first * sin))
    kept = [] if 2 * half == x.shape[-1] else [x[..., 2 * half :]]
    return jnp.concatenate([*turned, *kept], axis=-1)
