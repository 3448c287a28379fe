"""Reading a Hugging Face directory: config.json as data, safetensors single or sharded. Pickles are never opened."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tide_jax.convert.source import id_list, read_json
from tide_jax.errors import InputError
from tide_jax.tokenizer import Tokenizer

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class HuggingFaceDirectory:
    """A directory with `config.json`, `*.safetensors` and a tokenizer; see `Source`.

    Raises:
        InputError: a file is missing, truncated or foreign, shards contradict the index, or weights are quantised.
    """

    def __init__(self, directory: Path):
        from safetensors import SafetensorError, safe_open

        self._directory = directory
        self.config: Mapping[str, Any] = read_json(directory / "config.json")
        self._generation = {}
        if (directory / "generation_config.json").is_file():
            self._generation = read_json(directory / "generation_config.json")
        files, promised = self._shards()
        self._files, self.shapes, kinds = {}, {}, {}
        for path in files:
            try:
                handle = safe_open(path, framework="numpy")
            except (SafetensorError, OSError, ValueError) as error:
                raise InputError(
                    f"{path} cannot be read as safetensors ({error}; {path.stat().st_size} bytes). It is truncated or "
                    "another kind of file: download it again."
                ) from error
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                view = handle.get_slice(name)
                self._files[name] = handle
                self.shapes[name] = tuple(view.get_shape())
                kinds[name] = view.get_dtype()
        if missing := sorted(set(promised) - set(self.shapes)):
            raise InputError(
                f"{directory}: the index lists {len(missing)} tensors that no shard holds, e.g. {missing[0]!r} in "
                f"{promised[missing[0]]}. Download the checkpoint again."
            )
        if foreign := sorted({kind for kind in kinds.values() if kind not in _DTYPES} - {"I64", "BOOL"}):
            name = next(name for name, kind in kinds.items() if kind == foreign[0])
            method = (self.config.get("quantization_config") or {}).get("quant_method", "none named in config.json")
            raise InputError(
                f"{directory}: tensor {name!r} is stored as {foreign[0]} (quantisation: {method}). Quantised "
                "checkpoints are not supported: use the f32, bf16 or f16 original."
            )
        floats = {kind for kind in kinds.values() if kind in _DTYPES}
        self.dtype = _DTYPES[floats.pop()] if len(floats) == 1 else "float32"
        self.provenance = {"kind": "huggingface", "files": sorted(path.name for path in files)}
        if "_name_or_path" in self.config:
            self.provenance["name"] = self.config["_name_or_path"]

    def _shards(self) -> tuple[list[Path], dict[str, str]]:
        """Paths of the weight files, and the file the index promises for each tensor."""
        single, index = self._directory / "model.safetensors", self._directory / "model.safetensors.index.json"
        if index.is_file():
            promised = read_json(index).get("weight_map")
            if not isinstance(promised, dict) or not promised:
                raise InputError(f"{index} has no weight_map. Download it again.")
            names = sorted(set(promised.values()))
            if unsafe := [name for name in names if not re.fullmatch(r"[\w.-]+\.safetensors", str(name))]:
                raise InputError(f"{index} names {unsafe[0]!r}, which is not a safetensors file beside it.")
            if absent := [name for name in names if not (self._directory / name).is_file()]:
                raise InputError(
                    f"{self._directory}: {len(absent)} of {len(names)} shards are missing: {', '.join(absent)}. "
                    "The download is incomplete."
                )
            return [self._directory / name for name in names], promised
        if single.is_file():
            return [single], {}
        if (self._directory / "adapter_config.json").is_file():
            raise InputError(f"{self._directory} is a PEFT adapter, not a model. Merge it into its base model first.")
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self._directory.glob(pattern))
        hint = f" It holds {', '.join(pickles[:3])}: pickles can run code and are never opened." if pickles else ""
        raise InputError(
            f"{self._directory} holds neither model.safetensors nor model.safetensors.index.json.{hint} "
            "Download the safetensors files."
        )

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype."""
        return self._files[name].get_tensor(name)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights."""
        return Tokenizer.load(self._directory)

    def eos_ids(self, tokenizer: Tokenizer) -> list[int]:
        """The union of generation_config.json, config.json and the tokenizer."""
        named = [*id_list(self._generation.get("eos_token_id")), *id_list(self.config.get("eos_token_id"))]
        return sorted({*named, *tokenizer.eos_ids})
