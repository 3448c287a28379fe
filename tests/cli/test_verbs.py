"""Every verb does its work, and prints what scripts rely on."""

import io
import json
import shutil
import sys
import types

import numpy as np
import pytest
from convert.builders import write_directory

from tide_jax.checkpoint import read_manifest
from tide_jax.cli.main import VERBS
from tide_jax.exits import ExitHead, ExitHeads
from tide_jax.exits.heads import FILE_NAME, Router, save_heads

GENERATE_KEYS = {
    "text", "tokens", "exit_depths", "mean_depth", "tokens_per_second", "histogram", "executed_segments",
}  # fmt: skip
COMPARE_KEYS = {
    "agreement", "positions", "first_divergence", "kl", "nll_gap", "longest_repeat", "full_longest_repeat",
    "mean_depth", "histogram", "tokens_per_second", "full_tokens_per_second", "speedup",
    "texts", "full_texts", "prompts", "tokens", "exit_depths",
}  # fmt: skip


@pytest.fixture(scope="module")
def calibrated_dir(tiny_dir, tmp_path_factory):
    """The tiny model with routers of weight zero, which score 0.5, at 2 and 4; a threshold at 4 alone."""
    directory = tmp_path_factory.mktemp("calibrated") / "model"
    shutil.copytree(tiny_dir, directory)
    router = Router(np.zeros((24, 8), np.float32), np.zeros(8, np.float32))
    exits = ExitHeads({depth: ExitHead(router) for depth in (2, 4)}, {4: 0.4})
    fingerprint = read_manifest(directory).fingerprint
    save_heads(directory / FILE_NAME, exits, fingerprint=fingerprint, agreement=0.95)
    return directory


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches(tide, verb):
    code, out, _ = tide(verb, "--help")
    assert code == 0
    assert VERBS[verb].__doc__.partition("\n")[0] in out
    assert f"$ tide-jax {verb} " in out
    assert "--json" in out


def test_help_lists_every_verb(tide):
    code, out, _ = tide("--help")
    assert code == 0
    assert all(f"• {verb}" in out for verb in VERBS)


def test_inspect_json(tide_json, tiny_dir):
    facts = tide_json("inspect", tiny_dir)
    assert facts["config"]["num_layers"] == 6
    assert facts["weight_bytes"] == 4 * facts["parameters"]
    assert facts["chat_template"] and facts["eos_ids"] and facts["exits"] is None
    assert facts["files"] == ["huggingface.json", "tide.json"]


def test_inspect_says_what_a_token_costs(tide, tide_json, tiny_dir):
    """Counted by hand for 6 layers: width 24, 6 and 2 heads of 8, feed-forward 40, 260 tokens, tied, float32."""
    token = tide_json("inspect", tiny_dir)["per_token"]
    matrices = 24 * 48 + 2 * 24 * 16 + 48 * 24 + 3 * 24 * 40
    assert token == {
        "layer_flops": 2 * matrices,
        "layer_bytes": 4 * (matrices + 2 * 24),
        "head_flops": 2 * 260 * 24,
        "head_bytes": 4 * (260 * 24 + 24),
        "flops": 2 * (6 * matrices + 260 * 24),
        "bytes": 4 * (6 * (matrices + 48) + 260 * 24 + 24 + 24),
        "layer_flops_per_position": 4 * 48,
        "kv_bytes_per_position": 4 * 6 * 2 * 2 * 8,
    }
    words = " ".join(tide("inspect", tiny_dir)[1].split())
    assert "83.9 kFLOP, 169.2 kB of weights read at full depth; a layer 11.9 kFLOP, 24.0 kB" in words
    assert "K/V cache 768 B a position" in words


def test_inspect_counts_a_head_of_its_own(tide_json, tmp_path):
    target = tmp_path / "model"
    assert tide_json("convert", write_directory(tmp_path / "hf"), target)
    facts = tide_json("inspect", target)
    vocab, width = facts["config"]["vocab_size"], facts["config"]["hidden_size"]
    assert facts["config"]["tied_head"] is False
    assert facts["per_token"]["head_flops"] == 2 * vocab * width
    # All but the embedding, of which one row is read.
    assert facts["per_token"]["bytes"] == facts["weight_bytes"] - 4 * (vocab - 1) * width


def test_inspect_words_show_the_exits(tide, tide_json, tiny_dir, calibrated_dir):
    assert "not calibrated" in tide("inspect", tiny_dir)[1]
    code, out, _ = tide("inspect", calibrated_dir)
    words = " ".join(out.split())
    assert code == 0 and "heads after layer 2, 4" in words and "4 above 0.400" in words
    exits = tide_json("inspect", calibrated_dir)["exits"]
    assert exits == {"heads": [2, 4], "degenerate": [], "points": [4], "thresholds": {"4": 0.4}}


def test_generate_prints_the_text_alone_on_standard_output(tide, tiny_dir):
    code, out, err = tide("generate", tiny_dir, "--prompt", "ab", "--max-new-tokens", 4)
    assert code == 0
    assert out.count("\n") >= 1 and "layers" not in out
    assert "6.0 of 6 layers" in err


def test_generate_json(tide_json, tiny_dir):
    args = ("generate", tiny_dir, "--prompt", "ab", "--max-new-tokens", 4, "--exits", "fixed:2")
    data = tide_json(*args, "--exit-points", "2,4")
    assert data.keys() >= GENERATE_KEYS
    assert len(data["tokens"]) == len(data["exit_depths"]) >= 1
    assert set(data["exit_depths"][1:]) <= {2}
    assert len(data["executed_segments"]) == 3


def test_generate_raw_leaves_the_template_out(tide_json, tiny_dir):
    args = ("generate", tiny_dir, "--prompt", "ab", "--max-new-tokens", 6)
    assert tide_json(*args)["tokens"] != tide_json(*args, "--raw")["tokens"]


def test_generate_at_a_temperature_depends_on_the_seed_alone(tide_json, tiny_dir):
    args = ("generate", tiny_dir, "--prompt", "ab", "--max-new-tokens", 6, "--temperature", 2)
    once, again, other = (tide_json(*args, "--seed", seed)["tokens"] for seed in (1, 1, 2))
    assert once == again != other


def test_generate_with_routers(tide_json, calibrated_dir):
    args = ("generate", calibrated_dir, "--prompt", "ab", "--max-new-tokens", 4, "--exits")
    assert set(tide_json(*args, "router:0")["exit_depths"][1:]) <= {4}
    assert set(tide_json(*args, "router")["exit_depths"][1:]) <= {4}  # untrained: every score is 0.5, above 0.4
    assert set(tide_json(*args, "router:0.9")["exit_depths"][1:]) <= {6}


def test_compare_json(tide_json, tiny_dir, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    data = tide_json(
        "compare",
        tiny_dir,
        "--prompt",
        "zero",
        "--prompts",
        prompts,
        "--exits",
        "fixed:4",
        "--max-new-tokens",
        6,
    )
    assert data.keys() >= COMPARE_KEYS
    assert data["prompts"] == ["zero", "one", "two"]
    assert len(data["texts"]) == len(data["full_texts"]) == 3
    assert 0 <= data["agreement"] <= 1


def test_compare_shows_both_sides_and_the_texts(tide, tiny_dir):
    code, out, _ = tide(
        "compare", tiny_dir, "--prompt", "a", "--prompt", "b[/]", "--exits", "never", "--max-new-tokens", 4
    )
    assert code == 0
    assert "full depth" in out and "tokens/s" in out and "100.0 %" in out
    assert "b[/]" in out


def test_prompts_from_standard_input(tide_json, tiny_dir, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    data = tide_json("compare", tiny_dir, "--prompts", "-", "--exits", "never", "--max-new-tokens", 3)
    assert data["prompts"] == ["one", "two"]
    assert data["agreement"] == 1


def test_calibrate_hands_everything_on(tide, tide_json, tiny_dir, monkeypatch):
    calls = []

    class Result:
        report = {"chosen": [4], "loss": float("nan")}

        def save(self, directory):
            calls.append(directory)

        def table(self):
            return "a table"

    def calibrate(model, texts, **options):
        calls.append((texts, options))
        return Result()

    stub = types.SimpleNamespace(calibrate=calibrate, read_texts=lambda source, limit: [source] * limit)
    monkeypatch.setitem(sys.modules, "calib", stub)
    args = (
        "calibrate",
        tiny_dir,
        "--data",
        "-",
        "--texts",
        3,
        "--tokens",
        7,
        "--agreement",
        0.9,
        "--seed",
        5,
    )
    assert tide_json(*args, "--label", "cosine") == {"chosen": [4], "loss": None}
    options = {"tokens_per_text": 7, "agreement": 0.9, "label": "cosine", "prompts": None, "seed": 5}
    assert calls == [(["-"] * 3, options), tiny_dir]
    assert tide(*args)[1] == "a table\n"


def test_calibrate_for_real(tide, tide_json, tiny_dir, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(tiny_dir, directory)
    random = np.random.default_rng(0)
    words = ["".join(chr(c) for c in random.integers(97, 123, 30)) for _ in range(30)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": word}) for word in words))
    (tmp_path / "prompts.txt").write_text("\n".join(words[:4]))
    args = ("--data", tmp_path / "texts.jsonl", "--texts", 30, "--tokens", 24, "--prompts", tmp_path / "prompts.txt")
    report = tide_json("calibrate", directory, *args)
    assert [row["depth"] for row in report["depths"]] == [1, 2, 3, 4, 5]
    assert report["documents"] == 30 and sum(report["tokens"].values()) == 30 * 23
    seen = tide_json("inspect", directory)["exits"]
    assert seen["heads"] == [1, 2, 3, 4, 5] and seen["thresholds"] == report["chosen"]


@pytest.mark.slow
def test_convert_then_inspect_the_real_model(tide_json, smollm2_gguf, tmp_path):
    made = tide_json("convert", smollm2_gguf, tmp_path / "smollm2")
    assert made["parameters"] == 134_515_008
    assert made["seconds"] > 0
    seen = tide_json("inspect", tmp_path / "smollm2")
    assert {**seen, "seconds": made["seconds"]} == made


@pytest.mark.parametrize(
    ("draft", "width"),
    [
        (("--propose", "ngram"), 4),
        (("--exits", "fixed:4"), 3),
        (("--exits", "router:0.4", "--remainder", "project"), 4),
    ],
)
def test_verified_generation_says_what_the_full_model_says(tide_json, calibrated_dir, draft, width):
    args = ("generate", calibrated_dir, "--prompt", "abcabc", "--max-new-tokens", 12)
    plain = tide_json(*args)
    data = tide_json(*args, *draft, "--verify", width)
    assert plain["drafts"] is None and data["tokens"] == plain["tokens"] and data["text"] == plain["text"]
    drafts = data["drafts"]
    assert drafts["tokens"] == len(data["tokens"]) - 1 == pytest.approx(drafts["tokens_per_round"] * drafts["rounds"])
    assert sum(drafts["proposed"]) > 0
    assert drafts["draft_layers"] + drafts["settle_layers"] == data["executed_layers"]


def test_deferred_exits_report_their_depths_and_passes(tide, tide_json, calibrated_dir):
    args = ("generate", calibrated_dir, "--prompt", "abcabc", "--max-new-tokens", 9, "--exits", "fixed:4")
    data = tide_json(*args, "--remainder", "deferred:4")  # the row ends before its second queue is full
    assert data["exit_depths"] == [6, *[4] * 8] and data["drafts"]["passes"] == {"1": 8, "4": 1, "8": 0}
    _, _, err = tide(*args, "--remainder", "deferred:4")
    assert "passes by columns: 1: 89 %, 4: 11 %, 8: 0 %" in err
    _, _, err = tide(*args, "--verify", 4)
    assert "drafted tokens accepted" in err and "tokens a round" in err


def test_compare_verified_agrees_with_itself(tide, tide_json, calibrated_dir):
    args = ("compare", calibrated_dir, "--prompt", "abcabc", "--max-new-tokens", 12, "--verify", 4)
    for draft in (("--propose", "ngram"), ("--exits", "fixed:4")):
        data = tide_json(*args, *draft)
        assert data["agreement"] == 1 and data["texts"] == data["full_texts"] and data["kl"] < 1e-6
        assert data["drafts"]["tokens"] > 0 and data["verify"] == "4"
    code, out, _ = tide(*args, "--propose", "ngram")
    assert code == 0 and "ngram, verified 4" in out and "tokens a round" in out


def test_warmup_stores_what_verify_auto_needs(tide, tide_json, tiny_dir, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(tiny_dir, directory)
    auto = (
        "generate",
        directory,
        "--prompt",
        "abcabc",
        "--max-new-tokens",
        12,
        "--propose",
        "ngram",
        "--verify",
        "auto",
    )
    code, _, err = tide(*auto)
    assert code == 2 and "tide-jax warmup" in " ".join(err.split())
    data = tide_json("warmup", directory, "--batches", 1)
    assert list(data["seconds"]) == ["1"] and min(data["seconds"]["1"]["layer"]) > 0
    assert tide_json(*auto)["predicted_tokens_per_second"] > 0
    code, out, err = tide("warmup", directory, "--batches", "1,2")
    assert code == 0 and "4 columns" in out and "step_times.json" in err
