"""Converting a checkpoint: part by part, through the family's table, with every discrepancy named at once."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from tide_jax.checkpoint import Manifest, Tree, check_target, flat, part_trees, skeleton, write
from tide_jax.convert.gguf import GGUFFile
from tide_jax.convert.huggingface import HuggingFaceDirectory
from tide_jax.convert.source import Source
from tide_jax.errors import InputError
from tide_jax.models.families import FAMILIES, Family
from tide_jax.progress import track


def convert(
    source: str | Path, target: str | Path, *, dtype: str | None = None, overwrite: bool = False
) -> Manifest:
    """Convert a Hugging Face directory or a GGUF file into a directory that `tide_jax.load` reads.

    Args:
        source: directory with config.json, safetensors and tokenizer.json; or a `.gguf` file.
        target: the directory to make; it appears under its name only when it is whole.
        dtype: `float32`, `bfloat16` or `float16`; default: as stored (float32 for dequantised GGUF).
        overwrite: replace a converted model of that name.

    Raises:
        InputError: whatever cannot be honoured: cause, values, remedy.
    """
    source, target = Path(source), Path(target)
    check_target(target, overwrite=overwrite)
    origin = open_source(source)
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise InputError(f"dtype {dtype!r} is not supported; use float32, bfloat16 or float16.")
    kind = origin.config.get("model_type")
    if kind not in FAMILIES:
        raise InputError(
            f"{source}: model_type {kind!r} is not supported (supported: {', '.join(sorted(FAMILIES))})."
        )
    family = FAMILIES[kind]
    config = family.config(origin.config)
    stored = dtype or origin.dtype
    _, abstract = skeleton(config, stored)
    wanted = part_trees(nnx.to_pure_dict(abstract))
    names = match_weights(family, origin.shapes, wanted, tied=config.tied_head)
    if config.tied_head:
        _check_redundant_head(origin, family)
    tokenizer = origin.tokenizer()
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {config.vocab_size} rows. "
            "They belong to different models."
        )
    eos_ids = [token for token in origin.eos_ids(tokenizer) if 0 <= token < config.vocab_size]
    pieces = _pieces(origin, names, wanted, jax.numpy.dtype(stored))
    return write(
        target,
        config,
        track(pieces, total=len(wanted), description=f"converting {source.name}"),
        dtype=stored,
        eos_ids=eos_ids,
        source=origin.provenance,
        tokenizer=tokenizer,
        overwrite=overwrite,
    )


def open_source(source: Path) -> Source:
    """The reader for a directory or file.

    Raises:
        InputError: it does not exist, or is neither.
    """
    if source.is_dir():
        return HuggingFaceDirectory(source)
    if not source.exists():
        raise InputError(f"{source} does not exist. Give a Hugging Face directory or a .gguf file.")
    return GGUFFile(source)


Target = tuple[str, str, bool]


def match_weights(
    family: Family, shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tree], *, tied: bool
) -> dict[str, dict[str, tuple[str, bool]]]:
    """For each part and parameter path, the source tensor and whether it is transposed.

    Raises:
        InputError: missing, unexpected and mis-shaped tensors, all in one message.
    """
    needed = {(part, path): leaf.shape for part, tree in wanted.items() for path, leaf in flat(tree)}
    found: dict[tuple[str, str], tuple[str, bool]] = {}
    unexpected, misshapen = [], []
    for name, shape in shapes.items():
        if family.ignored.fullmatch(name) or (tied and name == "lm_head.weight"):
            continue
        target = _target(family, name)
        if target is None or target[:2] not in needed:
            unexpected.append(name)
            continue
        part, path, transpose = target
        found[part, path] = (name, transpose)
        expected = needed[part, path][::-1] if transpose else needed[part, path]
        if shape != expected:
            misshapen.append(f"{name} is {list(shape)}, the config says {list(expected)}")
    missing = [f"{part}.{path}" for part, path in needed if (part, path) not in found]
    problems = []
    for what, items in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen)):
        if items:
            more = f" and {len(items) - 5} more" if len(items) > 5 else ""
            problems.append(f"{len(items)} {what}: {'; '.join(items[:5])}{more}")
    if problems:
        raise InputError(
            f"the tensors do not fit a {family.name} model with this config. {'. '.join(problems)}. "
            "Config and weights belong to different models, or the checkpoint is incomplete."
        )
    names: dict[str, dict[str, tuple[str, bool]]] = {}
    for (part, path), value in found.items():
        names.setdefault(part, {})[path] = value
    return names


def _target(family: Family, name: str) -> Target | None:
    for weight in family.weights:
        if match := weight.source.fullmatch(name):
            part = f"layer_{int(match[1]):03d}" if weight.part == "layer" else weight.part
            return part, weight.path, weight.transpose
    return None


def _check_redundant_head(origin: Source, family: Family) -> None:
    """A tied model may ship its head once more, but not another one.

    Raises:
        InputError: the two differ.
    """
    if "lm_head.weight" not in origin.shapes:
        return
    embedding = next(name for name in origin.shapes if (_target(family, name) or ("",))[0] == "embedding")
    if not np.array_equal(origin.read("lm_head.weight"), origin.read(embedding)):
        raise InputError(
            "config.json says tie_word_embeddings, but lm_head.weight differs from the embedding. Set "
            "tie_word_embeddings to false to use the head, or remove lm_head.weight to use the embedding."
        )


def _pieces(
    origin: Source, names: Mapping[str, Mapping[str, tuple[str, bool]]], wanted: Mapping[str, Tree], dtype: Any
) -> Iterator[tuple[str, Tree]]:
    """Part by part, the tree of arrays."""
    for part, template in wanted.items():

        def build(tree: Tree, prefix: str = "", part: str = part) -> Tree:
            made = {}
            for key, value in tree.items():
                path = f"{prefix}.{key}" if prefix else key
                if isinstance(value, dict):
                    made[key] = build(value, path)
                else:
                    name, transpose = names[part][path]
                    array = origin.read(name)
                    made[key] = np.ascontiguousarray((array.T if transpose else array).astype(dtype, copy=False))
            return made

        yield part, build(template)
