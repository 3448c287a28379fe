"""Calibration end to end: routers fire where they should, never where they must not, and files belong to models."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from support.tiny import changed, tiny_model
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

import tide_jax as tide
from calib import Text, calibrate, read_texts
from calib.labels import COSINE
from calib.pipeline import candidate_depths
from tide_jax.exits.heads import FILE_NAME
from tide_jax.tokenizer import Tokenizer


def letter_tokenizer() -> Tokenizer:
    """One printable character a token, ids 0 … 96."""
    backend = tokenizers.Tokenizer(WordLevel({chr(33 + token): token for token in range(97)}, unk_token="!"))
    backend.pre_tokenizer = Split(tokenizers.Regex("."), "isolated")
    backend.decoder = Fuse()
    return Tokenizer(backend, special_tokens={})


def letters(count: int, length: int, seed: int = 0) -> list[Text]:
    random = np.random.default_rng(seed)
    rows = random.integers(0, 90, (count, length))
    return [Text("".join(chr(33 + token) for token in row), str(number)) for number, row in enumerate(rows)]


@pytest.fixture(scope="module")
def easy():
    """A model whose second half of layers is near identity."""

    def flatten(decoder):
        for layer in decoder.layers[3:]:
            layer.attention.o.kernel[...] = 1e-3 * layer.attention.o.kernel[...]
            layer.mlp.down.kernel[...] = 1e-3 * layer.mlp.down.kernel[...]

    model = changed(tiny_model(), flatten)
    model.tokenizer = letter_tokenizer()
    return model


def test_forced_easy_model_leaves_early_and_agrees(easy):
    result = calibrate(easy, letters(60, 40), agreement=0.99, tokens_per_text=40, live_prompts=8, live_tokens=24)
    model = tide.Model(easy.graphdef, easy.params, tokenizer=easy.tokenizer, exits=result.exits)
    prompts = [easy.tokenizer.encode(text.text[:12]) for text in letters(12, 12, seed=9)]
    report = tide.compare(model, prompts, exits=tide.RouterExit(), max_new_tokens=24, stop=[])
    left = sum(count for depth, count in report.histogram.items() if depth < 6) / sum(report.histogram.values())
    assert left >= 0.5
    assert report.mean_depth <= 0.8 * 6
    assert report.agreement >= 0.99
    assert set(result.exits.thresholds) == {int(depth) for depth in result.report["chosen"]}
    assert len(result.exits.thresholds) <= 3
    json.dumps(result.report)
    assert result.table() is not None


def test_degenerate_labels_are_flagged_and_never_fire(monkeypatch):
    model = tiny_model(seed=3)  # random layers: no middle state has a cosine above 0.98 with the last
    model.tokenizer = letter_tokenizer()
    with_cosine = calibrate(
        model,
        letters(30, 24),
        label="cosine",
        tokens_per_text=24,
        live_prompts=4,
        live_tokens=8,
        depths=(1, 2),
    )
    assert COSINE == 0.98
    assert with_cosine.exits.degenerate == {1, 2}
    assert with_cosine.exits.thresholds == {} and "learned" in with_cosine.report["reason"]
    assert [row["degenerate"] for row in with_cosine.report["depths"]] == [True, True]
    fired = tide.Model(model.graphdef, model.params, tokenizer=model.tokenizer, exits=with_cosine.exits)
    out = tide.generate(
        fired,
        [[1, 2, 3]],
        exits=tide.RouterExit(threshold=0.0),
        exit_points=[1, 2],
        max_new_tokens=6,
        stop=[],
    )
    assert out.stats.histogram == {6: 6}
    assert with_cosine.table() is not None


def test_candidates_are_every_fourth_layer_from_eight_and_never_the_last():
    assert candidate_depths(30) == (8, 12, 16, 20, 24, 28)
    assert candidate_depths(32) == (8, 12, 16, 20, 24, 28)
    assert candidate_depths(6) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"agreement": 0.0}, "agreement is 0.0"),
        ({"agreement": 1.5}, "agreement is 1.5"),
        ({"tokens_per_text": 1}, "tokens_per_text is 1"),
        ({"tokens_per_text": 513}, "context of 512"),
        ({"live_prompts": 0}, "live_prompts is 0"),
        ({"depths": (6,)}, r"candidate depths \[6\]"),
        ({"depths": (0, 2)}, r"candidate depths \[0, 2\]"),
    ],
)
def test_values_out_of_range_are_refused(easy, change, message):
    with pytest.raises(tide.InputError, match=message):
        calibrate(easy, letters(6, 8), **change)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_few_documents_are_enough_or_refused(easy, count):
    """With three to five documents the part for routers may hold one, from which no epoch can be chosen."""
    try:
        result = calibrate(easy, letters(count, 40), tokens_per_text=40, live_prompts=2, live_tokens=8, depths=(3,))
    except tide.InputError as error:
        assert "only 1 document is left for training routers" in str(error)
    else:
        assert result.report["documents"] == count


def test_too_few_documents_and_empty_texts(easy):
    with pytest.raises(tide.InputError, match="there are 2 documents"):
        calibrate(easy, letters(2, 8))
    with pytest.raises(tide.InputError, match="no calibration text has two tokens"):
        calibrate(easy, [Text("!", "a"), Text("#", "b")])


@pytest.mark.slow_all
def test_smollm2_saves_layers_on_its_own_held_out_answers(smollm2_dir, wikipedia, tmp_path):
    """Thresholds from Wikipedia and answers to some questions hold on answers to others."""
    model = tide.load(smollm2_dir)
    asked = (Path(__file__).parents[2] / "examples" / "questions.txt").read_text(encoding="utf-8").splitlines()
    result = calibrate(model, read_texts(wikipedia, limit=192), tokens_per_text=96, prompts=asked)
    result.save(tmp_path)
    assert (tmp_path / FILE_NAME).exists()
    model.exits = result.exits
    questions = [
        "What is a volcano?", "How is paper made?", "Why do we have seasons?", "Who was Isaac Newton?",
        "Explain what a budget is.", "How do magnets work?", "What do bees do for plants?", "Describe a desert.",
        "What is the purpose of sleep?", "How does a camera take a picture?", "What is a haiku?",
        "Why is salt used in food?",
        "How does soap clean?",
        "What is a rainforest?",
        "Give me three tips for writing a good speech.",
        "Who was Cleopatra?",
        "Explain how a battery works.",
        "What is the difference between a planet and a star?",
        "Write a short note to welcome a new neighbor.",
        "How is glass made?",
        "What does a lawyer do?",
        "A box holds 6 rows of 8 eggs. How many eggs are in it? Explain.",
        "Write a Python function that returns the largest number in a list.",
        "Why do cats purr?",
    ]  # fmt: skip
    assert not set(asked) & set(questions)
    chats = [[{"role": "user", "content": question}] for question in questions]
    yardstick = tide.Yardstick(model, chats, rule=tide.RouterExit(), max_new_tokens=64, batch=24)
    measured = yardstick.agreement(tide.RouterExit())
    print(result.report["chosen"], result.report["checked"], measured)
    assert measured["agreement"] >= 0.95
    assert 30 - measured["mean_depth"] >= 0.5
