"""The compiled decode loop, read: caches are updated in place, and skipped layers are real branches."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import hlo, topologies
from support.tiny import tiny_config

from tide_jax.decode import Ngram, StepTimes
from tide_jax.decode.control import new_control
from tide_jax.decode.loop import run, run_rounds
from tide_jax.decode.plan import Plan, Rounds
from tide_jax.decode.state import SLACK, new_rounds, new_state
from tide_jax.errors import InputError
from tide_jax.exits import Deferred, ExitHead, Projection, Router, RouterScorer
from tide_jax.kernels import register_cuda, status
from tide_jax.models import Decoder

POINTS = (1, 2, 3)
# A cache of 200 MB in bfloat16, more than a v5e has memory on the chip: XLA carries smaller ones there and back.
BATCH, SLOTS = 2, 1 << 18
# Four layers of SmolLM2-135M, with a small vocabulary: all weights and logits are smaller than a cache,
# so that only caches are found.
CONFIG = tiny_config(
    vocab_size=1024, hidden_size=576, ffn_size=1536, num_layers=4, num_heads=9, num_kv_heads=3, head_dim=64,
    max_positions=SLOTS,
)  # fmt: skip
CACHE_ELEMENTS = BATCH * 3 * SLOTS * 64


@pytest.fixture(scope="module")
def cuda_kernels():
    """The CUDA kernels, registered without a GPU where they were built; whether they are there."""
    try:
        return bool(register_cuda().targets)
    except InputError as error:
        if os.environ.get("TIDE_REQUIRE_CUDA") == "1":
            pytest.fail(f"TIDE_REQUIRE_CUDA=1, but {error}")
        return False


@pytest.fixture(
    params=["cpu", *(pytest.param(name, marks=pytest.mark.portability) for name in ("h200", "v5e"))], ids=str
)
def backend(request):
    """Each XLA in turn; a missing compiler skips, or fails where TIDE_REQUIRE_AOT=1 says it must be there."""
    reason = None if request.param == "cpu" else topologies.available(request.param)
    if reason and os.environ.get("TIDE_REQUIRE_AOT") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return request.param


def start(dtype, points, rounds):
    """A batch of rows whose caches are nearly as long as they can be."""
    state = new_state(
        CONFIG,
        tokens=[[1, 2]] * BATCH,
        max_new_tokens=[SLOTS - SLACK - 2] * BATCH,
        thresholds=np.zeros((BATCH, len(points)), np.float32),
        stops=[],
        seeds=[0] * BATCH,
        temperature=[0.0] * BATCH,
        dtype=dtype,
        record_states=False,
    )
    if rounds is None:
        return state
    times = StepTimes(layer=(1.0, 1.5, 2.0), head=(1.0, 1.5, 2.0))
    control = new_control(times, BATCH, 2.0) if rounds.adaptive else None
    return dataclasses.replace(state, rounds=new_rounds(BATCH, len(points) + 1, width=4, control=control))


def program(dtype, points, learned, rounds=None):
    """The engine's loop, and abstract arguments for it."""
    plan = Plan(points=points, scorer=RouterScorer()) if learned else Plan(points=points)
    if rounds is not None:
        plan = dataclasses.replace(plan, remainder=Deferred(), rounds=rounds)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, dtype=dtype, rngs=nnx.Rngs(0))))
    array = jax.ShapeDtypeStruct
    head = ExitHead(
        Router(array((576, 128), jnp.float32), array((128,), jnp.float32)),
        Projection(array((576, 576), jnp.float32), array((576,), jnp.float32)),
    )
    state = jax.eval_shape(lambda: start(dtype, points, rounds))
    assert state.caches[0].k.size == CACHE_ELEMENTS > max(leaf.size for leaf in jax.tree.leaves(params))
    heads = dict.fromkeys(points, head) if learned else {}
    return functools.partial(run if rounds is None else run_rounds, graphdef, plan), (
        params,
        heads,
        state,
        array((), jnp.int32),
    )


def compiled(backend, points, learned, rounds=None):
    """The text of the compiled loop."""
    dtype = jnp.float32 if backend == "cpu" else jnp.bfloat16
    loop, args = program(dtype, points, learned, rounds)
    if backend == "cpu":
        return jax.jit(loop, donate_argnums=2).lower(*args).compile().as_text()
    return topologies.compile_for(backend, loop, *args, donate_argnums=2).as_text()


@pytest.mark.parametrize(
    ("points", "learned"),
    [((), False), (POINTS, False), (POINTS, True)],
    ids=["plain", "thresholds", "routers"],
)
def test_the_decode_loop_never_copies_a_cache(backend, points, learned, cuda_kernels):
    text = compiled(backend, points, learned)
    fused = {"cpu": status().available, "h200": cuda_kernels, "v5e": False}[backend]
    assert hlo.custom_call_targets(text)["tide_exit_route_v1"] == (len(points) if learned and fused else 0)
    assert list(map(str, hlo.cache_sized_ops(text, CACHE_ELEMENTS))) == []
    entry = hlo.parse(text[text.index("\nENTRY ") :]).computations.popitem()[1]
    parameters = [i for i in entry.instructions.values() if i.opcode == "parameter"]
    caches = {int(i.args[0]) for i in parameters if i.elements == (CACHE_ELEMENTS,)}
    assert len(caches) == 2 * CONFIG.num_layers
    assert caches <= hlo.donated(text)
    # One branch for each segment but the first, which always runs, and one for the noise of sampling.
    assert len(hlo.conditionals_in_loops(text)) == len(points) + 1


@pytest.mark.parametrize(
    ("points", "rounds"),
    [
        ((), Rounds(bodies=(4, 8), compare=True, proposer=Ngram(), adaptive=True)),
        (POINTS, Rounds(bodies=(4, 8), compare=True, adaptive=True)),
    ],
    ids=["ngram", "exits"],
)
def test_rounds_hand_the_caches_on_in_place(backend, points, rounds):
    text = compiled(backend, points, bool(points), rounds)
    assert list(map(str, hlo.cache_sized_ops(text, CACHE_ELEMENTS))) == []
