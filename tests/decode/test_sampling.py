"""Choosing a token: argmax, draws that follow the softmax, noise of a row and a position alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_model

import tide_jax as tide
from tide_jax.decode.sampling import choose
from tide_jax.errors import InputError

LOGITS = np.array([3.0, 1.0, 0.2, -1.0, 2.5, 0.0, -0.5, 1.5], np.float32)
PROMPTS = [[4, 5, 6], [7], [7], [1, 2, 3, 4, 5]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def keys(*seeds):
    return jax.vmap(jax.random.key)(jnp.array(seeds))


def draws(count, temperature, *, by):
    """Many draws from the same logits: one per seed, or one per position of one seed."""
    seeds, places = (np.arange(count), np.full(count, 9)) if by == "seed" else (np.full(count, 3), np.arange(count))
    logits = jnp.tile(LOGITS, (count, 1))
    rows = keys(*seeds)
    return np.asarray(jax.jit(choose)(logits, rows, jnp.asarray(places, jnp.int32), jnp.full(count, temperature)))


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_softmax(by, temperature):
    count = 20_000
    seen = np.bincount(draws(count, temperature, by=by), minlength=8)
    weights = np.exp(LOGITS / temperature)
    wanted = count * weights / weights.sum()
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    assert statistic < 24.32  # chi-square, 7 degrees of freedom: 99.9 % of fair draws are below


def test_a_cold_draw_is_the_argmax_and_a_batch_may_mix():
    logits = jnp.array([[3.0, 1.0, 0.2, -1.0]] * 4 + [[0.0, -jnp.inf, 1.0, -jnp.inf]])
    at = jnp.zeros(5, jnp.int32)
    pick = jax.jit(choose)
    cold = pick(logits, keys(*range(5)), at, jnp.array([0.0, 1e-4, 1e-38, 0.0, 1e-4]))
    assert cold.tolist() == [0, 0, 0, 0, 2]
    warm = np.array([pick(logits, keys(*range(i, i + 5)), at, jnp.array([0.0, 9.0, 0.0, 9.0, 9.0])) for i in range(60)])
    assert (warm[:, [0, 2]] == 0).all()
    assert set(warm[:, 1]) == set(warm[:, 3]) == {0, 1, 2, 3}
    assert set(warm[:, 4]) == {0, 2}


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(InputError, match=str(temperature)):
        tide.Sampling(temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-50])
def test_a_cold_run_is_the_greedy_run(model, temperature):
    sampling = tide.Sampling(temperature=temperature)
    out = tide.generate(model, PROMPTS, max_new_tokens=12, sampling=sampling, seed=5)
    assert (out.tokens == tide.generate(model, PROMPTS, max_new_tokens=12).tokens).all()


def test_a_seed_belongs_to_a_row_and_rows_share_no_noise(model):
    def run(prompts, seed):
        return tide.generate(
            model, prompts, max_new_tokens=12, sampling=tide.Sampling(temperature=1.5), seed=seed
        ).tokens

    seeds = [3, 1, 2, 3]
    together = run(PROMPTS, seeds)
    assert (run(PROMPTS, seeds) == together).all()
    for prompt, seed, row in zip(PROMPTS, seeds, together, strict=True):
        assert run([prompt], seed)[0].tolist() == row.tolist()
    assert together[1].tolist() != together[2].tolist()  # equal prompts, other seeds
    assert run(PROMPTS, 3)[1].tolist() == run(PROMPTS, 3)[2].tolist()  # equal prompts, equal seeds
    state = tide.Engine(model).start(PROMPTS, rule=tide.Never(), max_new_tokens=2, seeds=[3] * 4)
    noise = [tuple(np.asarray(jax.random.key_data(key))) for key in state.keys]
    assert noise[1] == noise[2] and len(set(noise)) == 3  # other prompts, equal seeds: other noise
