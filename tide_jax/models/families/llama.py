"""Llama and its kin (SmolLM2, TinyLlama, …): pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU."""

import re
from collections.abc import Mapping
from typing import Any

from tide_jax.errors import InputError
from tide_jax.models.config import DecoderConfig
from tide_jax.models.families.family import ConfigReader, Family, Weight


def _config(data: Mapping[str, Any]) -> DecoderConfig:
    reader = ConfigReader(data, "llama")
    hidden, heads = reader.positive("hidden_size", int), reader.positive("num_attention_heads", int)
    kv_heads = reader.positive("num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise InputError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}. "
            "Correct it there."
        )
    head_dim = reader.positive("head_dim", int, hidden // heads)
    if head_dim % 2:
        raise InputError(
            f"config.json: head_dim {head_dim} is odd, but rotary embeddings turn pairs. Correct it there."
        )
    reader.only("hidden_act", "silu", "swish")
    reader.only("pretraining_tp", 1)
    reader.only("is_llama_config", True)
    reader.only("rope_interleaved", False)
    reader.only("sliding_window", None)
    reader.only("quantization_config", None)
    config = DecoderConfig(
        family="llama",
        vocab_size=reader.positive("vocab_size", int),
        hidden_size=hidden,
        ffn_size=reader.positive("intermediate_size", int),
        num_layers=reader.positive("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=reader.positive("rms_norm_eps", float, 1e-6),
        rope=reader.rope(),
        max_positions=reader.positive("max_position_embeddings", int, 2048),
        tied_head=reader.take("tie_word_embeddings", bool, False),
        attention_bias=reader.take("attention_bias", bool, False),
        mlp_bias=reader.take("mlp_bias", bool, False),
    )
    reader.finish()
    return config


def _linear(source: str, path: str) -> tuple[Weight, Weight]:
    source = f"model.layers.{{layer}}.{source}"
    return (
        Weight(source=f"{source}.weight", part="layer", path=f"{path}.kernel", transpose=True),
        Weight(source=f"{source}.bias", part="layer", path=f"{path}.bias"),
    )


def _norm(source: str, path: str) -> Weight:
    return Weight(source=f"model.layers.{{layer}}.{source}.weight", part="layer", path=f"{path}.scale")


LLAMA = Family(
    name="llama",
    config=_config,
    weights=(
        Weight(source="model.embed_tokens.weight", part="embedding", path="embedding"),
        _norm("input_layernorm", "attention_norm"),
        *_linear("self_attn.q_proj", "attention.q"),
        *_linear("self_attn.k_proj", "attention.k"),
        *_linear("self_attn.v_proj", "attention.v"),
        *_linear("self_attn.o_proj", "attention.o"),
        _norm("post_attention_layernorm", "mlp_norm"),
        *_linear("mlp.gate_proj", "mlp.gate"),
        *_linear("mlp.up_proj", "mlp.up"),
        *_linear("mlp.down_proj", "mlp.down"),
        Weight(source="model.norm.weight", part="final", path="final_norm.scale"),
        Weight(source="lm_head.weight", part="final", path="lm_head.kernel", transpose=True),
    ),
    ignored=re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq"),
)
