"""The engine: prefill, then one bounded while-loop of steps, each a single compiled program."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from tide_jax.compat import release_free_memory
from tide_jax.decode.sampling import choose
from tide_jax.decode.state import DecodeState, bucket, new_state
from tide_jax.decode.step import Columns, Plan, step
from tide_jax.errors import InputError
from tide_jax.exits import ExitHead, ExitRule, NoScorer, ProjectKV, Remainder, Scorer
from tide_jax.model import Model


def prefill(graphdef, plan: Plan, params, heads: Mapping[int, ExitHead], state: DecodeState, tokens, valid):
    """Run the prompts at full depth into the empty caches, and choose the first token of every row."""
    del heads  # every program takes the same arguments; a prompt runs all layers
    decoder = nnx.merge(graphdef, params)
    counters = state.segments_run
    state, result = step(decoder, {}, dataclasses.replace(plan, points=()), state, Columns(tokens, valid))
    state = dataclasses.replace(state, segments_run=counters)  # which count decode steps only
    rows, last = jnp.arange(valid.shape[0]), jnp.maximum(valid.sum(axis=1) - 1, 0)
    return _emit(decoder, state, result.x[rows, last], result.depth[rows, last])


def run(graphdef, plan: Plan, params, heads: Mapping[int, ExitHead], state: DecodeState, count):
    """At most `count` decode steps, fewer when every row has ended."""
    decoder = nnx.merge(graphdef, params)

    def wanted(carry):
        done, state = carry
        return (done < count) & state.live.any()

    def body(carry):
        done, state = carry
        token = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
        state, result = step(decoder, heads, plan, state, Columns(token, state.live[:, None]))
        state = dataclasses.replace(state, steps=state.steps + 1)
        return done + 1, _emit(decoder, state, result.x[:, 0], result.depth[:, 0])

    return jax.lax.while_loop(wanted, body, (jnp.int32(0), state))[1]


def _emit(decoder, state: DecodeState, x: jax.Array, depth: jax.Array) -> DecodeState:
    """Choose each live row's next token from its final state, and end rows at a stop id or at their limit."""
    at = state.length
    choice = choose(decoder.logits(x), state.keys, at, state.temperature)

    def put(target: jax.Array, value: jax.Array) -> jax.Array:
        """target[row, at[row]] = value[row] for live rows, in place."""
        old = jnp.take_along_axis(target, at.reshape(-1, *[1] * (target.ndim - 1)), axis=1)
        new = jnp.where(state.live.reshape(-1, *[1] * (target.ndim - 1)), value[:, None], old)
        return jax.vmap(lambda t, u, s: jax.lax.dynamic_update_slice_in_dim(t, u, s, axis=0))(target, new, at)

    known = jnp.take_along_axis(state.tokens, at[:, None], axis=1)[:, 0]
    token = jnp.where(at < state.given, known, choice)
    stopped = (token[:, None] == state.stops).any(axis=1)
    return dataclasses.replace(
        state,
        tokens=put(state.tokens, token),
        choices=put(state.choices, choice),
        depths=put(state.depths, depth),
        states=None if state.states is None else put(state.states, x),
        live=state.live & ~stopped & (at + 1 < state.limit),
    )


_PROGRAMS: dict[object, Callable] = {}


def _compiled(function: Callable, graphdef, plan: Plan, *args):
    """The compiled program of `function` for these shapes, and the seconds its compilation took (0: it was there).

    Compiled ahead of the call, so that no timing ever contains a compilation, and compilations can be counted.
    """
    leaves, tree = jax.tree.flatten(args)
    key = (function, graphdef, plan, tree, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
    if key in _PROGRAMS:
        return _PROGRAMS[key], 0.0
    began = time.perf_counter()
    jitted = jax.jit(functools.partial(function, graphdef, plan), donate_argnums=(2,))
    _PROGRAMS[key] = jitted.lower(*args).compile()
    release_free_memory()
    return _PROGRAMS[key], time.perf_counter() - began


@dataclasses.dataclass
class Timings:
    """Seconds by phase, and programs compiled."""

    prefill: float = 0.0
    decode: float = 0.0
    compile: float = 0.0
    compiles: int = 0


class Engine:
    """A model with its exits fixed, ready to run batches.

    Args:
        model: a loaded model.
        exit_points: depths (layers run, 1 … L − 1) at which tokens may leave; empty: the plain full-depth loop.
        scorer: what is looked at there; thresholds and depths are given per batch and are arrays.
        remainder: stands in for the layers that are not run.
        record_states: keep the final state of every position in `DecodeState.states`.

    Raises:
        InputError: an exit point outside 1 … L − 1.
    """

    def __init__(
        self,
        model: Model,
        *,
        exit_points: Sequence[int] = (),
        scorer: Scorer = NoScorer(),  # noqa: B008 - frozen, hashable
        remainder: Remainder = ProjectKV(),  # noqa: B008
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
        self.model = model
        points = tuple(sorted({int(depth) for depth in exit_points}))
        self.plan = Plan(points=points, scorer=scorer, remainder=remainder)
        self.record_states = record_states
        self.timings = Timings()
        exits = model.exits.heads if model.exits else {}
        self._heads = jax.tree.map(jnp.asarray, {depth: exits[depth] for depth in points if depth in exits})

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
        """
        batch = len(prompts)
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
        )
        if continuations is not None:
            tokens = np.array(state.tokens)
            given = np.array([len(p) + len(c) for p, c in zip(prompts, continuations, strict=True)], np.int32)
            for row, prompt, rest in zip(tokens, prompts, continuations, strict=True):
                row[len(prompt) : len(prompt) + len(rest)] = rest
            state = dataclasses.replace(state, tokens=jnp.asarray(tokens), given=jnp.asarray(given))
        width = bucket(max(len(prompt) for prompt in prompts), 32)
        valid = np.arange(width)[None, :] < np.array([[len(prompt)] for prompt in prompts])
        ids = np.zeros((batch, width), np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        state, seconds = self._call(prefill, state, jnp.asarray(ids), jnp.asarray(valid))
        self.timings.prefill += seconds
        return state

    def run(self, state: DecodeState, count: int) -> DecodeState:
        """At most `count` decode steps in one while-loop; `state` is donated: use only what is returned."""
        state, seconds = self._call(run, state, jnp.int32(count))
        self.timings.decode += seconds
        return state

    def _call(self, function: Callable, state: DecodeState, *args) -> tuple[DecodeState, float]:
        model = self.model
        program, seconds = _compiled(function, model.graphdef, self.plan, model.params, self._heads, state, *args)
        self.timings.compile += seconds
        self.timings.compiles += seconds > 0
        began = time.perf_counter()
        state = jax.block_until_ready(program(model.params, self._heads, state, *args))
        return state, time.perf_counter() - began
