"""Decoders: orthogonal blocks, one frozen config, one table per family."""

from tide_jax.models.blocks import KV, Attendable, Views
from tide_jax.models.config import DecoderConfig, LayerKind, RopeConfig
from tide_jax.models.decoder import Decoder

__all__ = ["KV", "Attendable", "Decoder", "DecoderConfig", "LayerKind", "RopeConfig", "Views"]
