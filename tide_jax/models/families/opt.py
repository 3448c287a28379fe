"""OPT: learned positions that begin at row 2, LayerNorm, ReLU."""

from collections.abc import Mapping
from typing import Any

from tide_jax.models.config import DecoderConfig
from tide_jax.models.families.family import Family, Weight, embedding, head, linear, norm
from tide_jax.models.families.reader import ConfigReader

_OFFSET = 2


def _config(data: Mapping[str, Any]) -> DecoderConfig:
    reader = ConfigReader(data, "opt")
    hidden, num_heads = reader.positive("hidden_size", int), reader.positive("num_attention_heads", int)
    heads = reader.checked_heads(hidden, num_heads, num_heads, hidden // num_heads)
    context = reader.positive("max_position_embeddings", int, 2048)
    # What only OPT-350m does: norms after the residual, and an embedding narrower than the states.
    reader.only("do_layer_norm_before", True)
    reader.only("_remove_final_layer_norm", False)
    reader.only("word_embed_proj_dim", hidden)
    reader.only("layer_norm_elementwise_affine", True)
    bias, layers = reader.take("enable_bias", bool, True), reader.positive("num_hidden_layers", int)
    config = DecoderConfig(
        family="opt",
        num_layers=layers,
        **heads,
        **reader.pattern([None] * layers, [None] * layers),
        vocab_size=reader.positive("vocab_size", int),
        ffn_size=reader.positive("ffn_dim", int),
        activation=reader.activation("activation_function", "relu"),
        gated=False,
        norm="layer",
        norm_eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        learned_positions=context + _OFFSET,
        position_offset=_OFFSET,
        max_positions=context,
        tied_head=reader.take("tie_word_embeddings", bool, True),
    )
    reader.finish()
    return config


_LAYER = "model.decoder.layers.{layer}"
OPT = Family(
    name="opt",
    types=("opt",),
    config=_config,
    weights=(
        embedding("model.decoder.embed_tokens"),
        Weight(source="model.decoder.embed_positions.weight", part="embedding", paths=("position_embedding",)),
        *norm(f"{_LAYER}.self_attn_layer_norm", "attention_norm"),
        *linear(f"{_LAYER}.self_attn.q_proj", "attention.q"),
        *linear(f"{_LAYER}.self_attn.k_proj", "attention.k"),
        *linear(f"{_LAYER}.self_attn.v_proj", "attention.v"),
        *linear(f"{_LAYER}.self_attn.out_proj", "attention.o"),
        *norm(f"{_LAYER}.final_layer_norm", "mlp_norm"),
        *linear(f"{_LAYER}.fc1", "mlp.up"),
        *linear(f"{_LAYER}.fc2", "mlp.down"),
        *norm("model.decoder.final_layer_norm", "final_norm", "final"),
        head("lm_head"),
    ),
    renamed=((r"^decoder\.", "model.decoder."),),
)
