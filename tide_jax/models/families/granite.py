"""Granite 3 and 4 (dense): Llama with factors on embeddings, attention scores, residuals and logits."""

from typing import Any

from tide_jax.models.families.llama import biases, kin
from tide_jax.models.families.reader import ConfigReader


def _granite(reader: ConfigReader, layers: int) -> dict[str, Any]:
    return biases(reader) | {
        "embedding_scale": reader.positive("embedding_multiplier", float, 1.0),
        "residual_scale": reader.positive("residual_multiplier", float, 1.0),
        "attention_scale": reader.positive("attention_multiplier", float, 1.0),
        "logit_divisor": reader.positive("logits_scaling", float, 1.0),
    }


GRANITE = kin("granite", _granite)
