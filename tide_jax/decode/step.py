"""One step: T columns per row through the layers they need, each row at its own positions.

Prefill, decode, drafting and the settling of deferred columns are this one function with other columns. Two rules give
it its shape. A conditional never returns a cache: branches hand back the few new K/V rows, which are written
afterwards, in place. And whether a segment runs is one scalar for the whole batch, but what a token keeps is decided
per layer, so that a row's text does not depend on its neighbours.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tide_jax.compat import in_default_layout
from tide_jax.decode.plan import Plan
from tide_jax.decode.state import CACHE_AXES, DecodeState
from tide_jax.exits import ExitHead, Remainder
from tide_jax.exits.heads import project
from tide_jax.kernels import Gate
from tide_jax.models import KV, Decoder, Views
from tide_jax.sharding import on_each


class Columns(NamedTuple):
    """The tokens of one step.

    Attributes:
        tokens: token ids.
        valid: columns that exist; in each row they come first.
        start: layers that a column has run already, its K/V rows below being in the cache; None: none has. Exit points
            or L, and never more than that of the column before it.
        x: the states of the columns after `start` layers; None with `start`.
        cap: layers above which the K/V of earlier columns are not the model's own, L where all are; None: all are.
            A remainder that defers makes a column leave there whatever its score.
    """

    tokens: Int[Array, "batch cols"]
    valid: Bool[Array, "batch cols"]
    start: Int[Array, "batch cols"] | None = None
    x: Float[Array, "batch cols embed"] | None = None
    cap: Int[Array, "batch cols"] | None = None


class StepResult(NamedTuple):
    """What the columns became.

    Attributes:
        x: final states: after the last layer, or after the exit projection of the point where the column left.
        depth: layers run.
        held: raw states after `depth` layers, or after `cap` layers where that is less.
        sure: columns that did not leave for the cap's sake alone.
        sound: columns whose states and K/V rows are finite.
    """

    x: Float[Array, "batch cols embed"]
    depth: Int[Array, "batch cols"]
    held: Float[Array, "batch cols embed"]
    sure: Bool[Array, "batch cols"]
    sound: Bool[Array, "batch cols"]


def step(
    decoder: Decoder, heads: Mapping[int, ExitHead], plan: Plan, state: DecodeState, cols: Columns
) -> tuple[DecodeState, StepResult]:
    """Run the columns; the new state has their K/V rows written and `length` advanced by the valid ones."""
    batch, width = cols.tokens.shape
    num_layers = decoder.config.num_layers
    positions = state.length[:, None] + jnp.arange(width)
    start = jnp.zeros((batch, width), jnp.int32) if cols.start is None else cols.start
    x = decoder.embed(cols.tokens, positions)
    if cols.start is not None:
        x = jnp.where((start > 0)[..., None], cols.x, x)
    running = cols.valid
    depth = jnp.full((batch, width), num_layers, jnp.int32)
    cap = depth if cols.cap is None else cols.cap
    sure = jnp.ones((batch, width), bool)
    remaining = None  # columns that the next segment is for, where an exit point has counted them
    out = held = x
    rows: list[KV] = []
    skips: list[Int[Array, " batch"]] = []
    segments_run = state.segments_run
    edges = (0, *plan.points, num_layers)
    for segment, (first, last) in enumerate(zip(edges, edges[1:], strict=False)):
        done = cols.valid & (start >= last)
        skip = done.sum(axis=1, dtype=jnp.int32)
        counts = (state.slots >= 0) & (state.slots < (state.length + skip)[:, None])
        views = decoder.view(positions, cols.valid & ~done, jnp.where(counts, state.slots, -1))
        run = _Segment(decoder, plan.remainder, state.caches, views, positions, cols.valid & ~done, first, last)
        if first == 0 and cols.start is None:
            needed = jnp.bool_(True)
            x, made = run.layers(x, running)
        else:
            needed = jnp.any(running & ~done) if remaining is None else remaining > 0
            x, made = jax.lax.cond(needed, run.layers, run.fill, x, running & ~done)
        rows.extend(made)
        if cols.start is not None:
            skips.extend([skip] * len(made))
        segments_run = segments_run.at[segment].add(needed.astype(jnp.int32))
        if last != num_layers:
            head = heads.get(last, ExitHead())
            threshold = jnp.broadcast_to(state.thresholds[:, segment, None], (batch, width))
            must = (cap == last) if plan.remainder.defers else jnp.zeros((batch, width), bool)
            gate = Gate(jnp.where(must, -jnp.inf, threshold), running & (start < last), ~running, depth)
            route = plan.scorer.route(last, head, x, positions, decoder, gate)
            leaves = running & route.exited
            held = jnp.where(((leaves & (last <= cap)) | (running & (cap == last)))[..., None], x, held)
            sure = sure & ~(leaves & must & ~(route.score > threshold))
            running, depth = ~route.exited, route.depth
            remaining = route.remaining if cols.start is None else None
            left = x if head.projection is None else project(head.projection, x, decoder.config.norm_eps)
            out = jnp.where(leaves[..., None], left, out)
    out = jnp.where(running[..., None], x, out)
    held = jnp.where((running & (cap == num_layers))[..., None], x, held)
    state, sound = _write(state, rows, skips, positions, cols.valid, jnp.isfinite(x).all(axis=-1))
    sound = sound & jnp.isfinite(out).all(axis=-1)
    flagged = state.flagged | (cols.valid & ~sound).any(axis=1)
    state = dataclasses.replace(state, segments_run=segments_run, flagged=flagged)
    return state, StepResult(out, depth, held, sure, sound)


class _Segment(NamedTuple):
    """The layers first … last − 1, run or filled in: the two branches of a segment's conditional."""

    decoder: Decoder
    remainder: Remainder
    caches: tuple[KV, ...]
    views: Views
    positions: jax.Array
    valid: jax.Array
    first: int
    last: int

    def layers(self, x: jax.Array, active: jax.Array) -> tuple[jax.Array, tuple[KV, ...]]:
        """The segment is run: each column keeps what its layer made, or what stands in for the layer."""
        made = []
        for index in range(self.first, self.last):
            layer, past = self.decoder.layers[index], self.caches[index]
            rows = layer.project_kv(x, self.views)
            ran = layer(x, rows, past, self.views)
            if self.remainder.rows_follow_state:
                x = jnp.where(active[..., None], ran, x)
            else:
                filled, fill_rows = self._filled(index, x)
                x = jnp.where(active[..., None], ran, filled)
                rows = _keep(active, rows, fill_rows)
            made.append(rows)
        return x, tuple(made)

    def fill(self, x: jax.Array, active: jax.Array) -> tuple[jax.Array, tuple[KV, ...]]:
        """No column needs the segment: the remainder stands in for all of it."""
        made = []
        for index in range(self.first, self.last):
            x, rows = self._filled(index, x)
            made.append(rows)
        return x, tuple(made)

    def _filled(self, index: int, x: jax.Array) -> tuple[jax.Array, KV]:
        """What the remainder leaves behind of one layer; columns that have run it already keep their state."""
        layer, past = self.decoder.layers[index], self.caches[index]
        filled, rows = self.remainder.fill(index, layer, x, past, self.views, self.positions, self.valid)
        return jnp.where(self.valid[..., None], filled, x), rows


def _keep(mask: Bool[Array, "batch cols"], yes: KV, no: KV) -> KV:
    """Rows of `yes` where the mask is set, of `no` elsewhere."""
    chosen = mask[:, None, :, None]
    return KV(jnp.where(chosen, yes.k, no.k), jnp.where(chosen, yes.v, no.v))


def _write(
    state: DecodeState,
    rows: list[KV],
    skips: list[Int[Array, " batch"]],
    positions: Int[Array, "batch cols"],
    valid: Bool[Array, "batch cols"],
    sound: Bool[Array, "batch cols"],
) -> tuple[DecodeState, Bool[Array, "batch cols"]]:
    """Write K/V rows at each row's own length, in place; those of columns with anything non-finite as zeros.

    Returns, with the state, which columns were finite. A masked slot still enters 0 · value in the attention sum, and
    0 · NaN is NaN: so nothing non-finite is ever stored. `sound`, which says that a column's last raw state is finite,
    also makes every write wait for every read: XLA on a CPU inserts copies before it orders operations, and copied the
    caches that it could have overwritten too early.
    """
    slot = state.length

    def put(target: jax.Array, update: jax.Array, slot: jax.Array, axis: int) -> jax.Array:
        return jax.vmap(lambda t, u, s: jax.lax.dynamic_update_slice_in_dim(t, u, s, axis=axis))(target, update, slot)

    caches = []
    stored = sound
    for layer, (cache, new) in enumerate(zip(state.caches, rows, strict=True)):
        finite = sound & jnp.isfinite(new.k).all(axis=(1, 3)) & jnp.isfinite(new.v).all(axis=(1, 3))
        stored = stored & finite
        new = _keep(finite, new, KV(jnp.zeros_like(new.k), jnp.zeros_like(new.v)))
        into = slot
        if skips:
            into = slot + skips[layer]
            new = _after(new, skips[layer])
        written = (put(*pair, into, 1) for pair in zip(cache, new, strict=True))
        # Where there is one row, XLA would choose a layout for the update or the product, and copy into it and back.
        caches.append(KV(*(on_each(in_default_layout, part, *CACHE_AXES) for part in written)))
    state = dataclasses.replace(
        state,
        caches=tuple(caches),
        slots=put(state.slots, jnp.where(valid, positions, -1), slot, 0),
        length=state.length + valid.sum(axis=1, dtype=jnp.int32),
    )
    return state, stored


def _after(rows: KV, skip: Int[Array, " batch"]) -> KV:
    """The rows of each row's columns from `skip` on; what is before comes last."""
    order = (jnp.arange(rows.k.shape[2]) + skip[:, None]) % rows.k.shape[2]
    index = order[:, None, :, None]
    return KV(jnp.take_along_axis(rows.k, index, axis=2), jnp.take_along_axis(rows.v, index, axis=2))
