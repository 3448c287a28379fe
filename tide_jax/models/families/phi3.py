"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with fused projections, some rotating a part of each head only."""

from collections.abc import Mapping
from typing import Any

from tide_jax.models.config import DecoderConfig
from tide_jax.models.families.family import Family, embedding, head, linear, norm
from tide_jax.models.families.reader import ConfigReader


def _config(data: Mapping[str, Any]) -> DecoderConfig:
    reader = ConfigReader(data, "phi3")
    heads, layers = reader.heads(), reader.positive("num_hidden_layers", int)
    context = reader.positive("max_position_embeddings", int, 4096)
    rope, context = reader.rope(heads["head_dim"], context, original=reader.optional(
        "original_max_position_embeddings", int, 4096))  # fmt: skip
    reader.only("attention_bias", False)
    reader.only("mlp_bias", False)
    reader.only("lm_head_bias", False)
    reader.only("full_attn_mod", 1)
    reader.only("interpolate_factor", 1)
    config = DecoderConfig(
        family="phi3",
        num_layers=layers,
        **heads,
        **reader.pattern([rope] * layers, [reader.optional("sliding_window", int)] * layers),
        vocab_size=reader.positive("vocab_size", int),
        ffn_size=reader.positive("intermediate_size", int),
        activation=reader.activation("hidden_act", "silu"),
        norm_eps=reader.positive("rms_norm_eps", float, 1e-5),
        max_positions=context,
        tied_head=reader.take("tie_word_embeddings", bool, False),
    )
    reader.finish()
    return config


_LAYER = "model.layers.{layer}"
PHI3 = Family(
    name="phi3",
    types=("phi3",),
    config=_config,
    weights=(
        embedding("model.embed_tokens"),
        *norm(f"{_LAYER}.input_layernorm", "attention_norm"),
        *linear(f"{_LAYER}.self_attn.qkv_proj", "attention.q", "attention.k", "attention.v"),
        *linear(f"{_LAYER}.self_attn.o_proj", "attention.o"),
        *norm(f"{_LAYER}.post_attention_layernorm", "mlp_norm"),
        *linear(f"{_LAYER}.mlp.gate_up_proj", "mlp.gate", "mlp.up"),
        *linear(f"{_LAYER}.mlp.down_proj", "mlp.down"),
        *norm("model.norm", "final_norm", "final"),
        head("lm_head"),
    ),
)
