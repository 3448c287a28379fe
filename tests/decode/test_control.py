"""The width of a round: the arithmetic of the choice, and the table it rests on."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import changed, tiny_model, with_heads

import tide_jax as tide
from tide_jax.decode import StepTimes, control
from tide_jax.decode.control import (
    FILE_NAME,
    MARGIN,
    PRIOR,
    at_batch,
    best_width,
    device_name,
    new_control,
    read_step_times,
)

TIMES = StepTimes(layer=(1.0, 1.5, 2.0), head=(6.0, 8.0, 9.0))
LAYERS = 30


def time_left(rates, proposals, left, width, drafting):
    """The rows' expected seconds to their limits, added up, in plain Python."""
    index = (1, 4, 8).index(width)
    rounds = sum(
        rest / sum(rate**i for i in range(min(n, width - 1) + 1))
        for rate, n, rest in zip(rates, proposals, left, strict=True)
    )
    depth = drafting or 0
    seconds = (LAYERS - depth if width > 1 else LAYERS) * TIMES.layer[index] + TIMES.head[index]
    if drafting and width > 1:
        seconds += width * depth * TIMES.layer[0] + (width - 1) * TIMES.head[0]
    return rounds * seconds * (1 if width == 1 else MARGIN)


@pytest.mark.parametrize("drafting", [None, 3.0, 12.0])
def test_the_fastest_width_is_chosen(drafting):
    random = np.random.default_rng(0)
    chosen = set()
    for _ in range(60):
        tried = random.integers(0, 40, 3).astype(float)
        accepted = np.round(tried * random.random(3) ** random.choice([0.02, 0.5, 3]))
        proposals, left = random.integers(0, 8, 3), random.integers(1, 100, 3)
        prior = PRIOR if drafting is None else control.EXITS_PRIOR
        rates = (accepted + prior[0]) / (tried + prior[1])
        state = new_control(TIMES, 3, drafting or LAYERS)
        state = state._replace(accepted=jnp.asarray(accepted, jnp.float32), tried=jnp.asarray(tried, jnp.float32))
        arguments = (state, (4, 8), LAYERS, jnp.asarray(proposals), jnp.asarray(left))
        width = int(best_width(*arguments, drafting_costs=drafting is not None))
        times = {option: time_left(rates, proposals, left.tolist(), option, drafting) for option in (1, 4, 8)}
        assert times[width] == pytest.approx(min(times.values()), rel=1e-5)
        chosen.add(width)
    assert chosen >= ({1} if drafting == 12.0 else {1, 4, 8})  # drafts of 12 layers seldom pay


def test_rows_that_have_ended_do_not_count():
    state = new_control(TIMES, 2, LAYERS)
    state = state._replace(accepted=jnp.asarray([30.0, 0.0]), tried=jnp.asarray([30.0, 30.0]))
    arguments = (state, (4, 8), LAYERS, jnp.asarray([7, 7]))
    assert best_width(*arguments, jnp.asarray([9, 0]), drafting_costs=False) == 8
    assert best_width(*arguments, jnp.asarray([0, 9]), drafting_costs=False) == 1


def test_the_table_moves_towards_the_clock_by_the_share_of_each_width():
    predicted = np.array([3.0, 1.0, 0.0])
    moved = TIMES.corrected(predicted, 6.0)  # half as long again
    np.testing.assert_allclose(moved.layer, [1 + 0.25 * 0.75, 1.5 * (1 + 0.25 * 0.25), 2.0])
    np.testing.assert_allclose(np.divide(moved.head, TIMES.head), np.divide(moved.layer, TIMES.layer))
    times = TIMES
    for _ in range(40):
        work = times.seconds(np.array([300, 0, 0]), np.array([10, 0, 0]))
        times = times.corrected(work, 1000.0)
    assert times.seconds(np.array([300, 0, 0]), np.array([10, 0, 0])).sum() == pytest.approx(1000, rel=1e-3)
    assert times.layer[1:] == TIMES.layer[1:]
    outlier = TIMES.corrected(predicted, 4000.0)
    assert max(np.divide(outlier.layer, TIMES.layer)) < 1.5
    assert TIMES.corrected(np.zeros(3), 1.0) == TIMES == TIMES.corrected(predicted, 0.0)


def test_times_between_measured_batch_sizes_are_interpolated():
    double = StepTimes(layer=(2.0, 3.0, 4.0), head=(12.0, 16.0, 18.0))
    tables = {1: TIMES, 8: double}
    assert at_batch(tables, 1) == at_batch({1: TIMES}, 5) == TIMES and at_batch(tables, 20) == double
    np.testing.assert_allclose(at_batch(tables, 4).layer, np.multiply(TIMES.layer, 1 + 3 / 7))


def test_step_times_are_kept_beside_the_model(tmp_path):
    control.write_step_times(tmp_path, "float32", {1: TIMES, 8: TIMES})
    other = StepTimes(layer=(4.0, 5.0, 6.0), head=(1.0, 1.0, 1.0))
    control.write_step_times(tmp_path, "bfloat16", {1: other})
    assert read_step_times(tmp_path, "float32") == {1: TIMES, 8: TIMES}
    assert read_step_times(tmp_path, "bfloat16") == {1: other}
    assert read_step_times(tmp_path, "float16") == read_step_times(tmp_path / "none", "float32") == {}
    control.write_step_times(tmp_path, "float32", {1: other})
    assert read_step_times(tmp_path, "float32") == {1: other, 8: TIMES}
    data = json.loads((tmp_path / FILE_NAME).read_text())
    for entry in data["entries"]:
        assert entry["device"] == device_name()
        entry["device"] = "another device"
    (tmp_path / FILE_NAME).write_text(json.dumps(data))
    assert read_step_times(tmp_path, "float32") == {}


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": "tide-step-times-0"}', '{"format": "tide-step-times-1", "widths": [1, 4], "entries": []}',
     '{"format": "tide-step-times-1", "widths": [1, 4, 8], "entries": [{"layer": [1, 2], "head": [1, 2, 3]}]}',
     '{"format": "tide-step-times-1", "widths": [1, 4, 8], "entries": [{"layer": [1, 2, 0], "head": [1, 2, 3]}]}',
     '{"format": "tide-step-times-1", "widths": [1, 4, 8], "entries": [{"layer": [1, 2, 3], "head": ["a", 2, 3]}]}',
     '{"format": "tide-step-times-1", "widths": [1, 4, 8], "entries": [{"layer": [1, 2, 3], "head": [NaN, 2, 3]}]}',
     '{"format": "tide-step-times-1", "widths": [1, 4, 8], "entries": [{"layer": [1, 2, 3], "head": [1, 2, 3], '
     '"device": "x", "dtype": "y", "batch": true}]}'],
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(tide.InputError, match="(?s)step_times.json cannot be read as step times.*tide-jax warmup"):
        read_step_times(tmp_path, "float32")
    control.write_step_times(tmp_path, "float32", {1: TIMES})  # the remedy
    assert read_step_times(tmp_path, "float32") == {1: TIMES}


def test_a_damaged_file_is_no_matter_to_a_run_that_needs_none(model, tmp_path):
    (tmp_path / FILE_NAME).write_text("{}")
    beside = tide.Model(model.graphdef, model.params, path=tmp_path)
    assert tide.generate(beside, [[1, 2]], max_new_tokens=2).lengths == [2]


@pytest.fixture(scope="module")
def model():
    return with_heads(tiny_model(num_layers=4), 1, 2, 3)


PROMPTS = [[1, 2, 1, 2, 1], [4, 5, 6, 7, 8], [11, 3, 90]]


@pytest.mark.parametrize("draft", ["ngram", "exits"])
def test_an_adaptive_run_is_exact_and_uses_every_width(model, draft):
    """Whatever the table says of the costs: it decides how long a run takes, never what is said."""
    kinds = {"ngram": dict(propose=tide.Ngram(shortest=1)), "exits": dict(exits=tide.FixedDepth(1), exit_points=[1])}
    plain = tide.generate(model, PROMPTS, max_new_tokens=80, stop=[])
    used = {}
    for name, layer in {"wide": (8.0, 1.0, 1.0), "steep": (1.0, 9.0, 30.0)}.items():
        times = StepTimes(layer=layer, head=(0.1, 0.1, 0.1))
        out = tide.generate(
            model, PROMPTS, max_new_tokens=80, stop=[], verify=tide.Verify("auto", times), **kinds[draft]
        )
        assert out.tokens.tolist() == plain.tokens.tolist()
        used[name] = out.stats.drafts.passes
        assert out.stats.predicted_tokens_per_second > 0
    assert used["steep"][4] == used["steep"][8] == 0
    assert used["wide"][8 if draft == "ngram" else 4] > 0


def test_drafts_that_pay_only_when_they_are_nearly_always_right_are_tried(model):
    """And those that are mostly wrong are left, and tried again now and then."""
    times = StepTimes(layer=(10.0, 3.0, 3.0), head=(1.0, 1.0, 1.0))
    kinds = dict(exits=tide.FixedDepth(1), exit_points=[1], verify=tide.Verify("auto", times))

    def weak(decoder):
        for layer in decoder.layers[1:]:
            layer.attention.o.kernel[...] = 0.01 * layer.attention.o.kernel[...]
            layer.mlp.down.kernel[...] = 0.01 * layer.mlp.down.kernel[...]

    right = changed(tide.Model(model.graphdef, model.params), weak)
    out = tide.generate(right, [[1, 2, 3]], max_new_tokens=120, stop=[], **kinds)
    settled = lambda drafts: drafts.passes[4] + drafts.passes[8]  # noqa: E731
    assert out.stats.drafts.acceptance_rate > 0.9 and settled(out.stats.drafts) < 30
    wrong = tide.generate(model, [[1, 2, 3]], max_new_tokens=480, stop=[], **kinds)
    assert wrong.stats.drafts.acceptance_rate < 0.5 and 2 <= settled(wrong.stats.drafts) < 60


def test_warmup_measures_and_keeps(model, tmp_path):
    tables = tide.warmup(model, batches=(1, 3), save=False)
    assert sorted(tables) == [1, 3]
    assert all(min(*table.layer, *table.head) > 0 for table in tables.values())
    kept = tide.Model(model.graphdef, model.params, exits=model.exits, path=tmp_path)
    tide.warmup(kept, batches=(1,))
    assert sorted(read_step_times(tmp_path, "float32")) == [1]
    tide.Engine(kept, propose=tide.Ngram(), verify=tide.Verify("auto"))


def test_what_warmup_cannot_do_is_refused(model):
    with pytest.raises(tide.InputError, match="made in memory"):
        tide.warmup(model)
    for batches in ((), (0,), (4, -1), 0):
        with pytest.raises(tide.InputError, match="batch sizes of 1 or more"):
            tide.warmup(model, batches=batches, save=False)
