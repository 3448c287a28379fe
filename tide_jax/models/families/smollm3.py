"""SmolLM3: Llama in which every fourth layer knows no positions."""

from typing import Any

from tide_jax.errors import InputError
from tide_jax.models.families.llama import biases, kin
from tide_jax.models.families.reader import ConfigReader, type_names


def _smollm3(reader: ConfigReader, layers: int) -> dict[str, Any]:
    every = reader.positive("no_rope_layer_interval", int, 4)
    rotated = reader.take("no_rope_layers", list, [int((index + 1) % every != 0) for index in range(layers)])
    if len(rotated) != layers or any(type(one) is not int or one not in (0, 1) for one in rotated):
        raise InputError(f"config.json: no_rope_layers is {rotated!r}, expected 0 or 1 for each of {layers} layers.")
    window = reader.optional("sliding_window", int)
    if not reader.take("use_sliding_window", bool, False):
        window = None
    sliding = reader.layer_types(layers, type_names([window is not None and not one for one in rotated]))
    # Without the switch no layer slides, whatever its type.
    windows = [window if slides else None for slides in sliding]
    return biases(reader) | {"rotated": [bool(one) for one in rotated], "windows": windows}


SMOLLM3 = kin("smollm3", _smollm3, kv_default=4, theta=2e6, max_positions=32768, tied=True)
