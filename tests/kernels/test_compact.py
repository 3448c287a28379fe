"""Rows gathered and put back, against plain Python, through both paths and under every transformation."""

import functools
import operator

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.require import missing
from support.routes import DTYPES, KINDS, norm_of

from tide_jax.kernels import compact, scatter_rows, status
from tide_jax.kernels.compact import _call as compact_kernel
from tide_jax.kernels.compact import reference as compact_reference
from tide_jax.kernels.scatter_rows import reference as scatter_reference


@pytest.fixture(params=["reference", "kernel", "public"])
def paths(request):
    """`compact` and `scatter_rows`, each way."""
    if request.param == "kernel" and not status().available:
        missing(status().reason, "TIDE_REQUIRE_KERNELS")
    return {
        "reference": (compact_reference, scatter_reference),
        "kernel": (functools.partial(_defaults, compact_kernel), scatter_rows),
        "public": (compact, scatter_rows),
    }[request.param]


def _defaults(kernel, x, keep, scale=None, bias=None, *, bucket, norm=None):
    return kernel(x, keep, scale, bias, bucket=bucket, norm=norm)


def check_compacted(kept, x, keep, bucket):
    """Order, places, zeros and count, in plain Python."""
    wanted = [i for i, one in enumerate(np.asarray(keep)) if one]
    assert kept.count.item() == len(wanted)
    assert kept.rows.dtype == x.dtype
    assert kept.rows.shape == (bucket, x.shape[1])
    places = wanted[:bucket] + [len(keep)] * (bucket - len(wanted))
    assert kept.index.tolist() == places
    padded = np.concatenate([np.asarray(x, np.float32), np.zeros((1, x.shape[1]), np.float32)])
    np.testing.assert_array_equal(np.asarray(kept.rows, np.float32), padded[places])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 300])
@pytest.mark.parametrize("bucket", [0, 1, 40, 310])
def test_there_and_back(paths, dtype, rows, bucket):
    gather, put = paths
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 24)), dtype)
    for keep in (np.ones(rows, bool), np.zeros(rows, bool), np.arange(rows) % 2 == 0, rng.random(rows) < 0.4):
        kept = gather(x, jnp.asarray(keep), bucket=bucket)
        check_compacted(kept, x, keep, bucket)
        base = jnp.zeros_like(x)
        back = np.asarray(put(base, kept.rows, kept.index), np.float32)
        there = np.isin(np.arange(rows), np.flatnonzero(keep)[:bucket])
        np.testing.assert_array_equal(back[there], np.asarray(x, np.float32)[there])
        assert not back[~there].any()


@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(keep=st.lists(st.booleans(), max_size=40), d=st.integers(1, 9), bucket=st.integers(0, 45))
def test_any_mask(paths, keep, d, bucket):
    x = jnp.asarray(np.arange(len(keep) * d, dtype=np.float32).reshape(len(keep), d))
    check_compacted(paths[0](x, jnp.asarray(keep, bool), bucket=bucket), x, keep, bucket)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_on_the_way(paths, kind, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(21, 40)), dtype)
    scale = jnp.asarray(rng.uniform(0.5, 1.5, size=40), jnp.float32)
    bias = jnp.asarray(rng.normal(size=40), jnp.float32) if kind == "layer" else None
    keep = jnp.asarray(rng.random(21) < 0.5)
    kept = paths[0](x, keep, scale, bias, bucket=16, norm=norm_of(kind))
    wide = np.asarray(x, np.float64)
    if kind == "layer":
        wide = wide - wide.mean(axis=1, keepdims=True)
    unit = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5)
    factor = np.asarray(scale, np.float64) + (kind == "rms_one_plus")
    want = unit * factor + (0 if bias is None else np.asarray(bias, np.float64))
    count = kept.count.item()
    assert 0 < count < 16
    tolerance = {"float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(
        np.asarray(kept.rows, np.float64)[:count], want[np.asarray(keep)], rtol=tolerance, atol=tolerance
    )
    assert not np.asarray(kept.rows, np.float32)[count:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_that_of_the_reference(paths, dtype):
    """Ties, overflow, denormals and NaN, through the norm that leaves numbers as they are."""
    values = [1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-12, 3e-8, 6.1e-5, 65519.0, 65520.0, 3e38, np.nan]
    x = jnp.ones((1, len(values)), dtype)  # unit, with eps 0
    scale = jnp.asarray(values, jnp.float32)
    norm = norm_of("rms", eps=0.0)
    got = paths[0](x, jnp.ones(1, bool), scale, bucket=1, norm=norm).rows[0]
    with np.errstate(over="ignore"):
        want = np.asarray(scale).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(got, np.float32), want.astype(np.float32))


def test_under_vmap(paths):
    gather, put = paths
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(3, 20, 6)), jnp.float32)
    keep = jnp.asarray(rng.random((3, 20)) < 0.5)
    kept = jax.vmap(functools.partial(gather, bucket=12))(x, keep)
    back = jax.vmap(put)(jnp.zeros_like(x), kept.rows, kept.index)
    for k in range(3):
        check_compacted(jax.tree.map(operator.itemgetter(k), kept), x[k], keep[k], 12)
        np.testing.assert_array_equal(back[k], np.where(np.asarray(keep[k])[:, None], x[k], 0))


def test_in_a_loop(paths):
    """Rows leave one after the other, as in decoding."""
    gather, put = paths
    x = jnp.arange(24.0).reshape(8, 3)

    @jax.jit
    def run(x):
        def body(i, x):
            kept = gather(x, jnp.arange(8) >= i, bucket=8)
            return put(x, kept.rows + 1, kept.index)

        return jax.lax.fori_loop(0, 5, body, x)

    want = np.arange(24.0).reshape(8, 3)
    for i in range(5):
        want[i:] += 1
    np.testing.assert_array_equal(run(x), want)


def test_rows_are_put_back_in_place():
    """A donated base is overwritten, not copied."""
    args = jnp.zeros((64, 32)), jnp.ones((4, 32)), jnp.arange(4, dtype=jnp.int32)
    text = jax.jit(scatter_rows, donate_argnums=0).lower(*args).compile().as_text()
    assert "input_output_alias" in text
    assert " copy(" not in text


def test_indices_outside_are_dropped(paths):
    base = jnp.zeros((3, 2))
    got = paths[1](base, jnp.ones((4, 2)), jnp.array([-1, 3, 1, 1000], jnp.int32))
    assert got[:, 0].tolist() == [0, 1, 0]


def test_what_does_not_fit_is_refused():
    x, keep = jnp.ones((3, 4)), jnp.ones(3, bool)
    refused = [
        ("`keep` must have shape", lambda: compact(x, jnp.ones(4, bool), bucket=2)),
        ("bucket is -1", lambda: compact(x, keep, bucket=-1)),
        ("without a `norm`", lambda: compact(x, keep, jnp.ones(4), bucket=2)),
        ("`scale`", lambda: compact(x, keep, jnp.ones(5), bucket=2, norm=norm_of("rms"))),
        ("`scale`", lambda: compact(x, keep, bucket=2, norm=norm_of("rms"))),
        ("`bias`", lambda: compact(x, keep, jnp.ones(4), bucket=2, norm=norm_of("layer"))),
        ("`rows`", lambda: scatter_rows(x, jnp.ones((2, 5)), jnp.zeros(2, jnp.int32))),
        ("`rows`", lambda: scatter_rows(x, jnp.ones((2, 4), jnp.bfloat16), jnp.zeros(2, jnp.int32))),
        ("`index`", lambda: scatter_rows(x, jnp.ones((2, 4)), jnp.zeros((2, 1), jnp.int32))),
    ]
    for message, call in refused:
        # The annotations may speak first, because the tests check them at run time.
        with pytest.raises((ValueError, TypeError), match=f"(?s){message}|{message.strip('`').split('`')[0]}"):
            call()
