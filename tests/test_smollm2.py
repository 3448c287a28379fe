"""The real SmolLM2-135M-Instruct: equal to transformers, skips what it says, stays within its memory."""

import json

import jax
import numpy as np
import pytest
from support.exact import ties
from support.memory import peak_anonymous
from support.tiny import Scripted, counted_layers, with_script

import tide_jax as tide
from tide_jax.decode.generate import engine_for

QUESTIONS = [
    "What is photosynthesis?",
    "How do I make pancakes?",
    "Explain gravity to a ten-year-old.",
    "List five tips for better sleep.",
    "Who was Marie Curie and why is she remembered?",
    "Describe the water cycle.",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Think step by step.",
    "I have 3 apples, buy 5 more and give away 2. How many are left? Explain.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is the capital of Australia, and how many people live there?",
]
NEW = 64


@pytest.fixture(scope="session")
def oracle(smollm2_gguf):
    torch = pytest.importorskip("torch", reason="PyTorch is the oracle")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session")
def chats(smollm2):
    return [smollm2.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]


@pytest.fixture(scope="session")
def greedy(smollm2, chats):
    """All prompts, of unequal lengths, in one batch at full depth."""
    return tide.generate(smollm2, chats, max_new_tokens=NEW, stop=[])


@pytest.mark.slow
@pytest.mark.torch
def test_logits_match_transformers(smollm2, oracle, wikipedia):
    import torch

    text = json.loads(wikipedia.read_text().splitlines()[0])["text"] * 3
    ids = np.array([smollm2.tokenizer.encode(text)[:200]])
    assert ids.shape == (1, 200)
    with torch.no_grad():
        wanted = oracle(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(np.asarray(smollm2(ids)), wanted, atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.torch
def test_greedy_tokens_match_transformers(greedy, chats, oracle):
    import torch

    for ids, row in zip(chats, greedy.tokens, strict=True):
        # Along our own tokens its choice is ours at every position: so its greedy decoding is ours, by induction.
        with torch.no_grad():
            logits = oracle(torch.tensor([[*ids, *row.tolist()]])).logits[0]
        assert logits[len(ids) - 1 : -1].argmax(dim=-1).tolist() == row.tolist()
    assert (greedy.exit_depths == 30).all()


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_logits(smollm2, chats, side):
    rows = [chats[index] for index in (0, 3, 5, 8)]
    cols = max(map(len, rows))
    assert len(set(map(len, rows))) == 4
    ids, mask = np.full((4, cols), 7), np.zeros((4, cols), bool)
    for index, row in enumerate(rows):
        place = slice(cols - len(row), cols) if side == "left" else slice(len(row))
        ids[index, place], mask[index, place] = row, True
    together = np.asarray(smollm2(ids, mask))
    for index, row in enumerate(rows):
        alone = np.asarray(smollm2(np.array([row])))[0]
        np.testing.assert_allclose(together[index, mask[index]], alone, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_row_of_a_batch_equals_the_row_alone(smollm2, chats, greedy):
    for index in (0, 3, 5, 8):
        alone = tide.generate(smollm2, [chats[index]], max_new_tokens=NEW, stop=[])
        assert alone.tokens[0].tolist() == greedy.tokens[index].tolist()


@pytest.mark.slow
def test_a_row_ends_at_the_models_own_end_of_text(smollm2, chats, greedy):
    out = tide.generate(smollm2, chats, max_new_tokens=NEW)
    ends = [next((i + 1 for i, token in enumerate(row) if token in smollm2.eos_ids), NEW) for row in greedy.tokens]
    assert out.lengths == ends and min(ends) < NEW
    for row, free, end, text in zip(out.tokens, greedy.tokens, ends, out.text, strict=True):
        assert row[:end].tolist() == free[:end].tolist()
        assert (row[end:] == smollm2.tokenizer.pad_id).all()
        words = free[: end - (free[end - 1] in smollm2.eos_ids)].tolist()
        assert text == smollm2.tokenizer.decode(words)


@pytest.mark.slow
def test_the_device_runs_the_layers_it_reports(smollm2, chats, monkeypatch):
    calls = counted_layers(monkeypatch)
    random = np.random.default_rng(0)
    points = (8, 16, 24)
    model = with_script(smollm2, {depth: random.integers(0, 2, 256) for depth in points})
    for rule in (Scripted(), tide.FixedDepth(8), tide.FixedDepth(16), tide.FixedDepth(30), Scripted()):
        engine = engine_for(model, exits=Scripted(), exit_points=points, remainder=tide.ProjectKV())
        state = engine.start([chats[0]], rule=rule, max_new_tokens=17)
        jax.effects_barrier()
        calls.clear()
        state = engine.run(state, 16)
        jax.effects_barrier()
        depths = np.asarray(state.depths)[0, len(chats[0]) + 1 :][:16]
        assert len(calls) == depths.sum()
        assert int(np.dot(np.diff((0, *points, 30)), state.segments_run)) == depths.sum()
        assert set(depths) == ({rule.layers} if isinstance(rule, tide.FixedDepth) else {8, 16, 24, 30})


MORE = [
    "Repeat the following sentence three times: the quick brown fox jumps over the lazy dog.",
    "Count from one to twenty in words.",
    "Write a limerick about a cat.",
    "Translate to French: good morning, my friend.",
    "List the planets of the solar system.",
    "Write a shell command that finds large files.",
    "Why do leaves change colour in autumn?",
    "What is 17 times 23? Show the steps.",
    "Write the alphabet, one letter per line.",
    "Name three rivers in Europe and one fact about each.",
]
POINTS = (8, 16, 24)
DRAFTS = {
    "ngram": dict(propose=tide.Ngram(), verify=tide.Verify(8)),
    "fixed": dict(exits=tide.FixedDepth(24), exit_points=[24], verify=tide.Verify(4)),
    "deferred": dict(exits=Scripted(), exit_points=POINTS, verify=tide.Verify(4)),
    "project": dict(exits=Scripted(), exit_points=POINTS, verify=tide.Verify(4), remainder=tide.ProjectKV()),
}


@pytest.fixture(scope="module")
def twenty(smollm2, chats, greedy):
    """Twenty prompts, and what the plain loop says to each."""
    more = [smollm2.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in MORE]
    rest = tide.generate(smollm2, more, max_new_tokens=NEW, stop=[])
    return [*chats, *more], [*greedy.tokens.tolist(), *rest.tokens.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("draft", list(DRAFTS))
def test_verified_tokens_are_those_of_the_plain_loop(smollm2, twenty, draft):
    prompts, wanted = twenty
    random = np.random.default_rng(0)
    model = smollm2
    if "exits" in DRAFTS[draft] and isinstance(DRAFTS[draft]["exits"], Scripted):
        model = with_script(smollm2, {depth: random.integers(0, 2, 256) for depth in POINTS})
    tied, drafts = 0, []
    for begin in (0, 10):
        rows = slice(begin, begin + 10)
        out = tide.generate(model, prompts[rows], max_new_tokens=NEW, stop=[], **DRAFTS[draft])
        drafts.append(out.stats.drafts)
        for prompt, got, row in zip(prompts[rows], out.tokens.tolist(), wanted[rows], strict=True):
            tied += ties(smollm2, prompt, got, row)
    total = tide.decode.Drafts.total(drafts)
    assert tied <= 1
    assert sum(total.proposed) > 100 and total.acceptance_rate > 0
    assert total.tokens == 20 * (NEW - 1)


RUN = """
import tide_jax as tide
model = tide.load(sys.argv[1])
result = tide.generate(model, "The sky is", max_new_tokens=64, exits=tide.FixedDepth(16), stop=[]).stats.new_tokens
"""


@pytest.mark.slow
def test_memory_of_a_run_is_the_weights_the_caches_and_little_else(smollm2_dir):
    peak, new_tokens = peak_anonymous(RUN, str(smollm2_dir))
    caches = 2 * 30 * 3 * 64 * 256 * 4  # K and V, layers, K/V heads, head_dim, slots, float32
    assert new_tokens == 64
    assert peak <= 540e6 + caches + 600e6
