"""The exit route by its formula in float64, and inputs for it; sizes that cover all pairs of values."""

import itertools

import jax.numpy as jnp
import numpy as np

from tide_jax.kernels import Gate, Norm

EPS = 1e-5
LAYERS = 7
KINDS = ("rms", "rms_one_plus", "layer")
DTYPES = ("float32", "bfloat16", "float16")
MASKS = ("all", "none", "alternating", "random")


def inputs(rows, d, r, *, dtype="float32", kind="rms", mask="random", scale=1.0, seed=0):
    """x, scale, bias, down, up, gate: what `exit_route` takes; rows may be a tuple of leading dimensions."""
    rng = np.random.default_rng(seed)
    rows = rows if isinstance(rows, tuple) else (rows,)
    count = int(np.prod(rows))
    x = jnp.asarray(rng.normal(size=(*rows, d)) * scale, dtype)
    weight = jnp.asarray(rng.uniform(0.5, 1.5, size=d), jnp.float32)
    bias = jnp.asarray(rng.normal(size=d), jnp.float32) if kind == "layer" else None
    down = jnp.asarray(rng.normal(size=(d, r)) / np.sqrt(d), jnp.float32)
    up = jnp.asarray(rng.normal(size=r) / np.sqrt(r) * 2, jnp.float32)
    live = {
        "all": np.ones(count, bool),
        "none": np.zeros(count, bool),
        "alternating": np.arange(count) % 2 == 0,
        "random": rng.random(count) < 0.7,
    }[mask]
    exited = np.zeros(count, bool) if mask == "all" else rng.random(count) < 0.3
    threshold = rng.choice([-np.inf, -1.0, 0.3, 0.5, 0.7, 2.0], size=count)
    parts = (threshold.astype(np.float32), live, exited, rng.integers(8, 40, size=count, dtype=np.int32))
    return x, weight, bias, down, up, Gate(*(jnp.asarray(part.reshape(rows)) for part in parts))


def norm_of(kind, eps=EPS):
    return Norm(kind=kind, eps=eps)


def expected_scores(x, scale, bias, down, up, *, kind="rms", eps=EPS):
    """The score in float64."""
    x, scale, down, up = (np.asarray(part).astype(np.float64) for part in (x, scale, down, up))
    if kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    unit = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    normed = unit * (1 + scale if kind == "rms_one_plus" else scale)
    if kind == "layer":
        normed = normed + np.asarray(bias, np.float64)
    hidden = normed @ down
    with np.errstate(over="ignore"):
        hidden = hidden / (1 + np.exp(-hidden))
        return 1 / (1 + np.exp(-(hidden @ up)))


def check_route(route, x, scale, bias, down, up, gate, *, kind="rms", eps=EPS, atol=2e-6):
    """Scores near those in float64; decisions exactly those of the scores, row by row, in plain Python."""
    scores = np.asarray(route.score)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(
        scores, expected_scores(x, scale, bias, down, up, kind=kind, eps=eps), rtol=0, atol=atol, equal_nan=True
    )
    assert np.asarray(route.exited).dtype == bool
    assert np.asarray(route.depth).dtype == np.int32
    remaining = 0
    flat = [np.asarray(part).reshape(-1) for part in (scores, *gate, route.exited, route.depth)]
    for score, threshold, live, exited, depth, now_exited, now_depth in zip(*flat, strict=True):
        leaves = live and not exited and (threshold == -np.inf or score > threshold)
        assert now_exited == (exited or leaves)
        assert now_depth == (LAYERS if leaves else depth)
        remaining += bool(live and not exited and not leaves)
    assert np.asarray(route.remaining).item() == remaining


def pairwise(**values):
    """Combinations in which any two values of different parameters meet at least once; deterministic."""
    names = list(values)
    wanted = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(values[a], values[b])
    }
    rng = np.random.default_rng(0)
    cases = []
    while wanted:
        best, covers = None, set()
        seed = dict(sorted(min(wanted, key=lambda pair: sorted(map(str, pair)))))
        for _ in range(30):
            case = {name: seed.get(name, values[name][rng.integers(len(values[name]))]) for name in names}
            met = {frozenset(pair) for pair in itertools.combinations(case.items(), 2)} & wanted
            if len(met) > len(covers):
                best, covers = case, met
        cases.append(best)
        wanted -= covers
    return cases
