"""The bodies of the CUDA kernels, run on a CPU: every thread a fiber, with real barriers and shuffles.

What this does not show is said in xla_ffi/testing/cuda_on_cpu/cuda_runtime.h.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.routes import DTYPES, EPS, KINDS, LAYERS, MASKS, check_route, inputs, pairwise

from tide_jax.kernels import Compacted, Route

SOURCES = Path(__file__).parents[2] / "xla_ffi"
# Each row is a sum of d products in float32, in 16 or more parts.
TOLERANCE = 1e-5


def compile_for_cpu(target, sources, *flags):
    """Compile sources that include CUDA kernels with the host's compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.fail("no C++ compiler; the tests of the kernels need one")
    includes = [f"-I{SOURCES / 'testing/cuda_on_cpu'}", f"-I{SOURCES / 'include'}", f"-I{SOURCES / 'src'}"]
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", *includes, *flags]
    done = subprocess.run([*command, *map(str, sources), "-o", str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The kernels as a shared library."""
    target = tmp_path_factory.mktemp("kernels") / "kernels_on_cpu.so"
    return ctypes.CDLL(compile_for_cpu(target, [SOURCES / "testing/kernels_on_cpu.cc"], "-O2", "-shared", "-fPIC"))


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def exit_route(library, x, scale, bias, down, up, gate, *, kind="rms", groups=1):
    rows, d, r = gate.depth.size // groups, x.shape[-1], up.shape[-1]
    operands = [np.ascontiguousarray(part) for part in (x, scale, np.zeros(0, np.float32) if bias is None else bias)]
    operands += [np.ascontiguousarray(part) for part in (down, up, *gate)]
    shape = gate.depth.shape
    remaining = np.full(groups, -1, np.int32)
    results = [np.full(shape, np.nan, np.float32), np.zeros(shape, bool), np.zeros(shape, np.int32), remaining]
    status = library.tide_exit_route(
        *map(pointer, (*operands, *results)), DTYPES.index(str(x.dtype)), *map(ctypes.c_int64, (groups, rows, d, r)),
        KINDS.index(kind), ctypes.c_float(EPS), LAYERS,
    )  # fmt: skip
    assert status == 0
    return Route(*results[:3], remaining if groups > 1 else remaining[0])


SIZES = {
    "rows": (0, 1, 4, 5, 31, 32, 33, 64, 65, 255, 256, 257, 1025, 4097),
    "d": (8, 100, 576, 768, 2048, 4096),
    "r": (1, 33, 64, 128, 257),
    "dtype": DTYPES,
    "kind": KINDS,
    "mask": MASKS,
    "major": (8, 9),
}
COVER = [case for case in pairwise(**SIZES) if case["rows"] * case["d"] * case["r"] <= 2e8]


@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(map(str, case.values())))
def test_all_pairs_of_sizes(library, case):
    case = dict(case)
    library.tide_device(case.pop("major"), 0, 0)
    args = inputs(**case)
    check_route(exit_route(library, *args, kind=case["kind"]), *args, kind=case["kind"], atol=TOLERANCE)


def test_the_cover_leaves_out_no_value():
    for name, values in SIZES.items():
        assert {case[name] for case in COVER} == set(values), name


@pytest.mark.parametrize("major", [8, 9])
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_the_order_of_threads_changes_nothing(library, rows, major):
    args = inputs(rows, 600, 70, kind="layer")
    seen = []
    for order, seed in ((0, 0), (1, 0), (2, 1), (2, 2)):
        library.tide_device(major, order, seed)
        seen.append(exit_route(library, *args, kind="layer"))
    for one in seen[1:]:
        for a, b in zip(seen[0], one, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("rows", "launches"), [(0, 0), (1, 1), (4, 1), (256, 1)])
def test_one_launch(library, rows, launches):
    library.tide_device(9, 0, 0)
    exit_route(library, *inputs(rows, 64, 32))
    assert library.tide_device(9, 0, 0) == launches


def test_a_row_is_routed_alike_beside_others(library):
    library.tide_device(9, 0, 0)
    x, *weights, gate = inputs(6, 300, 128)
    together = exit_route(library, x, *weights, gate)
    x, gate = x.at[2:].set(jnp.nan), gate._replace(live=gate.live.at[2:].set(False))
    other = exit_route(library, x, *weights, gate)
    np.testing.assert_array_equal(together.score[:2], other.score[:2])
    assert np.isnan(other.score[2:]).all()


def test_rows_that_no_vector_access_may_touch(library):
    """16-bit rows of odd width start anywhere."""
    library.tide_device(9, 0, 0)
    for dtype in DTYPES:
        args = inputs(3, 577, 40, dtype=dtype)
        check_route(exit_route(library, *args), *args, atol=TOLERANCE)


def test_groups_are_those_of_a_mapped_call(library):
    library.tide_device(9, 0, 0)
    sets = [inputs(5, 48, 20, kind="layer", seed=seed) for seed in range(3)]
    stacked = [np.stack([np.asarray(one[i]) for one in sets]) for i in range(5)]
    gate = type(sets[0][5])(*(np.stack([np.asarray(one[5][i]) for one in sets]) for i in range(4)))
    got = exit_route(library, *stacked, gate, kind="layer", groups=3)
    for k, one in enumerate(sets):
        check_route(Route(*(part[k] for part in got)), *one, kind="layer", atol=TOLERANCE)


def compact(library, x, keep, bucket, *, order=0):
    library.tide_device(9, order, 0)
    x, keep = np.ascontiguousarray(x), np.ascontiguousarray(keep)
    empty = np.zeros(0, np.float32)
    rows = np.full((bucket, x.shape[1]), 7, x.dtype)
    index, count = np.full(bucket, -1, np.int32), np.full(1, -1, np.int32)
    status = library.tide_compact(
        *map(pointer, (x, keep, empty, empty, rows, index, count)), DTYPES.index(str(x.dtype)),
        *map(ctypes.c_int64, (1, *x.shape, bucket)), -1, ctypes.c_float(0),
    )  # fmt: skip
    assert status == 0
    return Compacted(rows, index, count[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d", "bucket"), [(0, 8, 3), (1, 1, 1), (64, 24, 64), (65, 7, 20), (700, 40, 900)])
def test_rows_are_gathered_and_put_back(library, dtype, rows, d, bucket):
    rng = np.random.default_rng(rows)
    x = np.asarray(jnp.asarray(rng.normal(size=(rows, d)), dtype))
    for keep in (np.ones(rows, bool), np.zeros(rows, bool), np.arange(rows) % 2 == 1, rng.random(rows) < 0.3):
        wanted = np.flatnonzero(keep)
        for order in (0, 1):
            kept = compact(library, x, keep, bucket, order=order)
            assert kept.count == len(wanted)
            filled = min(bucket, len(wanted))
            np.testing.assert_array_equal(kept.index, [*wanted[:bucket], *[rows] * (bucket - filled)])
            np.testing.assert_array_equal(kept.rows[:filled], x[wanted[:bucket]])
            assert not kept.rows[filled:].astype(np.float32).any()
        base = np.zeros_like(x)
        out = np.empty_like(x)
        sizes = map(ctypes.c_int64, (1, rows, d * x.dtype.itemsize, bucket))
        assert library.tide_scatter_rows(*map(pointer, (base, kept.rows, kept.index, out)), *sizes) == 0
        there = np.isin(np.arange(rows), wanted[:bucket])
        np.testing.assert_array_equal(out, np.where(there[:, None], x, base))


SANITIZERS = {
    "address and undefined behaviour": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


def build_cover(directory, *flags):
    """The small cover of all kernels as a program, with the CPU kernels of every instruction set."""
    objects = []
    sets = {"baseline": ("4",), "avx2": ("8", "-mavx2", "-mfma")}
    sets["avx512"] = ("16", "-mavx512f", "-mavx512vl", "-mavx2", "-mfma")
    x86 = os.uname().machine == "x86_64"
    for name, (floats, *options) in sets.items():
        if x86 or name == "baseline":
            defines = (f"-DTIDE_ISA=isa_{name}", f"-DTIDE_VECTOR_FLOATS={floats}", "-fno-math-errno", "-c")
            source = [SOURCES / "src/router_cpu_isa.cc"]
            objects.append(compile_for_cpu(directory / f"{name}.o", source, *defines, *options, *flags))
    sources = [SOURCES / "testing/sanitize.cc", SOURCES / "src/router_cpu.cc", *objects]
    return compile_for_cpu(directory / "cover", sources, *(("-DTIDE_X86",) if x86 else ()), "-pthread", *flags)


@pytest.mark.slow
@pytest.mark.parametrize("name", SANITIZERS)
def test_sanitizers_find_nothing(tmp_path, name):
    """Out-of-bounds accesses, undefined behaviour, and races between threads that no barrier orders."""
    program = build_cover(tmp_path, "-g", "-O1", *SANITIZERS[name])
    # ThreadSanitizer wants addresses where it expects them.
    command = ["setarch", "-R", str(program)] if name == "thread" else [str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert done.stdout.endswith("all agree\n")


BROKEN_KERNEL = """
#include "tide/device.cuh"

void Kernel(int* global, int what) {
  TIDE_SHARED_MEMORY(shared);
  const int thread = static_cast<int>(threadIdx.x);
  shared[thread] = static_cast<float>(thread);
  if (what == 1) __syncthreads();
  const float other = shared[(thread + 1) % 64];  // what == 0: a race
  if (what == 2) shared[64 + thread] = other;
  if (what == 3 && thread == 5) return;
  const float sum = tide::SumOver<32>(other);
  global[thread] = static_cast<int>(sum);
}

int main(int, char** arguments) {
  int* global = new int[64];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(64);
  config.dynamicSmemBytes = 64 * sizeof(float);
  const cudaError_t error = cudaLaunchKernelEx(&config, Kernel, global, arguments[1][0] - '0');
  delete[] global;
  return error;
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "sanitizer", "finds"),
    [
        (0, "thread", "data race"),
        (1, "thread", None),
        (2, "address and undefined behaviour", "heap-buffer-overflow"),
        (3, "address and undefined behaviour", "divergent barrier"),
    ],
)
def test_what_is_broken_is_found(tmp_path, what, sanitizer, finds):
    """The emulator and the sanitizers on a kernel with one thing wrong at a time."""
    source = tmp_path / "broken.cc"
    source.write_text(BROKEN_KERNEL)
    program = compile_for_cpu(tmp_path / "broken", [source], "-g", "-O1", *SANITIZERS[sanitizer])
    command = ["setarch", "-R", str(program)] if sanitizer == "thread" else [str(program)]
    done = subprocess.run([*command, str(what)], capture_output=True, text=True, timeout=60)
    if finds is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert finds in done.stderr
