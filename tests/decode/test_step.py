"""The step: rows that do not depend on each other, columns that start in the middle, NaN that stays put."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import Scripted, ScriptedScorer, changed, counted_layers, poisoned, tiny_model, with_script

import tide_jax as tide
from tide_jax.decode.engine import Engine
from tide_jax.decode.state import DecodeState
from tide_jax.decode.step import Columns, Plan, step

LAYERS, NEW = 6, 10
POINTS = (1, 3, 5)
PROMPTS = [[4, 5, 6, 7, 8], [11, 3, 90], [60, 61, 62, 63, 64, 65, 66, 67, 68], [1]]
EDGES = (0, *POINTS, LAYERS)


@pytest.fixture(scope="module")
def model():
    return with_script(tiny_model(), {point: np.random.default_rng(point).random(256) for point in POINTS})


def decode(model, prompts, thresholds, wanted):
    """Rows leave where the script is above their own thresholds; the state, and each row's new positions."""
    engine = Engine(model, exit_points=POINTS, scorer=ScriptedScorer(), record_states=True)
    state = engine.start(prompts, rule=Scripted(), max_new_tokens=wanted)
    state = dataclasses.replace(state, thresholds=jnp.asarray(thresholds, jnp.float32))
    state = engine.run(state, NEW)
    arrays = [np.asarray(array) for array in (state.tokens, state.depths, state.states)]
    return state, [
        tuple(array[row, len(prompt) : len(prompt) + new] for array in arrays)
        for row, (prompt, new) in enumerate(zip(prompts, wanted, strict=True))
    ]


def script_depths(model, prompt, thresholds, new):
    """What the script says about each new token: the first, from the prefill, is at full depth."""
    scores = np.array([model.exits.heads[point].router.up for point in POINTS])
    leaves = scores > np.asarray(thresholds, np.float32)[:, None]
    depths = [LAYERS]
    for position in range(len(prompt), len(prompt) + new - 1):
        depths.append(next((p for p, out in zip(POINTS, leaves[:, position], strict=True) if out), LAYERS))
    return depths


numbers = st.sampled_from([-1.0, 0.3, 0.6, 0.9, 2.0])
schedules = st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=4, max_size=4)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(thresholds=schedules, others=schedules, wanted=st.lists(st.integers(1, NEW), min_size=4, max_size=4))
def test_a_row_does_not_depend_on_its_neighbours(model, thresholds, others, wanted):
    state, rows = decode(model, PROMPTS, thresholds, wanted)
    for prompt, own, new, (tokens, depths, states) in zip(PROMPTS, thresholds, wanted, rows, strict=True):
        _, [(alone, alone_depths, alone_states)] = decode(model, [prompt], [own], [new])
        assert tokens.tolist() == alone.tolist()
        assert depths.tolist() == alone_depths.tolist() == script_depths(model, prompt, own, new)
        np.testing.assert_allclose(states, alone_states, atol=1e-5, rtol=1e-5)  # products of other shapes, float32
    # The same shapes with other neighbours: the same bits.
    _, again = decode(model, PROMPTS, [thresholds[0], *others[1:]], [wanted[0], *wanted[:0:-1]])
    for one, other in zip(rows[0], again[0], strict=True):
        np.testing.assert_array_equal(one, other)
    # A segment ran in a step where the deepest row needed it, and in no other.
    table = np.zeros((4, NEW), int)
    for row, (_, depths, _) in enumerate(rows):
        table[row, : len(depths)] = depths
    deepest = table[:, 1:].max(axis=0)
    assert state.segments_run.tolist() == [int((deepest > edge).sum()) for edge in EDGES[:-1]]


class Settling:
    """Rows whose last columns were drafted to some depth, rolled back, and the same columns at full depth."""

    def __init__(self, starts: list[list[int]], program=None):
        self.model = tiny_model(2)
        decoder = nnx.merge(self.model.graphdef, self.model.params)
        plan = Plan(points=POINTS)
        self.step = program or jax.jit(lambda state, columns: step(decoder, {}, plan, state, columns))
        self.starts = np.array(starts, np.int32)
        batch, self.width = self.starts.shape
        engine = Engine(self.model, exit_points=POINTS)
        prompts = PROMPTS[:batch]
        self.before = engine.start(prompts, rule=tide.Never(), max_new_tokens=NEW)
        self.tokens = np.random.default_rng(3).integers(0, 97, self.starts.shape).astype(np.int32)
        self.drafted, self.x = self.before, np.zeros((batch, self.width, 24), np.float32)
        for column in range(self.width):
            thresholds = np.where(np.array(POINTS) == self.starts[:, column, None], -1.0, 2.0)
            state = dataclasses.replace(self.drafted, thresholds=jnp.asarray(thresholds, jnp.float32))
            columns = Columns(jnp.asarray(self.tokens[:, column, None]), jnp.ones((batch, 1), bool))
            self.drafted, result = self.step(state, columns)
            self.x[:, column] = np.asarray(result.x)[:, 0]
            depth = np.where(self.starts[:, column] > 0, self.starts[:, column], LAYERS)
            assert np.asarray(result.depth)[:, 0].tolist() == depth.tolist()

    def settle(self, valid, x=None) -> tuple[DecodeState, np.ndarray]:
        """The drafted columns from their start on."""
        state = dataclasses.replace(self.drafted, length=self.before.length, thresholds=self.before.thresholds)
        return self.step(
            state,
            Columns(
                jnp.asarray(self.tokens),
                jnp.asarray(valid),
                jnp.asarray(self.starts),
                jnp.asarray(self.x if x is None else x),
            ),
        )

    def full(self, valid) -> tuple[DecodeState, np.ndarray]:
        """The same columns, none of which ran before."""
        return self.step(self.before, Columns(jnp.asarray(self.tokens), jnp.asarray(valid)))

    def check(self, valid, settled, full):
        """Equal wherever a column exists: K/V rows, slots, lengths, final states, depths."""
        (state, result), (wanted, target) = settled, full
        assert state.length.tolist() == wanted.length.tolist() == (self.before.length + valid.sum(1)).tolist()
        np.testing.assert_allclose(np.asarray(result.x)[valid], np.asarray(target.x)[valid], atol=1e-5)
        assert (np.asarray(result.depth)[valid] == LAYERS).all()
        for row, length in enumerate(wanted.length):
            assert state.slots[row, :length].tolist() == wanted.slots[row, :length].tolist() == list(range(length))
            for cache, target in zip(state.caches, wanted.caches, strict=True):
                np.testing.assert_allclose(cache.k[row, :, :length], target.k[row, :, :length], atol=1e-5)
                np.testing.assert_allclose(cache.v[row, :, :length], target.v[row, :, :length], atol=1e-5)
        counted = (np.asarray(state.slots) >= 0) & (np.asarray(state.slots) < np.asarray(state.length)[:, None])
        assert counted.sum(axis=1).tolist() == wanted.length.tolist()
        assert not np.asarray(state.flagged).any()


def test_settling_continues_where_the_draft_left(monkeypatch):
    calls = counted_layers(monkeypatch)
    program, valid = None, np.ones((2, 4), bool)
    for start in POINTS:
        run = Settling([[start] * 4] * 2, program)
        program = run.step
        jax.effects_barrier()
        calls.clear()
        settled = jax.block_until_ready(run.settle(valid))
        jax.effects_barrier()
        assert len(calls) == LAYERS - start
        ran = np.asarray(settled[0].segments_run) - np.asarray(run.drafted.segments_run)
        assert ran.tolist() == [int(edge >= start) for edge in EDGES[:-1]]
        run.check(valid, settled, run.full(valid))


# A column's state at its start is the full model's own only if no earlier column of its row left before
# that depth. A start of 0 here was drafted at full depth.
MIXED = [[5, 3, 1, 0], [5, 5, 1, 1], [6, 6, 3, 3], [3, 1, 1, 1]]
LATE = [[5, 5, 5, 3], [5, 5, 3, 3], [3, 3, 3, 3], [5, 5, 5, 5]]
ALL = [[True] * 4] * 4
RAGGED = [[True] * 4, [True, True, False, False], [True] * 3 + [False], [False] * 4]


@pytest.fixture(scope="module")
def mixed():
    first = Settling(MIXED)
    return {"mixed": first, "late": Settling(LATE, first.step)}


@pytest.mark.parametrize("which", ["mixed", "late"])
@pytest.mark.parametrize("valid", [ALL, RAGGED], ids=["all", "ragged"])
def test_starts_may_differ_within_a_batch(mixed, which, valid):
    run, valid = mixed[which], np.array(valid)
    run.check(valid, run.settle(valid), run.full(valid))


def test_a_column_that_ran_all_layers_is_left_alone(mixed):
    run = Settling([[0] * 4] * 4, mixed["mixed"].step)
    run.starts[:] = LAYERS
    valid = np.ones((4, 4), bool)
    state, result = run.settle(valid)
    assert (np.asarray(result.x) == run.x).all()
    assert (state.segments_run == run.drafted.segments_run).all()
    run.check(valid, (state, result), run.full(valid))


@pytest.mark.parametrize("which", ["mixed", "late"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_columns_that_do_not_exist_may_hold_anything(mixed, which, poison):
    run, valid = mixed[which], np.array(RAGGED)
    poisoned = np.where(valid[..., None], run.x, poison).astype(np.float32)
    clean, sick = run.settle(valid), run.settle(valid, poisoned)
    run.check(valid, sick, run.full(valid))
    assert all(np.isfinite(cache.k).all() and np.isfinite(cache.v).all() for cache in sick[0].caches)
    one = Columns(jnp.asarray(run.tokens[:, :1]), jnp.ones((4, 1), bool))
    (_, later), (_, wanted) = run.step(sick[0], one), run.step(clean[0], one)
    np.testing.assert_array_equal(later.x, wanted.x)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("where", ["prompt", "later"])
def test_a_row_that_breaks_is_flagged_and_breaks_no_other(value, where):
    sick = poisoned(tiny_model(4, tied_head=False), 50, value)
    prompts = [[4, 5, 6], [7, 50, 8] if where == "prompt" else [7, 9, 8], [11, 3, 90, 2]]
    says = [[], [1, 50, 2] if where == "later" else [], []]
    engine = Engine(sick, exit_points=(3,), record_states=True)

    def run(rows):
        state = engine.start(
            [prompts[row] for row in rows],
            rule=tide.FixedDepth(3),
            max_new_tokens=NEW,
            continuations=[says[row] for row in rows],
        )
        return engine.run(state, NEW)

    state = run([0, 1, 2])
    assert state.flagged.tolist() == [False, True, False]
    assert all(np.isfinite(cache.k).all() and np.isfinite(cache.v).all() for cache in state.caches)
    for row in (0, 2):
        alone = run([row])
        new = slice(len(prompts[row]), len(prompts[row]) + NEW)
        assert state.tokens[row, new].tolist() == alone.tokens[0, new].tolist()
        np.testing.assert_allclose(state.states[row, new], alone.states[0, new], atol=1e-5)
    out = tide.generate(sick, prompts, max_new_tokens=NEW)
    assert out.stats.flagged == ([1] if where == "prompt" else [])


def test_a_row_that_overflows_in_the_last_layer_is_flagged():
    def change(decoder):
        decoder.embedding[...] = decoder.embedding[...].at[50].set(60_000.0)
        decoder.layers[0].mlp.down.bias[...] = jnp.full(24, 60_000.0, jnp.float16)

    narrow = changed(tiny_model(dtype=jnp.float16, num_layers=1, mlp_bias=True), change)
    assert tide.generate(narrow, [[1, 2], [1, 50], [3]], max_new_tokens=1).stats.flagged == [1]


def test_a_row_that_ended_broken_breaks_no_other():
    """It keeps its place in the batch, and its last token, whatever that is, is run in every step."""
    sick = poisoned(tiny_model(4, tied_head=False), 50, jnp.nan)
    engine = Engine(sick, record_states=True)
    state = engine.start(
        [[4, 5, 6], [7, 9]], rule=tide.Never(), max_new_tokens=NEW, stops=(50,), continuations=[[], [1, 50]]
    )
    state = engine.run(state, NEW)
    assert state.flagged.tolist() == [False, False]
    alone = engine.run(engine.start([[4, 5, 6]], rule=tide.Never(), max_new_tokens=NEW), NEW)
    assert state.tokens[0, :13].tolist() == alone.tokens[0, :13].tolist()
    np.testing.assert_allclose(state.states[0, 3:13], alone.states[0, 3:13], atol=1e-5)
    assert all(np.isfinite(cache.k).all() and np.isfinite(cache.v).all() for cache in state.caches)
