"""Ridge, splits, labels and thresholds against independent formulas."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.collect import split
from calib.labels import cosine, degenerate
from calib.projections import ridge
from calib.routers import RouterInput, scores, train_routers
from calib.thresholds import choose, curve, simulate
from tide_jax import InputError
from tide_jax.exits import Router


def test_ridge_solves_the_augmented_least_squares_problem():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 7)).astype(np.float32)
    y = rng.normal(size=(3000, 5)).astype(np.float32)
    strength = 0.05
    # The same optimum as plain least squares over rows that pull the kernel, but not the bias, to zero.
    rows = np.concatenate([np.c_[x, np.ones(len(x))], np.c_[np.eye(7) * (strength * len(x)) ** 0.5, np.zeros(7)]])
    expected = np.linalg.lstsq(rows.astype(np.float64), np.r_[y, np.zeros((7, 5))], rcond=None)[0]
    fitted = ridge(x, y, strength)
    np.testing.assert_allclose(fitted.kernel, expected[:-1], atol=1e-5)
    np.testing.assert_allclose(fitted.bias, expected[-1], atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 60), min_size=3, max_size=40), st.integers(0, 5))
def test_split_keeps_documents_whole_and_shares_close(counts, seed):
    document = np.repeat(np.arange(len(counts)), counts)
    masks = split(document, (0.4, 0.4, 0.2), seed)
    assert (np.sum(masks, axis=0) == 1).all()
    for one, other in itertools.combinations(masks, 2):
        assert not set(document[one]) & set(document[other])
    for mask, share in zip(masks, (0.4, 0.4, 0.2), strict=True):
        assert abs(mask.sum() - share * sum(counts)) <= max(counts) + 1


def test_split_needs_as_many_documents_as_parts():
    with pytest.raises(InputError, match="there are 2 documents"):
        split(np.array([0, 0, 1]), (0.4, 0.4, 0.2), 0)


def test_cosine_and_degenerate_labels():
    x = np.array([[3.0, 4.0], [1.0, 0.0]], np.float32)
    np.testing.assert_allclose(cosine(x, np.array([[4.0, 3.0], [0.0, 2.0]], np.float32)), [0.96, 0.0], atol=1e-6)
    assert degenerate(np.zeros(1000, bool)) and degenerate(np.arange(1000) < 15)
    assert not degenerate(np.arange(1000) < 20) and not degenerate(np.ones(1000, bool))


PLAIN = RouterInput(np.ones(12, np.float32), np.zeros(12, np.float32), False)


def test_routers_learn_a_separable_rule_and_keep_the_best_epoch():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 4000, 12)).astype(np.float32)
    label = np.stack([x[0, :, 0] > 0.3, x[1, :, 1] + x[1, :, 2] > 0])
    held_out = np.arange(4000) % 5 == 0
    routers, losses = train_routers(x.astype(np.float16), PLAIN, label, held_out, seed=0, progress=iter, epochs=20)
    for depth in range(2):
        predicted = scores(routers[depth], PLAIN, x[depth])
        assert ((predicted > 0.5) == label[depth])[held_out].mean() > 0.9
        truth = label[depth, held_out]
        entropy = -np.log(np.where(truth, predicted[held_out], 1 - predicted[held_out])).mean()
        assert losses[depth] == pytest.approx(entropy, rel=2e-2)


@pytest.mark.parametrize("kind", ["rms", "rms_one_plus", "layer"])
def test_scores_are_the_formula_on_what_the_final_norm_makes(kind):
    from flax import nnx

    from tide_jax.kernels import Norm
    from tide_jax.models.blocks import Normalization

    rng = np.random.default_rng(2)
    norm = Normalization(3, Norm(kind=kind, eps=1e-9), dtype=np.float32)
    for parameter in jax.tree.leaves(nnx.state(norm), is_leaf=lambda leaf: isinstance(leaf, nnx.Param)):
        parameter.set_value(jnp.asarray(rng.normal(size=3), jnp.float32))
    scale, bias = (np.asarray(norm.scale[...]), None if norm.bias is None else np.asarray(norm.bias[...]))
    x = rng.normal(size=(5, 3))
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True))
    if kind == "layer":
        apart = x - x.mean(axis=1, keepdims=True)
        normed = apart / np.sqrt((apart**2).mean(axis=1, keepdims=True)) * scale + bias
    else:
        normed = x * (scale + (kind == "rms_one_plus"))
    router = Router(down=rng.normal(size=(3, 4)).astype(np.float32), up=rng.normal(size=4).astype(np.float32))
    hidden = normed @ router.down
    expected = 1 / (1 + np.exp(-(hidden / (1 + np.exp(-hidden)) @ router.up)))
    made = scores(router, RouterInput.of(norm), x.astype(np.float32))
    np.testing.assert_allclose(made, expected, rtol=1e-4)
    np.testing.assert_allclose(RouterInput.of(norm)(x.astype(np.float32)), norm(jnp.asarray(x, jnp.float32)), atol=1e-5)


def test_simulate_leaves_at_the_first_point_that_fires():
    scores_ = {2: np.array([0.9, 0.1, 0.9, 0.1]), 4: np.array([0.9, 0.9, 0.1, 0.1])}
    good = {2: np.array([True, True, False, False]), 4: np.array([False, False, True, True])}
    saved, agrees = simulate({2: 0.5, 4: 0.5}, scores_, good, num_layers=6)
    # depths run: 2, 4, 2, 6 -> saved 4, 2, 4, 0; agreement: yes, no, no, yes
    assert saved == 2.5 and agrees == 0.5


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.sampled_from([0.8, 0.9, 0.97]))
def test_choice_keeps_the_agreement_and_beats_every_single_threshold(seed, agreement):
    rng = np.random.default_rng(seed)
    scores_ = {depth: rng.random(150) for depth in (2, 4, 6, 7)}
    good = {depth: rng.random(150) < 0.3 + 0.7 * value for depth, value in scores_.items()}
    thresholds, saved, kept = choose(scores_, good, num_layers=8, agreement=agreement)
    assert len(thresholds) <= 3 and kept >= agreement
    if thresholds:
        assert (saved, kept) == simulate(thresholds, scores_, good, 8)
    for depth, values in scores_.items():
        for threshold in np.quantile(values, np.linspace(0.2, 1.0, 48)):
            alone, agrees = simulate({depth: threshold}, scores_, good, 8)
            assert agrees < agreement or alone <= saved + 1e-9


def test_curve_counts_by_hand():
    rows = {row["threshold"]: row for row in curve(np.array([0.2, 0.6, 0.99]), np.array([False, False, True]))}
    assert rows[0.5] == {"threshold": 0.5, "coverage": 2 / 3, "precision": 0.5, "agreement": 2 / 3}
    assert rows[0.98]["precision"] == 1.0 and rows[0.98]["coverage"] == pytest.approx(1 / 3)
