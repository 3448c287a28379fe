"""Every family against PyTorch: states after each layer, logits with and without a cache, greedy tokens, and back."""

import copy
import json

import jax
import numpy as np
import pytest
from safetensors import safe_open
from support.tiny import with_heads
from support.variants import VARIANTS, save, torch_model, torch_states

import tide_jax as tide
from tide_jax.checkpoint import read_manifest
from tide_jax.decode.engine import Engine

pytestmark = pytest.mark.torch
NEW = 24
PROMPTS = [[int(token) for token in np.random.default_rng(seed).integers(3, 90, 19 - 6 * seed)] for seed in range(3)]


@pytest.fixture(scope="module", params=[
    pytest.param(variant, id=variant.id, marks=[pytest.mark.slow_all] if variant.slow else []) for variant in VARIANTS
])  # fmt: skip
def pair(request, tmp_path_factory):
    """The model in PyTorch, and the same one converted and loaded."""
    directory = tmp_path_factory.mktemp(request.param.id)
    theirs = torch_model(request.param)
    tide.convert(save(theirs, directory / "hf"), directory / "out")
    return theirs, tide.load(directory / "out"), directory


def test_states_after_every_layer_and_logits(pair):
    theirs, ours, _ = pair
    ids = np.random.default_rng(0).integers(3, 90, (2, 40))
    states, logits = torch_states(theirs, ids)
    assert len(states) == ours.config.num_layers + 1
    np.testing.assert_allclose(ours.hidden_states(ids), states, atol=1e-4, rtol=0)
    np.testing.assert_allclose(ours(ids), logits, atol=1e-4, rtol=0)


def test_rows_of_unequal_length_are_what_they_are_alone(pair):
    theirs, ours, _ = pair
    cols = max(map(len, PROMPTS))
    ids, mask = np.zeros((3, cols), int), np.zeros((3, cols), bool)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, True
    together = np.asarray(ours(ids, mask))
    for row, prompt in enumerate(PROMPTS):
        _, alone = torch_states(theirs, np.array([prompt]))
        np.testing.assert_allclose(together[row, : len(prompt)], alone[0], atol=1e-4, rtol=0)


def test_greedy_tokens_and_the_logits_of_cached_decoding(pair):
    import torch

    theirs, ours, _ = pair
    engine = Engine(ours, exit_points=(), record_states=True)
    state = engine.run(engine.start(PROMPTS, rule=tide.Never(), max_new_tokens=NEW), NEW)
    logits = jax.jit(lambda decoder, x: decoder.logits(x))
    decoder = tide_decoder(ours)
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            wanted = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                eos_token_id=None,
            )[0].tolist()  # fmt: skip
        at = slice(len(prompt), len(prompt) + NEW)
        assert np.asarray(state.tokens)[row, at].tolist() == wanted[len(prompt) :]
        _, full = torch_states(theirs, np.array([wanted]))
        made = logits(decoder, state.states[row, at])
        np.testing.assert_allclose(made, full[0, len(prompt) - 1 : -1], atol=1e-4, rtol=0)


def tide_decoder(model):
    from flax import nnx

    return nnx.merge(model.graphdef, model.params)


def test_exits_and_verified_decoding_run(pair):
    _, ours, _ = pair
    model = with_heads(ours, 1, 2)
    settings = dict(max_new_tokens=8, stop=[])
    plain = tide.generate(model, PROMPTS, **settings)
    depth = tide.generate(model, PROMPTS, exits=tide.FixedDepth(2), **settings).exit_depths
    assert set(depth[:, 1:].flat) == {2}
    leaving = tide.generate(model, PROMPTS, exits=tide.RouterExit({1: 0.5, 2: 0.5}), **settings)
    assert len(set(leaving.exit_depths.flat)) > 1
    verified = tide.generate(model, PROMPTS, exits=tide.FixedDepth(2), verify=tide.Verify(width=4), **settings)
    assert verified.tokens.tolist() == plain.tokens.tolist()


def test_there_and_back_bit_by_bit(pair):
    import torch
    import transformers

    theirs, _, directory = pair
    save(copy.deepcopy(theirs).to(torch.bfloat16), directory / "half", max_shard_size="20KB")
    tide.convert(directory / "half", directory / "half-out")
    assert read_manifest(directory / "half-out").dtype == "bfloat16"
    tide.export(directory / "half-out", directory / "back")
    there, back = (stored(directory / name) for name in ("half", "back"))
    assert there.keys() == back.keys()
    assert [name for name in there if not torch.equal(there[name], back[name])] == []
    model, found = transformers.AutoModelForCausalLM.from_pretrained(directory / "back", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    wanted = theirs.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name].to(torch.bfloat16)), name
    config = json.loads((directory / "back/config.json").read_text())
    assert config["model_type"] == theirs.config.model_type and config["dtype"] == "bfloat16"


def stored(directory) -> dict:
    """Every tensor of a directory of safetensors."""
    tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return tensors
