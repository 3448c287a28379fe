"""Hugging Face directories: parity with PyTorch, and every refusal."""

import contextlib
import copy
import json

import numpy as np
import pytest
from convert.builders import (
    SIZES,
    numpy_weights,
    torch_llama,
    torch_states,
    write_directory,
    write_sharded,
    write_tokenizer,
)
from safetensors.numpy import load_file, save_file

import tide_jax as tide
from tide_jax.checkpoint import read_manifest
from tide_jax.convert.conversion import open_source
from tide_jax.errors import InputError

IDS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 40))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Changes to the sizes, rotary parameters, dtype in the files, largest shard, rotary keys of an older config.
CASES = {
    "tied-f32": (
        dict(tie_word_embeddings=True),
        {"rope_type": "default", "rope_theta": 10000.0},
        "float32",
        "1GB",
        None,
    ),
    "untied-bf16-biased-llama3-sharded": (
        dict(num_key_value_heads=3, attention_bias=True, mlp_bias=True),
        {**LLAMA3, "rope_theta": 500000},
        "bfloat16",
        "20KB",
        None,
    ),
    "untied-f16-linear-sharded-old-keys": (
        dict(head_dim=8),
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        "float16",
        "20KB",
        {"rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 4}},
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_states_and_logits_are_those_of_pytorch(name, tmp_path):
    import torch

    changes, rope, dtype, shard, old = CASES[name]
    model = torch_llama(dtype, rope_parameters=rope, **changes)
    # Cast a copy: the rotary frequencies of the oracle are a buffer that must stay float32.
    copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(tmp_path / "hf", max_shard_size=shard)
    write_tokenizer(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1 or shard == "1GB"
    if old:
        config = json.loads((tmp_path / "hf/config.json").read_text())
        del config["rope_parameters"]
        (tmp_path / "hf/config.json").write_text(json.dumps(config | old))
    manifest = tide.convert(tmp_path / "hf", tmp_path / "out")
    assert manifest.dtype == dtype and manifest.eos_ids == (2, 5)
    loaded = tide.load(tmp_path / "out", dtype="float32")
    assert loaded.fingerprint == manifest.fingerprint == read_manifest(tmp_path / "out").fingerprint
    states, logits = torch_states(model, IDS)
    np.testing.assert_allclose(loaded.hidden_states(IDS), states, atol=1e-4, rtol=0)
    np.testing.assert_allclose(loaded(IDS), logits, atol=1e-4, rtol=0)


def leaves(model) -> dict[str, np.ndarray]:
    from flax import nnx

    from tide_jax.checkpoint import flat

    return {path: np.asarray(leaf) for path, leaf in flat(nnx.to_pure_dict(model.params))}


@pytest.mark.parametrize("tie", [True, False, ...])
@pytest.mark.parametrize("head", ["none", "equal", "different"])
def test_output_head(tie, head, tmp_path):
    tensors = numpy_weights(tie_word_embeddings=True)
    embedding = tensors["model.embed_tokens.weight"]
    if head != "none":
        tensors["lm_head.weight"] = embedding + (head == "different")
    source = write_directory(tmp_path / "hf", tensors, tie_word_embeddings=tie)
    if tie is True and head == "different":
        with pytest.raises(InputError, match=r"tie_word_embeddings.*lm_head\.weight differs"):
            tide.convert(source, tmp_path / "out")
    elif tie is not True and head == "none":  # absent means untied for this family
        with pytest.raises(InputError, match=r"1 missing: lm_head\.weight"):
            tide.convert(source, tmp_path / "out")
    else:
        manifest = tide.convert(source, tmp_path / "out")
        assert manifest.config.tied_head is (tie is True)
        arrays = leaves(tide.load(tmp_path / "out"))
        assert ("lm_head.kernel" in arrays) is (tie is not True)
        np.testing.assert_array_equal(arrays["embedding"], embedding)
        if tie is not True:
            np.testing.assert_array_equal(arrays["lm_head.kernel"], tensors["lm_head.weight"].T)
        return
    assert not (tmp_path / "out").exists()


def test_head_dim_of_its_own(tmp_path):
    changes = dict(hidden_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    tide.convert(write_directory(tmp_path / "hf", **changes), tmp_path / "out")
    arrays = leaves(tide.load(tmp_path / "out"))
    shapes = {name: arrays[f"layers.0.attention.{name}.kernel"].shape for name in "qkvo"}
    assert shapes == {"q": (12, 16), "k": (12, 8), "v": (12, 8), "o": (16, 12)}


def test_square_projections_are_transposed(tmp_path):
    """k and v of [16, 16]: no shape can tell that a transpose was forgotten."""
    changes = dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    tensors = numpy_weights(**changes)
    tide.convert(write_directory(tmp_path / "hf", tensors, **changes), tmp_path / "out")
    arrays = leaves(tide.load(tmp_path / "out"))
    for name in "kv":
        wanted = tensors[f"model.layers.1.self_attn.{name}_proj.weight"].T
        np.testing.assert_array_equal(arrays[f"layers.1.attention.{name}.kernel"], wanted)


@pytest.mark.parametrize(
    ("announced", "present", "message"),
    [
        (False, True, r"unexpected: .*self_attn\.q_proj\.bias"),
        (True, False, r"missing: .*model\.layers\.0\.self_attn\.q_proj\.bias"),
    ],
)
def test_biases_must_be_announced_and_there(announced, present, message, tmp_path):
    source = write_directory(tmp_path / "hf", numpy_weights(attention_bias=present), attention_bias=announced)
    with pytest.raises(InputError, match=message):
        tide.convert(source, tmp_path / "out")


def test_one_missing_and_one_mis_shaped_tensor_are_named_together(tmp_path):
    tensors = numpy_weights(attention_bias=True)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    tensors["model.norm.weight"] = np.ones(35, np.float32)
    with pytest.raises(
        InputError, match=r"1 missing: model\.layers\.1\.self_attn\.k_proj\.bias\. 1 of another shape: model"
    ):
        tide.convert(write_directory(tmp_path / "hf", tensors, attention_bias=True), tmp_path / "out")


def test_arrays_in_any_memory_order_come_back(tmp_path):
    tensors = numpy_weights()
    plain = {name: array.copy() for name, array in tensors.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.asfortranarray(tensors[name])
    tensors["lm_head.weight"] = np.repeat(tensors["lm_head.weight"], 2, axis=1)[:, ::2]
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(">f4")
    tide.convert(write_directory(tmp_path / "hf", tensors), tmp_path / "out")
    arrays = leaves(tide.load(tmp_path / "out"))
    np.testing.assert_array_equal(arrays["layers.0.mlp.up.kernel"], plain[name].T)
    np.testing.assert_array_equal(arrays["lm_head.kernel"], plain["lm_head.weight"].T)
    np.testing.assert_array_equal(arrays["final_norm.scale"], plain["model.norm.weight"])


def test_bfloat16_bytes_keep_their_values(tmp_path):
    import ml_dtypes

    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in numpy_weights().items()}
    raw = np.frombuffer(bytes.fromhex("803F49C0CD3D"), np.uint16)
    tensors["model.norm.weight"].view(np.uint16)[:3] = raw
    tensors["model.norm.weight"][3] = 1e38  # beyond float16
    assert tide.convert(write_directory(tmp_path / "hf", tensors), tmp_path / "out").dtype == "bfloat16"
    scale = leaves(tide.load(tmp_path / "out", dtype="bfloat16"))["final_norm.scale"]
    assert scale.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(scale[:3].astype(np.float64), [1.0, -3.140625, 0.10009765625])
    with pytest.raises(InputError, match=r"model\.norm\.weight holds values up to .*e\+3[78], more than float16"):
        tide.convert(tmp_path / "hf", tmp_path / "half", dtype="float16")
    with pytest.raises(InputError, match="more than float16 can hold"):
        tide.load(tmp_path / "out", dtype="float16")


def test_mixed_dtypes_are_widened_and_buffers_do_not_count(tmp_path):
    half = {name: array.astype(np.float16) for name, array in numpy_weights().items()}
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32)}
    assert tide.convert(write_directory(tmp_path / "a", half | buffer), tmp_path / "x").dtype == "float16"
    mixed = half | {"model.norm.weight": np.ones(36, np.float32)}
    assert tide.convert(write_directory(tmp_path / "b", mixed), tmp_path / "y").dtype == "float32"


def test_weights_that_are_not_numbers_are_refused(tmp_path):
    tensors = numpy_weights()
    tensors["model.layers.2.mlp.down_proj.weight"][3, 4] = np.nan
    source = write_directory(tmp_path / "hf", tensors)
    with pytest.raises(InputError, match=r"model\.layers\.2\.mlp\.down_proj\.weight holds 1 values .* of 1872"):
        tide.convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def edit_index(directory, change):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / SECOND).unlink(), f"1 of 2 shards are missing: {SECOND}.*incomplete"),
        (
            lambda d: (d / SECOND).write_bytes((d / SECOND).read_bytes()[:-7]),
            f"{SECOND} cannot be read as safetensors",
        ),
        (lambda d: (d / SECOND).write_bytes(b""), rf"{SECOND} cannot be read.* 0 bytes"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{"), "index.json cannot be read as JSON"),
        (lambda d: (d / "model.safetensors.index.json").write_text("[1]"), "JSON list, expected an object"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
        (lambda d: edit_index(d, lambda m: m.update(ghost=FIRST)), "'ghost' in model-00001-of-00002"),
        (
            lambda d: edit_index(d, lambda m: m.update({"lm_head.weight": FIRST, "model.norm.weight": FIRST})),
            "does not hold",
        ),
        (
            lambda d: edit_index(d, lambda m: m.update(ghost="../secret.safetensors")),
            r"'\.\./secret.* not a safetensors file",
        ),
        (
            lambda d: edit_index(d, lambda m: m.update(ghost="/etc/passwd")),
            "/etc/passwd.* not a safetensors file",
        ),
        (lambda d: edit_index(d, lambda m: m.update(ghost=["x"])), "not a safetensors file"),
        (lambda d: edit_index(d, lambda m: m.update(ghost=3)), "not a safetensors file"),
    ],
)
def test_shards(damage, message, tmp_path):
    source = tmp_path / "hf"
    write_sharded(source)
    damage(source)
    with pytest.raises(InputError, match=message):
        tide.convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_tensor_in_two_shards_is_taken_from_the_one_the_index_names(tmp_path):
    source = tmp_path / "hf"
    placed = write_sharded(source)
    norm, head = "model.norm.weight", "lm_head.weight"
    assert placed[norm] == SECOND and placed[head] == FIRST
    save_file(load_file(source / FIRST) | {norm: np.full(36, 7.0, np.float32)}, source / FIRST)
    save_file(load_file(source / SECOND) | {head: np.full((97, 36), 7.0, np.float32)}, source / SECOND)
    tide.convert(source, tmp_path / "out")
    arrays = leaves(tide.load(tmp_path / "out"))
    np.testing.assert_array_equal(arrays["final_norm.scale"], numpy_weights()[norm])
    np.testing.assert_array_equal(arrays["lm_head.kernel"], numpy_weights()[head].T)


def write_raw(path, entries: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file with dtypes that numpy does not have."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("kind", "suffix", "quantisation", "method"),
    [
        ("F8_E4M3", "weight", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "method: fp8"),
        ("F8_E4M3", "weight", ..., "method: none named"),
        ("U8", "weight", ..., "method: none named"),
        ("I32", "qweight", {"quant_method": "gptq", "bits": 4}, "method: gptq"),
        ("U8", "weight", ["not an object"], "method: none named"),
    ],
)
def test_quantised_weights_are_refused_with_the_method(kind, suffix, quantisation, method, tmp_path):
    source = write_directory(tmp_path / "hf", quantization_config=quantisation)
    name = f"model.layers.0.self_attn.q_proj.{suffix}"
    size = {"F8_E4M3": 1, "U8": 1, "I32": 4}[kind]
    scale = {"model.layers.0.self_attn.q_proj.weight_scale_inv": ("F32", [2, 1], bytes(8))}
    write_raw(source / "model.safetensors", {name: (kind, [2, 8], b"\x38" * 16 * size)} | scale)
    with pytest.raises(InputError, match=f"{name}' as {kind}.*{method}"):
        tide.convert(source, tmp_path / "out")


def test_a_quantisation_that_floats_hide_is_refused(tmp_path):
    source = write_directory(tmp_path / "hf", quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(InputError, match="quantization_config = .*compressed-tensors.*not supported"):
        tide.convert(source, tmp_path / "out")


@pytest.mark.parametrize("kind", ["I64", "BOOL"])
def test_parameters_must_be_floats(kind, tmp_path):
    tensors = numpy_weights()
    tensors["model.norm.weight"] = np.ones(36, {"I64": np.int64, "BOOL": bool}[kind])
    with pytest.raises(InputError, match="parameters are stored as (bool|int64)"):
        tide.convert(write_directory(tmp_path / "hf", tensors), tmp_path / "out")


def test_pickles_are_named_and_never_opened(tmp_path):
    source = write_directory(tmp_path / "hf")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "run").encode() + b"'\ntR.")
    with pytest.raises(InputError, match=r"pytorch_model\.bin: pickles can run code and are never opened"):
        tide.convert(source, tmp_path / "out")
    assert not (tmp_path / "run").exists()


def test_what_is_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    adapter = write_directory(tmp_path / "adapter")
    (adapter / "model.safetensors").unlink()
    (adapter / "adapter_config.json").write_text("{}")
    small = write_directory(tmp_path / "small", vocab_size=80)
    for source, message in (
        ("nowhere", "nowhere does not exist"),
        ("empty", "config.json is missing"),
        ("adapter", "PEFT adapter"),
        (small.name, "the tokenizer has 90 tokens, the embedding only 80 rows"),
    ):
        with pytest.raises(InputError, match=message):
            tide.convert(tmp_path / source, tmp_path / "out")
    with pytest.raises(InputError, match="'int8' is not supported"):
        tide.convert(write_directory(tmp_path / "hf"), tmp_path / "out", dtype="int8")


def test_end_ids_of_every_place(tmp_path):
    source = write_directory(tmp_path / "hf", eos_token_id=5)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 1000]}))
    assert tide.convert(source, tmp_path / "out").eos_ids == (2, 5, 7)
    for wrong in ("x", 1.5, [[3]], True, {"a": 1}):
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id is"):
            tide.convert(source, tmp_path / "out", overwrite=True)


def test_hostile_safetensors_headers(tmp_path):
    """Random damage in the header: refused, or harmless, and never another exception."""
    source = write_directory(tmp_path / "hf")
    path, rng = source / "model.safetensors", np.random.default_rng(0)
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(0, header)] = rng.integers(0, 256)
        path.write_bytes(damaged[: rng.choice([len(damaged), rng.integers(0, len(damaged))])])
        with contextlib.suppress(InputError):
            open_source(source)


def test_one_beginning_of_text_after_conversion(tmp_path):
    from tokenizers import Tokenizer, processors

    source = write_directory(tmp_path / "hf")
    backend = Tokenizer.from_file(str(source / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(source / "tokenizer.json"))
    (source / "chat_template.jinja").write_text("<s> w7 {{ messages[0]['content'] }}")
    tide.convert(source, tmp_path / "out")
    tokenizer = tide.load(tmp_path / "out").tokenizer
    assert tokenizer.encode("w8 w9") == [1, 8, 9]
    assert tokenizer.encode_chat([{"role": "user", "content": "w8"}]) == [1, 7, 8]
