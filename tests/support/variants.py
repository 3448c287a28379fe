"""Tiny Hugging Face models with random weights, several configs of every family, and what PyTorch makes of them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

ROPE_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ROPE_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
ROPE_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}

_COMMON: dict[str, Any] = dict(
    vocab_size=97, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=256, eos_token_id=2, bos_token_id=1, pad_token_id=0,
)  # fmt: skip
_WIDE = _COMMON | dict(head_dim=10)
_GEMMA = _WIDE | dict(num_hidden_layers=3)
_GPT2 = dict(
    vocab_size=97, n_embd=36, n_layer=3, n_head=6, n_positions=256, eos_token_id=2, bos_token_id=1, pad_token_id=0
)
_NEOX = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"} | dict(hidden_size=48)
_OPT = {key: value for key, value in _NEOX.items() if key != "intermediate_size"} | dict(
    hidden_size=36, ffn_dim=52, word_embed_proj_dim=36
)
_FALCON = {key: value for key, value in _NEOX.items() if key != "intermediate_size"} | dict(ffn_hidden_size=52)
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_FACTORS = [1.0 + 0.25 * index for index in range(5)]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One config of a family.

    Attributes:
        family: its name here.
        name: what is special about the config.
        config: the class in `transformers`.
        values: its arguments.
        slow: only in `make test-all`.
    """

    family: str
    name: str
    config: str
    values: dict[str, Any]
    slow: bool = True

    @property
    def id(self) -> str:
        """For the name of a test."""
        return f"{self.family}-{self.name}"


def _family(family: str, config: str, base: dict[str, Any], **variants: dict[str, Any]) -> list[Variant]:
    """The first of the variants is tested in every run."""
    return [
        Variant(family, name, config, base | changes, slow=index > 0)
        for index, (name, changes) in enumerate(variants.items())
    ]


VARIANTS = [
    *_family(
        "llama", "LlamaConfig", _WIDE,
        biased_llama3=dict(attention_bias=True, mlp_bias=True, rope_parameters=ROPE_LLAMA3),
        tied_yarn=dict(tie_word_embeddings=True, num_key_value_heads=3, rope_parameters=ROPE_YARN),
        linear_no_head_dim=dict(head_dim=None, num_key_value_heads=6, rope_parameters=ROPE_LINEAR),
    ),
    *_family(
        "mistral", "MistralConfig", _WIDE,
        window=dict(sliding_window=4),
        nemo=dict(sliding_window=None, num_key_value_heads=3, head_dim=16,
                  rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        tied=dict(sliding_window=7, head_dim=None, tie_word_embeddings=True),
    ),
    *_family(
        "ministral", "MinistralConfig", _WIDE,
        mixed=dict(sliding_window=4, layer_types=_MIXED),
        all_sliding=dict(sliding_window=5, num_key_value_heads=3),
        full=dict(layer_types=["full_attention"] * 3, tie_word_embeddings=True),
    ),
    *_family(
        "qwen2", "Qwen2Config", _COMMON,
        window_from_layer_1=dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
        tied=dict(tie_word_embeddings=True, num_key_value_heads=3, sliding_window=4),
        yarn=dict(rope_parameters=ROPE_YARN, layer_types=["full_attention"] * 3),
    ),
    *_family(
        "qwen3", "Qwen3Config", _WIDE,
        window_and_bias=dict(attention_bias=True, use_sliding_window=True, sliding_window=4,
                             layer_types=_MIXED, max_window_layers=3),
        tied=dict(tie_word_embeddings=True, num_key_value_heads=3),
        class_head_dim=dict(head_dim=128),
    ),
    *_family(
        "gemma", "GemmaConfig", _GEMMA,
        plain={},
        biased=dict(attention_bias=True, num_key_value_heads=3),
        legacy_activation=dict(hidden_act="gelu", num_key_value_heads=1),
    ),
    *_family(
        "gemma2", "Gemma2Config", _GEMMA,
        capped=dict(sliding_window=4, query_pre_attn_scalar=14, attn_logit_softcapping=2.0,
                    final_logit_softcapping=3.0),
        uncapped=dict(sliding_window=5, num_key_value_heads=3, attn_logit_softcapping=None,
                      final_logit_softcapping=None),
        biased=dict(sliding_window=4, attention_bias=True, layer_types=["full_attention"] * 3),
    ),
    *_family(
        "gemma3", "Gemma3TextConfig", _GEMMA,
        two_ropes=dict(
            sliding_window=4, layer_types=_MIXED, query_pre_attn_scalar=14,
            rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        ),
        pattern=dict(sliding_window=5, sliding_window_pattern=2, num_key_value_heads=3),
        capped=dict(sliding_window=4, final_logit_softcapping=3.0, attention_bias=True),
    ),
    *_family(
        "phi3", "Phi3Config", _COMMON | dict(hidden_size=60),
        window=dict(sliding_window=4),
        partial_longrope=dict(
            num_key_value_heads=3, partial_rotary_factor=0.6, original_max_position_embeddings=200,
            rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.6,
                             "original_max_position_embeddings": 200,
                             "short_factor": _FACTORS[:3], "long_factor": [9.0, 8.0, 7.0]},
        ),
        tied=dict(tie_word_embeddings=True, num_key_value_heads=6),
    ),
    *_family(
        "gpt2", "GPT2Config", _GPT2,
        plain={},
        inner_and_relu=dict(n_inner=50, activation_function="relu", n_head=4),
        unscaled=dict(scale_attn_weights=False, tie_word_embeddings=False, activation_function="gelu"),
    ),
    *_family(
        "gpt_neox", "GPTNeoXConfig", _NEOX,
        parallel={},
        sequential=dict(use_parallel_residual=False, attention_bias=False, num_attention_heads=3),
        all_rotated=dict(
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            hidden_act="gelu_new",
        ),
    ),
    *_family(
        "opt", "OPTConfig", _OPT,
        plain={},
        no_bias=dict(enable_bias=False, num_attention_heads=4),
        gelu_untied=dict(activation_function="gelu", tie_word_embeddings=False),
    ),
    *_family(
        "falcon", "FalconConfig", _FALCON,
        newer=dict(new_decoder_architecture=True, num_kv_heads=2),
        multi_query=dict(bias=True),
        multi_head_sequential=dict(multi_query=False, parallel_attn=False, tie_word_embeddings=False),
        newer_one_norm=dict(new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1, bias=True),
    ),
    *_family(
        "granite", "GraniteConfig", _COMMON,
        multipliers=dict(embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.4,
                         attention_multiplier=0.3),
        biased=dict(attention_bias=True, mlp_bias=True, num_key_value_heads=3, residual_multiplier=0.5),
        tied=dict(tie_word_embeddings=True, num_key_value_heads=None),
    ),
    *_family(
        "olmo2", "Olmo2Config", _COMMON,
        plain={},
        biased=dict(attention_bias=True, num_key_value_heads=3),
        tied=dict(tie_word_embeddings=True, num_key_value_heads=6, rope_parameters=ROPE_YARN),
    ),
    *_family(
        "smollm3", "SmolLM3Config", _COMMON | dict(num_hidden_layers=4),
        no_positions_in_some=dict(no_rope_layer_interval=2),
        window=dict(use_sliding_window=True, sliding_window=4, no_rope_layers=[1, 0, 1, 0], attention_bias=True),
        untied=dict(tie_word_embeddings=False, mlp_bias=True, num_key_value_heads=3),
    ),
]  # fmt: skip


def torch_model(variant: Variant, dtype: str = "float32"):
    """The model in float32; weights, norms and biases are random, and all values fit `dtype`."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, variant.config)(**variant.values)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            adds_one = variant.family.startswith("gemma")
            centre = 1.0 if ("norm" in name or ".ln_" in name) and not adds_one else 0.0
            spread = 0.05 if "embed" in name else 0.2  # Gemma multiplies what it embeds
            parameter.copy_((centre + spread * torch.randn_like(parameter)).to(getattr(torch, dtype)))
    return model


def layers_of(model) -> list:
    """The decoder layers."""
    base = model.base_model
    return list(getattr(getattr(base, "decoder", base), "layers", None) or base.h)


def torch_states(model, ids: np.ndarray, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Raw states before the first layer and after every one, and the logits."""
    import torch

    states = []

    def entered(_, args, kwargs):
        states.append(args[0] if args else kwargs["hidden_states"])

    def left(_, __, out):
        states.append(out[0] if isinstance(out, tuple) else out)

    layers = layers_of(model)
    hooks = [layers[0].register_forward_pre_hook(entered, with_kwargs=True)]
    hooks += [layer.register_forward_hook(left) for layer in layers]
    given = {} if mask is None else {"attention_mask": torch.from_numpy(mask.astype(np.int64))}
    with torch.no_grad():
        logits = model(torch.from_numpy(ids), **given).logits
    for hook in hooks:
        hook.remove()
    return np.stack([state.detach().float().numpy() for state in states]), logits.float().numpy()


def save(model, directory: Path, **options) -> Path:
    """The directory that Hugging Face writes, with a tokenizer of words."""
    from convert.builders import write_tokenizer

    model.save_pretrained(directory, **options)
    write_tokenizer(directory)
    return directory
