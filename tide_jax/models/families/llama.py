"""Llama and its kin (SmolLM2, TinyLlama, …): pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tide_jax.models.config import DecoderConfig
from tide_jax.models.families.family import Family, embedding, head, linear, norm
from tide_jax.models.families.reader import ConfigReader

_LAYER = "model.layers.{layer}"
WEIGHTS = (
    embedding("model.embed_tokens"),
    *norm(f"{_LAYER}.input_layernorm", "attention_norm"),
    *linear(f"{_LAYER}.self_attn.q_proj", "attention.q"),
    *linear(f"{_LAYER}.self_attn.k_proj", "attention.k"),
    *linear(f"{_LAYER}.self_attn.v_proj", "attention.v"),
    *norm(f"{_LAYER}.self_attn.q_norm", "attention.q_norm"),
    *norm(f"{_LAYER}.self_attn.k_norm", "attention.k_norm"),
    *linear(f"{_LAYER}.self_attn.o_proj", "attention.o"),
    *norm(f"{_LAYER}.post_attention_layernorm", "mlp_norm"),
    *linear(f"{_LAYER}.mlp.gate_proj", "mlp.gate"),
    *linear(f"{_LAYER}.mlp.up_proj", "mlp.up"),
    *linear(f"{_LAYER}.mlp.down_proj", "mlp.down"),
    *norm("model.norm", "final_norm", "final"),
    head("lm_head"),
)
BUFFERS = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")


def kin(
    name: str,
    special: Callable[[ConfigReader, int], Mapping[str, Any]],
    *,
    kv_default: int | None = None,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    max_positions: int = 2048,
    tied: bool = False,
) -> Family:
    """A family with the weights of Llama, which differs in few switches.

    Args:
        name: its name, and model type.
        special: reads what is its own, given the number of layers: fields of `DecoderConfig`, and optionally `windows`
            and `rotated`, a value for each layer.
        kv_default: K/V heads where the config is silent; None: as many as query heads.
        head_dim: channels of a head where the config is silent; None: width / heads.
        theta: base of the rotary embedding where the config is silent.
        max_positions: context where the config is silent.
        tied: whether the head is tied where the config is silent.
    """

    def read(data: Mapping[str, Any]) -> DecoderConfig:
        reader = ConfigReader(data, name)
        layers = reader.positive("num_hidden_layers", int)
        heads = reader.heads(kv_default=kv_default, head_dim=head_dim)
        own = dict(special(reader, layers))
        context = reader.positive("max_position_embeddings", int, max_positions)
        rope, context = reader.rope(heads["head_dim"], context, default_theta=theta)
        rotated = own.pop("rotated", [True] * layers)
        config = DecoderConfig(
            family=name,
            num_layers=layers,
            **heads,
            **reader.pattern([rope if yes else None for yes in rotated], own.pop("windows", [None] * layers)),
            **own,
            vocab_size=reader.positive("vocab_size", int),
            ffn_size=reader.positive("intermediate_size", int),
            activation=reader.activation("hidden_act", "silu"),
            norm_eps=reader.positive("rms_norm_eps", float, 1e-6),
            max_positions=context,
            tied_head=reader.take("tie_word_embeddings", bool, tied),
        )
        reader.finish()
        return config

    return Family(name=name, types=(name,), config=read, weights=WEIGHTS, ignored=BUFFERS)


def biases(reader: ConfigReader) -> dict[str, bool]:
    """One switch for all biases of attention, one for those of the MLP."""
    attention = reader.take("attention_bias", bool, False)
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": reader.take("mlp_bias", bool, False)}


def _llama(reader: ConfigReader, layers: int) -> dict[str, Any]:
    reader.only("pretraining_tp", 1)
    reader.only("is_llama_config", True)
    reader.only("rope_interleaved", False)
    return biases(reader)


LLAMA = kin("llama", _llama)
