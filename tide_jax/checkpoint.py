"""The converted directory: `tide.json`, one orbax sub-checkpoint per layer, and the tokenizer.

Layout:
    DIR/tide.json              format, config, dtype, provenance, stop ids, fingerprint, list of parts
    DIR/weights/embedding      token embedding
    DIR/weights/layer_000 …    one decoder layer each
    DIR/weights/final          final norm and, when untied, the LM head
    DIR/tokenizer/             tokenizer.json and its config
"""

import dataclasses
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tide_jax.compat import layer_checkpointer, restore_tree, save_tree
from tide_jax.errors import InputError
from tide_jax.models import Decoder, DecoderConfig

FORMAT = "tide-checkpoint-1"
MANIFEST = "tide.json"
Tree = dict[Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `tide.json` says.

    Attributes:
        config: the decoder.
        dtype: stored parameter dtype, `float32`, `bfloat16` or `float16`.
        eos_ids: ids that end a text, from every place the source names them.
        source: provenance: kind, file names, and what the source calls itself.
        fingerprint: digest of config and weights; exit heads name the model they belong to with it.
    """

    config: DecoderConfig
    dtype: str
    eos_ids: tuple[int, ...]
    source: Mapping[str, object]
    fingerprint: str


def parts(config: DecoderConfig) -> list[str]:
    """Names of the sub-checkpoints, in the order of the computation."""
    return ["embedding", *(f"layer_{index:03d}" for index in range(config.num_layers)), "final"]


def skeleton(config: DecoderConfig, dtype: Any) -> tuple[Any, Any]:
    """Graph definition and abstract parameters of the decoder, without allocating anything."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))))


def part_trees(tree: Tree) -> dict[str, Tree]:
    """The pure parameter dict of a decoder cut into its parts."""
    layers = {f"layer_{index:03d}": layer for index, layer in tree["layers"].items()}
    final = {name: tree[name] for name in ("final_norm", "lm_head") if name in tree}
    return {"embedding": {"embedding": tree["embedding"]}, **layers, "final": final}


def joined(pieces: Mapping[str, Tree]) -> Tree:
    """The inverse of `part_trees`."""
    layers = {int(name.removeprefix("layer_")): tree for name, tree in pieces.items() if name.startswith("layer_")}
    return {**pieces["embedding"], "layers": layers, **pieces["final"]}


def flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and leaf of every leaf, in order."""
    for name, value in tree.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict):
            yield from flat(value, path)
        else:
            yield path, value


def write(
    target: Path,
    config: DecoderConfig,
    pieces: Iterator[tuple[str, Tree]],
    *,
    dtype: str,
    eos_ids: Sequence[int],
    source: Mapping[str, object],
    tokenizer: Any,
    overwrite: bool,
) -> Manifest:
    """Write a converted directory, part by part; it appears under its name only when it is whole.

    Args:
        target: the directory to make.
        config: the decoder.
        pieces: part name and its tree of numpy arrays, produced one at a time.
        dtype: parameter dtype of the pieces.
        eos_ids: ids that end a text.
        source: provenance.
        tokenizer: an object with `save(directory)`.
        overwrite: replace an existing directory.

    Raises:
        InputError: the directory exists and `overwrite` is false, or it is not a converted model.
    """
    check_target(target, overwrite=overwrite)
    beside = target.with_name(f".{target.name}.part-{os.getpid()}")
    _remove_abandoned(target)
    try:
        (beside / "weights").mkdir(parents=True)
        checkpointer = layer_checkpointer()
        hasher = hashlib.sha256(json.dumps(config.to_json(), sort_keys=True).encode())
        for name, tree in pieces:
            for path, array in flat(tree):
                checksum = zlib.crc32(np.ascontiguousarray(array).view(np.uint8))
                hasher.update(f"{name}.{path} {array.dtype} {array.shape} {checksum}\n".encode())
            save_tree(checkpointer, beside / "weights" / name, tree)
        tokenizer.save(beside / "tokenizer")
        fingerprint = hasher.hexdigest()[:16]
        manifest = Manifest(
            config=config, dtype=dtype, eos_ids=tuple(eos_ids), source=source, fingerprint=fingerprint
        )
        data = dataclasses.asdict(manifest) | {"format": FORMAT, "parts": parts(config)}
        (beside / MANIFEST).write_text(json.dumps(data, indent=2) + "\n")
        if target.exists():
            shutil.rmtree(target)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that would destroy something.

    Raises:
        InputError: it exists without `overwrite`, or it is not a converted model, or its parent is missing.
    """
    if not target.parent.is_dir():
        raise InputError(f"{target} cannot be written: the directory {target.parent} does not exist. Create it first.")
    if not target.exists():
        return
    if not overwrite:
        raise InputError(
            f"{target} exists already. Give --overwrite (overwrite=True) to replace it, or another name."
        )
    if not (target / MANIFEST).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(
            f"{target} exists and is not a converted model (it holds no {MANIFEST}), so it is not overwritten. "
            "Remove it yourself, or give another name."
        )


def _remove_abandoned(target: Path) -> None:
    """Delete what conversions to the same target left when they were killed."""
    for path in target.parent.glob(f".{target.name}.part-*"):
        process = path.name.rpartition("-")[2]
        if not (process.isdigit() and Path(f"/proc/{process}").exists()):
            shutil.rmtree(path, ignore_errors=True)


def read_manifest(directory: Path) -> Manifest:
    """What `tide.json` of a converted directory says.

    Raises:
        InputError: no such directory, not a converted model, or written by another version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        what = "does not exist" if not directory.exists() else f"holds no {MANIFEST}"
        raise InputError(
            f"{directory} is not a converted model: it {what}. Make one with `tide-jax convert SRC {directory}`."
        )
    try:
        data = json.loads(path.read_text())
        version = data.pop("format")
        data.pop("parts")
        if version != FORMAT:
            raise InputError(
                f"{path} has format {version!r}, this version reads {FORMAT!r}. Convert the model again."
            )
        return Manifest(**data | {"config": DecoderConfig.from_json(data["config"]), "eos_ids": tuple(data["eos_ids"])})
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}). Convert the model again.") from error


def read_parameters(directory: Path, manifest: Manifest, dtype: Any) -> tuple[Any, Any]:
    """Graph definition and parameters, cast to `dtype`, one part in memory twice at most.

    Raises:
        InputError: a part is missing or damaged, or an array's shape is not the config's.
    """
    graphdef, abstract = skeleton(manifest.config, dtype)
    wanted = part_trees(nnx.to_pure_dict(abstract))
    checkpointer = layer_checkpointer()
    pieces = {}
    for name, expected in wanted.items():
        path = directory / "weights" / name
        if not path.is_dir():
            raise InputError(f"{path} is missing: the converted model is incomplete. Convert it again.")
        try:
            tree = restore_tree(checkpointer, path)
        except Exception as error:  # orbax and tensorstore raise many kinds for damaged files
            raise InputError(f"{path} cannot be read ({type(error).__name__}: {error}). Convert the model again.") from error
        shapes = {key: array.shape for key, array in flat(tree)}
        if shapes != {key: leaf.shape for key, leaf in flat(expected)}:
            raise InputError(
                f"{path} does not fit the config in {MANIFEST}: it holds {shapes}. Convert the model again."
            )
        pieces[name] = jax.tree.map(lambda array: jnp.asarray(array, dtype), tree)
    nnx.replace_by_pure_dict(abstract, joined(pieces))
    return graphdef, abstract
