"""Converting a checkpoint: part by part, through the family's table, with every discrepancy named at once."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from tide_jax.checkpoint import (
    DTYPES,
    Manifest,
    Tree,
    as_dtype,
    check_target,
    map_leaves,
    part_trees,
    skeleton,
    write,
)
from tide_jax.convert.gguf import GGUFFile
from tide_jax.convert.huggingface import HuggingFaceDirectory
from tide_jax.convert.matching import Placed, embedding_name, head_name, match, placements
from tide_jax.convert.source import Source
from tide_jax.errors import InputError
from tide_jax.models import DecoderConfig
from tide_jax.models.families import TYPES, Family
from tide_jax.progress import track
from tide_jax.tokenizer import Tokenizer


def convert_checkpoint(source: Path, target: Path, *, dtype: str | None, overwrite: bool) -> Manifest:
    """See `tide_jax.convert.convert`."""
    check_target(target, overwrite=overwrite)
    plan = make_plan(source, dtype=dtype)
    pieces = _pieces(plan)
    return write(
        target,
        plan.config,
        track(pieces, total=len(plan.wanted), description=f"converting {source.name}"),
        dtype=plan.dtype,
        eos_ids=plan.eos_ids,
        source=plan.origin.provenance,
        origin=plan.text,
        tokenizer=plan.tokenizer,
        overwrite=overwrite,
    )


class Plan(NamedTuple):
    """All that is known before a weight is read.

    Attributes:
        origin: where tensors are read.
        family: whose table is used.
        text: what of `config.json` describes the decoder.
        config: the same as the decoder's own config.
        wanted: for each part, the tree of abstract parameters.
        placed: every tensor of the model by its name in the table.
        found: the name that the source gives to each.
        dtype: of the parameters that are written.
        tokenizer: of the source.
        eos_ids: ids that end a text.
    """

    origin: Source
    family: Family
    text: Mapping[str, Any]
    config: DecoderConfig
    wanted: Mapping[str, Tree]
    placed: Mapping[str, Placed]
    found: Mapping[str, str]
    dtype: str
    tokenizer: Tokenizer
    eos_ids: list[int]


def make_plan(source: Path, *, dtype: str | None) -> Plan:
    """What converting this source would do.

    Raises:
        InputError: whatever cannot be honoured.
    """
    origin = open_source(source)
    if dtype not in (None, *DTYPES):
        raise InputError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}.")
    family = family_of(origin.config, source)
    text = family.text(origin.config)
    _refuse_quantised(text, source)
    config = family.config({key: value for key, value in text.items() if key != _QUANTISED})
    _check_sizes(config, origin)
    wanted = part_trees(nnx.to_pure_dict(skeleton(config, "float32")[1]))
    placed = placements(family, config, wanted)
    found = match(family, config, origin.shapes, placed)
    if config.tied_head:
        _check_redundant_head(origin, family)
    kinds = {origin.dtypes[name] for name in found.values()}
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
    return Plan(origin, family, text, config, wanted, placed, found, stored, tokenizer, eos_ids)


_QUANTISED = "quantization_config"


def _refuse_quantised(config: Mapping[str, Any], source: Path) -> None:
    """Refuse weights that need scales, whatever dtype the tensors have.

    Raises:
        InputError: config.json has a quantization_config.
    """
    if config.get(_QUANTISED) is not None:
        table = config[_QUANTISED]
        method = table.get("quant_method") if isinstance(table, dict) else table
        raise InputError(
            f"{source}: config.json has {_QUANTISED} = {method!r}: {table!r:.200}. Quantised checkpoints are not "
            "supported: use the f32, bf16 or f16 original."
        )


_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "ffn_config",
    "num_experts_per_tok",
)


def family_of(config: Mapping[str, Any], source: Path) -> Family:
    """The family that a `config.json` names.

    Raises:
        InputError: none, one that is not supported, or a mixture of experts.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in TYPES:
        return TYPES[kind]
    if experts := [key for key in _EXPERTS if config.get(key)]:
        raise InputError(
            f"{source}: model_type {kind!r} is a mixture of experts ({experts[0]} = {config[experts[0]]!r}), which is "
            f"not supported yet. Supported are dense models: {', '.join(sorted(TYPES))}."
        )
    raise InputError(f"{source}: model_type {kind!r} is not supported (supported: {', '.join(sorted(TYPES))}).")


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


def _check_redundant_head(origin: Source, family: Family) -> None:
    """A tied model may ship its head once more, but not another one.

    Raises:
        InputError: the two differ.
    """
    by_table = {family.canonical(name): name for name in origin.shapes}
    head, embedding = (by_table.get(name(family), name(family)) for name in (head_name, embedding_name))
    if head in origin.shapes and not np.array_equal(origin.read(head), origin.read(embedding)):
        raise InputError(
            f"config.json says tie_word_embeddings, but {head} differs from {embedding}. Set "
            f"tie_word_embeddings to false to use the head, or remove {head} to use the embedding."
        )


def _pieces(plan: Plan) -> Iterator[tuple[str, Tree]]:
    """Part by part, the tree of arrays in the dtype of the plan.

    Raises:
        InputError: a tensor holds what that dtype cannot, or no finite number at all.
    """
    for part, template in plan.wanted.items():
        arrays = {}
        for tensor in plan.placed.values():
            if tensor.part == part:
                name = plan.found[tensor.name]
                made = tensor.weight.take(plan.origin.read(name), tensor.sizes, plan.config.head_dim)
                for path, array in zip(tensor.weight.paths, made, strict=True):
                    arrays[path] = as_dtype(array, plan.dtype, name)
        yield part, map_leaves(lambda path, _, arrays=arrays: arrays[path], template)
