"""Reading a GGUF file of the llama architecture as if it were a Hugging Face checkpoint."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tide_jax.convert.gguf_file import read_gguf
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

_KEYS = re.compile(r"(block_count|context_length|embedding_length|feed_forward_length|vocab_size|"
                   r"attention\.(head_count|head_count_kv|layer_norm_rms_epsilon|key_length|value_length)|"
                   r"rope\.(freq_base|dimension_count|scaling\.(type|factor)))")  # fmt: skip
# Names, provenance and statistics of the quantiser; they do not change the arithmetic.
_INERT = re.compile(r"general\..*|tokenizer\..*|quantize\.imatrix\..*")

_TOKENIZER_KINDS: Mapping[str, tuple[type, type | None]] = {
    "tokenizer.ggml.model": (str, None),
    "tokenizer.ggml.pre": (str, None),
    "tokenizer.ggml.tokens": (list, str),
    "tokenizer.ggml.merges": (list, str),
    "tokenizer.ggml.token_type": (list, int),
    "tokenizer.chat_template": (str, None),
}


class GGUFFile:
    """A GGUF file of the llama architecture; see `Source`.

    Raises:
        InputError: not GGUF, truncated, another architecture, or a key or tensor it does not know.
    """

    def __init__(self, path: Path):
        self._path = path
        self._metadata, tensors = read_gguf(path)
        architecture = self._metadata.get("general.architecture")
        if architecture != "llama":
            raise InputError(
                f"{path}: GGUF architecture {architecture!r} is not supported (supported: 'llama'). Convert "
                "from the model's original directory instead."
            )
        if "rope_freqs.weight" in tensors:
            raise InputError(
                f"{path}: stretched rotary frequencies (tensor rope_freqs.weight) are not supported in GGUF "
                "files. Convert from the model's original directory, whose config.json says how they are "
                "made."
            )
        self._tensors = {self._huggingface_name(name): tensor for name, tensor in tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.dtypes = dict.fromkeys(self.shapes, "float32")
        self.config = self._config()
        self.provenance = {
            "kind": "gguf",
            "files": [path.name],
            "name": self._metadata.get("general.name"),
            "types": sorted({tensor.kind.name for tensor in tensors.values()}),
        }

    def _huggingface_name(self, name: str) -> str:
        match = re.fullmatch(r"(?:blk\.([0-9]+)\.)?([a-z_]+)\.(weight|bias)", name)
        if match is None or match[2] not in _NAMES:
            raise InputError(
                f"{self._path}: tensor {name!r} is not part of a llama model as this converter knows it, so "
                "the file is refused rather than converted wrongly."
            )
        layer = f"model.layers.{match[1]}." if match[1] is not None else ""
        return f"{layer}{_NAMES[match[2]]}.{match[3]}"

    def _config(self) -> Mapping[str, Any]:
        """The metadata, said in the words of a Hugging Face config."""
        prefix = "llama."
        keys = {key.removeprefix(prefix): value for key, value in self._metadata.items() if key.startswith(prefix)}
        unknown = {prefix + key: value for key, value in keys.items() if not _KEYS.fullmatch(key)}
        unknown |= {
            key: value
            for key, value in self._metadata.items()
            if not key.startswith(prefix) and not _INERT.fullmatch(key)
        }
        if unknown:
            key = min(unknown)
            raise InputError(
                f"{self._path}: metadata {key} = {_shown(unknown[key])} is not supported; it may change the "
                "arithmetic, so the file is refused rather than converted wrongly."
            )
        needed = ("block_count", "context_length", "embedding_length", "feed_forward_length",
                  "attention.head_count", "attention.layer_norm_rms_epsilon")  # fmt: skip
        if absent := [key for key in needed if key not in keys]:
            raise InputError(f"{self._path}: metadata {prefix}{absent[0]} is missing. The file is incomplete.")
        for key, value in keys.items():
            wanted = str if key == "rope.scaling.type" else int | float
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise InputError(
                    f"{self._path}: metadata {prefix}{key} = {_shown(value)} is not one value of the "
                    "expected type. Models whose layers differ are not supported."
                )
        heads = keys["attention.head_count"]
        head_dim = keys.get("attention.key_length", keys["embedding_length"] // heads if heads else 0)
        rotated = keys.get("rope.dimension_count", head_dim)
        if rotated != head_dim or keys.get("attention.value_length", head_dim) != head_dim:
            raise InputError(
                f"{self._path}: keys of {head_dim} channels, {rotated} of them rotated, and values of "
                f"{keys.get('attention.value_length', head_dim)}: the three must be equal. Convert from the "
                "model's original directory instead."
            )
        scaling = keys.get("rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise InputError(
                f"{self._path}: rope scaling {scaling!r} is not supported (supported: none, linear). Convert "
                "from the model's original directory instead."
            )
        rows = self.shapes.get("model.embed_tokens.weight", (0,))[0]
        if keys.get("vocab_size", rows) != rows:
            raise InputError(
                f"{self._path}: metadata llama.vocab_size is {keys['vocab_size']}, the embedding has {rows} "
                "rows. The file is damaged or was edited: get another copy."
            )
        linear = {"rope_type": "linear", "factor": _short_float(keys.get("rope.scaling.factor", 1.0))}
        return {
            "model_type": "llama",
            "hidden_size": keys["embedding_length"],
            "intermediate_size": keys["feed_forward_length"],
            "num_hidden_layers": keys["block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": keys.get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": _short_float(keys["attention.layer_norm_rms_epsilon"]),
            "rope_theta": _short_float(keys.get("rope.freq_base", 10_000.0)),
            "rope_scaling": linear if scaling == "linear" else None,
            "max_position_embeddings": keys["context_length"],
            "vocab_size": rows,
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "attention_bias": any(name.endswith("q_proj.bias") for name in self.shapes),
            "mlp_bias": any(name.endswith("gate_proj.bias") for name in self.shapes),
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor in float32, dequantised in row blocks, q and k rows back in half-rotated order.

        Raises:
            InputError: its quantisation cannot be decoded.
        """
        tensor = self._tensors[name]
        value = np.empty((len(tensor.rows), tensor.shape[-1]), np.float32)
        try:
            # A damaged scale is not a number or overflows; whoever reads checks that all values are finite.
            with np.errstate(all="ignore"):
                for begin in range(0, len(value), _BLOCK_ROWS):
                    end = min(begin + _BLOCK_ROWS, len(value))
                    value[begin:end] = tensor.dequantized(begin, end)
        except NotImplementedError as error:
            raise InputError(
                f"{self._path}: tensor {name} has type {tensor.kind.name}, which gguf cannot decode. Use a "
                "file of another quantisation."
            ) from error
        value = value.reshape(tensor.shape)
        if ".q_proj." in name:
            return unpermute(value, self.config["num_attention_heads"])
        if ".k_proj." in name:
            return unpermute(value, self.config["num_key_value_heads"])
        return value

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, rebuilt from the metadata.

        Raises:
            InputError: a key is missing or of another type, or the kind of tokenizer is not supported.
        """
        for key, value in self._metadata.items():
            loose = int if key.endswith("_token_id") else bool if key.startswith("tokenizer.ggml.add_") else object
            kind, inner = _TOKENIZER_KINDS.get(key, (loose, None))
            if not isinstance(value, kind) or (inner and not all(isinstance(item, inner) for item in value)):
                raise InputError(
                    f"{self._path}: metadata {key} = {_shown(value)} has another type than that key must "
                    "have. The file is damaged: download it again."
                )
        return tokenizer_from_gguf(self._metadata)

    def eos_ids(self, tokenizer: Tokenizer) -> list[int]:
        """End of text and, where named, end of turn."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        named = (id for key in keys for id in id_list(self._metadata.get(key), f"{self._path}: {key}"))
        return sorted({*tokenizer.eos_ids, *named})


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


def _shown(value: Any) -> str:
    """A metadata value in a message: arrays can hold a whole vocabulary."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _short_float(value: float) -> float:
    """The shortest decimal that is this float32: 1e-5, where the stored value as a float64 is 9.99…e-6."""
    with np.errstate(over="ignore"):  # infinity is refused with the config
        return float(str(np.float32(value)))
