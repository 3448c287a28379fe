"""GPT-NeoX and Pythia: LayerNorm, parallel residual, a part of each head rotated, q, k and v of a head together."""

import re
from collections.abc import Mapping
from typing import Any

from tide_jax.models.config import DecoderConfig
from tide_jax.models.families.family import Family, embedding, head, linear, norm
from tide_jax.models.families.reader import ConfigReader


def _config(data: Mapping[str, Any]) -> DecoderConfig:
    reader = ConfigReader(data, "gpt_neox")
    heads, layers = reader.heads(), reader.positive("num_hidden_layers", int)
    context = reader.positive("max_position_embeddings", int, 2048)
    rope, context = reader.rope(
        heads["head_dim"], context, share=0.25, theta_key="rotary_emb_base", share_key="rotary_pct"
    )
    bias = reader.take("attention_bias", bool, True)
    config = DecoderConfig(
        family="gpt_neox",
        num_layers=layers,
        **heads,
        **reader.pattern([rope] * layers, [None] * layers),
        vocab_size=reader.positive("vocab_size", int),
        ffn_size=reader.positive("intermediate_size", int),
        activation=reader.activation("hidden_act", "gelu"),
        gated=False,
        norm="layer",
        norm_eps=reader.positive("layer_norm_eps", float, 1e-5),
        residual="parallel" if reader.take("use_parallel_residual", bool, True) else "sequential",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        max_positions=context,
        tied_head=reader.take("tie_word_embeddings", bool, False),
    )
    reader.finish()
    return config


_LAYER = "gpt_neox.layers.{layer}"
GPT_NEOX = Family(
    name="gpt_neox",
    types=("gpt_neox",),
    config=_config,
    weights=(
        embedding("gpt_neox.embed_in"),
        *norm(f"{_LAYER}.input_layernorm", "attention_norm"),
        *linear(f"{_LAYER}.attention.query_key_value", "attention.q", "attention.k", "attention.v", split="heads"),
        *linear(f"{_LAYER}.attention.dense", "attention.o"),
        *norm(f"{_LAYER}.post_attention_layernorm", "mlp_norm"),
        *linear(f"{_LAYER}.mlp.dense_h_to_4h", "mlp.up"),
        *linear(f"{_LAYER}.mlp.dense_4h_to_h", "mlp.down"),
        *norm("gpt_neox.final_layer_norm", "final_norm", "final"),
        head("embed_out"),
    ),
    ignored=re.compile(r"gpt_neox\.layers\.[0-9]+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
    renamed=((r"^lm_head\.", "embed_out."),),
)
