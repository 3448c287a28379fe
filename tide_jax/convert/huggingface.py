"""Reading a Hugging Face directory: config.json as data, safetensors in one file or many, never a pickle."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tide_jax.convert.source import id_list, read_json
from tide_jax.errors import InputError
from tide_jax.tokenizer import Tokenizer

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_BUFFERS = {"I64": "int64", "BOOL": "bool"}  # position ids and masks in older exports; no family reads them


class HuggingFaceDirectory:
    """A directory with `config.json`, `*.safetensors` and a tokenizer; see `Source`.

    Raises:
        InputError: a file is missing, damaged or foreign, shards contradict the index, or weights are
            quantised.
    """

    def __init__(self, directory: Path):
        import ml_dtypes  # noqa: F401 - teaches numpy the name bfloat16, which safetensors asks it for
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
                for name in handle.keys():  # noqa: SIM118 - not a mapping
                    if promised.setdefault(name, path.name) != path.name:
                        continue
                    view = handle.get_slice(name)
                    self._files[name] = handle
                    self.shapes[name] = tuple(view.get_shape())
                    kinds[name] = view.get_dtype()
            except (SafetensorError, OSError, ValueError, OverflowError) as error:
                raise InputError(
                    f"{path} cannot be read as safetensors ({error}; {path.stat().st_size} bytes). It is "
                    "truncated or another kind of file: download it again."
                ) from error
        if missing := sorted(set(promised) - set(self.shapes)):
            raise InputError(
                f"{directory}: the index lists {len(missing)} tensors that their shard does not hold, e.g. "
                f"{missing[0]!r} in {promised[missing[0]]}. Download the checkpoint again."
            )
        known = _DTYPES | _BUFFERS
        if foreign := sorted(name for name, kind in kinds.items() if kind not in known):
            quantisation = self.config.get("quantization_config")
            method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
            raise InputError(
                f"{directory}: {len(foreign)} tensors are stored quantised, e.g. {foreign[0]!r} as "
                f"{kinds[foreign[0]]} (method: {method or 'none named in config.json'}). Quantised "
                "checkpoints are not supported: use the f32, bf16 or f16 original."
            )
        self.dtypes = {name: known[kind] for name, kind in kinds.items()}
        self.provenance = {"kind": "huggingface", "files": sorted(path.name for path in files)}
        if "_name_or_path" in self.config:
            self.provenance["name"] = self.config["_name_or_path"]

    def _shards(self) -> tuple[list[Path], dict[str, str]]:
        """Paths of the weight files, and the file the index promises for each tensor."""
        single, index = (
            self._directory / "model.safetensors",
            self._directory / "model.safetensors.index.json",
        )
        if index.is_file():
            promised = read_json(index).get("weight_map")
            if not isinstance(promised, dict) or not promised:
                raise InputError(f"{index} has no weight_map. Download it again.")
            # A name with a folder in it could reach any file of this machine.
            if unsafe := [name for name in promised.values() if not re.fullmatch(r"[\w.-]+\.safetensors", str(name))]:
                raise InputError(
                    f"{index} names {unsafe[0]!r}, which is not a safetensors file beside it. Download it "
                    "again, from a place you trust."
                )
            names = sorted(set(promised.values()))
            if absent := [name for name in names if not (self._directory / name).is_file()]:
                raise InputError(
                    f"{self._directory}: {len(absent)} of {len(names)} shards are missing: "
                    f"{', '.join(absent)}. The download is incomplete."
                )
            return [self._directory / name for name in names], promised
        if single.is_file():
            return [single], {}
        if (self._directory / "adapter_config.json").is_file():
            raise InputError(
                f"{self._directory} holds adapter_config.json but no model: it is a PEFT adapter. Merge it "
                "into its base model first."
            )
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
        named = [
            *id_list(
                self._generation.get("eos_token_id"),
                f"{self._directory}/generation_config.json: eos_token_id",
            ),
            *id_list(self.config.get("eos_token_id"), f"{self._directory}/config.json: eos_token_id"),
        ]
        return sorted({*named, *tokenizer.eos_ids})
