"""The compiled decode loop, read: caches are updated in place, and skipped layers are real branches."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import hlo, topologies
from support.tiny import tiny_config

from tide_jax.decode.engine import run
from tide_jax.decode.state import SLACK, new_state
from tide_jax.decode.step import Plan
from tide_jax.exits import ExitHead, Projection, Router, RouterScorer
from tide_jax.models import Decoder

POINTS = (1, 2, 3)
BATCH, SLOTS = 2, 4096
# Four layers of SmolLM2-135M, with a small vocabulary: all weights and logits are smaller than a cache,
# so that only caches are found.
CONFIG = tiny_config(
    vocab_size=1024, hidden_size=576, ffn_size=1536, num_layers=4, num_heads=9, num_kv_heads=3, head_dim=64,
    max_positions=8192,
)  # fmt: skip
CACHE_ELEMENTS = BATCH * 3 * SLOTS * 64


@pytest.fixture(params=["cpu", pytest.param("h200", marks=pytest.mark.portability)])
def backend(request):
    """Each XLA in turn; a missing compiler skips, or fails where TIDE_REQUIRE_AOT=1 says it must be there."""
    reason = None if request.param == "cpu" else topologies.available(request.param)
    if reason and os.environ.get("TIDE_REQUIRE_AOT") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return request.param


def program(dtype, points, learned):
    """The engine's loop, and abstract arguments for it."""
    plan = Plan(points=points, scorer=RouterScorer()) if learned else Plan(points=points)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, dtype=dtype, rngs=nnx.Rngs(0))))
    array = jax.ShapeDtypeStruct
    head = ExitHead(
        Router(array((576, 128), jnp.float32), array((128,), jnp.float32)),
        Projection(array((576, 576), jnp.float32), array((576,), jnp.float32)),
    )
    state = jax.eval_shape(
        lambda: new_state(
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
    )
    assert state.caches[0].k.size == CACHE_ELEMENTS > max(leaf.size for leaf in jax.tree.leaves(params))
    heads = dict.fromkeys(points, head) if learned else {}
    return functools.partial(run, graphdef, plan), (params, heads, state, array((), jnp.int32))


@pytest.mark.parametrize(
    ("points", "learned"),
    [((), False), (POINTS, False), (POINTS, True)],
    ids=["plain", "thresholds", "routers"],
)
def test_the_decode_loop_never_copies_a_cache(backend, points, learned):
    dtype = jnp.float32 if backend == "cpu" else jnp.bfloat16
    loop, args = program(dtype, points, learned)
    if backend == "cpu":
        text = jax.jit(loop, donate_argnums=2).lower(*args).compile().as_text()
    else:
        text = topologies.compile_for(backend, loop, *args, donate_argnums=2).as_text()
    assert list(map(str, hlo.cache_sized_ops(text, CACHE_ELEMENTS))) == []
    entry = hlo.parse(text[text.index("\nENTRY ") :]).computations.popitem()[1]
    parameters = [i for i in entry.instructions.values() if i.opcode == "parameter"]
    caches = {int(i.args[0]) for i in parameters if i.elements == (CACHE_ELEMENTS,)}
    assert len(caches) == 2 * CONFIG.num_layers
    assert caches <= hlo.donated(text)
    # One branch for each segment but the first, which always runs, and one for the noise of sampling.
    assert len(hlo.conditionals_in_loops(text)) == len(points) + 1
