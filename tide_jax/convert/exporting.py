"""The way back: a converted directory as a Hugging Face directory that `transformers` loads."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from tide_jax.arrays import write_safetensors
from tide_jax.checkpoint import ORIGIN, Manifest, Tree, flat, part_trees, read_manifest, read_parts, skeleton
from tide_jax.convert.conversion import family_of
from tide_jax.convert.matching import Placed, placements
from tide_jax.convert.source import read_json
from tide_jax.errors import InputError
from tide_jax.progress import track
from tide_jax.tokenizer import Tokenizer

_SHARD = 2 << 30  # bytes; one file is in memory while it is written


def export_checkpoint(source: Path, target: Path) -> dict[str, Any]:
    """See `tide_jax.convert.export`."""
    manifest = read_manifest(source)
    origin = read_json(source / ORIGIN)
    family = family_of(origin, source / ORIGIN)
    if family.name != manifest.config.family or family.config(origin) != manifest.config:
        raise InputError(
            f"{source / ORIGIN} describes another model than {source / 'tide.json'}. Convert the model again."
        )
    if os.path.lexists(target):
        raise InputError(f"{target} exists already. Give another name, or remove it yourself.")
    if not target.absolute().parent.is_dir():
        raise InputError(f"{target} cannot be written: {target.absolute().parent} is not a directory. Create it first.")
    wanted = part_trees(nnx.to_pure_dict(skeleton(manifest.config, "float32")[1]))
    placed = placements(family, manifest.config, wanted)
    beside = target.absolute().with_name(f".{target.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        parts = track(read_parts(source, manifest, wanted), total=len(wanted), description=f"exporting {source.name}")
        files = _write_weights(beside, parts, placed, manifest)
        config = {**origin, "dtype": manifest.dtype}
        config.pop("torch_dtype", None)
        (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if manifest.eos_ids:
            ends = {"eos_token_id": list(manifest.eos_ids)}
            (beside / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
        Tokenizer.load(source / "tokenizer").save(beside)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return {"path": str(target), "family": family.name, "dtype": manifest.dtype, "files": files, "tensors": len(placed)}


def _write_weights(
    directory: Path, parts: Iterator[tuple[str, Tree]], placed: Mapping[str, Placed], manifest: Manifest
) -> list[str]:
    """One file, or numbered ones with an index, as Hugging Face names them; their names."""
    shards = _shards(placed, np.dtype(manifest.dtype).itemsize)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    weight_map: dict[str, str] = {}
    size = 0
    for name, shard in zip(names, shards, strict=True):
        tensors = {}
        for part, tree in (next(parts) for _ in range(len(shard))):
            arrays = dict(flat(tree))
            for tensor in shard[part]:
                made = [arrays[path] for path in tensor.weight.paths]
                tensors[tensor.name] = tensor.weight.join(made, manifest.config.head_dim)
        write_safetensors(directory / name, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        size += sum(array.nbytes for array in tensors.values())
    next(parts, None)  # the progress bar ends where its items do
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _shards(placed: Mapping[str, Placed], itemsize: int) -> list[dict[str, list[Placed]]]:
    """The tensors of each file by part; a part is never divided."""
    parts: dict[str, list[Placed]] = {}
    for tensor in placed.values():
        parts.setdefault(tensor.part, []).append(tensor)
    shards: list[dict[str, list[Placed]]] = [{}]
    room = _SHARD
    for part, tensors in parts.items():
        size = itemsize * sum(int(np.prod(tensor.shape)) for tensor in tensors)
        if size > room and shards[-1]:
            shards.append({})
            room = _SHARD
        shards[-1][part] = tensors
        room -= size
    return shards
