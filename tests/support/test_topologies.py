"""What is said of chips that are not there, and what happens when their compilers are not there either."""

import pytest
from support import topologies

from benchmarks.roofline import CHIPS


def test_every_chip_of_the_table_is_a_target():
    assert set(topologies.TARGETS) == set(CHIPS)
    described = topologies.TARGETS["a100"].options["target_config"]
    assert "memory_bandwidth: 2039000000000\n" in described
    assert "cuda_compute_capability { major: 8 }" in described


def test_a_missing_compiler_skips_or_fails_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TIDE_REQUIRE_AOT", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no compiler for v6e: libtpu is not installed \(libtpu\)"):
        topologies.require("v6e")
    monkeypatch.setenv("TIDE_REQUIRE_AOT", "1")
    with pytest.raises(pytest.fail.Exception, match="no compiler for a100: jax_plugins.xla_cuda13 is not installed"):
        topologies.require("a100")
    topologies.require("cpu")
