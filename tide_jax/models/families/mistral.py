"""Mistral (7B, Nemo, Small) and Ministral: Llama with a sliding window, in all layers or in some."""

from typing import Any

from tide_jax.models.families.llama import kin
from tide_jax.models.families.reader import ConfigReader, type_names


def _mistral(reader: ConfigReader, layers: int) -> dict[str, Any]:
    return {"windows": [reader.optional("sliding_window", int, 4096)] * layers}


def _ministral(reader: ConfigReader, layers: int) -> dict[str, Any]:
    window = reader.optional("sliding_window", int, 4096)
    sliding = reader.layer_types(layers, type_names([window is not None] * layers))
    return {"windows": reader.windows(window, sliding)}


MISTRAL = kin("mistral", _mistral, kv_default=8, max_positions=4096 * 32)
MINISTRAL = kin("ministral", _ministral, kv_default=8, max_positions=4096 * 32)
