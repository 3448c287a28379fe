"""The exit route against the formula in float64, through both paths and under every transformation."""

import dataclasses
import functools
import operator

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.require import missing
from support.routes import DTYPES, KINDS, LAYERS, MASKS, check_route, expected_scores, inputs, norm_of, pairwise

from tide_jax.kernels import Gate, Norm, decide, exit_route, status
from tide_jax.kernels.exit_route import _call, _check, reference

TARGET = "tide_exit_route_v1"
RMS = {"norm": norm_of("rms"), "layers": LAYERS}
# A sum of thousands of float32 products, in whatever order, is not better than this.
WIDE = 1e-5


@pytest.fixture(scope="module")
def kernel():
    """The compiled kernel. Where the extension must be there, its absence is a failure and not a skip."""
    if not status().available:
        missing(status().reason, "TIDE_REQUIRE_KERNELS")
    return _call


@pytest.fixture(params=["reference", "kernel", "exit_route"])
def path(request):
    """Each way to compute the route."""
    if request.param == "kernel":
        return request.getfixturevalue("kernel")
    return {"reference": reference, "exit_route": exit_route}[request.param]


SIZES = {
    "rows": (0, 1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4097),
    "d": (8, 100, 576, 768, 2048, 4096),
    "r": (1, 33, 64, 128, 257),
    "dtype": DTYPES,
    "kind": KINDS,
    "mask": MASKS,
}
# What the float64 formula takes long for is left out: the largest sizes meet each other in no single case.
COVER = [case for case in pairwise(**SIZES) if case["rows"] * case["d"] * case["r"] <= 4e8]


@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(map(str, case.values())))
def test_all_pairs_of_sizes(kernel, case):
    args = inputs(**case)
    static = {"norm": norm_of(case["kind"]), "layers": LAYERS}
    check_route(kernel(*args, **static), *args, kind=case["kind"], atol=WIDE)
    check_route(jax.jit(functools.partial(reference, **static))(*args), *args, kind=case["kind"], atol=WIDE)


def test_the_cover_leaves_out_no_value():
    for name, values in SIZES.items():
        assert {case[name] for case in COVER} == set(values), name


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    rows=st.integers(0, 20),
    d=st.integers(1, 70),
    r=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size(kernel, rows, d, r, dtype, kind, seed):
    args = inputs(rows, d, r, dtype=dtype, kind=kind, seed=seed)
    # A LayerNorm of a single feature divides nothing by nothing: eps decides.
    check_route(kernel(*args, norm=norm_of(kind), layers=LAYERS), *args, kind=kind)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2, 0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_are_the_batch(path, shape, dtype):
    args = inputs(shape, 96, 40, dtype=dtype)
    route = path(*args, **RMS)
    check_route(route, *args)
    assert route.score.shape == route.exited.shape == route.depth.shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_do_not_change_the_score(path, dtype):
    x, *rest = inputs(5, 64, 32, dtype=dtype)
    large = jnp.clip(x.astype(jnp.float32) * 1e4, -6e4, 6e4).astype(dtype)  # float16 ends at 65504
    check_route(path(large, *rest, **RMS), large, *rest)


def test_scores_saturate_without_nan(path):
    x, scale, bias, down, up, gate = inputs(4, 16, 8)
    got = path(x, scale, bias, down * 1e4, jnp.full(8, 1e30), gate, **RMS)
    np.testing.assert_array_equal(got.score, np.ones(4, np.float32))
    got = path(x, scale, bias, down * 1e4, jnp.full(8, -1e30), gate, **RMS)
    np.testing.assert_array_equal(got.score, np.zeros(4, np.float32))


def test_hidden_values_of_every_size(path):
    """From the flat to the steep part of SiLU and sigmoid, and beyond what exp can hold."""
    x, scale, bias, down, up, gate = inputs(32, 8, 5)
    for size in (1e-3, 1.0, 30.0, 87.0, 89.0, 1e3):
        args = x, scale, bias, down * size, up / max(size, 1), gate
        check_route(path(*args, **RMS), *args, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_score_one_half(path, dtype):
    args = inputs(3, 40, 24, dtype=dtype, scale=0.0)
    np.testing.assert_array_equal(path(*args, **RMS).score, np.full(3, 0.5, np.float32))


@pytest.mark.parametrize(("dtype", "smallest"), [("float32", 1e-45), ("bfloat16", 9.2e-41), ("float16", 6e-8)])
def test_denormals(path, dtype, smallest):
    x, *rest = inputs(3, 40, 24)
    x = (jnp.sign(x) * smallest).astype(dtype)
    check_route(path(x, *rest, **RMS), x, *rest)


def test_float16_denormals_are_not_flushed(path):
    # With an eps of this size they decide the norm, so that losing them would show.
    args = inputs(3, 40, 24, dtype="float16", scale=3e-6)
    assert 0 < np.abs(np.asarray(args[0])).max() < 2**-14
    check_route(path(*args, norm=Norm(eps=1e-12), layers=LAYERS), *args, eps=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_state_spoils_its_own_row_only(path, dtype, bad):
    x, *weights, gate = inputs(3, 40, 24, dtype=dtype)
    want = expected_scores(x, *weights)
    gate = Gate(jnp.array([0.5, 0.0, 0.5]), jnp.ones(3, bool), jnp.zeros(3, bool), gate.depth)
    got = path(x.at[1, 7].set(bad), *weights, gate, **RMS)
    assert np.isnan(got.score[1])
    assert not got.exited[1]  # what is no number is above no threshold
    np.testing.assert_allclose(np.asarray(got.score)[[0, 2]], want[[0, 2]], rtol=0, atol=2e-6)


def test_minus_infinity_lets_every_row_go(path):
    x, *weights, gate = inputs(3, 40, 24)
    gate = Gate(jnp.full(3, -jnp.inf), jnp.array([True, True, False]), jnp.zeros(3, bool), gate.depth)
    got = path(x.at[1].set(jnp.nan), *weights, gate, **RMS)
    assert got.exited.tolist() == [True, True, False]
    assert got.remaining == 0


def test_a_threshold_equal_to_the_score_keeps_the_row(path):
    args = inputs(2, 40, 24, scale=0.0)
    gate = Gate(jnp.array([0.5, 0.4999]), jnp.ones(2, bool), jnp.zeros(2, bool), jnp.full(2, 30))
    assert path(*args[:-1], gate, **RMS).exited.tolist() == [False, True]


def test_the_kernel_routes_a_row_alike_in_any_batch(kernel):
    x, *weights, gate = inputs(37, 576, 128)
    together = kernel(x, *weights, gate, **RMS)
    alone = [kernel(x[i : i + 1], *weights, Gate(*(part[i : i + 1] for part in gate)), **RMS) for i in range(37)]
    np.testing.assert_array_equal(together.score, jnp.concatenate([one.score for one in alone]))
    assert together.remaining == sum(one.remaining for one in alone)


def test_eps_reaches_the_kernel(path):
    args = inputs(3, 40, 24)
    check_route(path(*args, norm=Norm(eps=0.5), layers=LAYERS), *args, eps=0.5)


def test_jit(path):
    args = inputs(1, 576, 128)
    check_route(jax.jit(functools.partial(path, **RMS))(*args), *args)


def test_twice_in_one_program(path):
    """The second exit point takes up what the first left."""
    x, *weights, gate = inputs(9, 40, 24, mask="all")

    @jax.jit
    def run(x, weights, gate):
        first = path(x, *weights, gate, **RMS)
        later = gate._replace(exited=first.exited, depth=first.depth, threshold=gate.threshold - 0.1)
        return later, path(x, *weights, later, **RMS)

    later, second = run(x, weights, gate)
    check_route(second, x, *weights, later)


def lowered(rows, **options):
    static = {**RMS, **options}
    return jax.jit(functools.partial(exit_route, **static)).lower(*inputs(rows, 16, 8)).as_text()


def test_the_kernel_is_used_for_few_rows_or_as_told(kernel):
    assert TARGET in lowered(1)
    assert TARGET in lowered(16)
    assert TARGET not in lowered(17)
    assert TARGET in lowered(17, use_kernels=True)
    assert TARGET not in lowered(1, use_kernels=False)


@pytest.mark.parametrize("mapped", [(0, None, None, None), (0, 0, 0, 0), (None, None, 0, None), (0, None, 0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_vmap(path, mapped, kind):
    """x, scale, down, up mapped or not; one gate for all, or one each."""
    sets = [inputs(2, 20, 12, kind=kind, seed=seed) for seed in range(3)]
    axes = {0: mapped[0], 1: mapped[1], 3: mapped[2], 4: mapped[3]}
    axes = [axes.get(i) for i in range(5)] + [0 if mapped[0] == 0 else None]
    stack = lambda *parts: jnp.stack(parts)  # noqa: E731
    args = [
        sets[0][i] if axis is None else jax.tree.map(stack, *(one[i] for one in sets)) for i, axis in enumerate(axes)
    ]
    got = jax.vmap(functools.partial(path, norm=norm_of(kind), layers=LAYERS), in_axes=tuple(axes))(*args)
    for k in range(3):
        pick = operator.itemgetter(k)
        one = [a if axis is None else jax.tree.map(pick, a) for a, axis in zip(args, axes, strict=True)]
        check_route(jax.tree.map(pick, got), *one, kind=kind)


def test_nested_vmap(path):
    x, scale, bias, down, up, gate = inputs((2, 3), 20, 12)
    downs = jnp.stack([down, -down])
    one = lambda x, down, gate: path(x, scale, bias, down, up, gate, **RMS)  # noqa: E731
    got = jax.vmap(jax.vmap(one, in_axes=(0, None, 0)), in_axes=(0, 0, 0))(x, downs, gate)
    for k in range(2):
        for j in range(3):
            pick = operator.itemgetter((k, j))
            check_route(jax.tree.map(pick, got), x[k, j], scale, bias, downs[k], up, jax.tree.map(pick, gate))


def test_while_loop(path):
    x, *weights, gate = inputs(1, 48, 16)

    @jax.jit
    def run(x):
        def step(carry):
            i, x, scores = carry
            score = path(x, *weights, gate, **RMS).score
            return i + 1, x + score[:, None], scores.at[i].set(score[0])

        return jax.lax.while_loop(lambda carry: carry[0] < 4, step, (0, x, jnp.zeros(4)))[2]

    want = []
    x64 = np.asarray(x, np.float64)
    for _ in range(4):
        want.append(expected_scores(x64, *weights)[0])
        x64 = x64 + want[-1]
    np.testing.assert_allclose(run(x), want, rtol=0, atol=4e-6)


def test_the_reference_has_gradients():
    x, scale, bias, down, up, gate = inputs(4, 12, 6)

    def loss(up):
        return reference(x, scale, bias, down, up, gate, **RMS).score.sum()

    step = 1e-6
    grad, up64 = jax.grad(loss)(up), np.asarray(up, np.float64)
    for j in range(6):
        nudge = step * np.eye(6)[j]
        high, low = (expected_scores(x, scale, bias, down, up64 + sign * nudge).sum() for sign in (1, -1))
        np.testing.assert_allclose(grad[j], (high - low) / (2 * step), rtol=0, atol=1e-5)


def test_decide_is_the_decision_alone():
    *_, gate = inputs(9, 4, 3)
    scores = jnp.linspace(0, 1, 9)
    route = decide(scores, gate, layers=LAYERS)
    np.testing.assert_array_equal(route.score, scores)
    leaves = gate.live & ~gate.exited & ((scores > gate.threshold) | jnp.isneginf(gate.threshold))
    np.testing.assert_array_equal(route.exited, gate.exited | leaves)
    assert route.remaining == (gate.live & ~route.exited).sum()


def broken():
    """Arguments of which one does not fit, by the name that the message must say."""
    x, scale, _, down, up, gate = inputs(2, 8, 4)
    args = {"x": x, "scale": scale, "bias": None, "down": down, "up": up, "gate": gate}
    yield "x", args | {"x": jnp.ones((2, 0))}
    yield "scale", args | {"scale": jnp.ones(7)}
    yield "bias", args | {"bias": jnp.ones(8)}
    yield "down", args | {"down": jnp.ones((4, 8))}
    yield "up", args | {"up": jnp.ones(5)}
    yield "threshold", args | {"gate": gate._replace(threshold=jnp.ones(3))}
    yield "live", args | {"gate": gate._replace(live=jnp.ones(3, bool))}
    yield "exited", args | {"gate": gate._replace(exited=jnp.ones((2, 2), bool))}
    yield "depth", args | {"gate": gate._replace(depth=jnp.ones(1, jnp.int32))}


@pytest.mark.parametrize(("name", "args"), list(broken()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_shape_is_refused_by_name(name, args):
    with pytest.raises(ValueError, match=rf"^`{name}` "):
        _check(**args, norm=norm_of("rms"))


@pytest.mark.parametrize("name", ["x", "scale", "down", "up", "threshold", "live", "depth"])
def test_a_wrong_dtype_is_refused_by_name(name):
    x, scale, bias, down, up, gate = inputs(2, 8, 4)
    args = {"x": x, "scale": scale, "bias": bias, "down": down, "up": up, "gate": gate}
    if name in args:
        args[name] = args[name].astype(jnp.int32)
    else:
        args["gate"] = gate._replace(**{name: getattr(gate, name).astype(jnp.float16)})
    with pytest.raises(TypeError, match=rf"^`{name}` must be "):
        _check(**args, norm=norm_of("rms"))


@pytest.mark.parametrize(("kind", "eps"), [("batch", 1e-5), ("rms", -1.0), ("rms", float("nan"))])
def test_an_unknown_norm_is_refused(kind, eps):
    with pytest.raises(ValueError, match="norm (kind|eps)"):
        Norm(kind=kind, eps=eps)


# Not x, whose shape says what the results are.
@pytest.mark.parametrize(
    ("name", "args"),
    [case for case in broken() if case[0] != "x"],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_handler_refuses_a_wrong_shape_by_name(kernel, name, args):
    """For programs that do not come through `exit_route`, such as exported ones."""
    rows = (2,)
    results = [jax.ShapeDtypeStruct(rows, dtype) for dtype in (jnp.float32, jnp.bool_, jnp.int32)]
    call = jax.ffi.ffi_call(TARGET, [*results, jax.ShapeDtypeStruct((), jnp.int32)])
    bias = jnp.zeros(0) if args["bias"] is None else args["bias"]
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"`{name}` must have shape \[.*\], got \["):
        jax.block_until_ready(
            call(
                args["x"], args["scale"], bias, args["down"], args["up"], *args["gate"],
                **norm_of("rms").attributes, layers=np.int32(LAYERS),
            )
        )  # fmt: skip


def test_the_handler_refuses_what_it_does_not_know(kernel):
    x, *rest = inputs(2, 8, 4)
    refused = pytest.raises(jax.errors.JaxRuntimeError, match="`x` must be float32, bfloat16 or float16")
    with refused:
        jax.block_until_ready(kernel(x.astype(jnp.int32), *rest, **RMS))
    with pytest.raises(jax.errors.JaxRuntimeError, match="d, the last dimension of `x`, must be 1 or more, got 0"):
        empty = (jnp.ones((2, 0)), jnp.ones(0), None, jnp.ones((0, 4)), jnp.ones(4), rest[-1])
        jax.block_until_ready(kernel(*empty, **RMS))
    unknown = dataclasses.replace(norm_of("rms"))
    object.__setattr__(unknown, "kind", "layer")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"`bias` must have shape \[8\], got \[0\]"):
        jax.block_until_ready(kernel(x, *rest, norm=unknown, layers=LAYERS))
