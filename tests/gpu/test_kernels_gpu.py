"""The kernels on an NVIDIA GPU: against the formulas in float64, plain Python, and the same model without them.

Skipped where there is no GPU. With TIDE_REQUIRE_KERNELS=1 a GPU without kernels is a failure.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.routes import DTYPES, KINDS, LAYERS, MASKS, check_route, inputs, norm_of, pairwise
from support.tiny import tiny_model, with_heads

import tide_jax as tide
from tide_jax.kernels import Gate, compact, exit_route, scatter_rows, status

pytestmark = pytest.mark.gpu

TARGET = "tide_exit_route_v1"
RMS = {"norm": norm_of("rms"), "layers": LAYERS, "use_kernels": True}
# A sum of thousands of float32 products, in whatever order, is not better than this.
WIDE = 1e-5
# XLA captures whole loops as CUDA graphs only if told to, and only by name; see benchmarks/gpu_check.py.
CAPTURED = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """The compiled kernels, on the device that JAX runs on by default."""
    if jax.default_backend() != "gpu":
        pytest.skip(f"JAX runs on {jax.default_backend()!r} here")
    if not status("cuda").available:
        if os.environ.get("TIDE_REQUIRE_KERNELS") == "1":
            pytest.fail(f"TIDE_REQUIRE_KERNELS=1, but {status('cuda').reason}")
        pytest.skip(status("cuda").reason)


SIZES = {
    "rows": (0, 1, 4, 5, 63, 64, 65, 256, 1025),
    "d": (8, 100, 577, 4096),
    "r": (1, 33, 128, 257),
    "dtype": DTYPES,
    "kind": KINDS,
    "mask": MASKS,
}
# What the float64 formula takes long for is left out.
COVER = [case for case in pairwise(**SIZES) if case["rows"] * case["d"] * case["r"] <= 4e8]


@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(map(str, case.values())))
def test_all_pairs_of_sizes(case):
    args = inputs(**case)
    route = jax.jit(functools.partial(exit_route, **RMS | {"norm": norm_of(case["kind"])}))(*args)
    check_route(route, *args, kind=case["kind"], atol=WIDE)


def test_a_row_does_not_depend_on_its_neighbours():
    route = jax.jit(functools.partial(exit_route, **RMS))
    for rows in (4, 64, 256):
        x, *rest = inputs(rows, 4096, 128, dtype="bfloat16")
        others = inputs(rows, 4096, 128, dtype="bfloat16", seed=1)[0].at[rows // 2].set(x[rows // 2])
        one, other = (np.asarray(route(states, *rest).score) for states in (x, others))
        assert one[rows // 2] == other[rows // 2]


def test_the_same_again_to_the_last_bit():
    args = inputs(256, 4096, 128, dtype="bfloat16")
    route = jax.jit(functools.partial(exit_route, **RMS))
    first = jax.device_get(route(*args))
    for _ in range(50):
        for one, other in zip(first, jax.device_get(route(*args)), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_state_spoils_its_own_row_only(dtype, bad):
    x, *weights, gate = inputs(3, 40, 24, dtype=dtype)
    gate = Gate(jnp.array([0.5, 0.0, -jnp.inf]), jnp.ones(3, bool), jnp.zeros(3, bool), gate.depth)
    sound, got = (exit_route(states, *weights, gate, **RMS) for states in (x, x.at[1, 7].set(bad)))
    assert np.isnan(got.score[1])
    assert got.exited.tolist()[1:] == [False, True]  # what is no number is above no threshold
    np.testing.assert_array_equal(np.asarray(got.score)[[0, 2]], np.asarray(sound.score)[[0, 2]])


@pytest.mark.parametrize("kind", KINDS)
def test_vmap(kind):
    sets = [inputs(5, 96, 40, kind=kind, seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *sets)
    got = jax.vmap(functools.partial(exit_route, **RMS | {"norm": norm_of(kind)}))(*stacked)
    for k, args in enumerate(sets):
        check_route(jax.tree.map(lambda part, k=k: part[k], got), *args, kind=kind)


@pytest.mark.parametrize("options", [None, CAPTURED], ids=["default", "captured"])
@pytest.mark.parametrize("rows", [1, 100])
def test_many_calls_in_one_loop(rows, options):
    """As XLA launches them in decoding: recorded as a CUDA graph, which is launched again with other buffers."""
    x, *weights, gate = inputs(rows, 576, 128, dtype="bfloat16", mask="all")

    def loop(use_kernels, x, weights, gate, count):
        def body(carry):
            done, x, total, gate, remaining = carry
            for _ in range(6):
                route = exit_route(x, *weights, gate, **RMS | {"use_kernels": use_kernels})
                x, total = -x, total + route.score
                # In half of the steps those that have left come back.
                gate = gate._replace(exited=route.exited & (done % 2 == 0), depth=route.depth + 1)
                remaining += route.remaining
            return done + 1, x, total, gate, remaining

        start = (jnp.int32(0), x, jnp.zeros(rows), gate, jnp.int32(0))
        return jax.lax.while_loop(lambda carry: carry[0] < count, body, start)[2:]

    counts = [jnp.int32(count) for count in (5, 1, 9)]
    lowered = jax.jit(functools.partial(loop, True)).lower(x, weights, gate, counts[0])
    try:
        program = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        pytest.skip(f"this version of XLA does not take the option: {error}")
    reference = jax.jit(functools.partial(loop, False))
    kept = []  # so that every run has results in other places
    for count in counts:
        got, want = (jax.device_get(run(x, weights, gate, count)) for run in (program, reference))
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-4)
        for one, other in zip(jax.tree.leaves(got[1:]), jax.tree.leaves(want[1:]), strict=True):
            np.testing.assert_array_equal(one, other)
        kept.append(program(x, weights, gate, count))


MOVES = pairwise(rows=(0, 1, 63, 64, 65, 1000), d=(1, 24, 577, 4096), bucket=(0, 1, 40, 1024), dtype=DTYPES, mask=MASKS)


@pytest.mark.parametrize("case", MOVES, ids=lambda case: "-".join(map(str, case.values())))
def test_there_and_back(case):
    rows, d, bucket, dtype = (case[name] for name in ("rows", "d", "bucket", "dtype"))
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, d)), dtype)
    keep = {
        "all": np.ones(rows, bool), "none": np.zeros(rows, bool), "alternating": np.arange(rows) % 2 == 0,
        "random": rng.random(rows) < 0.4,
    }[case["mask"]]  # fmt: skip
    kept = compact(x, jnp.asarray(keep), bucket=bucket, use_kernels=True)
    wanted = np.flatnonzero(keep)
    assert kept.count.item() == len(wanted)
    places = np.concatenate([wanted, np.full(max(bucket - len(wanted), 0), rows)])[:bucket].astype(int)
    assert kept.index.tolist() == places.tolist()
    states = np.asarray(x, np.float32)
    padded = np.concatenate([states, np.zeros((1, d), np.float32)])
    np.testing.assert_array_equal(np.asarray(kept.rows, np.float32), padded[places])
    # Back into another buffer, and in place.
    base = jnp.full_like(x, 7)
    want = np.full((rows, d), 7, np.float32)
    want[places[places < rows]] = states[places[places < rows]]
    put = functools.partial(scatter_rows, use_kernels=True)
    np.testing.assert_array_equal(np.asarray(put(base, kept.rows, kept.index), np.float32), want)
    np.testing.assert_array_equal(np.asarray(base, np.float32), np.full((rows, d), 7))
    given = jax.jit(put, donate_argnums=(0,))(base, kept.rows, kept.index)
    np.testing.assert_array_equal(np.asarray(given, np.float32), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_on_the_way(kind, dtype):
    x, scale, bias, *_ = inputs(130, 576, 1, dtype=dtype, kind=kind)
    keep = jnp.arange(130) % 3 == 0
    got, want = (
        np.asarray(compact(x, keep, scale, bias, bucket=48, norm=norm_of(kind), use_kernels=one).rows, np.float32)
        for one in (True, False)
    )
    # Rounded to 16 bits, the last of them may differ.
    np.testing.assert_allclose(got, want, rtol={"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}[dtype], atol=1e-5)


def test_the_handler_refuses_a_wrong_shape_by_name():
    """For programs that do not come through `exit_route`, such as exported ones."""
    x, scale, _, down, up, gate = inputs(2, 8, 4)
    results = [jax.ShapeDtypeStruct((2,), dtype) for dtype in (jnp.float32, jnp.bool_, jnp.int32)]
    call = jax.ffi.ffi_call(TARGET, [*results, jax.ShapeDtypeStruct((), jnp.int32)])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"`(up|down)` must have shape \["):
        jax.block_until_ready(
            call(x, scale, jnp.zeros(0), down, jnp.ones(5), *gate, **norm_of("rms").attributes, layers=np.int32(LAYERS))
        )


def test_a_model_decodes_the_same_with_and_without_kernels():
    model = with_heads(tiny_model(), 2, 4)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    one, other = (
        tide.generate(model, prompts, max_new_tokens=24, exits=tide.RouterExit(0.5, use_kernels=use_kernels), stop=[])
        for use_kernels in (True, False)
    )
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.exit_depths, other.exit_depths)
    assert len(set(np.asarray(one.exit_depths).flatten().tolist())) > 1  # some leave, some stay
