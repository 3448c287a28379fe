"""GGUF files: the same weights as the Hugging Face path, quantisations by their formulas, every refusal."""

import contextlib
import signal
from pathlib import Path

import gguf
import numpy as np
import pytest
from convert.builders import torch_llama, torch_states, write_directory
from support.memory import peak_anonymous

import tide_jax as tide
from tide_jax.convert.conversion import open_source
from tide_jax.convert.gguf import unpermute
from tide_jax.convert.gguf_file import read_gguf
from tide_jax.errors import InputError

SIZES = dict(
    vocab_size=96,
    hidden_size=96,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=32,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    eos_token_id=2,
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPE = gguf.GGMLQuantizationType


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k rows."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def quantised(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a tensor in a block format (ggml-common.h), and the float32 values that these bytes mean."""
    rows, width = values.shape
    blocks = values.reshape(rows, -1, 32)
    if kind == "F32":
        return values, values
    if kind == "F16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
    low = blocks.min(-1, keepdims=True).astype(np.float16)
    if kind == "Q8_0":
        scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
        q = np.clip(np.round(blocks / scale.astype(np.float32)), -127, 127).astype(np.int8)
        data = np.concatenate([scale.view(np.uint8), q.view(np.uint8)], -1)
        meant = scale.astype(np.float32) * q
    else:
        # Byte j of a block holds value j in its low four bits and value j + 16 in its high ones.
        symmetric = kind == "Q4_0"
        span = np.abs(blocks).max(-1, keepdims=True) / 8 if symmetric else np.ptp(blocks, -1, keepdims=True) / 15
        scale = span.astype(np.float16)
        offset = -8 * scale.astype(np.float32) if symmetric else low.astype(np.float32)
        q = np.clip(np.round((blocks - offset) / scale.astype(np.float32)), 0, 15).astype(np.uint8)
        packed = q[..., :16] | q[..., 16:] << 4
        head = [scale.view(np.uint8)] if symmetric else [scale.view(np.uint8), low.view(np.uint8)]
        data = np.concatenate([*head, packed], -1)
        meant = scale.astype(np.float32) * q + offset
    return data.reshape(rows, -1), meant.reshape(rows, width).astype(np.float32)


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], kinds=(), *, keys=(), drop=(), extra=(), architecture="llama"
):
    """A GGUF file of tensors with Hugging Face names; returns the values that its bytes mean.

    kinds are taken in turns by the matrices; keys are (name, method, value) that are added or replaced.
    """
    heads, kv_heads = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "llama.block_count": ("uint32", SIZES["num_hidden_layers"]),
        "llama.context_length": ("uint32", 256),
        "llama.embedding_length": ("uint32", 96),
        "llama.feed_forward_length": ("uint32", 64),
        "llama.attention.head_count": ("uint32", heads),
        "llama.attention.head_count_kv": ("uint32", kv_heads),
        "llama.attention.key_length": ("uint32", 32),
        "llama.attention.value_length": ("uint32", 32),
        "llama.attention.layer_norm_rms_epsilon": ("float32", 1e-5),
        "llama.rope.freq_base": ("float32", 10000.0),
        "llama.rope.dimension_count": ("uint32", 32),
        "general.name": ("string", "tiny"),
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", "gpt-2"),
        "tokenizer.ggml.tokens": ("array", ["t", "1", "t1", *(f"t{index}" for index in range(3, 96))]),
        "tokenizer.ggml.token_type": ("array", [1, 3, 3] + 93 * [1]),
        "tokenizer.ggml.merges": ("array", ["t 1"]),
        "tokenizer.ggml.eos_token_id": ("uint32", 2),
        **{name: (method, value) for name, method, value in keys},
    }
    for name, (method, value) in values.items():
        if name not in drop:
            getattr(writer, f"add_{method}")(name, value)
    meant = {}
    matrices = 0
    for name, value in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            target = f"blk.{layer}.{NAMES[module]}.{leaf}"
        else:
            target = f"{NAMES[module]}.{leaf}"
        kind = "F32"
        if value.ndim == 2 and kinds:
            kind, matrices = kinds[matrices % len(kinds)], matrices + 1
        data, meant[name] = quantised(value, kind) if value.ndim == 2 else (value, value)
        count = {"q_proj": heads, "k_proj": kv_heads}.get(module.rpartition(".")[2])
        data = permute(data, count) if count else data
        writer.add_tensor(target, np.ascontiguousarray(data), raw_dtype=TYPE[kind])
    for name, value in extra:
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def weights(tied: bool = False, **changes) -> dict[str, np.ndarray]:
    model = torch_llama(**SIZES | {"tie_word_embeddings": tied} | changes)
    return {
        name: value.detach().numpy().copy()
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kinds", "tied", "linear"),
    [
        (("F32",), False, False),
        (("Q4_1", "Q8_0", "Q4_0", "F16"), True, True),
        (("Q4_0", "Q4_1", "Q8_0"), False, False),
    ],
)
def test_a_file_equals_the_directory_of_the_same_weights(kinds, tied, linear, tmp_path):
    import torch

    scaling = (("llama.rope.scaling.type", "string", "linear"), ("llama.rope.scaling.factor", "float32", 2.5))
    changes = dict(attention_bias=not tied, mlp_bias=not tied)
    meant = write_gguf(tmp_path / "tiny.gguf", weights(tied, **changes), kinds, keys=scaling if linear else ())
    rope = {"rope_type": "linear", "factor": 2.5} if linear else None
    write_directory(
        tmp_path / "hf",
        meant,
        **SIZES | changes,
        tie_word_embeddings=tied,
        rope_scaling=rope,
        rope_theta=10000.0,
    )
    ours = tide.convert(tmp_path / "tiny.gguf", tmp_path / "a")
    theirs = tide.convert(tmp_path / "hf", tmp_path / "b")
    assert ours.config == theirs.config and ours.parts == theirs.parts
    assert ours.config.tied_head is tied and ours.eos_ids == (2,)
    assert set(ours.source["types"]) == set(kinds) | {"F32"}
    if kinds == ("F32",):
        return
    parameters = {"rope_type": "linear", "factor": 2.5} if linear else {"rope_type": "default"}
    model = torch_llama(**SIZES | changes, tie_word_embeddings=tied, rope_parameters=parameters | {"rope_theta": 1e4})
    model.load_state_dict({name: torch.from_numpy(value) for name, value in meant.items()}, strict=not tied)
    ids = np.random.default_rng(0).integers(0, 96, (1, 30))
    loaded = tide.load(tmp_path / "a")
    states, logits = torch_states(model, ids)
    np.testing.assert_allclose(loaded.hidden_states(ids), states, atol=1e-4, rtol=0)
    np.testing.assert_allclose(loaded(ids), logits, atol=1e-4, rtol=0)


def test_row_order_of_llama_cpp():
    rows = np.arange(8)
    two_heads, one_head = np.array([0, 2, 1, 3, 4, 6, 5, 7]), np.array([0, 4, 1, 5, 2, 6, 3, 7])
    np.testing.assert_array_equal(unpermute(two_heads, 2), rows)
    np.testing.assert_array_equal(unpermute(one_head, 1), rows)
    np.testing.assert_array_equal(unpermute(one_head, 2), [0, 1, 4, 5, 2, 3, 6, 7])  # with the heads of q: wrong
    matrix = np.arange(24).reshape(8, 3)
    np.testing.assert_array_equal(unpermute(matrix[one_head], 1), matrix)


@pytest.fixture(scope="module")
def tensors():
    return weights()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(keys=[("llama.expert_count", "uint32", 8)]),
            "metadata llama.expert_count = 8 is not supported",
        ),
        (dict(keys=[("llama.attention.sliding_window", "uint32", 9)]), "llama.attention.sliding_window = 9"),
        (dict(keys=[("split.count", "uint16", 2)]), "metadata split.count = 2"),
        (dict(keys=[("adapter.type", "string", "lora")]), "metadata adapter.type = 'lora'"),
        (dict(keys=[("llama.rope.scaling.type", "string", "yarn")]), "rope scaling 'yarn'"),
        (
            dict(keys=[("llama.rope.dimension_count", "uint32", 16)]),
            "keys of 32 channels, 16 of them rotated",
        ),
        (dict(keys=[("llama.attention.value_length", "uint32", 16)]), "values of 16"),
        (dict(keys=[("llama.vocab_size", "uint32", 95)]), "vocab_size is 95, the embedding has 96 rows"),
        (dict(keys=[("llama.block_count", "uint32", 3)]), r"9 missing: model\.layers\.2\.input_layernorm"),
        (
            dict(keys=[("llama.block_count", "uint32", 2**32 - 1)]),
            "asks for 4294967295 layers|must be a finite number",
        ),
        (dict(keys=[("llama.attention.head_count", "uint32", 0)]), "'num_attention_heads' is 0|keys of 32"),
        (
            dict(keys=[("llama.attention.head_count", "array", [6, 6])]),
            r"head_count = \[6, 6\] is not one value",
        ),
        (
            dict(keys=[("llama.attention.head_count_kv", "uint32", 4)]),
            "6 attention heads are not a multiple of 4",
        ),
        (dict(keys=[("llama.attention.layer_norm_rms_epsilon", "float64", 1e300)]), "rms_norm_eps"),
        (
            dict(keys=[("llama.rope.freq_base", "string", "big")]),
            "llama.rope.freq_base = 'big' is not one value",
        ),
        (dict(keys=[("tokenizer.ggml.tokens", "uint32", 4)]), "tokenizer.ggml.tokens = 4 has another type"),
        (dict(keys=[("tokenizer.ggml.token_type", "array", ["a"])]), "token_type = .* another type"),
        (dict(keys=[("tokenizer.ggml.eos_token_id", "string", "x")]), "eos_token_id = 'x' has another type"),
        (dict(drop=["llama.context_length"]), "llama.context_length is missing"),
        (dict(architecture="qwen2"), "architecture 'qwen2' is not supported"),
        (dict(extra=[("rope_freqs.weight", np.ones(16, np.float32))]), r"rope_freqs\.weight.* not supported"),
        (
            dict(extra=[("blk.0.attn_sinks.weight", np.ones(6, np.float32))]),
            r"tensor 'blk\.0\.attn_sinks\.weight'",
        ),
        (dict(extra=[("blk.7.attn_norm.weight", np.ones(96, np.float32))]), r"unexpected: model\.layers\.7"),
        (
            dict(extra=[("blk.00.attn_norm.weight", np.ones(96, np.float32))]),
            r"unexpected: model\.layers\.00",
        ),
        (dict(extra=[("output.bias", np.ones(96, np.float32))]), r"unexpected: lm_head\.bias"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(change, message, tensors, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tensors, **change)
    with pytest.raises(InputError, match=message):
        tide.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_general_and_tokenizer_keys_are_inert(tensors, tmp_path):
    keys = [("general.made.up", "uint32", 3), ("tokenizer.ggml.scores", "array", [0.5] * 96)]
    write_gguf(tmp_path / "tiny.gguf", tensors, keys=keys)
    assert tide.convert(tmp_path / "tiny.gguf", tmp_path / "out").source["name"] == "tiny"


def test_a_type_that_cannot_be_decoded_and_values_that_are_no_numbers(tensors, tmp_path):
    write_gguf(tmp_path / "a.gguf", tensors)
    raw = bytearray((tmp_path / "a.gguf").read_bytes())
    at = raw.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    raw[at : at + 4] = int(TYPE.I32).to_bytes(4, "little")
    (tmp_path / "b.gguf").write_bytes(raw)
    with pytest.raises(InputError, match=r"model\.norm\.weight has type I32, which gguf cannot decode"):
        tide.convert(tmp_path / "b.gguf", tmp_path / "out")
    broken = tensors | {"model.norm.weight": np.full(96, np.inf, np.float32)}
    write_gguf(tmp_path / "c.gguf", broken)
    with pytest.raises(InputError, match=r"model\.norm\.weight holds 96 values that are infinite"):
        tide.convert(tmp_path / "c.gguf", tmp_path / "out")


def test_our_reader_agrees_with_that_of_gguf(tensors, tmp_path):
    path = tmp_path / "tiny.gguf"
    types = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    keys = [(f"general.{type}", type, 7 if type[0] == "u" else -7) for type in types]
    keys += [("general.f32", "float32", 0.1), ("general.f64", "float64", 0.1), ("general.bool", "bool", True)]
    keys += [("general.bools", "array", [True, False]), ("general.floats", "array", [0.5, -1.25])]
    write_gguf(path, tensors, ("Q4_1", "F16", "Q8_0"), keys=[*keys, ("general.words", "string", "é ▁")])
    metadata, tensors = read_gguf(path)
    reader = gguf.GGUFReader(path)
    assert metadata == {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert list(tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist())) and ours.kind == tensor.tensor_type
        assert ours.rows.tobytes() == tensor.data.tobytes()


@pytest.fixture
def small(tensors, tmp_path):
    """A file of few bytes behind the header, for damaging."""
    write_gguf(tmp_path / "tiny.gguf", {"model.norm.weight": tensors["model.norm.weight"]})
    return tmp_path / "tiny.gguf"


@contextlib.contextmanager
def within(seconds: int):
    """Fail instead of hanging on a count that a damaged header announces."""

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_truncation_anywhere_is_refused(small):
    whole = small.read_bytes()
    cut = small.with_name("cut.gguf")
    end = len(whole) - 255 // 32 * 32  # the writer pads the data, and nobody misses padding
    for size in [*range(0, 64), *range(64, end, 7)]:
        cut.write_bytes(whole[:size])
        with within(5), pytest.raises(InputError, match="is not a GGUF file|cannot be read as GGUF"):
            read_gguf(cut)


def test_hostile_headers(small):
    """Damage is refused, or harmless, and never another exception nor a hang."""
    whole, rng = small.read_bytes(), np.random.default_rng(0)
    bad = small.with_name("bad.gguf")
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 5)):
            at, size = rng.integers(4, len(whole) - 300), rng.choice([1, 4, 8])
            damaged[at : at + size] = rng.choice([b"\xff" * size, rng.bytes(size), b"\0" * size])[:size].ljust(
                size, b"\0"
            )
        bad.write_bytes(damaged)
        try:
            with within(5):
                origin = open_source(bad)
                origin.eos_ids(origin.tokenizer())
        except InputError:
            refused += 1
    assert refused > 250


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_anonymous_memory_of_converting_smollm2(dtype, smollm2_gguf, tmp_path):
    """At most 0.6 GB, of which the float32 embedding is 0.113 GB and the libraries 0.09 GB."""
    program = "import tide_jax; tide_jax.convert(sys.argv[1], sys.argv[2], dtype=sys.argv[3])"
    peak, _ = peak_anonymous(program, str(smollm2_gguf), str(tmp_path / "out"), dtype)
    assert 0.1e9 < peak <= 0.6e9
