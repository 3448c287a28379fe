"""What the library does with the compiled extension, and without it."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from support.require import missing

from tide_jax.errors import InputError
from tide_jax.kernels import KernelStatus, scatter_rows, status

SCORES = """
import json, logging
import jax.numpy as jnp
import numpy as np
logging.basicConfig()
from tide_jax.kernels import Gate, Norm, exit_route, status
rng = np.random.default_rng(0)
x, norm, down, up = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((1, 64), (64,), (64, 32), (32,)))
gate = Gate(jnp.full(1, 0.5), jnp.ones(1, bool), jnp.zeros(1, bool), jnp.full(1, 9))
scores = [
    exit_route(x * k, norm, None, down / 8, up, gate, norm=Norm(eps=0.1), layers=3).score.item()
    for k in (0.01, 0.1, 1.0)
]
s = status()
print(json.dumps({"scores": scores, "available": s.available, "path": s.path, "reason": s.reason}))
"""

HIDDEN = """
import sys
sys.modules["tide_jax._xla_ffi"] = None
"""

# A file that is found like the extension and is no library at all.
BROKEN = """
import importlib.util, sys
from importlib.machinery import ExtensionFileLoader

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "tide_jax._xla_ffi":
            loader = ExtensionFileLoader(name, {path!r})
            return importlib.util.spec_from_file_location(name, {path!r}, loader=loader)

sys.meta_path.insert(0, Finder)
"""


def run(code, **env):
    clean = {k: v for k, v in os.environ.items() if k != "TIDE_KERNELS"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def report(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def default():
    """The scores of a process that found things as they are."""
    return report(run(SCORES))


def test_status_is_complete():
    state = status()
    assert isinstance(state, KernelStatus)
    assert state is status()
    assert state.versions.items() >= {"jax": jax.__version__, "jaxlib": jaxlib.__version__}.items()
    assert state.available == bool(state.targets)
    assert state.reason


def test_the_extension_is_there_where_it_must_be():
    state = status()
    if os.environ.get("TIDE_REQUIRE_KERNELS") == "1":
        assert state.available, state.reason
    if state.available:
        assert set(state.targets) == {"tide_compact_v1", "tide_exit_route_v1"}
        assert os.path.exists(state.path)


def test_importing_does_not_load_the_extension():
    code = "import sys, tide_jax.kernels; print('tide_jax._xla_ffi' in sys.modules)"
    assert run(code).stdout.strip() == "False"


def test_switched_off(default):
    done = run(SCORES, TIDE_KERNELS="off")
    off = report(done)
    assert not off["available"]
    assert "TIDE_KERNELS=off" in off["reason"]
    assert off["scores"] == pytest.approx(default["scores"], abs=1e-6)
    assert "kernels" not in done.stderr


def test_an_unknown_switch_is_refused():
    done = run(SCORES, TIDE_KERNELS="maybe")
    assert done.returncode != 0
    assert "TIDE_KERNELS must be 'auto' or 'off', got 'maybe'." in done.stderr


def test_not_built(default):
    done = run(HIDDEN + SCORES)
    hidden = report(done)
    assert not hidden["available"]
    assert hidden["path"] is None
    assert "not part of this install" in hidden["reason"]
    assert hidden["scores"] == pytest.approx(default["scores"], abs=1e-6)
    assert done.stderr.count("Native kernels are not available") == 1


def test_broken(default, tmp_path):
    path = tmp_path / "_xla_ffi.so"
    path.write_bytes(b"not a shared library")
    done = run(BROKEN.replace("{path!r}", repr(str(path))) + SCORES)
    broken = report(done)
    assert not broken["available"]
    assert broken["path"] == str(path)
    for fact in (str(path), "ImportError", f"jaxlib {jaxlib.__version__}", "install tide-jax again"):
        assert fact in broken["reason"]
    assert broken["scores"] == pytest.approx(default["scores"], abs=1e-6)
    assert done.stderr.count("RuntimeWarning: Native kernels are broken") == 1


REQUIRED = """
import json
import tide_jax as tide
from tide_jax.errors import InputError
from tide_jax.kernels import register_cuda
messages = []
for insist in (lambda: tide.RouterExit(0.5, use_kernels=True), register_cuda):
    try:
        insist()
        messages.append(None)
    except InputError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


def test_insisting_on_kernels_that_are_not_there_is_refused_at_once():
    required, cuda = json.loads(run(HIDDEN + "sys.modules['tide_jax._xla_ffi_cuda'] = None\n" + REQUIRED).stdout)
    assert required.startswith("use_kernels=True, and the kernels are not available: tide_jax._xla_ffi is not part of")
    for fact in (f"jax {jax.__version__}", f"jaxlib {jaxlib.__version__}"):
        assert fact in required
    assert cuda.startswith("The CUDA kernels cannot be registered: tide_jax._xla_ffi_cuda is not part of this install")
    assert "TIDE_CUDA=ON" in cuda

    required, cuda = json.loads(run(REQUIRED, TIDE_KERNELS="off").stdout)
    assert "switched off by TIDE_KERNELS=off" in required
    assert "switched off by TIDE_KERNELS=off" in cuda


def test_a_machine_without_a_gpu_never_loads_the_cuda_extension():
    code = SCORES + "import sys; print('tide_jax._xla_ffi_cuda' in sys.modules, status('cuda').available)"
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False False"


def test_status_of_cuda_says_what_is_missing():
    state = status("cuda")
    if not state.available:
        assert "register_cuda()" in state.reason
        assert state.targets == ()


def test_insisting_on_a_kernel_that_this_platform_has_none_of_is_refused():
    if not status().available:
        missing(status().reason, "TIDE_REQUIRE_KERNELS")
    with pytest.raises(InputError, match="tide_scatter_rows_v1 has no kernel for this platform"):
        scatter_rows(jnp.zeros((3, 2)), jnp.ones((1, 2)), jnp.zeros(1, jnp.int32), use_kernels=True)


SHARDED = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tide_jax.kernels import Gate, Norm, Route, exit_route
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "other"))
rng = np.random.default_rng(0)
x, scale, down, up = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 64), (64,), (64, 32), (32,)))
gate = Gate(jnp.linspace(0, 1, 8), jnp.ones(8, bool), jnp.zeros(8, bool), jnp.full(8, 9))

def local(x, scale, down, up, gate):
    route = exit_route(x, scale, None, down / 8, up, gate, norm=Norm(eps=0.1), layers=3)
    return route._replace(remaining=jax.lax.psum(route.remaining, ("data", "other")))

rows = P(("data", "other"))
weights = (P(), P(), P())
program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, *weights, rows),
                                out_specs=Route(rows, rows, rows, P())))
args = (x, scale, down, up, gate)
specs = (rows, *weights, Gate(rows, rows, rows, rows))
shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, P))
placed = jax.device_put(args, shardings)
text = program.lower(*placed).compile().as_text()
assert "tide_exit_route_v1" in text
assert "all-gather" not in text
whole = exit_route(x, scale, None, down / 8, up, gate, norm=Norm(eps=0.1), layers=3, use_kernels=False)
got = program(*placed)
np.testing.assert_allclose(got.score, whole.score, atol=2e-6)
np.testing.assert_array_equal(got.depth, whole.depth)
assert got.remaining == whole.remaining, (got.remaining, whole.remaining)

# Operands that vary over different axes.
def mixed(x, gate):
    return exit_route(x, scale, None, down / 8, up, gate, norm=Norm(eps=0.1), layers=3).depth

specs = (P("data"), P("other"))
depth = jax.jit(jax.shard_map(mixed, mesh=mesh, in_specs=specs, out_specs=P(("data", "other"))))(x, gate)
assert set(depth.tolist()) <= {3, 9}, depth
print("ok")
"""


X64 = """
import jax.numpy as jnp
from tide_jax.kernels import compact
kept = compact(jnp.ones((4, 3), jnp.float32), jnp.ones(4, bool), bucket=2)
assert kept.rows.dtype == jnp.float32 and kept.index.dtype == jnp.int32
print("ok")
"""


def test_wide_numbers_by_default_change_nothing():
    done = run(X64, JAX_ENABLE_X64="1")
    assert done.stdout == "ok\n", done.stderr


def test_under_shard_map_nothing_is_gathered():
    if not status().available:
        missing(status().reason, "TIDE_REQUIRE_KERNELS")
    done = run(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert done.stdout == "ok\n", done.stderr
