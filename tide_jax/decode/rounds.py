"""A round: draft some columns per row, then settle all of them in one pass of the layers they did not run.

Drafting is the ordinary step of one column, whose columns may leave early, or a proposer that runs no layer. A column
that left waits in the queue with its exit state. Its K/V rows below its exit are the full model's own, provided that
no earlier column of the queue left at a shallower depth: that depth is the *cap* of the column. So settling starts at
the smaller of exit and cap, and layers run with true inputs are never run twice.

Verified (`compare`): the settling pass says what the full model would have emitted after each column; the longest
agreeing prefix is kept, the first disagreement is replaced by the full model's token, and the rest is rolled back by
`length`. Otherwise the draft's tokens stand, and settling only completes their K/V.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tide_jax.decode.control import learn
from tide_jax.decode.emit import choices, emit, followed, is_stop
from tide_jax.decode.plan import Plan
from tide_jax.decode.proposers import Proposal
from tide_jax.decode.state import DecodeState, Tally
from tide_jax.decode.step import Columns, step
from tide_jax.exits import Deferred, ExitHead
from tide_jax.exits.remainders import WIDTHS
from tide_jax.exits.rules import STAY
from tide_jax.models import Decoder


class Queue(NamedTuple):
    """The columns of a round; column 0 holds each row's last token.

    Attributes:
        base: position of column 0.
        count: columns that wait to be settled.
        tokens: tokens of the columns, drafted ones from column 1 on.
        start: layers that each has run with true inputs.
        depth: layers after which each was drafted from.
        x: states after `start` layers; None where a proposer drafts, for which start is 0.
        open: rows that go on drafting.
        doubt: rows whose last column is not to be trusted: the settling pass says what follows it.
        passes: drafting passes so far.
    """

    base: Int[Array, " batch"]
    count: Int[Array, " batch"]
    tokens: Int[Array, "batch cols"]
    start: Int[Array, "batch cols"]
    depth: Int[Array, "batch cols"]
    x: Float[Array, "batch cols embed"] | None
    open: Bool[Array, " batch"]
    doubt: Bool[Array, " batch"]
    passes: Int[Array, ""]


def open_queue(decoder: Decoder, plan: Plan, state: DecodeState, proposal: Proposal | None) -> Queue:
    """The queue at the beginning of a round: empty, with every live row drafting; or filled by the proposer.

    Where no row has a proposal there is nothing to settle, and every live row takes an ordinary step.
    """
    batch, cols = state.live.shape[0], plan.rounds.bodies[-1]
    tokens = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
    later, count, opened, x = jnp.zeros((batch, cols - 1), jnp.int32), jnp.zeros(batch, jnp.int32), state.live, None
    if proposal is None:
        x = jnp.zeros((batch, cols, decoder.config.hidden_size), state.caches[0].k.dtype)
    else:
        # The last column worth running is the one before the row's limit.
        room = jnp.minimum(state.rounds.width, state.limit - 1 - state.length) - 1
        proposals = jnp.where(state.live, jnp.minimum(proposal.count, room), 0)
        drafted = (proposals > 0).any()
        later = proposal.tokens[:, : cols - 1]
        count = jnp.where(state.live & drafted, proposals + 1, 0)
        opened = state.live & ~drafted
    return Queue(
        base=state.length,
        count=count,
        tokens=jnp.concatenate([tokens, later], axis=1),
        start=jnp.zeros((batch, cols), jnp.int32),
        depth=jnp.full((batch, cols), decoder.config.num_layers, jnp.int32),
        x=x,
        open=opened,
        doubt=jnp.zeros(batch, bool),
        passes=jnp.int32(0),
    )


def draft(
    decoder: Decoder, heads: Mapping[int, ExitHead], plan: Plan, state: DecodeState, queue: Queue
) -> tuple[DecodeState, Queue]:
    """One more column of every open row, through as many layers as the exit rule wants.

    A first column that runs all layers is the full model's own: its token is emitted at once. A column at which the
    rule does not let go before its cap ends the draft of its row.
    """
    num_layers, compare = decoder.config.num_layers, plan.rounds.compare
    width = state.rounds.width
    first = queue.count == 0
    cap = jnp.where(first, num_layers, _at(queue.start, queue.count - 1))
    # With a single column to come there is nothing to settle together.
    alone = compare & first & ((width == 1) | (state.length + 2 >= state.limit))
    before = state
    state = dataclasses.replace(state, thresholds=jnp.where(alone[:, None], STAY, state.thresholds))
    token = _at(queue.tokens, queue.count)
    state, result = step(decoder, heads, plan, state, Columns(token[:, None], queue.open[:, None], cap=cap[:, None]))
    state = dataclasses.replace(state, thresholds=before.thresholds)

    depth, sure = result.depth[:, 0], result.sure[:, 0]
    full = queue.open & first & (depth == num_layers)
    waits = queue.open & ~full
    count = queue.count + waits
    more = count < width
    speaks = full | (waits & sure & (more | (not compare)))
    at = state.length[:, None]
    choice = jax.lax.cond(
        speaks.any(), lambda: choices(decoder, state, result.x, at), lambda: jnp.zeros(at.shape, jnp.int32)
    )
    said = followed(state, choice, at)
    ends = (is_stop(state, said) | (at + 1 >= state.limit[:, None]))[:, 0]
    emits = full if compare else speaks
    state = emit(state, emits.astype(jnp.int32), state.length, choice, result.depth, result.x)
    if compare:  # what a draft breaks is not the row's fault
        state = dataclasses.replace(state, flagged=jnp.where(waits, before.flagged, state.flagged))
    else:  # a row that has ended needs no more K/V
        count = jnp.where(state.live, count, 0)

    here = waits[:, None] & (jnp.arange(queue.start.shape[1]) == queue.count[:, None])
    follows = speaks[:, None] & (jnp.arange(queue.start.shape[1]) == count[:, None])
    queue = queue._replace(
        base=jnp.where(full, state.length, queue.base),
        count=count,
        tokens=jnp.where(follows, said, queue.tokens),
        start=jnp.where(here, jnp.minimum(depth, cap)[:, None], queue.start),
        depth=jnp.where(here, depth[:, None], queue.depth),
        x=None if queue.x is None else jnp.where(here[..., None], result.held, queue.x),
        open=queue.open & sure & more & ~ends,
        doubt=queue.doubt | (waits & ~sure),
        passes=queue.passes + 1,
    )
    return _counted(state, 0, speaks.any()), queue


def settle(decoder: Decoder, plan: Plan, width: int, state: DecodeState, queue: Queue) -> tuple[DecodeState, Queue]:
    """Run the layers that the waiting columns did not run, all columns at once, and empty the queue."""
    cols = jnp.arange(width)
    valid = cols < queue.count[:, None]
    columns = Columns(queue.tokens[:, :width], valid)
    settling = Plan(remainder=Deferred())
    if queue.x is not None:
        columns = columns._replace(start=queue.start[:, :width], x=queue.x[:, :width])
        settling = dataclasses.replace(settling, points=plan.points)
    before = state
    state = dataclasses.replace(state, length=queue.base, thresholds=jnp.full_like(state.thresholds, STAY))
    state, result = step(decoder, {}, settling, state, columns)
    index = WIDTHS.index(width)
    tally = before.rounds.tally
    ran = tally.settled_segments.at[index].add(state.segments_run - before.segments_run)
    state = dataclasses.replace(
        state,
        thresholds=before.thresholds,
        segments_run=before.segments_run,
        rounds=before.rounds._replace(tally=tally._replace(settled_segments=ran)),
    )
    if plan.rounds.compare:
        kept, state = _judge(decoder, state, queue, result.x)
        # What is rolled back was never the row's: a wrong draft may break, its row does not.
        broken = (~result.sound & (cols < kept[:, None])).any(axis=1)
        state = dataclasses.replace(state, flagged=before.flagged | broken)
        speaks = jnp.bool_(True)
    else:
        at, last = state.length[:, None], jnp.maximum(queue.count - 1, 0)
        x = jnp.take_along_axis(result.x, last[:, None, None], axis=1)
        speaks = queue.doubt.any()
        choice = jax.lax.cond(speaks, lambda: choices(decoder, state, x, at), lambda: jnp.zeros_like(at))
        depth = jnp.full(at.shape, decoder.config.num_layers, jnp.int32)
        state = emit(state, queue.doubt.astype(jnp.int32), state.length, choice, depth, x)
    state = dataclasses.replace(state, length=jnp.where(queue.count > 0, state.length, before.length))
    return _counted(state, index, speaks), queue._replace(count=jnp.zeros_like(queue.count))


def _judge(
    decoder: Decoder, state: DecodeState, queue: Queue, x: Float[Array, "batch cols embed"]
) -> tuple[Int[Array, " batch"], DecodeState]:
    """Keep the drafted tokens that the full model would have emitted, and the full model's own after them.

    Returns, with the state, how many columns of each row are kept.
    """
    width = x.shape[1]
    cols, waiting = jnp.arange(width), queue.count > 0
    first = queue.base + 1
    at = first[:, None] + cols
    choice = choices(decoder, state, x, at)
    token = followed(state, choice, at)
    proposed = jnp.maximum(queue.count - 1, 0)
    drafted = jnp.roll(queue.tokens[:, :width], -1, axis=1)
    right = (drafted == token) & (cols < proposed[:, None])
    agreed = jnp.cumprod(right, axis=1).sum(axis=1)
    ends = is_stop(state, token) | (at + 1 >= state.limit[:, None])
    until_end = jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1) + 1, width)
    count = jnp.where(waiting, jnp.minimum(agreed + 1, until_end), 0)
    accepted = jnp.minimum(agreed, count)
    depth = jnp.where(cols < accepted[:, None], queue.depth[:, :width], decoder.config.num_layers)
    state = emit(state, count, first, choice, depth, x)
    places = jnp.arange(state.rounds.tally.proposed.shape[0])
    tally = state.rounds.tally
    tally = tally._replace(
        proposed=tally.proposed + (places < proposed[:, None]).sum(axis=0),
        accepted=tally.accepted + (places < accepted[:, None]).sum(axis=0),
        corrected=tally.corrected + ((accepted < proposed) & (count > accepted)).sum(),
    )
    rounds = learn(state.rounds._replace(tally=tally), accepted, proposed)
    return count, dataclasses.replace(state, length=queue.base + count, rounds=rounds)


def _at(table: Int[Array, "batch cols"], index: Int[Array, " batch"]) -> Int[Array, " batch"]:
    """table[row, index[row]], the index brought into range."""
    return jnp.take_along_axis(table, jnp.clip(index, 0, table.shape[1] - 1)[:, None], axis=1)[:, 0]


def _counted(state: DecodeState, index: int, speaks: Bool[Array, ""]) -> DecodeState:
    """One more pass of the width with that index, and one through the LM head where it speaks."""
    tally: Tally = state.rounds.tally
    tally = tally._replace(
        passes=tally.passes.at[index].add(1), lm_heads=tally.lm_heads.at[index].add(speaks.astype(jnp.int32))
    )
    return dataclasses.replace(state, rounds=state.rounds._replace(tally=tally))
