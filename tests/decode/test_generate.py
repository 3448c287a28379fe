"""`generate` on tiny models: equal to the plain forward and to the formulas; ends; refusals."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import Reference, cast, tiny_model, with_heads

import tide_jax as tide
from tide_jax.decode import engine as engines
from tide_jax.decode.output import collect
from tide_jax.errors import InputError

LAYERS, NEW = 6, 13
PROMPTS = [[4, 5, 6, 7, 8], [11, 3, 90], [60, 61, 62, 63, 64, 65, 66, 67, 68], [1]]


@pytest.fixture(scope="module")
def model():
    return with_heads(tiny_model(), 2, 4)


@pytest.fixture(scope="module")
def plain(model):
    """Greedy tokens at full depth, without exit points, to the end."""
    return tide.generate(model, PROMPTS, max_new_tokens=NEW, stop=[])


def recorded(model, rule, points=(2, 4), prompts=PROMPTS):
    """Tokens, depths and final states of the new positions of a greedy run."""
    scorer = tide.RouterExit().scorer if model.exits else tide.Never().scorer
    engine = engines.Engine(model, exit_points=points, scorer=scorer, record_states=True)
    state = engine.run(engine.start(prompts, rule=rule, max_new_tokens=NEW), NEW)
    new = [slice(len(prompt), len(prompt) + NEW) for prompt in prompts]
    arrays = (state.tokens, state.depths, state.states)
    return tuple(np.stack([np.asarray(array)[row, at] for row, at in enumerate(new)]) for array in arrays)


def test_cached_decoding_equals_the_plain_forward(model, plain):
    tokens, depths, states = recorded(model, tide.Never())
    assert (tokens == plain.tokens).all() and (depths == LAYERS).all()
    assert len(np.unique(tokens)) > 12  # or nothing would be proved
    for prompt, row, state in zip(PROMPTS, tokens, states, strict=True):
        ids = np.array([[*prompt, *row]])
        said = slice(len(prompt) - 1, -1)
        assert np.asarray(model(ids))[0, said].argmax(axis=1).tolist() == row.tolist()
        np.testing.assert_allclose(state, np.asarray(model.hidden_states(ids))[-1, 0, said], atol=1e-4)


def test_with_and_without_kernels_the_same_tokens_leave_at_the_same_depths(model):
    exits = [tide.RouterExit({2: 0.45, 4: 0.5}, use_kernels=choice) for choice in (None, False)]
    default, without = (tide.generate(model, PROMPTS, max_new_tokens=NEW, stop=[], exits=rule) for rule in exits)
    assert {2, 4, LAYERS} & set(np.unique(default.exit_depths)) != {LAYERS}  # some do leave
    np.testing.assert_array_equal(default.tokens, without.tokens)
    np.testing.assert_array_equal(default.exit_depths, without.exit_depths)


@pytest.mark.parametrize(
    "rule",
    [tide.Never(), tide.RouterExit(threshold=2.0), tide.FixedDepth(LAYERS), tide.RouterExit({2: 1.0})],
    ids=repr,
)
def test_a_rule_that_never_fires_changes_nothing(model, plain, rule):
    out = tide.generate(model, PROMPTS, max_new_tokens=NEW, stop=[], exits=rule, exit_points=[2, 4])
    assert (out.tokens == plain.tokens).all()
    assert (out.exit_depths == LAYERS).all()
    assert out.stats.histogram == {LAYERS: len(PROMPTS) * NEW}


@pytest.mark.parametrize("projections", [False, True])
@pytest.mark.parametrize("depth", [2, 4])
def test_fixed_depth_equals_the_formulas(model, projections, depth):
    model = with_heads(model, 2, 4, projections=projections)
    tokens, depths, states = recorded(model, tide.FixedDepth(depth))
    assert (depths[:, 0] == LAYERS).all() and (depths[:, 1:] == depth).all()
    for prompt, row, made in zip(PROMPTS, tokens, states, strict=True):
        reference = Reference(model)
        wanted = [reference.prefill(prompt), *(reference.feed(int(token), depth) for token in row[:-1])]
        assert row.tolist() == [int(logits.argmax()) for _, logits in wanted]
        np.testing.assert_allclose(made, [x for x, _ in wanted], atol=1e-4)


def test_untied_biased_model_equals_the_formulas():
    model = with_heads(tiny_model(5, tied_head=False, qkv_bias=True, o_bias=True), 2, 4)
    tokens, _, states = recorded(model, tide.FixedDepth(4), prompts=PROMPTS[:1])
    reference = Reference(model)
    wanted = [reference.prefill(PROMPTS[0]), *(reference.feed(int(token), 4) for token in tokens[0, :-1])]
    assert tokens[0].tolist() == [int(logits.argmax()) for _, logits in wanted]
    np.testing.assert_allclose(states[0], [x for x, _ in wanted], atol=1e-4)


def test_a_router_fires_where_its_formula_says(model):
    rule = tide.RouterExit(threshold={2: 0.55, 4: 0.5})
    tokens, depths, _ = recorded(model, rule)
    scale = np.asarray(model.params["final_norm"]["scale"][...], np.float64)
    seen = set()
    for prompt, row, ran in zip(PROMPTS, tokens, depths, strict=True):
        reference = Reference(model)
        reference.prefill(prompt)
        for token, depth in zip(row[:-1], ran[1:], strict=True):
            wanted = LAYERS
            for point in (4, 2):
                probe = Reference(model)
                probe.keys, probe.values = ([list(k) for k in rows] for rows in (reference.keys, reference.values))
                probe.projections = {}
                x, _ = probe.feed(int(token), point)
                normed = x / np.sqrt(np.mean(x * x) + model.config.norm_eps) * scale
                router = model.exits.heads[point].router
                wide = normed @ np.asarray(router.down)
                score = 1 / (1 + np.exp(-(wide / (1 + np.exp(-wide))) @ np.asarray(router.up)))
                assert abs(score - rule.threshold[point]) > 1e-5
                wanted = point if score > rule.threshold[point] else wanted
            assert depth == wanted
            seen.add(wanted)
            reference.feed(int(token), wanted)
    assert seen == {2, 4, LAYERS}


def ends(tokens, stops):
    """How many tokens of each row are kept, counting the first stop token."""
    return [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in tokens]


@pytest.mark.parametrize("form", [list, lambda ids: ids + ids, lambda ids: ids[:1], lambda ids: ids[0]])
def test_each_row_ends_at_its_own_stop_token(model, plain, form):
    chosen = [int(plain.tokens[0, 5]), int(plain.tokens[1, 2])]
    stop = form(chosen)
    out = tide.generate(model, PROMPTS, max_new_tokens=NEW, stop=stop)
    wanted = ends(plain.tokens, np.atleast_1d(stop))
    assert out.lengths == wanted and len(set(wanted)) > 1
    for row, ran, free, end in zip(out.tokens, out.exit_depths, plain.tokens, wanted, strict=True):
        assert row[:end].tolist() == free[:end].tolist() and (row[end:] == 0).all()
        assert (ran[:end] == LAYERS).all() and (ran[end:] == 0).all()
    assert out.stats.new_tokens == sum(wanted)
    assert out.stats.steps == max(wanted) - 1


def test_scripted_rows_end_where_they_say_a_stop_id():
    model = tide.Model(tiny_model().graphdef, tiny_model().params, eos_ids=(5, 7))
    engine = engines.Engine(model)
    says = [[3, 7, 9, 9], [4, 4, 5, 2], [5, 1, 1, 1], [1, 2, 3, 4]]
    state = engine.start([[1, 5]] * 4, rule=tide.Never(), max_new_tokens=4, stops=(5, 7), continuations=says)
    out = collect(engine, engine.run(state, 3), [2] * 4, 4)
    assert out.tokens.tolist() == [[3, 7, 5, 5], [4, 4, 5, 5], [5, 5, 5, 5], [1, 2, 3, 4]]
    assert (out.exit_depths > 0).tolist() == (np.arange(4) < np.array([[2], [3], [1], [4]])).tolist()
    assert out.lengths == [2, 3, 1, 4]
    state = engine.start([[1, 5]] * 4, rule=tide.Never(), max_new_tokens=4, stops=(), continuations=says)
    out = collect(engine, engine.run(state, 3), [2] * 4, 4)
    assert out.tokens.tolist() == says and out.lengths == [4] * 4


def test_the_loop_ends_with_the_last_row():
    engine = engines.Engine(tiny_model())
    says = [[3, 7, 9, 9], [4, 4, 5, 2]]
    state = engine.start([[1, 5]] * 2, rule=tide.Never(), max_new_tokens=4, stops=(5, 7), continuations=says)
    assert int(engine.run(state, 100).steps) == 2


def test_the_models_own_stops_are_the_default(model, plain):
    chosen = (int(plain.tokens[0, 5]), int(plain.tokens[2, 3]))
    own = tide.Model(model.graphdef, model.params, eos_ids=chosen)
    out = tide.generate(own, PROMPTS, max_new_tokens=NEW)
    assert out.lengths == ends(plain.tokens, chosen)
    assert all((row[end:] == chosen[0]).all() for row, end in zip(out.tokens, out.lengths, strict=True))
    assert tide.generate(own, PROMPTS, max_new_tokens=NEW, stop=[]).tokens.tolist() == plain.tokens.tolist()


def test_no_new_tokens(model):
    out = tide.generate(model, PROMPTS, max_new_tokens=0)
    assert out.tokens.shape == out.exit_depths.shape == (4, 0)
    assert out.lengths == [0] * 4 and out.stats.new_tokens == out.stats.steps == 0


def test_a_full_context_works_and_one_more_is_refused(model):
    prompt = [list(range(90)) + list(range(40))] * 4
    room = model.config.max_positions - 130
    for exits in (None, tide.FixedDepth(2)):
        out = tide.generate(model, prompt, max_new_tokens=room, stop=[], exits=exits, exit_points=[2, 4])
        assert out.lengths == [room] * 4
        with pytest.raises(InputError) as refusal:
            tide.generate(model, prompt, max_new_tokens=room + 1, exits=exits, exit_points=[2, 4])
        assert all(str(number) in str(refusal.value) for number in (130, room + 1, 513, 512))
    short = tide.generate(model, prompt, max_new_tokens=5, stop=[], exits=exits, exit_points=[2, 4])
    assert (short.tokens == out.tokens[:, :5]).all()  # whatever the size of the caches


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_models_generate(model, dtype):
    narrow = cast(model, dtype)
    engine = engines.Engine(narrow, exit_points=(2, 4), scorer=tide.RouterExit().scorer, record_states=True)
    wide = recorded(model, tide.FixedDepth(4))
    says = wide[0].tolist()
    state = engine.start(PROMPTS, rule=tide.FixedDepth(4), max_new_tokens=NEW, continuations=says)
    state = engine.run(state, NEW)
    assert not np.asarray(state.flagged).any()
    assert all(cache.k.dtype == cache.v.dtype == dtype for cache in state.caches)
    for row, prompt in enumerate(PROMPTS):
        states = np.asarray(state.states[row, len(prompt) : len(prompt) + NEW], np.float32)
        assert np.isfinite(states).all()
        off = np.linalg.norm(states - wide[2][row], axis=1) / np.linalg.norm(wide[2][row], axis=1)
        assert off.max() < (0.15 if dtype == jnp.bfloat16 else 0.02)
    state = engine.run(engine.start(PROMPTS, rule=tide.RouterExit(0.5), max_new_tokens=NEW), NEW)
    assert not np.asarray(state.flagged).any() and not np.asarray(state.live).any()
    assert set(np.unique(state.depths)) == {0, 2, 4, LAYERS}


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1, 97]], ["97", "96"]),
        ([[-1]], ["-1", "96"]),
        ([], ["no prompt"]),
        ([[1, 2], []], ["prompt 1", "empty"]),
        (np.zeros((2, 0), int), ["prompt 0", "empty"]),
        (np.array([1.0, 2.0]), ["float64", "(2,)"]),
        (np.zeros((1, 1, 1), int), ["(1, 1, 1)"]),
        ([1.5], ["1.5"]),
        ([[1, 2], None], ["None"]),
        ([[1, 2], 7], ["7"]),
        ([[1, True]], ["True"]),
        ([np.array([1.0])], ["1.0"]),
        ({"role": "user"}, ["dict"]),
        ("text", ["tokenizer"]),
    ],
    ids=repr,
)
def test_bad_prompts_are_refused(model, prompts, words):
    with pytest.raises(InputError) as refusal:
        tide.generate(model, prompts)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize(
    "prompts",
    [[1, 2], (1, 2), np.array([1, 2]), jnp.array([[1, 2]]), [[1, 2]], [np.array([1, 2], np.uint8)]],
    ids=repr,
)
def test_ids_may_come_in_any_form(model, prompts):
    wanted = tide.generate(model, [[1, 2]], max_new_tokens=2)
    assert (tide.generate(model, prompts, max_new_tokens=2).tokens == wanted.tokens).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(max_new_tokens=-1), ["-1"]),
        (dict(max_new_tokens=True), ["True"]),
        (dict(stop=[97]), ["97", "96"]),
        (dict(seed=[1]), ["1 seeds", "2 prompts"]),
        (dict(exit_points=[0]), ["[0]", "5"]),
        (dict(exit_points=[2, 6]), ["[6]", "6 layers"]),
        (dict(exits=tide.FixedDepth(0)), ["[0]"]),
        (dict(exits=tide.FixedDepth(7)), ["[7]", "6 layers"]),
        (dict(exits=tide.FixedDepth(-1)), ["[-1]"]),
        (dict(exits=tide.FixedDepth(3), exit_points=[2, 4]), ["FixedDepth(3)", "[2, 4]", "6"]),
        (dict(exits=tide.RouterExit(0.5), exit_points=[3, 4]), ["[3]", "[2, 4]"]),
    ],
    ids=repr,
)
def test_bad_options_are_refused(model, options, words):
    with pytest.raises(InputError) as refusal:
        tide.generate(model, [[1, 2], [3]], **options)
    assert all(word in str(refusal.value) for word in words)


TYPES = """
import numpy as np
import tide_jax as tide
from support.tiny import tiny_model

for options in (
    dict(max_new_tokens=1.5), dict(max_new_tokens="2.5"), dict(stop="word"), dict(stop=[1.25]),
    dict(stop=3.5), dict(seed=4.5), dict(seed=[5.5]), dict(exit_points=[6.5]),
    dict(exits=tide.FixedDepth(2.0)),
):
    try:
        tide.generate(tiny_model(), [[1, 2]], **options)
    except tide.InputError as error:
        print(error)
"""


def test_values_of_a_wrong_type_are_refused():
    """In a process of its own, where no annotation is checked before the library can speak."""
    tests = Path(__file__).parent.parent
    paths = os.pathsep.join([str(tests), str(tests.parent)])
    environ = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", TYPES], capture_output=True, text=True, check=True, env=environ)
    for words, message in zip(
        ["1.5", "2.5", "word", "1.25", "3.5", "4.5", "5.5", "6.5", "2.0"],
        done.stdout.splitlines(),
        strict=True,
    ):
        assert words in message


def test_router_exit_without_heads_is_refused():
    with pytest.raises(InputError, match="calibrate"):
        tide.generate(tiny_model(), [[1]], exits=tide.RouterExit())
    with pytest.raises(InputError, match="needs calibrated exits"):
        tide.generate(tiny_model(), [[1]], exits=tide.RouterExit(0.5), exit_points=[3])
    out = tide.generate(tiny_model(), [[1]], exits=tide.RouterExit(), exit_points=[], max_new_tokens=2)
    assert (out.exit_depths == LAYERS).all()
