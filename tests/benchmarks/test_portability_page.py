"""The committed page of portability is what its command would write."""

import json

import pytest

from benchmarks import portability
from benchmarks.roofline import CHIPS

PAGE = portability.ROOT / "docs" / "portability.md"


@pytest.fixture(scope="module")
def compiled():
    return json.loads(portability.RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_the_one_that_would_be_written(compiled):
    assert portability.page(compiled) == PAGE.read_text(encoding="utf-8"), (
        "run `python benchmarks/portability.py --write docs/portability.md`"
    )


def test_every_program_was_compiled_for_every_chip(compiled):
    assert set(compiled["programs"]) == set(CHIPS)
    for target, kinds in compiled["programs"].items():
        assert tuple(kinds) == portability.KINDS
        assert len({(seen["layers"], seen["jax"]) for seen in kinds.values()}) == 1
        calls = kinds["routers"]["kernel_calls"]
        assert calls == (len(kinds["routers"]["exit_points"]) if CHIPS[target].host_predicates else 0)


def test_drift_is_noticed(compiled, monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["portability.py", "--write", str(page)])
    assert portability.main() == 0
    monkeypatch.setattr("sys.argv", ["portability.py", "--check", str(page)])
    assert portability.main() == 0
    page.write_text(page.read_text(encoding="utf-8").replace("4.80", "4.81"), encoding="utf-8")
    assert portability.main() == 1
    assert "write it again" in capsys.readouterr().err
