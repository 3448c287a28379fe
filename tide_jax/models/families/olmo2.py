"""OLMo 2: norms after attention and MLP, and one norm for the queries of all heads, one for the keys."""

import re
from collections.abc import Mapping
from typing import Any

from tide_jax.models.config import DecoderConfig
from tide_jax.models.families.family import Family, embedding, head, linear, norm
from tide_jax.models.families.reader import ConfigReader


def _config(data: Mapping[str, Any]) -> DecoderConfig:
    reader = ConfigReader(data, "olmo2")
    heads, bias = reader.heads(), reader.take("attention_bias", bool, False)
    context = reader.positive("max_position_embeddings", int, 2048)
    rope, context = reader.rope(heads["head_dim"], context)
    layers = reader.positive("num_hidden_layers", int)
    config = DecoderConfig(
        family="olmo2",
        num_layers=layers,
        **heads,
        **reader.pattern([rope] * layers, [None] * layers),
        vocab_size=reader.positive("vocab_size", int),
        ffn_size=reader.positive("intermediate_size", int),
        activation=reader.activation("hidden_act", "silu"),
        norm_eps=reader.positive("rms_norm_eps", float, 1e-5),
        norms="post",
        qk_norm="heads",
        qkv_bias=bias,
        o_bias=bias,
        max_positions=context,
        tied_head=reader.take("tie_word_embeddings", bool, False),
    )
    reader.finish()
    return config


_LAYER = "model.layers.{layer}"
OLMO2 = Family(
    name="olmo2",
    types=("olmo2",),
    config=_config,
    weights=(
        embedding("model.embed_tokens"),
        *linear(f"{_LAYER}.self_attn.q_proj", "attention.q"),
        *linear(f"{_LAYER}.self_attn.k_proj", "attention.k"),
        *linear(f"{_LAYER}.self_attn.v_proj", "attention.v"),
        *linear(f"{_LAYER}.self_attn.o_proj", "attention.o"),
        *norm(f"{_LAYER}.self_attn.q_norm", "attention.q_norm"),
        *norm(f"{_LAYER}.self_attn.k_norm", "attention.k_norm"),
        *norm(f"{_LAYER}.post_attention_layernorm", "attention_post_norm"),
        *linear(f"{_LAYER}.mlp.gate_proj", "mlp.gate"),
        *linear(f"{_LAYER}.mlp.up_proj", "mlp.up"),
        *linear(f"{_LAYER}.mlp.down_proj", "mlp.down"),
        *norm(f"{_LAYER}.post_feedforward_layernorm", "mlp_post_norm"),
        *norm("model.norm", "final_norm", "final"),
        head("lm_head"),
    ),
    ignored=re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq"),
)
