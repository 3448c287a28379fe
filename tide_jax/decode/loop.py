"""The traced programs: prefill, and the bounded while-loops that decode."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from tide_jax.decode.control import best_width, forget, learn, offered
from tide_jax.decode.emit import choices, emit
from tide_jax.decode.plan import Plan
from tide_jax.decode.proposers import Proposal, propose
from tide_jax.decode.rounds import draft, open_queue, settle
from tide_jax.decode.state import DecodeState
from tide_jax.decode.step import Columns, StepResult, step
from tide_jax.exits import ExitHead
from tide_jax.models import Decoder


def prefill(graphdef, plan: Plan, params, heads: Mapping[int, ExitHead], state: DecodeState, tokens, valid):
    """Run the prompts at full depth into the empty caches, and choose the first token of every row."""
    del heads  # every program takes the same arguments; a prompt runs all layers
    decoder = nnx.merge(graphdef, params)
    counters = state.segments_run
    state, result = step(decoder, {}, dataclasses.replace(plan, points=()), state, Columns(tokens, valid))
    state = dataclasses.replace(state, segments_run=counters)  # which count decode steps only
    last = jnp.maximum(valid.sum(axis=1) - 1, 0)[:, None, None]
    x = jnp.take_along_axis(result.x, last, axis=1)
    return _emit_one(decoder, state, result._replace(x=x, depth=result.depth[:, :1]))


def run(graphdef, plan: Plan, params, heads: Mapping[int, ExitHead], state: DecodeState, count):
    """At most `count` decode steps, fewer when every row has ended."""
    decoder = nnx.merge(graphdef, params)

    def body(state: DecodeState) -> DecodeState:
        token = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
        state, result = step(decoder, heads, plan, state, Columns(token, state.live[:, None]))
        return _emit_one(decoder, state, result)

    return _repeat(body, state, count)


def run_rounds(graphdef, plan: Plan, params, heads: Mapping[int, ExitHead], state: DecodeState, count):
    """At most `count` rounds of drafting and settling.

    The loops inside a round hand the caches on in place, which conditionals could not: one copy of all layers drafts,
    one per width settles, and each runs as often as it is wanted, which may be never.
    """
    decoder = nnx.merge(graphdef, params)
    rounds = plan.rounds

    def body(state: DecodeState) -> DecodeState:
        proposal = None
        if rounds.proposer is not None:
            proposal = propose(rounds.proposer, state.tokens, state.length, state.states)
        if rounds.adaptive:
            state = _choose_width(decoder, plan, state, proposal)
        before = state
        state = _count_round(state)
        queue = open_queue(decoder, plan, state, proposal)
        passes = state.rounds.width.max() if proposal is None else 1
        state, queue = jax.lax.while_loop(
            lambda carry: carry[1].open.any() & (carry[1].passes < passes),
            lambda carry: draft(decoder, heads, plan, *carry),
            (state, queue),
        )
        for narrower, width in zip((0, *rounds.bodies), rounds.bodies, strict=False):
            state, queue = jax.lax.while_loop(
                lambda carry, low=narrower, high=width: (low < carry[1].count.max()) & (carry[1].count.max() <= high),
                lambda carry, width=width: settle(decoder, plan, width, *carry),
                (state, queue),
            )
        return _observe(plan, before, state, proposal) if rounds.adaptive else state

    return _repeat(body, state, count)


def _repeat(body, state: DecodeState, count) -> DecodeState:
    """The body at most `count` times, as long as a row lives."""

    def counted(carry):
        done, state = carry
        state = body(state)
        return done + 1, dataclasses.replace(state, steps=state.steps + 1)

    return jax.lax.while_loop(lambda carry: (carry[0] < count) & carry[1].live.any(), counted, (jnp.int32(0), state))[1]


def _emit_one(decoder: Decoder, state: DecodeState, result: StepResult) -> DecodeState:
    """Each live row's next token, from the final state of its one column."""
    choice = choices(decoder, state, result.x, state.length[:, None])
    return emit(state, state.live.astype(jnp.int32), state.length, choice, result.depth, result.x)


def _count_round(state: DecodeState) -> DecodeState:
    tally = state.rounds.tally
    tally = tally._replace(rounds=tally.rounds + state.live)
    return dataclasses.replace(state, rounds=state.rounds._replace(tally=tally))


def _choose_width(decoder: Decoder, plan: Plan, state: DecodeState, proposal: Proposal | None) -> DecodeState:
    left = jnp.where(state.live, state.limit - 1 - state.length, 0)
    room = jnp.maximum(left - 1, 0)
    proposals = room if proposal is None else jnp.minimum(proposal.count, room)
    rounds, layers = state.rounds, decoder.config.num_layers
    control = offered(rounds.control, proposals)
    width = best_width(control, plan.rounds.bodies, layers, proposals, left, drafting_costs=proposal is None)
    rounds = rounds._replace(control=control, width=jnp.full_like(rounds.width, width))
    return dataclasses.replace(state, rounds=rounds)


def _observe(plan: Plan, before: DecodeState, state: DecodeState, proposal: Proposal | None) -> DecodeState:
    """Learn what settling did not teach: the layers a draft runs, and the worth of a proposal that was not used."""
    rounds, old = state.rounds, before.rounds
    if proposal is None:
        edges = jnp.asarray((0, *plan.points, len(state.caches)))
        ran = ((state.segments_run - before.segments_run) * jnp.diff(edges)).sum()
        passes = rounds.tally.passes[0] - old.tally.passes[0]
        drafted = rounds.width.max() > 1
        layers = 0.9 * rounds.control.draft_layers + 0.1 * ran / jnp.maximum(passes, 1)
        used = rounds._replace(control=rounds.control._replace(draft_layers=layers))
        rounds = jax.tree.map(lambda one, other: jnp.where(drafted, one, other), used, forget(rounds))
    else:
        token = jnp.take_along_axis(state.tokens, before.length[:, None] + 1, axis=1)[:, 0]
        settled = (rounds.tally.passes != old.tally.passes)[1:].any()
        unused = (before.live & (proposal.count > 0) & ~settled).astype(jnp.int32)
        rounds = learn(rounds, unused * (proposal.tokens[:, 0] == token), unused)
    return dataclasses.replace(state, rounds=rounds)
