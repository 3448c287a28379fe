"""The README's example runs as it stands."""

import json
import re
from pathlib import Path

import jax
import pytest

import tide_jax as tide
from tide_jax.exits import ExitHead, ExitHeads, Router
from tide_jax.exits.heads import FILE_NAME, save_heads

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_example_runs_on_a_calibrated_model(smollm2_dir, tmp_path, monkeypatch, capsys):
    (tmp_path / "demo_out").mkdir()
    directory = tmp_path / "demo_out" / "smollm2"
    directory.mkdir()
    for entry in smollm2_dir.iterdir():
        (directory / entry.name).symlink_to(entry)
    keys = jax.random.split(jax.random.key(0))
    router = Router(0.05 * jax.random.normal(keys[0], (576, 128)), jax.random.normal(keys[1], (128,)))
    save_heads(
        directory / FILE_NAME,
        ExitHeads({24: ExitHead(router)}, {24: 0.5}),
        fingerprint=tide.load(directory).fingerprint,
        agreement=0.95,
    )
    monkeypatch.chdir(tmp_path)
    example, exact, shared = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"[\d.]+% agreement, [\d.]+ of 30 layers, \d+ tokens/s", printed)
    exec(compile(exact, "README.md", "exec"), names)
    assert names["exact"].text == tide.generate(names["model"], names["chat"]).text
    assert re.fullmatch(r"(nan|[\d.]+) [\d.]+\n", capsys.readouterr().out)
    exec(compile(shared, "README.md", "exec"), names)
    chats = [names["chat"]] * names["model"].mesh.shape["data"]
    assert tide.generate(names["model"], chats).text == names["exact"].text * len(chats)


def test_every_folder_the_readme_names_exists():
    root = Path(__file__).parent.parent
    layout = README[README.index("## Where things are") :]
    for name in re.findall(r"(?:^|\s{4,})((?:tide_jax/)?[a-z_]+)\s{3,}\S", layout, flags=re.M):
        assert (root / name).is_dir(), name


def test_links_lead_somewhere_and_nothing_is_left_to_fill_in():
    root = Path(__file__).parent.parent
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert "docs/exit_depths.png" in links
    assert [link for link in links if "://" not in link and not (root / link).exists()] == []
    assert "PLACEHOLDER" not in README and "@@" not in README


def test_the_speeds_it_quotes_are_those_of_the_committed_run():
    root = Path(__file__).parent.parent
    measured = json.loads((root / "benchmarks" / "results" / "decode_cpu.json").read_text())
    for name in ("full_vs_transformers", "depth24_vs_full", "depth16_vs_full", "depth8_vs_full"):
        assert f"| {measured[name]:.2f} × |" in README


def results(name):
    return json.loads((Path(__file__).parent.parent / "benchmarks" / "results" / name).read_text())


def test_the_kernel_times_it_quotes_are_those_of_the_committed_run():
    page = (Path(__file__).parent.parent / "docs" / "kernels.md").read_text(encoding="utf-8")
    measured = results("kernels_cpu.json")
    quoted = 0
    for op in ("exit_route", "compact", "compact_normed"):
        for size, times in measured[op].items():
            rows, width = size.removeprefix("n").split(" d")
            best = times["us"][times["best_xla"]]
            row = f"| {op} | {rows} | {width} | {times['us']['kernel']:.2f} | {best:.2f} | {times['ratio']:.2f} × |"
            quoted += row in page
            assert times["us"]["kernel"] > 0
    assert quoted == sum(len(measured[op]) for op in ("exit_route", "compact", "compact_normed"))
    for name in ("exit_route_n1_vs_xla", "exit_route_n16_vs_xla"):
        assert f"{measured[name]:.2f} ×" in README


def test_the_gains_of_verified_decoding_it_quotes_are_those_of_the_committed_run():
    measured, exact = results("verified_cpu.json"), results("exactness_cpu.json")
    for group, ratio in measured["groups"].items():
        assert f"{ratio:.2f} ×" in README, group
    for name in ("copy_heavy_w4", "copy_heavy_w8", "batch8"):
        assert f"{measured[name]:.2f} ×" in README, name
    for name, ratio in measured["exit_drafts"].items():
        assert f"{ratio:.2f} ×" in README, name
    assert measured["identical"]
    assert sum(kind["faults"] for kind in exact["drafts"].values()) == 0
    assert {kind["tokens"] for kind in exact["drafts"].values()} == {25400}
    assert "25,400 tokens" in README
