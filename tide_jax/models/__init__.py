"""Decoders: orthogonal blocks, one frozen config, one table per family."""

from tide_jax.models.blocks import KV, Attendable
from tide_jax.models.config import DecoderConfig, RopeConfig
from tide_jax.models.decoder import Decoder

__all__ = ["KV", "Attendable", "Decoder", "DecoderConfig", "RopeConfig"]
