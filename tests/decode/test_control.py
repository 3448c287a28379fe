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


def seconds_of(width, drafting):
    """Of one round, in plain Python; a wide one has to promise more."""
    index, depth = (1, 4, 8).index(width), drafting or 0
    seconds = (LAYERS - depth if width > 1 else LAYERS) * TIMES.layer[index] + TIMES.head[index]
    if drafting and width > 1:
        seconds += width * depth * TIMES.layer[0] + (width - 1) * TIMES.head[0]
    return seconds * (1 if width == 1 else MARGIN)


def time_left(rates, proposals, left, width, drafting):
    """The rows' expected seconds to their limits, added up."""
    rounds = sum(
        rest / sum(rate**i for i in range(min(n, width - 1) + 1))
        for rate, n, rest in zip(rates, proposals, left, strict=True)
    )
    return rounds * seconds_of(width, drafting)


def end_of_batch(rates, offers, left, width, drafting):
    """The expected seconds until the last row ends, if rounds with something to draft have this width."""
    rounds = [
        rest / (1 + offer * (sum(rate**i for i in range(width)) - 1))
        for rate, offer, rest in zip(rates, offers, left, strict=True)
    ]
    wide = np.mean([offer for offer, rest in zip(offers, left, strict=True) if rest])
    plain = seconds_of(1, drafting)
    return max(rounds) * (plain + wide * (seconds_of(width, drafting) - plain))


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
        offers = random.random(3) if drafting is None else np.ones(3)
        known = {"accepted": accepted, "tried": tried, "offers": offers}
        state = state._replace(**{name: jnp.asarray(value, jnp.float32) for name, value in known.items()})
        arguments = (state, (4, 8), LAYERS, jnp.asarray(proposals), jnp.asarray(left))
        width = int(best_width(*arguments, drafting_costs=drafting is not None))
        times = {option: time_left(rates, proposals, left.tolist(), option, drafting) for option in (1, 4, 8)}
        plain = end_of_batch(rates, offers, left.tolist(), 1, drafting)
        for option in (4, 8):
            if end_of_batch(rates, offers, left.tolist(), option, drafting) > plain:
                del times[option]
        assert times[width] == pytest.approx(min(times.values()), rel=1e-5)
        chosen.add(width)
    assert chosen >= ({1} if drafting == 12.0 else {1, 4, 8})  # drafts of 12 layers seldom pay


def test_rows_that_have_ended_do_not_count():
    state = new_control(TIMES, 2, LAYERS)
    state = state._replace(accepted=jnp.asarray([30.0, 0.0]), tried=jnp.asarray([30.0, 30.0]))
    arguments = (state, (4, 8), LAYERS, jnp.asarray([7, 7]))
    assert best_width(*arguments, jnp.asarray([9, 0]), drafting_costs=False) == 8
    assert best_width(*arguments, jnp.asarray([0, 9]), drafting_costs=False) == 1


def test_no_row_waits_for_drafts_that_do_not_bring_the_end_nearer():
    """One row always drafts, rightly, and ends soon; the other never does, and its tokens are what is waited for."""
    state = new_control(TIMES, 2, LAYERS)._replace(accepted=jnp.asarray([30.0, 30.0]), tried=jnp.asarray([30.0, 30.0]))
    both, left = jnp.asarray([7, 7]), jnp.asarray([60, 60])
    for offers, width in (((1.0, 1.0), 8), ((1.0, 0.05), 1)):
        known = state._replace(offers=jnp.asarray(offers))
        assert best_width(known, (4, 8), LAYERS, both, left, drafting_costs=False) == width


def test_offers_are_how_often_a_row_could_draft():
    state, share = new_control(TIMES, 2, LAYERS), np.full(2, control.OFFERS_PRIOR)
    for proposals in ([3, 0], [1, 0], [0, 7]):
        state = control.offered(state, jnp.asarray(proposals))
        share = control.MEMORY * share + (1 - control.MEMORY) * (np.asarray(proposals) > 0)
    np.testing.assert_allclose(state.offers, share, rtol=1e-6)


def test_the_table_follows_the_clock_and_keeps_its_proportions():
    moved = TIMES.corrected(4.0, 6.0)  # half as long again
    np.testing.assert_allclose(moved.layer, np.multiply(TIMES.layer, 1.25))
    np.testing.assert_allclose(moved.head, np.multiply(TIMES.head, 1.25))
    times = TIMES
    for _ in range(40):
        work = times.seconds(np.array([300, 20, 0]), np.array([10, 1, 0])).sum()
        times = times.corrected(work, 1000.0)
    assert times.seconds(np.array([300, 20, 0]), np.array([10, 1, 0])).sum() == pytest.approx(1000, rel=1e-3)
    np.testing.assert_allclose(np.divide(times.layer, times.layer[0]), np.divide(TIMES.layer, TIMES.layer[0]))
    outlier = TIMES.corrected(4.0, 4000.0)
    assert max(np.divide(outlier.layer, TIMES.layer)) <= 1.5
    assert TIMES.corrected(0.0, 1.0) == TIMES == TIMES.corrected(4.0, 0.0)


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
