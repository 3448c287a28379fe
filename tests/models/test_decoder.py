"""The decoder without a cache, against the formulas in numpy, and what it refuses."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import Reference, cast, changed, tiny_model

from tide_jax.errors import InputError


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def padded(rows, side, fill):
    cols = max(map(len, rows))
    ids, mask = np.full((len(rows), cols), fill), np.zeros((len(rows), cols), bool)
    for index, row in enumerate(rows):
        place = slice(cols - len(row), cols) if side == "left" else slice(len(row))
        ids[index, place], mask[index, place] = row, True
    return ids, mask


@pytest.mark.parametrize("changes", [{}, {"tied_head": False, "qkv_bias": True, "o_bias": True}, {"num_kv_heads": 6}])
def test_logits_are_those_of_the_formulas(changes):
    model = tiny_model(3, **changes)
    ids = np.random.default_rng(0).integers(0, 97, 20)
    reference = Reference(model)
    wanted = [reference.feed(int(token), 6) for token in ids]
    np.testing.assert_allclose(np.asarray(model(ids[None]))[0], [logits for _, logits in wanted], atol=1e-4)
    states = np.asarray(model.hidden_states(ids[None]))
    assert states.shape == (7, 1, 20, 24)
    np.testing.assert_allclose(states[-1, 0], [x for x, _ in wanted], atol=1e-4)


def test_hidden_states_count_the_layers_run(model):
    ids = np.random.default_rng(1).integers(0, 97, 9)
    states = np.asarray(model.hidden_states(ids[None]))[:, 0]
    assert (states[0] == np.asarray(model.params["embedding"][...])[ids]).all()
    for depth in range(1, 7):
        reference = Reference(model)
        first, _ = reference.feed(int(ids[0]), depth)  # what an early exit holds is the state after `depth` layers
        np.testing.assert_allclose(states[depth, 0], first, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, side):
    random = np.random.default_rng(2)
    rows = [random.integers(0, 97, length) for length in (3, 11, 7, 1)]
    ids, mask = padded(rows, side, fill=5)
    together = np.asarray(model(ids, mask))
    states = np.asarray(model.hidden_states(ids, mask))
    for index, row in enumerate(rows):
        np.testing.assert_allclose(together[index, mask[index]], np.asarray(model(row[None]))[0], atol=1e-5)
        np.testing.assert_allclose(
            states[:, index, mask[index]], np.asarray(model.hidden_states(row[None]))[:, 0], atol=1e-5
        )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_a_pad_holds_reaches_no_token(model, side, poison):
    def change(decoder):
        decoder.embedding[...] = decoder.embedding[...].at[0].set(poison)

    sick = changed(model, change)
    ids, mask = padded([[1, 2, 3], [4, 5, 6, 7, 8]], side, fill=0)
    clean_ids, _ = padded([[1, 2, 3], [4, 5, 6, 7, 8]], side, fill=9)
    states = np.asarray(sick.hidden_states(ids, mask))
    np.testing.assert_array_equal(states[:, mask], np.asarray(model.hidden_states(clean_ids, mask))[:, mask])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_row_of_pads_alone_is_finite(model, dtype):
    mask = np.array([[True] * 4, [False] * 4])
    assert np.isfinite(np.asarray(cast(model, dtype)(np.ones((2, 4), int), mask))).all()


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        ([[1, 97]], None, ["97", "96"]),
        ([[-1, 2]], None, ["-1", "96"]),
        ([1, 2], None, ["(2,)"]),
        ([[1.0, 2.0]], None, ["float64"]),
        ([[True, False]], None, ["bool"]),
        ([[1, 2]], [[True]], ["(1, 1)", "(1, 2)"]),
        (np.zeros((1, 513), int), None, ["513", "512"]),
    ],
)
def test_bad_input_is_refused(model, ids, mask, words):
    call = inspect.unwrap(type(model).__call__)  # the tests' own shape checks would come first
    with pytest.raises(InputError) as refusal:
        call(model, np.asarray(ids), None if mask is None else np.asarray(mask))
    assert all(word in str(refusal.value) for word in words)


def test_16_bit_models_are_near_float32(model):
    ids = np.random.default_rng(4).integers(0, 97, (2, 12))
    wide = np.asarray(model(ids))
    for dtype, error in ((jnp.bfloat16, 0.1), (jnp.float16, 0.01)):
        logits = np.asarray(cast(model, dtype)(ids))
        assert logits.dtype == np.float32
        assert np.abs(logits - wide).max() <= error * np.abs(wide).max()
