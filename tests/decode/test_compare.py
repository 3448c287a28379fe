"""The yardstick, recomputed by hand along trajectories made by the formulas in numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import Reference, changed, tiny_model, with_heads

import tide_jax as tide
from tide_jax.decode.compare import longest_repeat
from tide_jax.errors import InputError

LAYERS, NEW = 6, 12
PROMPTS = [[4, 5, 6, 7, 8], [11, 3, 90]]


@pytest.fixture(scope="module")
def model():
    return with_heads(tiny_model(), 2, 4)


def greedy(model, prompt, depth):
    """Tokens of a free run, and the logits that each came from."""
    reference = Reference(model)
    _, logits = reference.prefill(prompt)
    tokens, said = [], []
    for _ in range(NEW):
        tokens.append(int(logits.argmax()))
        said.append(logits)
        _, logits = reference.feed(tokens[-1], depth)
    return tokens, said


def forced(model, prompt, tokens, depth):
    """The logits at each token of a trajectory, after early exit at all tokens before it."""
    reference = Reference(model)
    return [reference.prefill(prompt)[1], *(reference.feed(token, depth)[1] for token in tokens[:-1])]


def log_softmax(logits):
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@pytest.mark.parametrize("depth", [2, 4])
def test_every_figure_is_what_its_definition_says(model, depth):
    report = tide.compare(model, PROMPTS, exits=tide.FixedDepth(depth), exit_points=[2, 4], max_new_tokens=NEW, stop=[])
    same, kl, gap, divergence, repeat, full_repeat = [], [], [], [], [], []
    for prompt in PROMPTS:
        tokens, full = greedy(model, prompt, LAYERS)
        free, _ = greedy(model, prompt, depth)
        other = forced(model, prompt, tokens, depth)
        for token, one, two in list(zip(tokens, full, other, strict=True))[1:]:
            p, q = log_softmax(one), log_softmax(two)
            same.append(two.argmax() == token)
            kl.append((np.exp(p) * (p - q)).sum())
            gap.append(p[token] - q[token])
        divergence.append(next((i for i in range(NEW) if free[i] != tokens[i]), NEW))
        repeat.append(brute_force(free))
        full_repeat.append(brute_force(tokens))
    assert report.positions == len(same) == 2 * (NEW - 1)
    assert report.agreement == pytest.approx(np.mean(same)) and report.agreement < 1
    assert report.kl == pytest.approx(np.mean(kl), rel=1e-3)
    assert report.nll_gap == pytest.approx(np.mean(gap), rel=1e-3)
    assert report.first_divergence == np.mean(divergence)
    assert (report.longest_repeat, report.full_longest_repeat) == (np.mean(repeat), np.mean(full_repeat))
    assert report.mean_depth == report.forced_mean_depth == depth
    assert report.histogram == {depth: 2 * (NEW - 1)}


def test_the_full_model_agrees_with_itself(model):
    report = tide.compare(model, PROMPTS, exits=tide.Never(), exit_points=[2, 4], max_new_tokens=NEW, stop=[])
    assert (report.agreement, report.kl, report.nll_gap) == (1, 0, 0)
    assert report.first_divergence == NEW
    assert report.mean_depth == LAYERS


def test_batches_change_no_figure(model):
    rule = tide.FixedDepth(4)
    options = dict(rule=rule, exit_points=[2, 4], max_new_tokens=NEW, stop=[])
    alone = tide.Yardstick(model, PROMPTS, **options).measure(rule)
    batched = tide.Yardstick(model, PROMPTS, **options, batch=2)
    together = batched.measure(rule)
    for name in ("agreement", "positions", "first_divergence", "longest_repeat", "mean_depth", "histogram"):
        assert getattr(alone, name) == getattr(together, name)
    assert together.kl == pytest.approx(alone.kl, rel=1e-3)
    assert batched.agreement(rule) == {
        "agreement": alone.agreement, "positions": alone.positions, "mean_depth": alone.forced_mean_depth
    }  # fmt: skip


def test_a_trajectory_ends_at_its_stop_token(model):
    tokens, _ = greedy(model, PROMPTS[0], LAYERS)
    stop = tokens[6]
    count = tokens.index(stop) + 1
    report = tide.compare(
        model, PROMPTS[:1], exits=tide.FixedDepth(4), exit_points=[2, 4], max_new_tokens=NEW, stop=[stop]
    )
    said = forced(model, PROMPTS[0], tokens, 4)[1:count]
    assert 1 < report.positions == count - 1
    assert report.agreement == np.mean([logits.argmax() == t for logits, t in zip(said, tokens[1:], strict=False)])


def test_layers_that_change_little_can_be_left_out():
    def weaken(decoder):
        for layer in list(decoder.layers)[LAYERS // 2 :]:
            layer.attention.o.kernel[...] = 1e-3 * layer.attention.o.kernel[...]
            layer.mlp.down.kernel[...] = 1e-3 * layer.mlp.down.kernel[...]

    easy = changed(tiny_model(), weaken)
    prompts = np.random.default_rng(0).integers(0, 97, (8, 5))
    report = tide.compare(easy, prompts, exits=tide.FixedDepth(LAYERS // 2), max_new_tokens=32, stop=[])
    assert report.positions == 8 * 31
    assert report.agreement >= 0.99
    assert report.mean_depth == LAYERS // 2


def brute_force(tokens):
    def grams(size):
        return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]

    return max((size for size in range(1, len(tokens)) if len(set(grams(size))) < len(grams(size))), default=0)


@given(st.lists(st.integers(0, 2), max_size=24))
def test_longest_repeat_is_the_longest_that_brute_force_finds(tokens):
    assert longest_repeat(tokens) == brute_force(tokens)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(max_new_tokens=1), ["1", "2"]),
        (dict(max_new_tokens=510), ["515", "512"]),
        (dict(max_new_tokens=-3), ["-3"]),
        (dict(exit_points=[2]), ["FixedDepth(4)", "[2]"]),
    ],
    ids=repr,
)
def test_bad_input_is_refused(model, options, words):
    with pytest.raises(InputError) as refusal:
        tide.compare(model, PROMPTS, exits=tide.FixedDepth(4), **options)
    assert all(word in str(refusal.value) for word in words)


def test_nothing_to_compare_is_said(model):
    first = greedy(model, PROMPTS[0], LAYERS)[0][0]
    with pytest.raises(InputError, match="ended at its first token"):
        tide.compare(model, PROMPTS[:1], exits=tide.Never(), exit_points=[2, 4], max_new_tokens=NEW, stop=[first])
