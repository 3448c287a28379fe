"""Gemma 1, 2 and 3 (text): norms of 1 + scale, scaled embeddings, and from 2 on four norms a layer and windows."""

import re
from collections.abc import Mapping
from typing import Any

from tide_jax.models.config import DecoderConfig
from tide_jax.models.families.family import Family, embedding, head, linear, norm
from tide_jax.models.families.llama import BUFFERS, WEIGHTS
from tide_jax.models.families.reader import ConfigReader, type_names


def _config(family: str, data: Mapping[str, Any]) -> DecoderConfig:
    reader = ConfigReader(data, family)
    second, third = family != "gemma", family == "gemma3"
    layers = reader.positive("num_hidden_layers", int)
    heads = reader.heads(kv_default=4 if second else 16, head_dim=256)
    bias = reader.take("attention_bias", bool, False)
    reader.only("use_bidirectional_attention", False)
    context = reader.positive("max_position_embeddings", int, 131_072 if third else 8192)
    windows: list[int | None] = [None] * layers
    own: dict[str, Any] = {}
    if second:
        own = {
            "norms": "both",
            "qk_norm": "head" if third else "none",
            "attention_scale": reader.positive("query_pre_attn_scalar", float, 256.0) ** -0.5,
            "attention_softcap": None if third else reader.optional("attn_logit_softcapping", float, 50.0),
            "logit_softcap": reader.optional("final_logit_softcapping", float, None if third else 30.0),
        }
        # transformers 5 keeps the key with an underscore, beside the layer types that it made of it.
        if third:
            # The reference reads this key and caps nothing; every release has null there.
            reader.only("attn_logit_softcapping", None)
        every = reader.positive("sliding_window_pattern", int, 6) if third else 2
        every = reader.positive("_sliding_window_pattern", int, every) if third else 2
        sliding = reader.layer_types(layers, type_names([bool((index + 1) % every) for index in range(layers)]))
        windows = reader.windows(reader.optional("sliding_window", int, 4096), sliding)
    if third:
        full, near, context = reader.ropes(heads["head_dim"], context)
        ropes = [near if slides else full for slides in sliding]
    else:
        rope, context = reader.rope(heads["head_dim"], context)
        ropes = [rope] * layers
    # The first releases name the exact GELU and mean its approximation; some name it twice, and the second holds.
    first = reader.activation("hidden_act", "gelu_pytorch_tanh")
    activation = reader.activation("hidden_activation", "gelu_pytorch_tanh") if second else first
    config = DecoderConfig(
        family=family,
        num_layers=layers,
        **heads,
        **reader.pattern(ropes, windows),
        **own,
        vocab_size=reader.positive("vocab_size", int),
        ffn_size=reader.positive("intermediate_size", int),
        activation="gelu_tanh" if activation == "gelu" and not second else activation,
        norm="rms_one_plus",
        norm_eps=reader.positive("rms_norm_eps", float, 1e-6),
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=heads["hidden_size"] ** 0.5,
        max_positions=context,
        tied_head=reader.take("tie_word_embeddings", bool, True),
    )
    reader.finish()
    return config


def _text(data: Mapping[str, Any]) -> dict[str, Any]:
    """The text part of a model that also sees; a text model itself."""
    text = data.get("text_config")
    if not isinstance(text, dict):
        return dict(data)
    above = {key: data[key] for key in ("eos_token_id", "bos_token_id", "tie_word_embeddings") if key in data}
    return {**above, **text, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}


_LAYER = "model.layers.{layer}"
_FOUR_NORMS = (
    embedding("model.embed_tokens"),
    *norm(f"{_LAYER}.input_layernorm", "attention_norm"),
    *linear(f"{_LAYER}.self_attn.q_proj", "attention.q"),
    *linear(f"{_LAYER}.self_attn.k_proj", "attention.k"),
    *linear(f"{_LAYER}.self_attn.v_proj", "attention.v"),
    *linear(f"{_LAYER}.self_attn.o_proj", "attention.o"),
    *norm(f"{_LAYER}.self_attn.q_norm", "attention.q_norm"),
    *norm(f"{_LAYER}.self_attn.k_norm", "attention.k_norm"),
    *norm(f"{_LAYER}.post_attention_layernorm", "attention_post_norm"),
    *norm(f"{_LAYER}.pre_feedforward_layernorm", "mlp_norm"),
    *linear(f"{_LAYER}.mlp.gate_proj", "mlp.gate"),
    *linear(f"{_LAYER}.mlp.up_proj", "mlp.up"),
    *linear(f"{_LAYER}.mlp.down_proj", "mlp.down"),
    *norm(f"{_LAYER}.post_feedforward_layernorm", "mlp_post_norm"),
    *norm("model.norm", "final_norm", "final"),
    head("lm_head"),
)
GEMMA = Family(
    name="gemma", types=("gemma",), config=lambda data: _config("gemma", data), weights=WEIGHTS, ignored=BUFFERS
)
GEMMA2 = Family(name="gemma2", types=("gemma2",), config=lambda data: _config("gemma2", data), weights=_FOUR_NORMS)
GEMMA3 = Family(
    name="gemma3",
    types=("gemma3_text", "gemma3"),
    config=lambda data: _config("gemma3", data),
    weights=_FOUR_NORMS,
    ignored=re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    renamed=((r"^language_model\.(?=model\.|lm_head\.)", ""), (r"^model\.language_model\.", "model.")),
    text=_text,
)
