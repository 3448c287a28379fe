"""Reading a GGUF file of the llama architecture as if it were a Hugging Face checkpoint."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tide_jax.convert.gguf_tokenizer import tokenizer_from_gguf
from tide_jax.convert.source import id_list
from tide_jax.errors import InputError
from tide_jax.tokenizer import Tokenizer

_BLOCK_ROWS = 4096  # rows dequantised at a time: bounds the temporaries of a large embedding

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_TRAINING_KEYS = re.compile(r"(block_count|context_length|embedding_length|feed_forward_length|vocab_size|"
                            r"attention\.(head_count|head_count_kv|layer_norm_rms_epsilon|key_length|value_length)|"
                            r"rope\.(freq_base|dimension_count|scaling\.(type|factor)))")  # fmt: skip


class GGUFFile:
    """A GGUF file of the llama architecture; see `Source`.

    Raises:
        InputError: not GGUF, truncated, another architecture, or a key or tensor it does not know.
    """

    def __init__(self, path: Path):
        self._path = path
        reader = _open(path)
        self._metadata = {key: field.contents() for key, field in reader.fields.items()}
        architecture = self._metadata.get("general.architecture")
        if architecture != "llama":
            raise InputError(f"{path}: GGUF architecture {architecture!r} is not supported (supported: 'llama').")
        self._tensors = {_huggingface_name(tensor.name, path): tensor for tensor in reader.tensors}
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
        self.config = self._config()
        self.dtype = "float32"
        self.provenance = {
            "kind": "gguf",
            "files": [path.name],
            "name": self._metadata.get("general.name"),
            "types": sorted({tensor.tensor_type.name for tensor in reader.tensors}),
        }

    def _config(self) -> Mapping[str, Any]:
        """The metadata, said in the words of a Hugging Face config."""
        prefix = "llama."
        keys = {key.removeprefix(prefix): value for key, value in self._metadata.items() if key.startswith(prefix)}
        if unknown := sorted(key for key in keys if not _TRAINING_KEYS.fullmatch(key)):
            raise InputError(
                f"{self._path}: metadata {prefix}{unknown[0]} = {keys[unknown[0]]!r} is not supported; it may change the "
                "arithmetic, so the file is refused rather than converted wrongly."
            )
        needed = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
                  "attention.layer_norm_rms_epsilon")  # fmt: skip
        if absent := [key for key in needed if key not in keys]:
            raise InputError(f"{self._path}: metadata {prefix}{absent[0]} is missing. The file is incomplete.")
        width, heads = keys["embedding_length"], keys["attention.head_count"]
        head_dim = keys.get("attention.key_length", width // heads)
        rotated = keys.get("rope.dimension_count", head_dim)
        if rotated != head_dim or keys.get("attention.value_length", head_dim) != head_dim:
            raise InputError(
                f"{self._path}: {rotated} rotated channels of {head_dim} (values {keys.get('attention.value_length')}): "
                "partial rotation is not supported for llama files."
            )
        if "rope_freqs" in self._tensors:
            raise InputError(f"{self._path}: stretched rotary frequencies (rope_freqs.weight) are not supported yet.")
        scaling = keys.get("rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise InputError(f"{self._path}: rope scaling {scaling!r} is not supported (supported: none, linear).")
        return {
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": keys["feed_forward_length"],
            "num_hidden_layers": keys["block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": keys.get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": _short_float(keys["attention.layer_norm_rms_epsilon"]),
            "rope_theta": keys.get("rope.freq_base", 10_000.0),
            "rope_scaling": {"rope_type": "linear", "factor": keys["rope.scaling.factor"]} if scaling == "linear" else None,
            "max_position_embeddings": keys["context_length"],
            "vocab_size": self.shapes.get("model.embed_tokens.weight", (0,))[0],
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "attention_bias": any(name.endswith("q_proj.bias") for name in self.shapes),
            "mlp_bias": any(name.endswith("gate_proj.bias") for name in self.shapes),
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor in float32, dequantised in row blocks, q and k rows back in half-rotated order."""
        from gguf import dequantize

        tensor = self._tensors[name]
        value = np.empty(self.shapes[name], np.float32)
        for begin in range(0, len(value), _BLOCK_ROWS):
            rows = slice(begin, begin + _BLOCK_ROWS)
            value[rows] = dequantize(tensor.data[rows], tensor.tensor_type).reshape(value[rows].shape)
        if ".q_proj." in name:
            value = unpermute(value, self.config["num_attention_heads"])
        elif ".k_proj." in name:
            value = unpermute(value, self.config["num_key_value_heads"])
        return value

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, rebuilt from the metadata."""
        return tokenizer_from_gguf(self._metadata)

    def eos_ids(self, tokenizer: Tokenizer) -> list[int]:
        """End of text and, where named, end of turn."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return sorted({*tokenizer.eos_ids, *(i for key in keys for i in id_list(self._metadata.get(key)))})


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of q and k rows, which interleaves the two rotated halves of each head.

    Args:
        rows: weight [heads · head_dim, in] or bias [heads · head_dim].
        heads: query heads for q, key/value heads for k.

    Example:
        >>> unpermute(np.array([0, 2, 1, 3, 4, 6, 5, 7]), 2).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _open(path: Path):
    """A reader over the file.

    Raises:
        InputError: it cannot be read as GGUF, or tensors lie beyond its end.
    """
    from gguf import GGUFReader

    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise InputError(f"{path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'.")
        return GGUFReader(path)
    except InputError:
        raise
    except Exception as error:  # the parser raises whatever the damaged bytes make it meet
        raise InputError(
            f"{path} cannot be read as GGUF ({type(error).__name__}: {error}; {path.stat().st_size} bytes). It is "
            "truncated or damaged: download it again."
        ) from error


def _huggingface_name(name: str, path: Path) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if match is None or match[2] not in {*_NAMES, "rope_freqs"}:
        raise InputError(f"{path}: tensor {name!r} is not part of a llama model as this converter knows it.")
    if match[2] == "rope_freqs":
        return "rope_freqs"
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _short_float(value: float) -> float:
    """The shortest decimal that is this float32: 1e-5, where float64 arithmetic on the stored value gives 9.99…e-6."""
    return float(str(np.float32(value)))
