"""Qwen2, Qwen2.5 and Qwen3: Llama with biases on q, k and v, or with normed queries and keys; some layers may slide."""

from typing import Any

from tide_jax.models.families.llama import kin
from tide_jax.models.families.reader import ConfigReader, type_names


def _windows(reader: ConfigReader, layers: int) -> list[int | None]:
    """Windows only where the switch is on, and only from layer `max_window_layers` on.

    So the code of the models does; what is written about the key says the opposite.
    """
    window, first = reader.optional("sliding_window", int, 4096), reader.take("max_window_layers", int, 28)
    if not reader.take("use_sliding_window", bool, False):
        window = None
    slides = [window is not None and index >= first for index in range(layers)]
    return reader.windows(window, reader.layer_types(layers, type_names(slides)))


def _qwen2(reader: ConfigReader, layers: int) -> dict[str, Any]:
    reader.only("use_mrope", False)
    return {"qkv_bias": True, "windows": _windows(reader, layers)}


def _qwen3(reader: ConfigReader, layers: int) -> dict[str, Any]:
    bias = reader.take("attention_bias", bool, False)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "windows": _windows(reader, layers)}


QWEN2 = kin("qwen2", _qwen2, kv_default=32, max_positions=32768)
QWEN3 = kin("qwen3", _qwen3, kv_default=32, head_dim=128, max_positions=32768)
