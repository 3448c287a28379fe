"""Exit heads: what calibration learns at one exit point, and the file it is kept in."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from tide_jax.arrays import write_safetensors
from tide_jax.compat import current_mesh
from tide_jax.errors import InputError
from tide_jax.kernels import Gate, Route, exit_route
from tide_jax.models import Decoder
from tide_jax.sharding import spec

FILE_NAME = "exit_heads.safetensors"
FORMAT = "tide-exit-heads-1"


class Router(NamedTuple):
    """sigmoid(up · silu(norm(x) @ down)): how likely the state is good enough (TIDE, arXiv 2603.21365, section 3)."""

    down: Float[Array, "embed bottleneck"]
    up: Float[Array, " bottleneck"]


class Projection(NamedTuple):
    """The affine map of unit-RMS states into the space of the last layer's states."""

    kernel: Float[Array, "embed embed"]
    bias: Float[Array, " embed"]


class ExitHead(NamedTuple):
    """Router and projection of one exit point; either may be absent (no score; identity)."""

    router: Router | None = None
    projection: Projection | None = None


def project(projection: Projection, x: Float[Array, "*rows embed"], eps: float) -> Float[Array, "*rows embed"]:
    """States of the exit point carried into the last layer's space, in the dtype of x.

    The input is brought to unit RMS first, because attention-sink tokens have states a hundred times longer than
    all others and a least-squares map would serve them alone; the final norm makes the scale of the output free.
    """
    return (unit(x, eps) @ projection.kernel + projection.bias).astype(x.dtype)


def unit(x: Float[Array, "*rows embed"], eps: float) -> Float[Array, "*rows embed"]:
    """States scaled to a root mean square of 1, float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def route(
    router: Router,
    x: Float[Array, "*rows embed"],
    decoder: Decoder,
    gate: Gate,
    *,
    layers: int,
    use_kernels: bool | None,
) -> Route:
    """Who leaves by the router's probability, made from the raw state: it applies the model's final norm itself.

    On a mesh every device routes its own rows, and all know how many remain of all rows: so they take one branch.
    """
    norm = decoder.final_norm

    def call(x, parameters: tuple, router: Router, gate: Gate) -> Route:
        return exit_route(
            x, *parameters, router.down, router.up, gate, norm=norm.norm, layers=layers, use_kernels=use_kernels
        )

    operands = (x, norm.parameters(), router, gate)
    mesh = current_mesh()
    if mesh is None:
        return call(*operands)
    rows = spec(mesh, ("batch",), x.shape)

    def local(*operands) -> Route:
        made = call(*operands)
        return made if rows[0] is None else made._replace(remaining=jax.lax.psum(made.remaining, rows[0]))

    shared = jax.shard_map(local, in_specs=(rows, P(), P(), rows), out_specs=Route(rows, rows, rows, P()))
    return shared(*operands)


class ExitHeads(NamedTuple):
    """All calibrated exit points of a model.

    Attributes:
        heads: exit head by depth (layers run).
        thresholds: the stored router threshold by depth, only for the points that calibration chose.
        degenerate: depths whose labels had too few positives to learn from: these routers never fire.
        fingerprint: of the model they were made for; None: not said.
    """

    heads: Mapping[int, ExitHead]
    thresholds: Mapping[int, float]
    degenerate: frozenset[int] = frozenset()
    fingerprint: str | None = None


def check_heads(exits: ExitHeads, points: Sequence[int], *, fingerprint: str, hidden_size: int) -> None:
    """Refuse exit heads that were not made for the model that is to leave through them.

    Raises:
        InputError: heads of another model, or of another width.
    """
    if not points:
        return
    if exits.fingerprint not in (None, fingerprint):
        raise InputError(
            f"the exit heads belong to the model with fingerprint {exits.fingerprint!r}, this one has {fingerprint!r}. "
            "Calibrate this model, or load it without exit heads (exits=False)."
        )
    for depth in points:
        inputs = {part.shape[0] for part in jax.tree.leaves(exits.heads.get(depth)) if part.ndim == 2}
        if inputs - {hidden_size}:
            raise InputError(
                f"the exit head at depth {depth} takes states of width {sorted(inputs)}, this model has width "
                f"{hidden_size}: it was made for another model."
            )


def save_heads(path: Path, exits: ExitHeads, *, fingerprint: str, agreement: float) -> None:
    """Write heads and thresholds as one safetensors file whose header names the model they belong to."""
    tensors = {}
    for depth, head in exits.heads.items():
        for part in (head.router, head.projection):
            if part is not None:
                for name, value in part._asdict().items():
                    tensors[f"{depth}.{type(part).__name__.lower()}.{name}"] = np.asarray(value, np.float32)
    header = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "agreement": repr(agreement),
        "thresholds": json.dumps({str(depth): value for depth, value in sorted(exits.thresholds.items())}),
        "degenerate": json.dumps(sorted(exits.degenerate)),
    }
    write_safetensors(path, tensors, header)


def load_heads(path: Path, *, fingerprint: str, hidden_size: int, num_layers: int) -> ExitHeads:
    """Read what `save_heads` wrote.

    Raises:
        InputError: the file belongs to another model, has another format, or its tensors have other shapes.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} cannot be read as exit heads ({error}). Remove it or run `tide-jax calibrate` again."
        ) from error
    if header.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {header.get('format')!r}, this version reads {FORMAT!r}. "
            "Run `tide-jax calibrate` again."
        )
    if header.get("fingerprint") != fingerprint:
        raise InputError(
            f"{path} was calibrated for the model with fingerprint {header.get('fingerprint')!r}, but the model beside "
            f"it has {fingerprint!r}. Exit heads of another model would leave at the wrong tokens: "
            "run `tide-jax calibrate` on this model, or remove the file."
        )
    try:
        parts: dict[tuple[int, str], dict[str, np.ndarray]] = {}
        for name, value in tensors.items():
            depth, part, field = name.split(".")
            parts.setdefault((int(depth), part), {})[field] = value
        heads = {}
        for depth in sorted({depth for depth, _ in parts}):
            router, projection = parts.get((depth, "router")), parts.get((depth, "projection"))
            heads[depth] = ExitHead(
                Router(**{name: jnp.asarray(value) for name, value in router.items()}) if router else None,
                Projection(**{name: jnp.asarray(value) for name, value in projection.items()}) if projection else None,
            )
        thresholds = {int(depth): float(value) for depth, value in json.loads(header["thresholds"]).items()}
        flagged = frozenset(json.loads(header["degenerate"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is damaged ({type(error).__name__}: {error}). Run `tide-jax calibrate` again, or remove it."
        ) from error
    for depth, head in heads.items():
        shapes = {name: value.shape for part in head if part is not None for name, value in part._asdict().items()}
        square, width = (hidden_size, hidden_size), (hidden_size,)
        fits = {"down": (*width, *shapes.get("up", ())), "up": shapes.get("up"), "kernel": square, "bias": width}
        if not 1 <= depth < num_layers or any(shape != fits[name] for name, shape in shapes.items()):
            raise InputError(
                f"{path} holds an exit head at depth {depth} with shapes {shapes}; the model has {num_layers} layers "
                f"of width {hidden_size}. Run `tide-jax calibrate` again."
            )
    return ExitHeads(heads, thresholds, flagged, fingerprint)
