"""Falcon: LayerNorm, attention and MLP side by side, and for each K/V head its queries, its key and its value together.

The older models (7B: one K/V head; RW: as many as query heads) and the newer ones (40B, 180B, 11B: several) name these
differently, but lay out the fused projection in the same way.
"""

from collections.abc import Mapping
from typing import Any

from tide_jax.errors import InputError
from tide_jax.models.config import DecoderConfig
from tide_jax.models.families.family import Family, embedding, head, linear, norm
from tide_jax.models.families.reader import ConfigReader


def _config(data: Mapping[str, Any]) -> DecoderConfig:
    reader = ConfigReader(data, "falcon")
    hidden, num_heads = reader.positive("hidden_size", int), reader.positive("num_attention_heads", int)
    newer = reader.take("new_decoder_architecture", bool, False)
    named, one = reader.positive("num_kv_heads", int, num_heads), reader.take("multi_query", bool, True)
    kv_heads = named if newer else 1 if one else num_heads
    reader.only("num_key_value_heads", kv_heads)  # as newer exports say it once more
    heads = reader.checked_heads(hidden, num_heads, kv_heads, hidden // num_heads)
    parallel = reader.take("parallel_attn", bool, True)
    norms = reader.take("num_ln_in_parallel_attn", int, 2 if newer else 1)
    if norms not in (1, 2) or (norms == 2 and not newer) or (newer and not parallel):
        raise InputError(
            f"config.json: new_decoder_architecture = {newer} with parallel_attn = {parallel} and "
            f"num_ln_in_parallel_attn = {norms} is not a Falcon that this converter knows. Correct it there."
        )
    reader.only("alibi", False)
    context = reader.positive("max_position_embeddings", int, 2048)
    rope, context = reader.rope(heads["head_dim"], context)
    bias, layers = reader.take("bias", bool, False), reader.positive("num_hidden_layers", int)
    config = DecoderConfig(
        family="falcon",
        num_layers=layers,
        **heads,
        **reader.pattern([rope] * layers, [None] * layers),
        vocab_size=reader.positive("vocab_size", int),
        ffn_size=reader.optional("ffn_hidden_size", int) or 4 * hidden,
        activation=reader.activation("activation", "gelu"),
        gated=False,
        norm="layer",
        norm_eps=reader.positive("layer_norm_epsilon", float, 1e-5),
        residual="sequential" if not parallel else "parallel" if norms == 2 else "shared",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        max_positions=context,
        tied_head=reader.take("tie_word_embeddings", bool, True),
    )
    reader.finish()
    return config


def _two_norms(config: DecoderConfig) -> bool:
    """Attention and MLP side by side, each with a norm of its own, have other names for them."""
    return config.residual == "parallel"


def _one_norm(config: DecoderConfig) -> bool:
    return not _two_norms(config)


_LAYER = "transformer.h.{layer}"
FALCON = Family(
    name="falcon",
    types=("falcon",),
    config=_config,
    weights=(
        embedding("transformer.word_embeddings"),
        *norm(f"{_LAYER}.input_layernorm", "attention_norm", when=_one_norm),
        *norm(f"{_LAYER}.ln_attn", "attention_norm", when=_two_norms),
        *linear(f"{_LAYER}.self_attention.query_key_value", "attention.q", "attention.k", "attention.v", split="heads"),
        *linear(f"{_LAYER}.self_attention.dense", "attention.o"),
        *norm(f"{_LAYER}.post_attention_layernorm", "mlp_norm", when=_one_norm),
        *norm(f"{_LAYER}.ln_mlp", "mlp_norm", when=_two_norms),
        *linear(f"{_LAYER}.mlp.dense_h_to_4h", "mlp.up"),
        *linear(f"{_LAYER}.mlp.dense_4h_to_h", "mlp.down"),
        *norm("transformer.ln_f", "final_norm", "final"),
        head("lm_head"),
    ),
)
