"""Models shared by several devices: what each of them holds, and what cannot be shared."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert.builders import write_directory
from flax import nnx
from jax.sharding import PartitionSpec as P
from support import topologies
from support.tiny import tiny_config, tiny_model

import tide_jax as tide
from calib import calibrate
from tide_jax import sharding
from tide_jax.checkpoint import skeleton
from tide_jax.compat import current_mesh, use_mesh
from tide_jax.decode import StepTimes
from tide_jax.decode.control import new_control
from tide_jax.decode.state import CACHE_AXES, logical_axes, new_rounds, new_state
from tide_jax.errors import InputError

SIZES = dict(vocab_size=96, hidden_size=32, ffn_size=64, num_heads=8, num_kv_heads=4, head_dim=8)
COUNTS = {"heads": 8, "kv_heads": 4, "mlp": 64, "vocab": 96}


@pytest.mark.parametrize(
    ("sizes", "counts", "words"),
    [
        (2, COUNTS, ["mesh is 2", "{'data': 2, 'model': 4}"]),
        ("data=2", COUNTS, ["mesh is 'data=2'"]),
        (None, COUNTS, ["mesh is None"]),
        ({"tensor": 2}, COUNTS, ["'tensor' is unknown", "data and model"]),
        ({}, COUNTS, ["mesh is {}"]),
        ({"data": 0}, COUNTS, ["0 is not a number of devices of 1 or more"]),
        ({"model": -1}, COUNTS, ["-1 is not"]),
        ({"model": 2.0}, COUNTS, ["2.0 is not"]),
        ({"model": True}, COUNTS, ["True is not"]),
        ({"data": 9}, COUNTS, ["data=9 needs 9 devices", "there are 8 (cpu)", "host_platform_device_count=8"]),
        ({"data": 4, "model": 4}, COUNTS, ["data=4,model=4 needs 16 devices"]),
        ({"model": 3}, COUNTS, ["model=3", "8 query heads", "by 3 devices", "1, 2, 4 or 8."]),
        ({"model": 4}, {**COUNTS, "heads": 12, "kv_heads": 6}, ["6 K/V heads", "1 or 2."]),
        ({"model": 8}, {**COUNTS, "mlp": 60}, ["60 feed-forward channels", "1, 2 or 4."]),
        (
            {"data": 2, "model": 2},
            {**COUNTS, "heads": 5, "kv_heads": 5, "mlp": 60},
            ["data=2,model=2", "5 query", "1 or 5."],
        ),
    ],
)
def test_a_mesh_that_cannot_be(sizes, counts, words):
    with pytest.raises(InputError) as error:
        sharding.make_mesh(sizes, counts)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("sizes", "shape", "written"),
    [
        ({"data": 8}, (8, 1, 1), "data=8"),
        ({"data": np.int64(3)}, (3, 1, 1), "data=3"),
        ({"model": 4}, (1, 4, 1), "model=4"),
        ({"model": 8}, (1, 4, 2), "model=8"),
        ({"data": 2, "model": 2}, (2, 2, 1), "data=2,model=2"),
        ({"data": 1, "model": 1}, (1, 1, 1), "model=1"),
    ],
)
def test_a_mesh(sizes, shape, written):
    mesh = sharding.make_mesh(sizes, COUNTS)
    assert tuple(mesh.shape.values()) == shape
    assert sharding.describe(mesh.shape) == written
    assert list(mesh.devices.flat) == jax.devices()[: math.prod(shape)]


# Parts into which each dimension is cut on 4 and on 8 devices along model: written by hand.
CUT = {
    "embedding": ("all", 1),
    "q.kernel": (1, "all"),
    "k.kernel": (1, "heads"),
    "v.kernel": (1, "heads"),
    "o.kernel": ("all", 1),
    "gate.kernel": (1, "all"),
    "up.kernel": (1, "all"),
    "down.kernel": ("all", 1),
    "lm_head.kernel": (1, "all"),
    "q.bias": ("all",),
    "k.bias": ("heads",),
    "v.bias": ("heads",),
    "o.bias": (1,),
    "gate.bias": ("all",),
    "up.bias": ("all",),
    "down.bias": (1,),
    "scale": (1,),
}


@pytest.mark.parametrize("sizes", [{"model": 4}, {"model": 8}, {"data": 2, "model": 4}, {"data": 8}])
def test_every_device_holds_its_part_of_every_parameter(sizes):
    model = tiny_model(**SIZES, tied_head=False, qkv_bias=True, o_bias=True, mlp_bias=True)
    shared = model.shared(sizes)
    parts = {1: 1, "all": sizes.get("model", 1), "heads": min(sizes.get("model", 1), 4)}
    seen = set()
    whole = dict(jax.tree_util.tree_leaves_with_path(model.params))
    for path, array in jax.tree_util.tree_leaves_with_path(shared.params):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        (rule,) = [key for key in CUT if name.endswith(key)]
        seen.add(rule)
        wanted = tuple(size // parts[cut] for size, cut in zip(array.shape, CUT[rule], strict=True))
        assert {shard.data.shape for shard in array.addressable_shards} == {wanted}, name
        assert len(array.addressable_shards) == math.prod(sizes.values())
        np.testing.assert_array_equal(array, whole[path])
    assert seen == set(CUT)


@pytest.mark.parametrize("changes", [{}, {"tied_head": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True}])
def test_every_parameter_names_its_axes(changes):
    _, params = skeleton(tiny_config(**changes), jnp.float32)
    for variable in jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        assert len(variable.axes) == len(variable.shape)
        assert {*variable.axes} <= {*sharding.RULES, "embed"}


def test_a_model_is_loaded_in_parts(tmp_path):
    tide.convert(write_directory(tmp_path / "hf"), tmp_path / "model")
    one = tide.load(tmp_path / "model")
    heads = one.config.num_kv_heads
    shared = tide.load(tmp_path / "model", mesh={"data": 2, "model": heads})
    for path, array in jax.tree_util.tree_leaves_with_path(shared.params):
        # Norms are whole, and so are the embeddings: their number is odd.
        cut = not any(name in jax.tree_util.keystr(path) for name in ("norm", "embedding", "lm_head"))
        assert {shard.data.size * (heads if cut else 1) for shard in array.addressable_shards} == {array.size}
    np.testing.assert_allclose(shared(np.array([[1, 2, 3]])), one(np.array([[1, 2, 3]])), atol=1e-4)
    with pytest.raises(InputError, match="cannot be shared evenly by 5 devices"):
        tide.load(tmp_path / "model", mesh={"model": 5})


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_cannot_be_shared(rows):
    model = tiny_model(**SIZES).shared({"data": 2, "model": 2})
    with pytest.raises(InputError, match=rf"data=2,model=2: a batch of {rows} cannot be shared.*multiple of 2 rows"):
        tide.generate(model, [[1, 2]] * rows, max_new_tokens=2)
    with pytest.raises(InputError, match="multiple of 2"):  # before anything is measured
        tide.warmup(model, batches=[2, rows], save=False, progress=lambda batches: pytest.fail("measured"))
    assert model(np.ones((rows, 2), int)).shape == (rows, 2, 96)  # whole on every device


@pytest.mark.parametrize("sizes", [{"data": 8}, {"model": 8}, {"data": 2, "model": 4}])
def test_tokens_are_looked_up_where_they_are(sizes):
    random = np.random.default_rng(0)
    table = random.normal(size=(96, 5)).astype(np.float32)
    tokens = np.concatenate([np.arange(96), random.integers(0, 96, 96)]).reshape(8, -1).astype(np.int32)
    mesh = sharding.make_mesh(sizes, COUNTS)
    args = sharding.place((table, tokens), (P("vocab"), P("batch")), mesh)
    with use_mesh(mesh):
        found = jax.jit(sharding.look_up)(*args)
    np.testing.assert_array_equal(found, table[tokens])
    np.testing.assert_array_equal(sharding.look_up(jnp.asarray(table), jnp.asarray(tokens)), table[tokens])


def test_a_model_knows_its_mesh_by_its_parameters():
    model = tiny_model(**SIZES)
    shared = model.shared({"data": 2, "model": 2})
    assert model.mesh is None
    assert tide.Model(shared.graphdef, shared.params).mesh == shared.mesh
    assert dict(shared.shared({"model": 4}).mesh.shape) == {"data": 1, "model": 4, "copies": 1}


@pytest.mark.portability
@pytest.mark.parametrize("sizes", [{"model": 3}, {"data": 3}, {"model": 2}, {"data": 2, "model": 2}])
def test_chips_that_fill_no_box(sizes):
    topologies.require("v5e")
    mesh = sharding.make_mesh(sizes, {"heads": 6, "kv_heads": 6, "mlp": 6, "vocab": 6}, topologies.devices("v5e", 4))
    assert mesh.size == math.prod(sizes.values())


def test_every_array_of_a_state_has_axes():
    """A batch of 5, and nothing else of that size."""
    sizes = dict(
        tokens=[[1]] * 5, max_new_tokens=[1] * 5, thresholds=np.zeros((5, 2), np.float32), stops=[], seeds=[0] * 5,
        temperature=[0.0] * 5, dtype=jnp.float32, record_states=True,
    )  # fmt: skip
    state = new_state(tiny_config(), **sizes)
    times = StepTimes(layer=(1.0, 1.0, 1.0), head=(1.0, 1.0, 1.0))
    state = dataclasses.replace(state, rounds=new_rounds(5, 3, width=4, control=new_control(times, 5, 2.0)))
    axes = jax.tree_util.tree_leaves(logical_axes(state))
    for (path, leaf), own in zip(jax.tree_util.tree_leaves_with_path(state), axes, strict=True):
        assert (own[:1] == ("batch",)) == (leaf.shape[:1] == (5,)), path
    assert [own for own in axes if len(own) == 2] == [CACHE_AXES] * 12


def test_calibration_is_refused():
    with pytest.raises(InputError, match="calibration runs on one device"):
        calibrate(tiny_model(**SIZES).shared({"data": 2}), [])


def test_names_do_nothing_without_a_mesh():
    x = jnp.ones((4, 4))
    assert current_mesh() is None
    assert sharding.constrain(x, "batch", "mlp") is x
    assert sharding.on_each(lambda x: x, x, "batch") is x


def test_a_mesh_of_other_axes_is_left_alone():
    """Someone may trace our programs for a mesh of their own."""
    mesh = jax.make_mesh((8,), ("expert",), (jax.sharding.AxisType.Auto,))
    model = tiny_model(**SIZES)
    with use_mesh(mesh):
        logits = model(np.array([[1, 2, 3]]))
    np.testing.assert_allclose(logits, model(np.array([[1, 2, 3]])), atol=1e-5)


def test_step_times_are_those_of_the_mesh(tmp_path):
    tide.convert(write_directory(tmp_path / "hf"), tmp_path / "model")
    shared = tide.load(tmp_path / "model", mesh={"data": 2})
    assert sorted(tide.warmup(shared)) == [2, 8]
    tide.generate(shared, [[1, 2]] * 2, max_new_tokens=4, propose=tide.Ngram(), verify=tide.Verify("auto"))
    with pytest.raises(InputError, match=r"none for cpu, \d+ cores, float32"):
        tide.generate(
            tide.load(tmp_path / "model"), [[1, 2]], max_new_tokens=4, propose=tide.Ngram(), verify=tide.Verify("auto")
        )
