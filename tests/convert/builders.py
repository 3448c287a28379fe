"""Tiny checkpoints for tests: PyTorch Llamas with random weights, and the directories they come in."""

import json
from pathlib import Path

import numpy as np

from tide_jax.arrays import write_safetensors

SIZES = dict(
    vocab_size=97,
    hidden_size=36,
    intermediate_size=52,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    eos_token_id=[2, 5],
)


def torch_llama(dtype: str = "float32", **changes):
    """A Hugging Face Llama in float32 whose norms and biases are random too; all values fit `dtype`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | changes, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_((centre + 0.2 * torch.randn_like(parameter)).to(getattr(torch, dtype)))
    return model


def torch_states(model, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Raw states after the embedding and after every layer, before the final norm, and the logits."""
    import torch

    states = []
    hooks = [layer.register_forward_hook(lambda _, __, out: states.append(out)) for layer in model.model.layers]
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)).logits
    for hook in hooks:
        hook.remove()
    first = model.model.embed_tokens(torch.from_numpy(ids))
    return np.stack([state.detach().float().numpy() for state in (first, *states)]), logits.float().numpy()


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of 90 words; `</s>` is the token 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, 90)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))


def write_config(directory: Path, **changes) -> None:
    """config.json as Hugging Face writes it for `SIZES`; a change to `...` removes the key."""
    config = {"model_type": "llama", "hidden_act": "silu", "rope_theta": 10000.0, **SIZES, **changes}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def numpy_weights(seed: int = 0, **changes) -> dict[str, np.ndarray]:
    """Random float32 tensors of a Llama by Hugging Face name; biases where the sizes ask for them."""
    size = SIZES | {"attention_bias": False, "mlp_bias": False} | changes
    d, f, hd = size["hidden_size"], size["intermediate_size"], size["head_dim"]
    q, kv = size["num_attention_heads"] * hd, size["num_key_value_heads"] * hd
    shapes = {"model.embed_tokens.weight": (size["vocab_size"], d), "model.norm.weight": (d,)}
    if not size["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (size["vocab_size"], d)
    for layer in range(size["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (d,)
        for name, rows, inner, bias in (
            ("self_attn.q_proj", q, d, "attention_bias"),
            ("self_attn.k_proj", kv, d, "attention_bias"),
            ("self_attn.v_proj", kv, d, "attention_bias"),
            ("self_attn.o_proj", d, q, "attention_bias"),
            ("mlp.gate_proj", f, d, "mlp_bias"),
            ("mlp.up_proj", f, d, "mlp_bias"),
            ("mlp.down_proj", d, f, "mlp_bias"),
        ):
            shapes[f"{prefix}{name}.weight"] = (rows, inner)
            if size[bias]:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_directory(directory: Path, tensors=None, **changes) -> Path:
    """A Hugging Face directory of random weights, or of the tensors given."""
    write_tokenizer(directory)
    write_config(directory, **changes)
    sizes = {key: value for key, value in changes.items() if key in SIZES or key.endswith("_bias")}
    tensors = numpy_weights(**{k: v for k, v in sizes.items() if v is not ...}) if tensors is None else tensors
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    return directory


def write_sharded(directory: Path, shards: int = 2, **changes) -> dict[str, str]:
    """A Hugging Face directory in shards; returns the weight map of its index."""
    write_directory(directory, **changes)
    (directory / "model.safetensors").unlink()
    tensors = numpy_weights()
    names = [f"model-{index:05d}-of-{shards:05d}.safetensors" for index in range(1, shards + 1)]
    placed = {name: names[index % shards] for index, name in enumerate(tensors)}
    for file in names:
        write_safetensors(directory / file, {n: a for n, a in tensors.items() if placed[n] == file}, {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return placed
