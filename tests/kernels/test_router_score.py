"""The router score against the formula in float64, through both paths and under every transformation."""

import functools
import os

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tide_jax.kernels import router_score, status
from tide_jax.kernels.router_score import _call, _check, reference

EPS = 1e-5
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def kernel():
    """The compiled kernel. Where the extension must be there, its absence is a failure and not a skip."""
    if not status().available:
        if os.environ.get("TIDE_REQUIRE_KERNELS") == "1":
            pytest.fail(f"TIDE_REQUIRE_KERNELS=1, but {status().reason}")
        pytest.skip(status().reason)
    return _call


@pytest.fixture(params=["reference", "kernel", "router_score"])
def path(request):
    """Each way to compute the score."""
    if request.param == "kernel":
        return request.getfixturevalue("kernel")
    return {"reference": reference, "router_score": router_score}[request.param]


def expected(x, norm_weight, down, up, eps=EPS):
    x, norm_weight, down, up = (np.asarray(a).astype(np.float64) for a in (x, norm_weight, down, up))
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * norm_weight
    hidden = np.einsum("...d,dr->...r", normed, down)
    hidden = hidden / (1 + np.exp(-hidden))
    return 1 / (1 + np.exp(-hidden @ up))


def inputs(shape, r, dtype="float32", scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    d = shape[-1]
    x = jnp.asarray(rng.normal(size=shape) * scale, dtype)
    norm_weight = jnp.asarray(rng.uniform(0.5, 1.5, size=d), jnp.float32)
    down = jnp.asarray(rng.normal(size=(d, r)) / np.sqrt(d), jnp.float32)
    up = jnp.asarray(rng.normal(size=r) / np.sqrt(r) * 2, jnp.float32)
    return x, norm_weight, down, up


def check_close(got, want):
    assert got.dtype == jnp.float32
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    rows=st.integers(0, 17),
    d=st.integers(1, 70),
    r=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size(kernel, rows, d, r, dtype, seed):
    args = inputs((rows, d), r, dtype, seed=seed)
    want = expected(*args)
    check_close(kernel(*args, eps=EPS), want)
    check_close(jax.jit(functools.partial(reference, eps=EPS))(*args), want)


@pytest.mark.parametrize("shape", [(576,), (1, 576), (2, 3, 576), (0, 5), (2, 0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_are_the_batch(path, shape, dtype):
    args = inputs(shape, 128, dtype)
    check_close(path(*args, eps=EPS), expected(*args))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_do_not_change_the_score(path, dtype):
    x, *weights = inputs((5, 64), 32, dtype)
    large = x.astype(jnp.float32) * 1e4
    large = jnp.clip(large, -6e4, 6e4).astype(dtype)  # float16 ends at 65504
    check_close(path(large, *weights, eps=EPS), expected(large, *weights))


def test_scores_saturate_without_nan(path):
    x, norm_weight, down, up = inputs((4, 16), 8)
    got = path(x, norm_weight, down * 1e4, jnp.full(8, 1e30), eps=EPS)
    np.testing.assert_array_equal(got, np.ones(4, np.float32))
    got = path(x, norm_weight, down * 1e4, jnp.full(8, -1e30), eps=EPS)
    np.testing.assert_array_equal(got, np.zeros(4, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_score_one_half(path, dtype):
    x, *weights = inputs((3, 40), 24, dtype, scale=0.0)
    np.testing.assert_array_equal(path(x, *weights, eps=EPS), np.full(3, 0.5, np.float32))


@pytest.mark.parametrize(("dtype", "smallest"), [("float32", 1e-45), ("bfloat16", 9.2e-41), ("float16", 6e-8)])
def test_denormals(path, dtype, smallest):
    x, *weights = inputs((3, 40), 24)
    x = (jnp.sign(x) * smallest).astype(dtype)
    check_close(path(x, *weights, eps=EPS), expected(x, *weights))


def test_float16_denormals_are_not_flushed(path):
    # With an eps of this size they decide the norm, so that losing them would show.
    x, *weights = inputs((3, 40), 24, "float16", scale=3e-6)
    assert 0 < np.abs(np.asarray(x)).max() < 2**-14
    check_close(path(x, *weights, eps=1e-12), expected(x, *weights, eps=1e-12))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_state_spoils_its_own_row_only(path, dtype, bad):
    x, *weights = inputs((3, 40), 24, dtype)
    want = expected(x, *weights)
    got = np.asarray(path(x.at[1, 7].set(bad), *weights, eps=EPS))
    assert np.isnan(got[1])
    check_close(got[[0, 2]], want[[0, 2]])


def test_the_kernel_scores_a_row_alike_in_any_batch(kernel):
    x, *weights = inputs((9, 576), 128)
    together = kernel(x, *weights, eps=EPS)
    alone = [kernel(x[i], *weights, eps=EPS) for i in range(9)]
    np.testing.assert_array_equal(together, jnp.stack(alone))


def test_eps_reaches_the_kernel(path):
    args = inputs((3, 40), 24)
    check_close(path(*args, eps=0.5), expected(*args, eps=0.5))


def test_jit(path):
    args = inputs((1, 576), 128)
    check_close(jax.jit(functools.partial(path, eps=EPS))(*args), expected(*args))


def test_router_score_lowers_to_the_kernel_for_a_single_row(kernel):
    def text(rows):
        return jax.jit(functools.partial(router_score, eps=EPS)).lower(*inputs((rows, 16), 8)).as_text()

    assert "tide_router_score_v1" in text(1)
    assert "tide_router_score_v1" not in text(2)


@pytest.mark.parametrize("mapped", [(0, None, None, None), (0, 0, 0, 0), (None, None, 0, None), (0, None, 0, 0)])
def test_vmap(path, mapped):
    sets = [inputs((2, 20), 12, seed=seed) for seed in range(3)]
    args = [sets[0][i] if axis is None else jnp.stack([one[i] for one in sets]) for i, axis in enumerate(mapped)]
    got = jax.vmap(functools.partial(path, eps=EPS), in_axes=mapped)(*args)
    for k in range(3):
        one = [a if axis is None else a[k] for a, axis in zip(args, mapped, strict=True)]
        check_close(got[k], expected(*one))


def test_nested_vmap(path):
    x, norm_weight, down, up = inputs((2, 3, 20), 12)
    downs = jnp.stack([down, -down])
    one = functools.partial(path, eps=EPS)
    got = jax.vmap(jax.vmap(one, in_axes=(0, None, None, None)), in_axes=(0, None, 0, None))(x, norm_weight, downs, up)
    for k in range(2):
        check_close(got[k], expected(x[k], norm_weight, downs[k], up))


def test_while_loop(path):
    x, *weights = inputs((1, 48), 16)

    @jax.jit
    def run(x):
        def step(carry):
            i, x, scores = carry
            score = path(x, *weights, eps=EPS)
            return i + 1, x + score[:, None], scores.at[i].set(score[0])

        return jax.lax.while_loop(lambda carry: carry[0] < 4, step, (0, x, jnp.zeros(4)))[2]

    want = []
    x64 = np.asarray(x, np.float64)
    for _ in range(4):
        want.append(expected(x64, *weights)[0])
        x64 = x64 + want[-1]
    check_close(run(x), np.asarray(want))


def test_the_reference_has_gradients():
    x, norm_weight, down, up = inputs((4, 12), 6)

    def loss(down, up):
        return reference(x, norm_weight, down, up, eps=EPS).sum()

    step = 1e-6
    grad = jax.grad(loss, argnums=1)(down, up)
    up64 = np.asarray(up, np.float64)
    for j in range(6):
        nudge = step * np.eye(6)[j]
        high = expected(x, norm_weight, down, up64 + nudge).sum()
        low = expected(x, norm_weight, down, up64 - nudge).sum()
        np.testing.assert_allclose(grad[j], (high - low) / (2 * step), rtol=0, atol=1e-5)


WRONG_SHAPES = {
    "x": ((), (8,), (8, 4), (4,)),
    "norm_weight": ((2, 8), (7,), (8, 4), (4,)),
    "down": ((2, 8), (8,), (4, 8), (4,)),
    "up": ((2, 8), (8,), (8, 4), (5,)),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_a_wrong_shape_is_refused_by_name(name):
    args = [jnp.ones(shape) for shape in WRONG_SHAPES[name]]
    with pytest.raises(ValueError, match=rf"^`{name}` must have shape .*, got \["):
        _check(*args)
    # Here the annotations may speak first, because the tests check them at run time.
    with pytest.raises((ValueError, TypeError), match=name):
        router_score(*args, eps=EPS)


# Not x: without its last dimension the result has no shape, and no call can be made.
@pytest.mark.parametrize("name", ["norm_weight", "down", "up"])
def test_the_handler_refuses_a_wrong_shape_by_name(kernel, name):
    args = [jnp.ones(shape) for shape in WRONG_SHAPES[name]]
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"`{name}` must have shape .*, got \["):
        jax.block_until_ready(kernel(*args, eps=EPS))


def test_the_handler_refuses_an_empty_state(kernel):
    args = [jnp.ones(shape) for shape in ((2, 0), (0,), (0, 4), (4,))]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"`x` must have shape .* got \[2, 0\]"):
        jax.block_until_ready(kernel(*args, eps=EPS))


@pytest.mark.parametrize("position", range(4))
def test_a_wrong_dtype_is_refused_by_name(position):
    name = ("x", "norm_weight", "down", "up")[position]
    args = list(inputs((2, 8), 4))
    args[position] = args[position].astype(jnp.int32)
    with pytest.raises(TypeError, match=rf"^`{name}` must be float32"):
        _check(*args)
    with pytest.raises(TypeError, match=name):
        router_score(*args, eps=EPS)


def test_the_handler_refuses_a_wrong_dtype(kernel):
    x, *weights = inputs((2, 8), 4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="`x` must be float32, bfloat16 or float16"):
        jax.block_until_ready(kernel(x.astype(jnp.int32), *weights, eps=EPS))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Wrong buffer dtype"):
        jax.block_until_ready(kernel(x, weights[0], weights[1].astype(jnp.bfloat16), weights[2], eps=EPS))
