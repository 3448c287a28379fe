"""One program on several devices: what one device says, and nothing gathered that should stay where it is.

Values are compared on eight devices that this CPU pretends to have. What the compilers of real ones make of the same
programs is read as in `test_compiled`.
"""

import functools
import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from support import hlo, programs, topologies
from support.tiny import tiny_config, tiny_model, with_heads

import tide_jax as tide
from tide_jax.decode import engine, export
from tide_jax.decode.plan import Plan
from tide_jax.decode.state import new_state, place_state
from tide_jax.kernels import status
from tide_jax.models import decoder

POINTS, NEW, ROWS = (1,), 10, 8
MODELS = {
    "smollm2": dict(
        vocab_size=49_152, hidden_size=576, ffn_size=1536, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=64,
        embedding_scale=0.1,
    ),
    "tiny": dict(
        vocab_size=96, hidden_size=32, ffn_size=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=32,
    ),
}  # fmt: skip
MESHES = [
    ("smollm2", {"data": 8}),
    ("smollm2", {"model": 3}),
    ("smollm2", {"data": 2, "model": 3}),
    ("tiny", {"model": 4}),
    ("tiny", {"model": 8}),  # each K/V head on two devices
    ("tiny", {"data": 2, "model": 4}),
]
RUNS = {
    "full depth": dict(exits=tide.Never(), exit_points=POINTS),
    "exits": dict(exits=tide.RouterExit(0.5), exit_points=POINTS),
    "fixed": dict(exits=tide.FixedDepth(1), exit_points=POINTS),
    "sampled": dict(exits=tide.RouterExit(0.5), exit_points=POINTS, sampling=tide.Sampling(temperature=0.8), seed=3),
    "verified": dict(exits=tide.RouterExit(0.5), verify=tide.Verify(4)),
}
# Another program: on one mesh.
MORE_RUNS = {"looked up": dict(propose=tide.Ngram(shortest=1), verify=tide.Verify(4))}


@functools.cache
def one_device(name: str) -> tide.Model:
    return with_heads(tiny_model(**MODELS[name]), *POINTS)


@functools.cache
def prompts(name: str) -> list[list[int]]:
    """Rows of different lengths; those of the tiny model name most of its tokens, so that there is much to look up."""
    size = MODELS[name]["vocab_size"]
    longest = size if name == "tiny" else 11
    ids = np.random.default_rng(5).integers(0, size, (ROWS, longest))
    return [row[: longest - i].tolist() for i, row in enumerate(ids)]


@functools.cache
def alone(name: str, run: str):
    """What one device says."""
    return tide.generate(one_device(name), prompts(name), max_new_tokens=NEW, stop=[], **(RUNS | MORE_RUNS)[run])


@pytest.fixture(params=MESHES, ids=lambda case: f"{case[0]}-{'-'.join(f'{k}{v}' for k, v in case[1].items())}")
def shared(request):
    """The name of a model, how it is shared, and the model; the programs made for it are its own."""
    name, sizes = request.param
    engine._PROGRAMS.clear()
    return name, sizes, one_device(name).shared(sizes)


def test_what_one_device_says_and_nothing_is_gathered(shared):
    name, sizes, model = shared
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, (ROWS, 12))
    np.testing.assert_allclose(model(ids), one_device(name)(ids), atol=1e-4, rtol=0)

    runs = RUNS | (MORE_RUNS if sizes == {"data": 2, "model": 4} else {})
    for run, asked in runs.items():
        out = tide.generate(model, prompts(name), max_new_tokens=NEW, stop=[], **asked)
        np.testing.assert_array_equal(out.tokens, alone(name, run).tokens, run)
        np.testing.assert_array_equal(out.exit_depths, alone(name, run).exit_depths, run)
        assert out.stats.executed_segments == alone(name, run).stats.executed_segments, run
        assert out.stats.drafts == alone(name, run).stats.drafts, run
    assert set(alone(name, "exits").stats.histogram) == {*POINTS, model.config.num_layers}

    config = model.config
    weights = config.hidden_size * config.num_kv_heads * config.head_dim
    cache = ROWS * config.num_kv_heads * 256 * config.head_dim // (sizes.get("data", 1) * min(sizes.get("model", 1), 4))
    meshed = {key: program for key, program in engine._PROGRAMS.items() if "NamedSharding" in str(key[-1])}
    assert {key[0].__name__ for key in meshed} == {"prefill", "run", "run_rounds"}
    for (function, _, plan, *_), program in meshed.items():
        text = program.as_text()
        assert list(map(str, hlo.redistributed(text, weights))) == []
        if name == "tiny":  # the other has logits as large as its short caches
            assert list(map(str, hlo.cache_sized_ops(text, cache))) == []
        kernels = hlo.custom_call_targets(text)["tide_exit_route_v1"]
        routed = function.__name__ != "prefill" and hasattr(plan.scorer, "use_kernels")
        assert kernels == (len(plan.points) if routed and status().available else 0)
        if function.__name__ == "run":
            assert len(hlo.conditionals_in_loops(text)) == len(plan.points) + 1


def test_something_was_drafted_and_accepted():
    for run in ("verified", "looked up"):
        assert 0 < alone("tiny", run).stats.drafts.acceptance_rate < 1


@pytest.mark.slow_all
def test_the_yardstick_is_the_same():
    asked = dict(exits=tide.RouterExit(0.5), max_new_tokens=6, stop=[])
    wanted = tide.compare(one_device("tiny"), prompts("tiny")[:2], **asked)
    found = tide.compare(one_device("tiny").shared({"model": 4}), prompts("tiny")[:2], **asked)
    assert (found.agreement, found.histogram) == (wanted.agreement, wanted.histogram)
    np.testing.assert_allclose([found.kl, found.nll_gap], [wanted.kl, wanted.nll_gap], atol=1e-5)


BATCH, SLOTS = 8, 1 << 17
CONFIG = tiny_config(
    vocab_size=49_152, hidden_size=512, ffn_size=1024, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=64,
    max_positions=SLOTS,
)  # fmt: skip
WEIGHTS = CONFIG.hidden_size * CONFIG.num_kv_heads * CONFIG.head_dim


def compiled(target: str, kind: str, sizes: dict[str, int], batch: int) -> str:
    """The text of a program for several chips that are not there."""
    topologies.require(target)
    slots = SLOTS * BATCH // batch
    program = programs.program(kind, CONFIG, points=POINTS, batch=batch, slots=slots, dtype=jnp.bfloat16)
    return program.compile_for_mesh(target, sizes).as_text()


@pytest.mark.portability
@pytest.mark.parametrize(
    ("target", "kind", "sizes", "batch"),
    [
        ("h200", "routers", {"model": 8}, 1),
        ("h200", "routers", {"data": 8}, BATCH),
        ("h200", "verified", {"data": 2, "model": 4}, BATCH),
        ("v5e", "routers", {"data": 2, "model": 2}, BATCH),
        pytest.param("v5e", "verified", {"model": 4}, BATCH, marks=pytest.mark.slow_all),
    ],
    ids=str,
)
def test_nothing_is_gathered_by_compilers_of_accelerators(target, kind, sizes, batch):
    text = compiled(target, kind, sizes, batch)
    cache = BATCH * CONFIG.num_kv_heads * SLOTS * CONFIG.head_dim // np.prod(list(sizes.values()))
    assert list(map(str, hlo.redistributed(text, WEIGHTS))) == []
    assert list(map(str, hlo.cache_sized_ops(text, cache))) == []
    assert hlo.undonated(text, cache) == []
    assert list(map(str, hlo.host_ops_in_loops(text))) == []
    assert len(hlo.conditionals_in_loops(text)) == {"routers": 2, "verified": 6}[kind]


@pytest.mark.portability
def test_an_embedding_left_to_xla_would_be_found(monkeypatch):
    monkeypatch.setattr(decoder, "look_up", lambda table, tokens: table[tokens])
    found = hlo.redistributed(compiled("h200", "plain", {"model": 8}, 1), WEIGHTS)
    assert [f"bf16[{CONFIG.vocab_size},{CONFIG.hidden_size}]" in finding.shape for finding in found] == [True]


@pytest.mark.portability
def test_a_layout_that_gathers_caches_would_be_found(monkeypatch):
    step = importlib.import_module("tide_jax.decode.step")  # the package has a function of this name
    monkeypatch.setattr(step, "on_each", lambda function, x, *axes: function(x))
    found = hlo.redistributed(compiled("h200", "plain", {"model": 8}, BATCH), WEIGHTS)
    assert len(found) == 2 * CONFIG.num_layers


def test_exported_programs_are_for_one_device(tmp_path):
    model = one_device("tiny").shared({"data": 2})
    sizes = dict(
        tokens=[[1, 2]] * 2, max_new_tokens=[4, 4], thresholds=np.zeros((2, 0), np.float32), stops=[], seeds=[0, 0],
        temperature=[0.0, 0.0], dtype=model.dtype, record_states=False,
    )  # fmt: skip
    state = place_state(new_state(model.config, **sizes, mesh=model.mesh), model.mesh)
    loop = functools.partial(engine.run, model.graphdef, Plan())
    export.save_program(tmp_path / "run", loop, model.params, {}, state, jnp.int32(4), platforms=["cpu"])
    program = export.load_program(tmp_path / "run")
    assert program.exported.nr_devices == 1
    ended = program(one_device("tiny").params, {}, new_state(model.config, **sizes), jnp.int32(4))
    assert int(ended.steps) == 4
