"""Exit heads: the file, and the two formulas, against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from support.tiny import tiny_model, with_heads

import tide_jax as tide
from tide_jax.arrays import write_safetensors
from tide_jax.errors import InputError
from tide_jax.exits import ExitHead, ExitHeads
from tide_jax.exits.heads import load_heads, project, route, save_heads
from tide_jax.kernels import Gate

DEPTHS = (11, 3, 7)
MODEL = dict(fingerprint="this one", hidden_size=24, num_layers=12)


@pytest.fixture(scope="module")
def model():
    return with_heads(tiny_model(num_layers=12), *DEPTHS)


@pytest.fixture
def path(model, tmp_path):
    heads = dict(model.exits.heads)
    heads[7] = ExitHead(router=heads[7].router)
    heads[11] = ExitHead(projection=heads[11].projection)
    exits = ExitHeads(heads, {11: 0.9, 3: 0.1234567890123, 7: 0.5})
    save_heads(tmp_path / "heads", exits, fingerprint="this one", agreement=0.95)
    return tmp_path / "heads"


def test_a_round_trip_keeps_every_bit_and_the_order_of_depths(model, path):
    read = load_heads(path, **MODEL)
    assert list(read.heads) == list(read.thresholds) == [3, 7, 11]
    assert read.thresholds == {3: 0.1234567890123, 7: 0.5, 11: 0.9}
    assert read.heads[7].projection is None and read.heads[11].router is None
    for depth, part in ((3, "router"), (3, "projection"), (7, "router"), (11, "projection")):
        for one, other in zip(getattr(read.heads[depth], part), getattr(model.exits.heads[depth], part), strict=True):
            np.testing.assert_array_equal(one, other)


def run(model, exits):
    return tide.generate(model, [[1, 2, 3]], max_new_tokens=9, exits=exits, exit_points=sorted(DEPTHS))


def test_an_engine_refuses_heads_of_another_model(model, tmp_path):
    save_heads(tmp_path / "heads", model.exits, fingerprint="this one", agreement=0.95)
    exits = load_heads(tmp_path / "heads", **MODEL)
    other = tide.Model(model.graphdef, model.params, exits=exits, fingerprint="another one")
    with pytest.raises(tide.InputError, match="'this one', this one has 'another one'"):
        tide.Engine(other, exit_points=(7,))
    tide.Engine(other)  # which uses none of them
    wide = tiny_model(hidden_size=30, num_layers=12)
    borrowed = tide.Model(wide.graphdef, wide.params, exits=model.exits)
    with pytest.raises(tide.InputError, match=r"depth 7 takes states of width \[24\], this model has width 30"):
        tide.Engine(borrowed, exit_points=(7,), verify=tide.Verify(4))


def test_heads_that_were_read_drive_a_run(model, tmp_path):
    save_heads(tmp_path / "heads", model.exits, fingerprint="this one", agreement=0.95)
    exits = load_heads(tmp_path / "heads", **MODEL)
    read = tide.Model(model.graphdef, model.params, exits=exits, fingerprint="this one")
    for exits in (tide.RouterExit(), tide.FixedDepth(7)):
        one, other = (run(m, exits) for m in (model, read))
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.exit_depths.tolist() == other.exit_depths.tolist()
        assert other.exit_depths.min() < 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(fingerprint="another"), ["this one", "another"]),
        (dict(hidden_size=32), ["24", "32"]),
        (dict(num_layers=11), ["depth 11", "11 layers"]),
    ],
    ids=repr,
)
def test_heads_of_another_model_are_refused(path, changes, words):
    with pytest.raises(InputError) as refusal:
        load_heads(path, **{**MODEL, **changes})
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_damaged_file_is_refused(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=str(path)):
        load_heads(path, **MODEL)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        load_heads(tmp_path / "nowhere", **MODEL)


@pytest.mark.parametrize("name", ["3.router.up", "3.router.down", "3.projection.kernel", "3.projection.bias"])
def test_a_tensor_of_another_shape_is_refused(path, name):
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        header = file.metadata()
    tensors = load_file(path)
    tensors[name] = tensors[name][..., :-1]
    write_safetensors(path, tensors, header)
    with pytest.raises(InputError, match="depth 3"):
        load_heads(path, **MODEL)


def test_a_file_of_another_format_is_refused(path):
    save_file(load_file(path), path, {"format": "tide-exit-heads-0", "fingerprint": "this one"})
    with pytest.raises(InputError, match="tide-exit-heads-0"):
        load_heads(path, **MODEL)


def test_projection_and_score_are_their_formulas(model):
    head = model.exits.heads[3]
    decoder = nnx.merge(model.graphdef, model.params)
    x = np.random.default_rng(0).normal(scale=5, size=(4, 3, 24)).astype(np.float32)
    unit = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + model.config.norm_eps)
    kernel, bias = (np.asarray(array, np.float64) for array in head.projection)
    projected = project(head.projection, jnp.asarray(x), model.config.norm_eps)
    np.testing.assert_allclose(projected, unit @ kernel + bias, atol=1e-5)
    wide = unit * np.asarray(model.params["final_norm"]["scale"][...]) @ np.asarray(head.router.down)
    logit = (wide / (1 + np.exp(-wide))) @ np.asarray(head.router.up)
    rows = x.shape[:-1]
    gate = Gate(jnp.full(rows, 0.5), jnp.ones(rows, bool), jnp.zeros(rows, bool), jnp.full(rows, 9))
    routed = route(head.router, jnp.asarray(x), decoder, gate, layers=3, use_kernels=None)
    np.testing.assert_array_equal(routed.depth, np.where(np.asarray(routed.score) > 0.5, 3, 9))
    np.testing.assert_allclose(routed.score, 1 / (1 + np.exp(-logit)), atol=1e-5)
