"""The converted directory: `tide.json`, one orbax sub-checkpoint per layer, and the tokenizer.

Layout:
    DIR/tide.json              format, config, dtype, provenance, stop ids, fingerprint, list of parts
    DIR/weights/embedding      token embedding
    DIR/weights/layer_000 …    one decoder layer each
    DIR/weights/final          final norm and, when untied, the LM head
    DIR/tokenizer/             tokenizer.json and its config
    DIR/huggingface.json       the `config.json` it came with, for the way back
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tide_jax.compat import layer_checkpointer, restore_tree, save_tree
from tide_jax.errors import InputError
from tide_jax.models import Decoder, DecoderConfig
from tide_jax.models.families import FAMILIES
from tide_jax.sharding import parameter_shardings

FORMAT = "tide-checkpoint-2"
DTYPES = ("float32", "bfloat16", "float16")
MANIFEST = "tide.json"
ORIGIN = "huggingface.json"
Tree = dict[Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `tide.json` says.

    Attributes:
        config: the decoder.
        dtype: stored parameter dtype, `float32`, `bfloat16` or `float16`.
        eos_ids: ids that end a text, from every place the source names them.
        source: provenance: kind, file names, and what the source calls itself.
        parts: digest of the arrays of every sub-checkpoint, in the order of the computation.
        files: digest of the files of every sub-checkpoint.

    The fingerprint is a digest of config and parts; exit heads name the model they belong to with it.
    """

    config: DecoderConfig
    dtype: str
    eos_ids: tuple[int, ...]
    source: Mapping[str, object]
    parts: Mapping[str, str]
    files: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits."""
        named = json.dumps([self.config.to_json(), dict(self.parts)], sort_keys=True)
        return hashlib.sha256(named.encode()).hexdigest()[:16]


def part_name(layer: int) -> str:
    """Name of the sub-checkpoint of a layer, counted from 0."""
    return f"layer_{layer:03d}"


def skeleton(config: DecoderConfig, dtype: Any) -> tuple[Any, Any]:
    """Graph definition and abstract parameters of the decoder, without allocating anything."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))))


def part_trees(tree: Tree) -> dict[str, Tree]:
    """The pure parameter dict of a decoder cut into its parts."""
    layers = {part_name(index): layer for index, layer in tree["layers"].items()}
    final = {name: tree[name] for name in ("final_norm", "lm_head") if name in tree}
    tables = {name: tree[name] for name in ("embedding", "position_embedding") if name in tree}
    return {"embedding": tables, **layers, "final": final}


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


def map_leaves(function: Callable[[str, Any], Any], tree: Tree, prefix: str = "") -> Tree:
    """A tree of the same structure whose leaves are `function` of dotted path and leaf."""
    return {
        name: map_leaves(function, value, f"{prefix}{name}.")
        if isinstance(value, dict)
        else function(f"{prefix}{name}", value)
        for name, value in tree.items()
    }


def as_dtype(array: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """The array in another dtype, contiguous; not copied where it is so already.

    Raises:
        InputError: it holds infinities or NaN, or values that `dtype` cannot hold; `name` is for the message.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.ascontiguousarray(array.astype(dtype, copy=False))
        if np.isfinite(made).all():
            return made
        finite = np.isfinite(array)
    if not finite.all():
        raise InputError(
            f"{name} holds {array.size - int(finite.sum())} values that are infinite or not a number, of "
            f"{array.size}. The weights are damaged: download them again."
        )
    raise InputError(
        f"{name} holds values up to {float(np.abs(array).max()):.4g}, more than {dtype} can hold. Use "
        "bfloat16 or float32."
    )


def _array_digest(tree: Tree) -> str:
    """Of names, dtypes, shapes and values."""
    hasher = hashlib.sha256()
    for path, array in flat(tree):
        checksum = zlib.crc32(np.ascontiguousarray(array).view(np.uint8))
        hasher.update(f"{path} {array.dtype} {array.shape} {checksum}\n".encode())
    return hasher.hexdigest()[:16]


def _file_digest(directory: Path) -> str:
    """Of the names and bytes of all files in a directory; read block by block."""
    hasher = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        checksum = 0
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                checksum = zlib.crc32(block, checksum)
        hasher.update(f"{path.relative_to(directory)} {path.stat().st_size} {checksum}\n".encode())
    return hasher.hexdigest()[:16]


def write(
    target: Path,
    config: DecoderConfig,
    pieces: Iterator[tuple[str, Tree]],
    *,
    dtype: str,
    eos_ids: Sequence[int],
    source: Mapping[str, object],
    origin: Mapping[str, object],
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
        origin: the Hugging Face config of the model.
        tokenizer: an object with `save(directory)`.
        overwrite: replace an existing directory.

    Raises:
        InputError: the directory exists and `overwrite` is false, or it is not a converted model, or another
            process is writing it, or the place cannot be written to.
    """
    target = Path(os.path.abspath(target))
    check_target(target, overwrite=overwrite)
    try:
        with _staging(target) as beside:
            check_target(target, overwrite=overwrite)  # an interrupted overwrite may have been undone
            (beside / "weights").mkdir()
            checkpointer = layer_checkpointer()
            arrays, files = {}, {}
            for name, tree in pieces:
                arrays[name] = _array_digest(tree)
                save_tree(checkpointer, beside / "weights" / name, tree)
                files[name] = _file_digest(beside / "weights" / name)
            tokenizer.save(beside / "tokenizer")
            (beside / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
            manifest = Manifest(
                config=config, dtype=dtype, eos_ids=tuple(eos_ids), source=source, parts=arrays, files=files
            )
            data = {"format": FORMAT, "fingerprint": manifest.fingerprint, **dataclasses.asdict(manifest)}
            (beside / MANIFEST).write_text(json.dumps(data, indent=2) + "\n")
            check_target(target, overwrite=overwrite)
            _put_in_place(beside, target)
    except OSError as error:
        raise InputError(
            f"{target} cannot be written ({type(error).__name__}: {error}). Check the permissions of "
            f"{target.parent} and the space that is left there."
        ) from error
    return manifest


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that would destroy something.

    Raises:
        InputError: it exists without `overwrite`, or it is not a converted model, or its parent is missing.
    """
    target = Path(os.path.abspath(target))
    if not target.parent.is_dir():
        raise InputError(f"{target} cannot be written: {target.parent} is not a directory. Create it first.")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise InputError(f"{target} exists already. Give --overwrite (overwrite=True) to replace it, or another name.")
    empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if not empty and (target.is_symlink() or not _is_converted(target)):
        raise InputError(
            f"{target} exists and is not a converted model (a directory whose {MANIFEST} names the format), "
            "so it is not overwritten. Remove it yourself, or give another name."
        )


def _is_converted(directory: Path) -> bool:
    """Whether its manifest is one of ours, of whatever version."""
    try:
        return str(json.loads((directory / MANIFEST).read_text())["format"]).startswith("tide-checkpoint-")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """An empty hidden directory beside the target, locked while in use and removed unless it was renamed.

    The lock ends with its process, so what a killed conversion left is known for certain and cleared away.

    Raises:
        InputError: another process holds it.
        OSError: the place cannot be written to.
    """
    beside = target.with_name(f".{target.name}.part")
    beside.mkdir(exist_ok=True)
    handle = os.open(beside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between opening and locking, another process may have renamed or removed the directory.
            ours = os.path.samestat(os.fstat(handle), os.stat(beside))
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise InputError(f"{target} is being written by another process just now ({beside}). Wait for it to end.")
        aside = _aside(target)
        known = {"weights", "tokenizer", ORIGIN, MANIFEST}
        foreign = [beside / name for name in os.listdir(beside) if name not in known]
        if aside.exists() and not _is_converted(aside):
            foreign.append(aside)
        if foreign:
            raise InputError(
                f"{foreign[0]} is in the way, and no conversion made it. Remove it yourself, or give another name."
            )
        if aside.exists():
            # A conversion was killed while it replaced the target: before or after the new one was in place.
            _remove_model(aside) if os.path.lexists(target) else aside.rename(target)
        for left in beside.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield beside
        finally:
            if beside.exists():
                shutil.rmtree(beside, ignore_errors=True)
    finally:
        os.close(handle)


def _aside(target: Path) -> Path:
    """Where the earlier model waits while the new one takes its name."""
    return target.with_name(f".{target.name}.old")


def _put_in_place(beside: Path, target: Path) -> None:
    """Give the new directory its name; at every moment the earlier model or the new one is whole on disk."""
    aside = _aside(target)
    if target.exists():
        target.rename(aside)
    try:
        beside.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    if aside.exists():
        _remove_model(aside)


def _remove_model(directory: Path) -> None:
    """Remove a converted model, its manifest last, so that what a kill leaves is still known as one."""
    for path in directory.iterdir():
        if path.name != MANIFEST:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(directory)


def read_manifest(directory: Path) -> Manifest:
    """What `tide.json` of a converted directory says.

    Raises:
        InputError: no such directory, not a converted model, damaged, or written by another version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        what = "does not exist" if not directory.exists() else f"holds no {MANIFEST}"
        aside = _aside(Path(os.path.abspath(directory)))
        hint = f" An interrupted overwrite left the earlier model in {aside}: rename it." if aside.exists() else ""
        source = (directory / "config.json").is_file()  # a Hugging Face checkpoint, not yet converted
        command = f"tide-jax convert {directory} DST" if source else f"tide-jax convert SRC {directory}"
        raise InputError(f"{directory} is not a converted model: it {what}. Make one with `{command}`.{hint}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise InputError(
                f"{path} has format {data['format']!r}, this version reads {FORMAT!r}. Convert the model again."
            )
        config = DecoderConfig.from_json(data["config"])
        parts, files, ids = data["parts"], data["files"], data["eos_ids"]
        names = [part_name(index) for index in range(min(config.num_layers, len(parts)))]
        sound = {
            "family": config.family in FAMILIES,
            "dtype": data["dtype"] in DTYPES,
            "eos_ids": isinstance(ids, list) and all(type(token) is int for token in ids),
            "source": isinstance(data["source"], dict),
            "parts": isinstance(parts, dict) and list(parts) == ["embedding", *names, "final"],
            "files": isinstance(files, dict) and list(files) == list(parts),
        }
        if wrong := [name for name, good in sound.items() if not good]:
            raise ValueError(f"{wrong[0]!r} is not sound")
        manifest = Manifest(
            config=config,
            dtype=data["dtype"],
            eos_ids=tuple(ids),
            source=data["source"],
            parts=parts,
            files=files,
        )
        if manifest.fingerprint != data["fingerprint"]:
            raise ValueError(f"'fingerprint' is {data['fingerprint']!r}, the content has {manifest.fingerprint!r}")
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error}). Convert the model again.") from error
    return manifest


def read_parameters(
    directory: Path, manifest: Manifest, dtype: Any, mesh: jax.sharding.Mesh | None = None
) -> tuple[Any, Any]:
    """Graph definition and parameters, cast to `dtype`, one part in memory twice at most.

    With a mesh each device is given its share of every part, as soon as that is read.

    Raises:
        InputError: a part is missing or damaged, or `dtype` cannot hold its values.
    """
    graphdef, abstract = skeleton(manifest.config, dtype)
    wanted = part_trees(nnx.to_pure_dict(abstract))
    places = {}
    if mesh is not None:
        shardings = parameter_shardings(abstract, mesh, manifest.config.axis_counts)
        places = dict(flat(part_trees(nnx.to_pure_dict(shardings))))

    def placed(path: str, array: np.ndarray) -> jax.Array:
        array = as_dtype(array, kind, path)
        return jax.device_put(array, places[path]) if places else jnp.asarray(array)

    kind = np.dtype(dtype).name
    pieces = {name: map_leaves(placed, tree, f"{name}.") for name, tree in read_parts(directory, manifest, wanted)}
    nnx.replace_by_pure_dict(abstract, joined(pieces))
    return graphdef, abstract


def read_parts(directory: Path, manifest: Manifest, wanted: Mapping[str, Tree]) -> Iterator[tuple[str, Tree]]:
    """Part by part, the tree of arrays as they are stored.

    Args:
        directory: what `write` made.
        manifest: what its `tide.json` says.
        wanted: for each part, the tree of abstract parameters.

    Raises:
        InputError: a part is missing or damaged.
    """
    checkpointer = layer_checkpointer()
    for name, expected in wanted.items():
        path = directory / "weights" / name
        if not path.is_dir():
            raise InputError(f"{path} is missing: the converted model is incomplete. Convert it again.")
        # Before orbax reads them: a file that is gone comes back as zeros, without an error.
        if (digest := _file_digest(path)) != manifest.files[name]:
            raise InputError(
                f"{path} is damaged: the digest of its files is {digest}, {MANIFEST} says "
                f"{manifest.files[name]}. Convert the model again."
            )
        tree = restore_tree(checkpointer, path)
        shapes = {key: array.shape for key, array in flat(tree)}
        if shapes != {key: leaf.shape for key, leaf in flat(expected)}:
            raise InputError(
                f"{path} does not fit the config in {MANIFEST}: it holds {shapes}. Convert the model again."
            )
        yield name, tree
