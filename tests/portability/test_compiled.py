"""The engine's programs as each XLA compiles them, read: one program, five accelerators and this machine.

Every program is compiled once for each target, and everything is asked of that one text.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest
from support import hlo, programs, topologies

from tide_jax.decode import loop
from tide_jax.errors import InputError
from tide_jax.kernels import register_cuda, status

POINTS = (1,)
# A cache of 200 MB in bfloat16, more than a v5e has memory on the chip: XLA carries smaller ones there and back. All
# weights and logits are smaller than that, so that only caches are found. One row has as many slots as two together.
BATCH, SLOTS = 2, 1 << 18
CONFIG = programs.smollm2_config(2, SLOTS)
CACHE_ELEMENTS = BATCH * CONFIG.num_kv_heads * SLOTS * CONFIG.head_dim
WEIGHT_ELEMENTS = CONFIG.hidden_size * CONFIG.num_kv_heads * CONFIG.head_dim  # the smallest matrix
TARGET = "tide_exit_route_v1"
COLUMNS = {"prefill": programs.PROMPT, "verified": 4, "lookup": 8}  # of the widest pass; else 1
# One for the noise of sampling wherever a token is chosen. Of the segments that exit points part, a pass of one column
# always runs the first; a settling pass may skip any. Drafting goes through the LM head only if a draft is to be said.
CONDITIONALS = {
    "prefill": 0,
    "plain": 1,
    "depths": len(POINTS) + 1,
    "routers": len(POINTS) + 1,
    "verified": (len(POINTS) + 2) + (len(POINTS) + 1 + 1),
    "lookup": 2 + 2 * 1,
}
TARGETS = ("cpu", *topologies.TARGETS)
EVERYWHERE = ("prefill", "plain", "routers", "verified")
CASES = [
    *((target, kind, BATCH) for target in TARGETS for kind in EVERYWHERE),
    *((target, "lookup", BATCH) for target in ("cpu", "h200")),
    ("cpu", "depths", BATCH),
    # Compilers drop a dimension of 1, and then choose other layouts and loops.
    *((target, "routers", 1) for target in TARGETS),
    *((target, "verified", 1) for target in ("cpu", "v5e")),
]
# The compilers of these differ from those of the h200 and the v5e in little but numbers: `make test-all`.
ALIKE = {(target, kind, 1) for target in ("a100", "h100", "v6e") for kind in EVERYWHERE} | {
    (target, kind, BATCH) for target in ("a100", "h100", "v6e") for kind in ("prefill", "plain")
}


def marks(target: str, kind: str, batch: int) -> list:
    """What selects the tests of this program."""
    named = [pytest.mark.portability] if target != "cpu" else []
    return [*named, pytest.mark.slow_all] if (target, kind, batch) in ALIKE else named


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA made of one program for one target; `kernels`: it had ours to call."""

    target: str
    kind: str
    batch: int
    kernels: bool
    text: str = dataclasses.field(repr=False)  # megabytes
    temporaries: int


def cuda_kernels() -> bool:
    """Whether the CUDA kernels are registered: they can be without a GPU, where they were built."""
    try:
        return bool(register_cuda().targets)
    except InputError as error:
        if os.environ.get("TIDE_REQUIRE_CUDA") == "1":
            pytest.fail(f"TIDE_REQUIRE_CUDA=1, but {error}")
        return False


def small(target: str, kind: str, batch: int = BATCH) -> programs.Program:
    """A program of few layers; on a CPU in float32, of which DESIGN's bounds there are."""
    dtype = jnp.float32 if target == "cpu" else jnp.bfloat16
    slots = BATCH * SLOTS // batch
    config = dataclasses.replace(CONFIG, max_positions=slots)
    return programs.program(kind, config, points=POINTS, batch=batch, slots=slots, dtype=dtype)


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, id="-".join(map(str, case)), marks=marks(*case)) for case in CASES],
)
def compiled(request) -> Compiled:
    """Each program on each target."""
    target, kind, batch = request.param
    topologies.require(target)
    kernels = {"cpu": lambda: status().available, "cuda": cuda_kernels, "tpu": lambda: False}
    platform = "cpu" if target == "cpu" else topologies.TARGETS[target].platform
    there = kernels[platform]()
    executable = small(target, kind, batch).compile_for(target)
    return Compiled(target, kind, batch, there, executable.as_text(), executable.memory_analysis().temp_size_in_bytes)


def test_nothing_in_the_loop_is_as_large_as_a_cache(compiled):
    assert list(map(str, hlo.cache_sized_ops(compiled.text, CACHE_ELEMENTS))) == []


def test_every_cache_is_written_into_the_one_it_was_given(compiled):
    caches = [i for i in hlo.parse(compiled.text).parameters() if i.elements == (CACHE_ELEMENTS,)]
    assert len(caches) == 2 * CONFIG.num_layers
    assert hlo.undonated(compiled.text, CACHE_ELEMENTS) == []


def test_what_may_be_skipped_is_a_branch(compiled):
    assert len(hlo.conditionals_in_loops(compiled.text)) == CONDITIONALS[compiled.kind]


def test_the_loop_needs_no_host(compiled):
    assert list(map(str, hlo.host_ops_in_loops(compiled.text))) == []


def test_kernels_are_called_where_there_are_any(compiled):
    points = len(POINTS) if compiled.kind in ("routers", "verified") else 0
    assert hlo.custom_call_targets(compiled.text)[TARGET] == (points if compiled.kernels else 0)


def test_no_weights_are_held_twice(compiled):
    assert list(map(str, hlo.widened(compiled.text, WEIGHT_ELEMENTS))) == []


def test_temporaries_are_a_few_activations(compiled):
    itemsize, heads, columns = 2, CONFIG.num_heads, COLUMNS.get(compiled.kind, 1)
    if compiled.target == "cpu":
        itemsize = 4
    elif topologies.TARGETS[compiled.target].platform == "tpu":
        # Attention weights stay float32 there, and the rows of one K/V head fill whole tiles of 8.
        rows = columns * CONFIG.num_heads // CONFIG.num_kv_heads
        itemsize, heads = 4, CONFIG.num_kv_heads * -(-rows // 8) * 8 / columns
    bound = hlo.temporaries_bound(
        batch=BATCH, columns=columns, vocab=CONFIG.vocab_size, ffn=CONFIG.ffn_size, heads=heads, slots=SLOTS,
        itemsize=itemsize,
    )  # fmt: skip
    assert compiled.temporaries <= bound


@pytest.fixture(params=["cpu", pytest.param("h200", marks=pytest.mark.portability)])
def mutant(request):
    """A target on which a mutated program is compiled."""
    topologies.require(request.param)
    return request.param


def test_a_cache_through_a_cond_would_be_found(mutant, monkeypatch):
    """A step that is skipped as a whole when no row lives: right, but the caches come out of the cond."""
    real = loop.step

    def skippable(decoder, heads, plan, state, cols):
        run = lambda state: real(decoder, heads, plan, state, cols)  # noqa: E731
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(run, state)[1])
        return jax.lax.cond(state.live.any(), run, lambda state: (state, nothing), state)

    monkeypatch.setattr(loop, "step", skippable)
    text = small(mutant, "plain").compile_for(mutant).as_text()
    assert "a conditional returns a cache" in "\n".join(map(str, hlo.cache_sized_ops(text, CACHE_ELEMENTS)))
    assert len(hlo.conditionals_in_loops(text)) == CONDITIONALS["plain"] + 1


def test_a_dropped_donation_would_be_found(mutant):
    text = small(mutant, "plain").compile_for(mutant, donate=False).as_text()
    assert len(hlo.undonated(text, CACHE_ELEMENTS)) == 2 * CONFIG.num_layers


def test_a_cond_under_vmap_would_be_found(mutant, monkeypatch):
    """One predicate per row instead of one for the batch: both branches run, and a select keeps one."""
    real = jax.lax.cond

    def batched(needed, *args):
        return jax.tree.map(lambda leaf: leaf[0], jax.vmap(lambda one: real(one, *args))(needed[None]))

    monkeypatch.setattr(jax.lax, "cond", batched)
    text = small(mutant, "routers").compile_for(mutant).as_text()
    assert hlo.conditionals_in_loops(text) == []
