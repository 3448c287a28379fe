"""What the library does with the compiled extension, and without it."""

import json
import os
import subprocess
import sys

import jax
import jaxlib
import pytest

from tide_jax.kernels import KernelStatus, status

SCORES = """
import json, logging
import jax.numpy as jnp
import numpy as np
logging.basicConfig()
from tide_jax.kernels import router_score, status
rng = np.random.default_rng(0)
x, norm, down, up = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((1, 64), (64,), (64, 32), (32,)))
scores = [router_score(x * k, norm, down / 8, up, eps=0.1).item() for k in (0.01, 0.1, 1.0)]
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
    assert (state.jax, state.jaxlib) == (jax.__version__, jaxlib.__version__)
    assert state.available == bool(state.targets)
    assert state.reason


def test_the_extension_is_there_where_it_must_be():
    state = status()
    if os.environ.get("TIDE_REQUIRE_KERNELS") == "1":
        assert state.available, state.reason
    if state.available:
        assert "tide_router_score_v1" in state.targets
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
