"""Converting a checkpoint: part by part, through the family's table, with every discrepancy named at once."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from tide_jax.checkpoint import (
    DTYPES,
    Manifest,
    Tree,
    as_dtype,
    check_target,
    flat,
    map_leaves,
    part_name,
    part_trees,
    skeleton,
    write,
)
from tide_jax.convert.gguf import GGUFFile
from tide_jax.convert.huggingface import HuggingFaceDirectory
from tide_jax.convert.source import Source
from tide_jax.errors import InputError
from tide_jax.models import DecoderConfig
from tide_jax.models.families import FAMILIES, Family, Weight
from tide_jax.progress import track


def convert_checkpoint(source: Path, target: Path, *, dtype: str | None, overwrite: bool) -> Manifest:
    """See `tide_jax.convert.convert`."""
    check_target(target, overwrite=overwrite)
    origin = open_source(source)
    if dtype not in (None, *DTYPES):
        raise InputError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}.")
    kind = origin.config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(f"{source}: model_type {kind!r} is not supported (supported: {', '.join(sorted(FAMILIES))}).")
    family = FAMILIES[kind]
    config = family.config(origin.config)
    _check_sizes(config, origin)
    wanted = part_trees(nnx.to_pure_dict(skeleton(config, "float32")[1]))
    names = match_weights(family, origin.shapes, wanted, tied=config.tied_head)
    if config.tied_head:
        _check_redundant_head(origin, family)
    kinds = {origin.dtypes[name] for part in names.values() for name in part.values()}
    if strange := kinds - set(DTYPES):
        raise InputError(
            f"{source}: parameters are stored as {', '.join(sorted(strange))}; use the f32, bf16 or f16 original."
        )
    # Of several, float32 holds every one exactly; bfloat16 and float16 do not hold each other.
    stored = dtype or (kinds.pop() if len(kinds) == 1 else "float32")
    tokenizer = origin.tokenizer()
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding only "
            f"{config.vocab_size} rows. They belong to different models: take both from one release."
        )
    # An id beyond the embedding can never be chosen, so it ends nothing.
    eos_ids = [token for token in origin.eos_ids(tokenizer) if 0 <= token < config.vocab_size]
    pieces = _pieces(origin, family, names, wanted, stored)
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
    if not source.is_file():
        what = "is neither a directory nor a file" if source.exists() else "does not exist"
        raise InputError(f"{source} {what}. Give a Hugging Face directory or a .gguf file.")
    return GGUFFile(source)


def _check_sizes(config: DecoderConfig, origin: Source) -> None:
    """Refuse absurd sizes before anything is built of them.

    Raises:
        InputError: more layers than tensors, or more elements in one tensor than any file holds.
    """
    widest = config.hidden_size * max(config.vocab_size, config.ffn_size, config.num_heads * config.head_dim)
    if config.num_layers > len(origin.shapes) or widest > 2**40:
        raise InputError(
            f"the config asks for {config.num_layers} layers and a tensor of {widest} elements, but the "
            f"files hold {len(origin.shapes)} tensors. Config and weights belong to different models, or the "
            "checkpoint is incomplete."
        )


def match_weights(
    family: Family, shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Tree], *, tied: bool
) -> dict[str, dict[str, str]]:
    """For each part and parameter path, the source tensor.

    Args:
        family: whose table is used.
        shapes: what the source holds.
        wanted: for each part, the tree of abstract parameters.
        tied: the model has no head of its own; one in the source is left out.

    Raises:
        InputError: missing, unexpected and mis-shaped tensors, all in one message.
    """
    needed = {(part, path): leaf.shape for part, tree in wanted.items() for path, leaf in flat(tree)}
    found: dict[tuple[str, str], str] = {}
    unexpected, misshapen = [], []
    for name, shape in shapes.items():
        row = family.locate(name)
        if family.ignored.fullmatch(name) or (tied and row and row[0].path == _HEAD):
            continue
        key = _place(*row) if row else None
        if key not in needed:
            unexpected.append(name)
            continue
        found[key] = name
        expected = needed[key][::-1] if row[0].transpose else needed[key]
        if shape != expected:
            misshapen.append(f"{name} is {list(shape)}, the config says {list(expected)}")
    missing = [_source_name(family, *key) for key in needed if key not in found]
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
    names: dict[str, dict[str, str]] = {}
    for (part, path), name in found.items():
        names.setdefault(part, {})[path] = name
    return names


_HEAD = "lm_head.kernel"


def _place(weight: Weight, layer: int | None) -> tuple[str, str]:
    """Part and path of a row of a table."""
    return weight.part if layer is None else part_name(layer), weight.path


def _source_name(family: Family, part: str, path: str) -> str:
    """The Hugging Face name of a parameter, the inverse of `Family.locate` and `_place`."""
    for weight in family.weights:
        layer = int(part.rpartition("_")[2]) if weight.part == "layer" and part.startswith("layer_") else None
        if _place(weight, layer) == (part, path):
            return weight.source.format(layer=layer)
    raise AssertionError(f"the table of {family.name} has no row for {part} {path}")


def _check_redundant_head(origin: Source, family: Family) -> None:
    """A tied model may ship its head once more, but not another one.

    Raises:
        InputError: the two differ.
    """
    head, embedding = _source_name(family, "final", _HEAD), _source_name(family, "embedding", "embedding")
    if head in origin.shapes and not np.array_equal(origin.read(head), origin.read(embedding)):
        raise InputError(
            f"config.json says tie_word_embeddings, but {head} differs from {embedding}. Set "
            f"tie_word_embeddings to false to use the head, or remove {head} to use the embedding."
        )


def _pieces(
    origin: Source,
    family: Family,
    names: Mapping[str, Mapping[str, str]],
    wanted: Mapping[str, Tree],
    dtype: str,
) -> Iterator[tuple[str, Tree]]:
    """Part by part, the tree of arrays in `dtype`.

    Raises:
        InputError: a tensor holds what `dtype` cannot, or no finite number at all.
    """
    transposed = {weight.path for weight in family.weights if weight.transpose}
    for part, template in wanted.items():

        def array(path: str, _: Any, part: str = part) -> np.ndarray:
            name = names[part][path]
            stored = origin.read(name)
            return as_dtype(stored.T if path in transposed else stored, dtype, name)

        yield part, map_leaves(array, template)
