"""The engine's programs as files: one artefact for CPU, CUDA and TPU, run later without being traced again.

A file holds a program, not the weights: those are arguments. It begins with one line of JSON that says what the rest
needs, so that a file which cannot be run here is refused by name before anything is compiled. The rest is
`jax.export`'s own format, of the program over a flat list of arrays: pytrees belong to the process that calls it.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export

from tide_jax.decode.state import DecodeState
from tide_jax.errors import InputError
from tide_jax.kernels import registry
from tide_jax.kernels.exit_route import TARGET

FORMAT = "tide-program-1"
PLATFORMS = ("cpu", "cuda", "tpu")


def versions() -> dict[str, str]:
    """What must be the same where a program is saved and where it is loaded."""
    return {name: importlib.metadata.version(name) for name in ("tide-jax", "jax")}


def save_program(
    path: Path,
    function: Callable,
    params: Any,
    heads: Any,
    state: Any,
    *rest: Any,
    platforms: Sequence[str] = PLATFORMS,
) -> None:
    """Write a program of the engine, `function(params, heads, state, *rest)`, which returns the new state.

    Of the arguments only shapes and dtypes are read: the program is for one device. On each platform it calls the
    kernels that are registered for that platform in this process; `register_cuda()` does that without a GPU.

    Raises:
        InputError: the package flatbuffers is missing.
    """
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, heads, state, *rest))
    leaves, tree = jax.tree.flatten(abstract)
    first = len(jax.tree.leaves((params, heads)))

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*tree.unflatten(leaves)))

    # jax.export vouches for few custom calls. That ours are there is checked when the program is loaded, and the other,
    # which keeps the layout of a cache, is XLA's own; loading asks for the same version.
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in (TARGET, "LayoutConstraint")]
    exported = export.export(jax.jit(flat), platforms=tuple(platforms), disabled_checks=checks)(*leaves)
    called = TARGET in exported.mlir_module()
    try:
        body = bytes(exported.serialize())
    except ImportError as error:
        raise InputError(
            f"A program is written with the package flatbuffers ({error}). Run `pip install 'tide-jax[export]'`."
        ) from error
    header = {
        "format": FORMAT,
        "versions": versions(),
        "targets": {name: [TARGET] if called and name in registry.platforms(TARGET) else [] for name in platforms},
        "state": [first, first + len(jax.tree.leaves(state))],
        "digest": _digest(body),
    }
    path.write_bytes(json.dumps(header).encode() + b"\n" + body)


@dataclasses.dataclass(frozen=True)
class LoadedProgram:
    """A program from a file: `program(params, heads, state, *rest)` is the new state, the old one is donated.

    Attributes:
        path: of the file.
        exported: the program over the leaves of its arguments.
        state: numbers of the first leaf of the state, and of the first after it.
    """

    path: Path
    exported: export.Exported
    state: tuple[int, int]

    @functools.cached_property
    def _jitted(self) -> Callable:
        return jax.jit(self.exported.call, donate_argnums=tuple(range(*self.state)))

    def __call__(self, params: Any, heads: Any, state: DecodeState, *rest: Any) -> DecodeState:
        """The new state.

        Raises:
            InputError: the arguments are not of the shapes and dtypes that the program was saved for.
        """
        leaves = jax.tree_util.tree_leaves_with_path((params, heads, state, *rest))
        given = [f"{leaf.dtype}{list(leaf.shape)}" for _, leaf in leaves]
        wanted = [f"{aval.dtype}{list(aval.shape)}" for aval in self.exported.in_avals]
        if given != wanted:
            seen = f"{len(given)} arrays, not {len(wanted)}"
            if len(given) == len(wanted):
                index = next(i for i, one in enumerate(given) if one != wanted[i])
                name = jax.tree_util.keystr(leaves[index][0])
                seen = f"argument {name} is {given[index]}, not {wanted[index]}"
            raise InputError(
                f"{self.path} was saved for a model or a batch of other sizes: {seen}. Save a program for these."
            )
        return jax.tree.structure(state).unflatten(self._jitted(*(leaf for _, leaf in leaves)))


def load_program(path: Path) -> LoadedProgram:
    """Read what `save_program` wrote.

    Raises:
        InputError: no such file or not such a file, a damaged one, one of other versions, or one for another platform
            than programs run on here by default, or with kernels for it that are not there.
    """
    try:
        line, _, body = path.read_bytes().partition(b"\n")
        header = json.loads(line)
        found, state, targets = header["versions"], tuple(header["state"]), header["targets"]
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}")
        if header["digest"] != _digest(body):
            raise ValueError(f"{len(body)} bytes of program with another digest than when it was saved")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read as a program, {FORMAT!r} ({error}). Save it again.") from error
    if found != versions():
        raise InputError(f"{path} was saved with {_list(found)}, and here are {_list(versions())}. Save it again here.")
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    if platform not in targets:
        raise InputError(f"{path} was saved for {', '.join(targets)}, and programs run on {platform} here.")
    if missing := [target for target in targets[platform] if platform not in registry.platforms(target)]:
        raise InputError(
            f"{path} calls {', '.join(missing)}, which is not registered for {platform} here: "
            f"{registry.status(platform).reason}. Save it with TIDE_KERNELS=off to do without."
        )
    try:
        return LoadedProgram(path, export.deserialize(bytearray(body)), state)
    except ImportError as error:
        raise InputError(
            f"A program is read with the package flatbuffers ({error}). Run `pip install 'tide-jax[export]'`."
        ) from error


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]


def _list(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())
