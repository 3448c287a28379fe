"""Shared fixtures: the real SmolLM2, a tiny random model, and a persistent cache of compiled programs."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples"), str(ROOT)]

import jax  # noqa: E402
import pytest  # noqa: E402

# One run compiles the same few programs in many tests and processes; they are kept for its duration and the next.
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache")))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
# Programs run on the first, unless a test shares a model among them.
jax.config.update("jax_num_cpu_devices", 8)

ASSETS = Path(os.environ.get("TIDE_ASSETS", ROOT / ".assets"))


def _asset(name: str) -> Path:
    path = ASSETS / name
    if not path.exists():
        pytest.fail(f"{path} is missing: run `python examples/assets.py` (make test does)")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    return _asset("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def wikipedia() -> Path:
    """English Wikipedia paragraphs, one JSON object a line."""
    return _asset("wikipedia.jsonl")


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_gguf, tmp_path_factory) -> Path:
    """SmolLM2 converted, once per session."""
    import tide_jax as tide

    target = tmp_path_factory.mktemp("models") / "smollm2"
    tide.convert(smollm2_gguf, target)
    return target


@pytest.fixture(scope="session")
def smollm2(smollm2_dir):
    """SmolLM2 loaded in float32."""
    import tide_jax as tide

    return tide.load(smollm2_dir)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compiled programs are let go after each module: XLA maps every one of them into memory, in many pieces, and a
    process may have 65,530 such mappings."""
    yield
    from tide_jax.decode import engine

    engine._PROGRAMS.clear()
    jax.clear_caches()
    gc.collect()
