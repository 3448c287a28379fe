"""The engine: prefill, then one bounded while-loop of steps, each a single compiled program."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from tide_jax.compat import release_free_memory
from tide_jax.decode.ahead import compile_ahead
from tide_jax.decode.control import at_batch, device_name, executed, new_control, read_step_times
from tide_jax.decode.loop import prefill, run, run_rounds
from tide_jax.decode.plan import Plan
from tide_jax.decode.proposers import Proposer
from tide_jax.decode.state import DecodeState, RoundState, bucket, new_rounds, new_state, place_state
from tide_jax.decode.verify import Verify, plan_rounds
from tide_jax.errors import InputError
from tide_jax.exits import Deferred, ExitRule, NoScorer, ProjectKV, Remainder, Scorer
from tide_jax.exits.heads import check_heads
from tide_jax.exits.rules import STAY
from tide_jax.model import Model
from tide_jax.sharding import check_rows, place

CHUNK = 32  # rounds between two looks at the clock

_PROGRAMS: dict[object, Callable] = {}


def _compiled(function: Callable, graphdef, plan: Plan, mesh: Mesh | None, *args):
    """The compiled program of `function` for these shapes, and the seconds its compilation took (0: it was there)."""
    leaves, tree = jax.tree.flatten(args)
    key = (function, graphdef, plan, tree, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
    if key in _PROGRAMS:
        return _PROGRAMS[key], 0.0
    began = time.perf_counter()
    _PROGRAMS[key] = compile_ahead(functools.partial(function, graphdef, plan), *args, state=2, mesh=mesh)
    release_free_memory()
    return _PROGRAMS[key], time.perf_counter() - began


@dataclasses.dataclass
class Timings:
    """Seconds by phase, and programs compiled.

    Attributes:
        prefill: of the prompts, first tokens included.
        decode: of all other tokens.
        predicted: of the same, from the step times of `tide-jax warmup`; 0 where there are none, or nothing is drafted.
        compile: of programs; never part of another phase.
        compiles: how many programs.
    """

    prefill: float = 0.0
    decode: float = 0.0
    predicted: float = 0.0
    compile: float = 0.0
    compiles: int = 0


class Engine:
    """A model with its exits fixed, ready to run batches.

    Args:
        model: a loaded model.
        exit_points: depths (layers run, 1 … L − 1) at which tokens may leave; empty: the plain full-depth loop.
        scorer: what is looked at there; thresholds and depths are given per batch and are arrays.
        remainder: stands in for the layers that are not run; None: `ProjectKV()`, and under `verify` `Deferred`.
        propose: drafts without running layers, instead of the exits; needs `verify`.
        verify: the full model judges every token.
        record_states: keep the final state of every position in `DecodeState.states`.

    Raises:
        InputError: an exit point outside 1 … L − 1, exit heads of another model, nothing that drafts under `verify`
            or two things that do, a proposer without `verify` or without the states it needs, widths that contradict
            each other, or width "auto" without step times.
    """

    def __init__(
        self,
        model: Model,
        *,
        exit_points: Sequence[int] = (),
        scorer: Scorer = NoScorer(),  # noqa: B008 - frozen, hashable
        remainder: Remainder | None = None,
        propose: Proposer | None = None,
        verify: Verify | None = None,
        record_states: bool = False,
    ):
        layers = model.config.num_layers
        if wrong := [
            depth for depth in exit_points if not (isinstance(depth, int | np.integer) and 1 <= depth < layers)
        ]:
            raise InputError(
                f"exit_points {wrong}: an exit point is a number of layers run between 1 and {layers - 1} for this "
                f"model of {layers} layers; the last layer is never an exit."
            )
        points = tuple(sorted({int(depth) for depth in exit_points}))
        if model.exits is not None:
            check_heads(model.exits, points, fingerprint=model.fingerprint, hidden_size=model.config.hidden_size)
        self.model = model
        rounds, self._width = plan_rounds(points, remainder, propose, verify)
        self._step_times = {}
        if verify is not None and verify.times is not None:
            self._step_times = {1: verify.times}
        elif rounds is not None:
            self._step_times = read_step_times(model.path, model.dtype.name, model.mesh)
        if remainder is None:
            remainder = ProjectKV() if rounds is None else Deferred()
        if rounds is not None and rounds.adaptive and not self._step_times:
            raise InputError(
                'Verify("auto") chooses widths from measured step times, and this model has none for '
                f"{device_name(model.mesh)}, {model.dtype.name}. Run `tide-jax warmup` on it, or give Verify a width "
                "or times."
            )
        if propose is not None and propose.needs_states and not record_states:
            raise InputError(
                f"{propose!r} drafts from the final states of earlier tokens, which this engine does not keep. Use "
                "record_states=True."
            )
        if rounds is not None and isinstance(remainder, Deferred):  # its width is an array: one program per body
            remainder = Deferred(rounds.bodies[-1])
        self.plan = Plan(points=points, scorer=scorer, remainder=remainder, rounds=rounds)
        self.record_states = record_states
        self.timings = Timings()
        exits = model.exits.heads if model.exits else {}
        self._heads = place({depth: exits[depth] for depth in points if depth in exits}, P(), model.mesh)

    def thresholds(self, rule: ExitRule, batch: int) -> np.ndarray:
        """The rule's thresholds at this engine's points, float32 [batch, points]."""
        row = rule.thresholds(self.plan.points, self.model.exits, self.model.config.num_layers)
        return np.tile(row, (batch, 1))

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        rule: ExitRule,
        max_new_tokens: int | Sequence[int],
        stops: Sequence[int] = (),
        seeds: Sequence[int] | None = None,
        temperature: float = 0.0,
        continuations: Sequence[Sequence[int] | Int[np.ndarray, " new"]] | None = None,
    ) -> DecodeState:
        """Prefill the prompts; the state has each row's first token chosen.

        Args:
            prompts: token ids, one sequence per row, none empty.
            rule: when tokens leave.
            max_new_tokens: new tokens per row.
            stops: ids that end a row.
            seeds: one per row; default 0 for all.
            temperature: 0 is greedy.
            continuations: tokens that follow each prompt whatever the model says (teacher forcing).

        Raises:
            InputError: rows that the model's mesh does not share evenly.
        """
        batch = len(prompts)
        check_rows(self.model.mesh, batch)
        wanted = np.broadcast_to(max_new_tokens, batch).tolist()
        state = new_state(
            self.model.config,
            tokens=prompts,
            max_new_tokens=wanted,
            thresholds=self.thresholds(rule, batch),
            stops=stops,
            seeds=[0] * batch if seeds is None else seeds,
            temperature=[temperature] * batch,
            dtype=self.model.dtype,
            record_states=self.record_states,
            mesh=self.model.mesh,
        )
        if continuations is not None:
            tokens = np.array(state.tokens)
            given = np.array([len(p) + len(c) for p, c in zip(prompts, continuations, strict=True)], np.int32)
            for row, prompt, rest in zip(tokens, prompts, continuations, strict=True):
                row[len(prompt) : len(prompt) + len(rest)] = rest
            state = dataclasses.replace(state, tokens=jnp.asarray(tokens), given=jnp.asarray(given))
        if self.plan.rounds is not None:
            state = dataclasses.replace(state, rounds=self._new_rounds(batch, state.thresholds))
        width = bucket(max(len(prompt) for prompt in prompts), 32)
        valid = np.arange(width)[None, :] < np.array([[len(prompt)] for prompt in prompts])
        ids = np.zeros((batch, width), np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        state, seconds = self._call(prefill, state, *place((ids, valid), P("batch"), self.model.mesh))
        self.timings.prefill += seconds
        return state

    def _new_rounds(self, batch: int, thresholds) -> RoundState:
        control = None
        if self.plan.rounds.adaptive:
            leaving = np.flatnonzero(np.asarray(thresholds)[0] < STAY)
            depth = self.plan.points[leaving[0]] if leaving.size else self.model.config.num_layers
            control = new_control(at_batch(self._step_times, batch), batch, depth)
        return new_rounds(batch, len(self.plan.points) + 1, width=self._width, control=control)

    def run(self, state: DecodeState, count: int) -> DecodeState:
        """At most `count` decode steps, or rounds, in one while-loop; `state` is donated: use only what is returned."""
        if self.plan.rounds is None:
            state, seconds = self._call(run, state, place(np.int32(count), P(), self.model.mesh))
        else:
            before = self._executed(state)
            state, seconds = self._call(run_rounds, state, place(np.int32(count), P(), self.model.mesh))
            state = self._compared_with_the_clock(state, before, seconds)
        self.timings.decode += seconds
        return state

    def finish(self, state: DecodeState) -> DecodeState:
        """Run until every row has ended."""
        # Every step and round yields a token per row at least. Where widths are chosen, the host looks at the clock.
        chunk = int(np.max(np.asarray(state.limit)))
        if self.plan.rounds is not None and self.plan.rounds.adaptive:
            chunk = CHUNK
        while np.asarray(state.live).any():
            state = self.run(state, chunk)
        return state

    @property
    def edges(self) -> tuple[int, ...]:
        """Layers run at the ends of the segments between exit points."""
        return (0, *self.plan.points, self.model.config.num_layers)

    def _executed(self, state: DecodeState) -> tuple[np.ndarray, np.ndarray]:
        return executed(state.rounds.tally, state.segments_run, self.edges)

    def _compared_with_the_clock(self, state: DecodeState, before, seconds: float) -> DecodeState:
        """Count what the step times predicted for a run, and take their scale for the next from what it took."""
        batch = state.live.shape[0]
        if not self._step_times:
            return state
        times = at_batch(self._step_times, batch)
        layers, heads = (now - then for now, then in zip(self._executed(state), before, strict=True))
        predicted = float(times.seconds(layers, heads).sum())
        self.timings.predicted += predicted
        times = times.corrected(predicted, seconds)
        self._step_times = {**self._step_times, batch: times}
        control = state.rounds.control
        if control is None:
            return state
        control = control._replace(
            layer=jnp.asarray(times.layer, jnp.float32), head=jnp.asarray(times.head, jnp.float32)
        )
        return dataclasses.replace(state, rounds=state.rounds._replace(control=control))

    def _call(self, function: Callable, state: DecodeState, *args) -> tuple[DecodeState, float]:
        model = self.model
        state = place_state(state, model.mesh)
        program, seconds = _compiled(
            function, model.graphdef, self.plan, model.mesh, model.params, self._heads, state, *args
        )
        self.timings.compile += seconds
        self.timings.compiles += seconds > 0
        began = time.perf_counter()
        state = jax.block_until_ready(program(model.params, self._heads, state, *args))
        return state, time.perf_counter() - began
