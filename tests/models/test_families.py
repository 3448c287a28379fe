"""Reading configs: nothing overlooked, both spellings of the rotary embedding, and its frequencies."""

import ast
import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import tide_jax
from tide_jax.errors import InputError
from tide_jax.models import DecoderConfig, LayerKind, RopeConfig
from tide_jax.models.families import FAMILIES, TYPES
from tide_jax.models.rope import inverse_frequencies

PACKAGE = Path(tide_jax.__file__).parent
BASE = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes) -> DecoderConfig:
    return FAMILIES["llama"].config({key: value for key, value in (BASE | changes).items() if value is not ...})


@pytest.mark.parametrize("config", [DecoderConfig, LayerKind, RopeConfig])
def test_every_field_is_read_somewhere(config):
    read = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        if "families" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    assert {field.name for field in dataclasses.fields(config)} <= read


def test_a_family_is_a_reader_and_a_table_of_under_120_lines():
    for path in (PACKAGE / "models/families").glob("*.py"):
        if path.name not in ("__init__.py", "family.py", "reader.py", "rope.py"):
            assert len(path.read_text().splitlines()) < 120, path


def test_defaults_and_values():
    plain = read()
    assert (plain.head_dim, plain.num_kv_heads, plain.norm_eps, plain.max_positions) == (6, 2, 1e-6, 2048)
    assert plain.kinds == (LayerKind(rope=RopeConfig()),) and not (
        plain.tied_head or plain.qkv_bias or plain.o_bias or plain.mlp_bias
    )
    assert read(num_key_value_heads=None).num_kv_heads == 6
    assert read(head_dim=None).head_dim == 6 and read(head_dim=128).head_dim == 128
    full = read(
        head_dim=10,
        rms_norm_eps=1e-5,
        max_position_embeddings=77,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_theta=5,
        sliding_window=None,
        rope_scaling=None,
    )
    assert full == DecoderConfig(
        family="llama",
        vocab_size=97,
        hidden_size=36,
        ffn_size=52,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        norm_eps=1e-5,
        kinds=(LayerKind(rope=RopeConfig(theta=5.0)),),
        max_positions=77,
        tied_head=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )
    assert DecoderConfig.from_json(json.loads(json.dumps(full.to_json()))) == full


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual_multiplier": 0.22}, r"does not know for llama models: residual_multiplier = 0\.22"),
        ({"use_mrope": True, "logit_scale": 2}, r"logit_scale = 2, use_mrope = True"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map = "),
        ({"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu' is not supported"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*awq"),
        ({"vocab_size": ...}, "no 'vocab_size'"),
        ({"vocab_size": "97"}, "'vocab_size' is '97', expected int"),
        ({"vocab_size": True}, "'vocab_size' is True, expected int"),
        ({"hidden_size": 36.0}, r"'hidden_size' is 36\.0, expected int"),
        ({"hidden_size": 10**400}, "'hidden_size' is 1000"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"num_attention_heads": -6}, "'num_attention_heads' is -6"),
        ({"num_key_value_heads": 4}, "6 attention heads are not a multiple of 4"),
        ({"head_dim": 7}, "7 channels of a head of 7"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps' is inf"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes', expected bool"),
        ({"rope_theta": 0.5}, r"rope_theta is 0\.5"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\]"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_theta": 10**400}, "rope_theta is inf"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling of kind 'dynamic' is not supported",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "needs exactly .*original_max"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters of kind 'proportional'"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "table of its own for 'rope_type'"),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 2}},
            "kind 'linear' and 'llama3'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, r"needs exactly \['factor'\], got \[\]"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "truncate": False}},
            r"got \['factor', 'truncate'\]",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, r"factor is 0\.5, .* at least 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        (
            {"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0}},
            r"1\.0 must be above low_freq",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"original_max_position_embeddings": 0.5}},
            "is 0.5",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_scaling": []}, r"rope_scaling is \[\], expected an object"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "table of its own for 'full_attention'",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "contradict each other",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"rope_type": "linear", "factor": 4},
            },
            "rope_scaling = .* contradicts rope_parameters",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes, message):
    with pytest.raises(InputError, match=message):
        read(**changes)


def test_spellings_of_the_rotary_embedding():
    old = read(rope_theta=500000, rope_scaling={"rope_type": "llama3", **LLAMA3}).kinds[0].rope
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 500000, **LLAMA3}).kinds[0].rope
    assert old == new == RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192)
    assert (
        read(rope_theta=5e5, rope_scaling=None).kinds[0].rope
        == read(rope_parameters={"rope_theta": 500000}).kinds[0].rope
    )
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).kinds[0].rope == RopeConfig(theta=5e5)
    linear = RopeConfig(kind="linear", factor=2.0)
    for key in ({"type": "linear"}, {"rope_type": "linear"}, {"type": "linear", "rope_type": "linear"}):
        assert read(rope_scaling={**key, "factor": 2}).kinds[0].rope == linear
    both = dict(rope_scaling={"type": "linear", "factor": 2}, rope_theta=1e4)
    assert (
        read(**both, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}).kinds[0].rope
        == linear
    )


def test_inverse_frequencies():
    """Values computed once from the published formulas in double precision."""
    llama31 = RopeConfig(theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    wanted = [
        1,
        1.939227447e-1,
        3.760603093e-2,
        7.292664737e-3,
        5.248461610e-4,
        3.428102196e-5,
        6.647869871e-6,
        1.289173172e-6,
    ]
    np.testing.assert_allclose(inverse_frequencies(llama31, 16), wanted, rtol=2e-7)
    llama32 = dataclasses.replace(llama31, factor=32.0)
    ratio = inverse_frequencies(llama32, 64) / inverse_frequencies(RopeConfig(theta=5e5), 64)
    np.testing.assert_array_equal(ratio[:15], 1)
    np.testing.assert_allclose(ratio[15:], [0.605573, 0.303743, 0.103448] + [0.03125] * 14, rtol=5e-6)
    plain, linear = RopeConfig(theta=100.0), RopeConfig(theta=100.0, kind="linear", factor=4.0)
    np.testing.assert_allclose(inverse_frequencies(plain, 4), [1, 0.1], rtol=1e-7)
    np.testing.assert_allclose(inverse_frequencies(linear, 4), [0.25, 0.025], rtol=1e-7)


def test_yarn_and_longrope():
    """Values computed once from the published formulas in double precision."""
    table = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    yarn = read(rope_parameters=table, head_dim=16).kinds[0].rope
    wanted = [1, 1.778279410e-1, 3.162277660e-2, 4.217559939e-3, 5e-4, 4.445698525e-5, 7.905694150e-6, 1.405853313e-6]
    np.testing.assert_allclose(inverse_frequencies(yarn, 16), wanted, rtol=2e-7)
    assert yarn.gain == pytest.approx(1.138629436, rel=1e-9)
    assert read(rope_parameters=table | {"attention_factor": 1.5}).kinds[0].rope.gain == 1.5
    long = {"rope_type": "longrope", "short_factor": [1, 2, 4], "long_factor": [8, 8, 8], "factor": 16,
            "original_max_position_embeddings": 1024}  # fmt: skip
    config = read(rope_scaling=long, max_position_embeddings=16384)
    rope = config.kinds[0].rope
    assert config.max_positions == 1024  # beyond it other factors hold, which cached keys cannot change over to
    assert rope.gain == pytest.approx((1 + np.log(16) / np.log(1024)) ** 0.5)
    plain = inverse_frequencies(RopeConfig(), 6)
    np.testing.assert_allclose(inverse_frequencies(rope, 6), plain / [1, 2, 4], rtol=1e-6)
    alike = long | {"long_factor": [1, 2, 4]}
    assert read(rope_scaling=alike, max_position_embeddings=16384).max_positions == 16384
    with pytest.raises(InputError, match="3 frequencies, but 2 short and 3 long"):
        read(rope_scaling=long | {"short_factor": [1, 2]})


def kinds_of(kind, **changes):
    base = {key: value for key, value in BASE.items() if key != "model_type"} | {"num_hidden_layers": 4}
    return FAMILIES[kind].config({"model_type": kind, **base, **changes})


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("flag", "first", "types", "windows"),
    [
        (True, 2, None, [None, None, 3, 3]),
        (True, 4, None, [None] * 4),
        (True, 0, None, [3] * 4),
        (False, 0, None, [None] * 4),
        (True, 0, ["full_attention", "sliding_attention", "full_attention", "full_attention"], [None, 3, None, None]),
    ],
)
def test_windows_of_qwen(family, flag, first, types, windows):
    config = kinds_of(family, use_sliding_window=flag, sliding_window=3, max_window_layers=first, layer_types=types)
    assert [config.kinds[config.kind_of(layer)].window for layer in range(4)] == windows


def test_class_defaults_of_head_dim_and_windows():
    assert kinds_of("qwen2").head_dim == 6 and kinds_of("qwen3").head_dim == 128
    assert {kinds_of(name).head_dim for name in ("gemma", "gemma2", "gemma3")} == {256}
    assert (
        kinds_of("mistral").kinds[0].window == 4096 and kinds_of("mistral", sliding_window=None).kinds[0].window is None
    )
    assert kinds_of("mistral", head_dim=None).head_dim == 6
    assert kinds_of("gemma2", query_pre_attn_scalar=144).attention_scale == pytest.approx(0.0833333, rel=1e-5)
    gemma3 = kinds_of("gemma3", query_pre_attn_scalar=168, rope_local_base_freq=1e4, rope_theta=1e6,
                      rope_scaling={"rope_type": "linear", "factor": 8.0})  # fmt: skip
    assert gemma3.attention_scale == pytest.approx(0.0771517, rel=1e-5) and gemma3.logit_softcap is None
    tables = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    assert gemma3 == kinds_of("gemma3", query_pre_attn_scalar=168, rope_parameters=tables)
    for cap in (0, -1.0, float("nan")):
        with pytest.raises(InputError, match="final_logit_softcapping"):
            kinds_of("gemma2", final_logit_softcapping=cap)


def test_text_and_sight_together_are_read_for_the_text():
    family = TYPES["gemma3"]
    text = {key: value for key, value in BASE.items() if key != "model_type"} | {"model_type": "gemma3_text"}
    both = {"model_type": "gemma3", "text_config": text, "vision_config": {"layers": 3}, "eos_token_id": [1, 106]}
    assert family.config(family.text(both)) == FAMILIES["gemma3"].config(text)
    assert family.text(both)["eos_token_id"] == [1, 106] and family.text(both)["model_type"] == "gemma3_text"
    for name in (
        "model.language_model.layers.0.mlp.up_proj.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
    ):
        assert family.canonical(name) == "model.layers.0.mlp.up_proj.weight"
    for name in ("vision_tower.x", "model.vision_tower.x.weight", "multi_modal_projector.y"):
        assert family.ignored.fullmatch(name)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["llama3", "linear", "default"])
def test_inverse_frequencies_are_those_of_transformers(kind):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    numbers = {"llama3": LLAMA3, "linear": {"factor": 3.0}, "default": {}}[kind]
    rope = {"rope_type": kind, "rope_theta": 123456.0, **numbers}
    sizes = dict(head_dim=64, max_position_embeddings=16384)
    theirs = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=rope, **sizes)).inv_freq.numpy()
    np.testing.assert_allclose(
        inverse_frequencies(read(rope_parameters=rope, **sizes).kinds[0].rope, 64), theirs, rtol=1e-6
    )


def test_values_of_any_type_are_refused_or_read():
    """Every key with every kind of value: an `InputError` or a config, nothing else."""
    values = [
        0,
        -1,
        1,
        2.5,
        1e308,
        float("inf"),
        float("nan"),
        10**400,
        "x",
        "",
        [],
        [1],
        {},
        {"a": {}},
        True,
        False,
    ]
    keys = [
        *BASE,
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rms_norm_eps",
        "hidden_act",
        "tie_word_embeddings",
        "attention_bias",
        "max_position_embeddings",
        "quantization_config",
    ]
    scalings = [
        {"rope_type": kind, key: value} | extra
        for kind in ("llama3", "linear")
        for key in [*LLAMA3, "rope_theta"]
        for value in values
        for extra in ({}, {k: v for k, v in LLAMA3.items() if k != key})
    ]
    cases = [{key: value} for key in keys for value in values] + [{"rope_scaling": scaling} for scaling in scalings]
    refused = 0
    for changes in cases:
        with contextlib.suppress(InputError):
            config = read(**changes)
            assert np.isfinite(inverse_frequencies(config.kinds[0].rope, 8)).all()
            assert DecoderConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
            refused -= 1
        refused += 1
    assert refused > len(cases) // 2


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": "2"},
        {"num_layers": True},
        {"num_layers": 0},
        {"tied_head": 1},
        {"norm_eps": 1},
        {"family": None},
        {"kinds": None},
        {"kinds": []},
        {"kinds": [{"rope": {"theta": 1.0, "kind": "yarn"}, "window": None}]},
        {"kinds": [{"rope": None, "window": 0}]},
        {"kinds": [{"rope": None}]},
        {"pattern": [0]},
        {"pattern": [0, 1]},
        {"pattern": [0, -1]},
        {"norms": "before"},
        {"attention_softcap": 0.0},
        {"more": 1},
        {"norm_eps": float("nan")},
    ],
)
def test_a_stored_config_is_checked(change):
    with pytest.raises(TypeError):
        DecoderConfig.from_json(read().to_json() | change)
