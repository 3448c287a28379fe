"""The engine's programs with abstract arguments: what is compiled, exported and read, at any size, without weights."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from support import topologies
from support.tiny import tiny_config

from tide_jax.decode import Ngram, StepTimes
from tide_jax.decode.control import new_control
from tide_jax.decode.loop import prefill, run, run_rounds
from tide_jax.decode.plan import Plan, Rounds
from tide_jax.decode.state import SLACK, logical_axes, new_rounds, new_state
from tide_jax.exits import Deferred, ExitHead, Projection, Router, RouterScorer
from tide_jax.models import Decoder, DecoderConfig
from tide_jax.sharding import make_mesh, named_sharding, parameter_shardings

PROMPT = 32  # columns of a prefill
DONATED = 2  # the state, among the arguments of every program


def smollm2_config(num_layers: int, slots: int) -> DecoderConfig:
    """SmolLM2-135M with fewer layers, and as many positions as there are cache slots."""
    return tiny_config(
        vocab_size=49_152, hidden_size=576, ffn_size=1536, num_layers=num_layers, num_heads=9, num_kv_heads=3,
        head_dim=64, max_positions=slots,
    )  # fmt: skip


class Program(NamedTuple):
    """A function of the engine and abstract arguments for it: parameters, exit heads, state, and what else it takes."""

    function: Callable
    args: tuple
    config: DecoderConfig

    def compile_for(self, target: str, *, donate: bool = True):
        """Compiled for one chip of `target`, or for this machine ("cpu")."""
        return topologies.compile_for(target, self.function, *self.args, donate_argnums=(DONATED,) if donate else ())

    def compile_for_mesh(self, target: str, sizes: Mapping[str, int]):
        """Compiled for a mesh of chips of `target`, or of devices of this process; cut as the engine cuts."""
        chips = topologies.devices(target, math.prod(sizes.values()))
        mesh = make_mesh(sizes, self.config.axis_counts, chips)
        params, heads, state, *rest = self.args

        def cut(tree, shardings):
            as_cut = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)  # noqa: E731
            return jax.tree.map(as_cut, tree, shardings)

        def by_axes(tree, axes):
            return cut(tree, jax.tree.map(lambda leaf, axes: named_sharding(mesh, axes, leaf.shape), tree, axes))

        def alike(tree, *axes):
            return by_axes(tree, jax.tree.map(lambda _: PartitionSpec(*axes), tree))

        args = (
            cut(params, parameter_shardings(params, mesh, self.config.axis_counts)),
            alike(heads),
            by_axes(state, logical_axes(state)),
            *(alike(leaf, "batch") for leaf in rest),
        )
        return topologies.compile_for(target, self.function, *args, donate_argnums=(DONATED,), mesh=mesh)


def plan(kind: str, points: Sequence[int]) -> Plan:
    """What is static about a program of this name."""
    points = tuple(points)
    verified = Rounds(bodies=(4,), compare=True, adaptive=True)
    looked_up = dataclasses.replace(verified, bodies=(4, 8), proposer=Ngram())
    return {
        "prefill": lambda: Plan(),
        "plain": lambda: Plan(),
        "depths": lambda: Plan(points=points),
        "routers": lambda: Plan(points=points, scorer=RouterScorer()),
        "verified": lambda: Plan(points=points, scorer=RouterScorer(), remainder=Deferred(), rounds=verified),
        "lookup": lambda: Plan(remainder=Deferred(), rounds=looked_up),
    }[kind]()


def program(kind: str, config: DecoderConfig, *, points: Sequence[int], batch: int, slots: int, dtype) -> Program:
    """One of the engine's programs, as abstract as it is compiled.

    Args:
        kind: "prefill" of `PROMPT` columns; the loops "plain", "depths" (exits that need no router), "routers",
            "verified" (drafts by exits with routers) and "lookup" (drafts from the text).
        config: of the decoder.
        points: exit points of the loops that have any.
        batch: rows.
        slots: of the caches, a power of two from 256 on.
        dtype: of weights, states and caches.
    """
    made = plan(kind, points)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))))
    array, d = jax.ShapeDtypeStruct, config.hidden_size
    head = ExitHead(
        Router(array((d, 128), jnp.float32), array((128,), jnp.float32)),
        Projection(array((d, d), jnp.float32), array((d,), jnp.float32)),
    )
    heads = dict.fromkeys(made.points, head) if isinstance(made.scorer, RouterScorer) else {}
    state = jax.eval_shape(functools.partial(_state, made, config, batch, slots, dtype))
    if kind == "prefill":
        columns = (array((batch, PROMPT), jnp.int32), array((batch, PROMPT), jnp.bool_))
        return Program(functools.partial(prefill, graphdef, made), (params, heads, state, *columns), config)
    loop = run if made.rounds is None else run_rounds
    return Program(functools.partial(loop, graphdef, made), (params, heads, state, array((), jnp.int32)), config)


def _state(made: Plan, config: DecoderConfig, batch: int, slots: int, dtype):
    """A batch of rows whose caches are nearly as long as they can be."""
    state = new_state(
        config,
        tokens=[[1, 2]] * batch,
        max_new_tokens=[slots - SLACK - 2] * batch,
        thresholds=np.zeros((batch, len(made.points)), np.float32),
        stops=[],
        seeds=[0] * batch,
        temperature=[0.0] * batch,
        dtype=dtype,
        record_states=False,
    )
    if made.rounds is None:
        return state
    times = StepTimes(layer=(1.0, 1.5, 2.0), head=(1.0, 1.5, 2.0))
    control = new_control(times, batch, 2.0) if made.rounds.adaptive else None
    return dataclasses.replace(state, rounds=new_rounds(batch, len(made.points) + 1, width=4, control=control))
