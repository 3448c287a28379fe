"""GPT-2: learned positions, LayerNorm, one fused projection, kernels stored the way round they are used here."""

import re
from collections.abc import Mapping
from typing import Any

from tide_jax.models.config import DecoderConfig
from tide_jax.models.families.family import Family, Weight, embedding, head, linear, norm
from tide_jax.models.families.reader import ConfigReader


def _config(data: Mapping[str, Any]) -> DecoderConfig:
    reader = ConfigReader(data, "gpt2")
    hidden, num_heads = reader.positive("n_embd", int), reader.positive("n_head", int)
    heads = reader.checked_heads(hidden, num_heads, num_heads, hidden // num_heads)
    context = reader.positive("n_positions", int, 1024)
    reader.only("n_ctx", context)
    reader.only("scale_attn_by_inverse_layer_idx", False)
    reader.only("add_cross_attention", False)
    layers = reader.positive("n_layer", int)
    config = DecoderConfig(
        family="gpt2",
        num_layers=layers,
        **heads,
        **reader.pattern([None] * layers, [None] * layers),
        vocab_size=reader.positive("vocab_size", int),
        ffn_size=reader.optional("n_inner", int) or 4 * hidden,
        activation=reader.activation("activation_function", "gelu_new"),
        gated=False,
        norm="layer",
        norm_eps=reader.positive("layer_norm_epsilon", float, 1e-5),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        attention_scale=None if reader.take("scale_attn_weights", bool, True) else 1.0,
        learned_positions=context,
        max_positions=context,
        tied_head=reader.take("tie_word_embeddings", bool, True),
    )
    reader.finish()
    return config


_LAYER = "transformer.h.{layer}"
GPT2 = Family(
    name="gpt2",
    types=("gpt2",),
    config=_config,
    weights=(
        embedding("transformer.wte"),
        Weight(source="transformer.wpe.weight", part="embedding", paths=("position_embedding",)),
        *norm(f"{_LAYER}.ln_1", "attention_norm"),
        *linear(f"{_LAYER}.attn.c_attn", "attention.q", "attention.k", "attention.v", transpose=False),
        *linear(f"{_LAYER}.attn.c_proj", "attention.o", transpose=False),
        *norm(f"{_LAYER}.ln_2", "mlp_norm"),
        *linear(f"{_LAYER}.mlp.c_fc", "mlp.up", transpose=False),
        *linear(f"{_LAYER}.mlp.c_proj", "mlp.down", transpose=False),
        *norm("transformer.ln_f", "final_norm", "final"),
        head("lm_head"),
    ),
    ignored=re.compile(r"(transformer\.)?h\.[0-9]+\.attn\.(bias|masked_bias)"),
    # The first releases were written without their head, and so without the prefix.
    renamed=((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),
)
