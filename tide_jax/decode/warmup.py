"""Measure what passes of 1, 4 and 8 columns cost on this device."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from tide_jax.compat import release_free_memory
from tide_jax.decode.ahead import compile_ahead
from tide_jax.decode.control import StepTimes, write_step_times
from tide_jax.decode.emit import choices
from tide_jax.decode.plan import Plan
from tide_jax.decode.state import DecodeState, new_state, place_state
from tide_jax.decode.step import Columns, step
from tide_jax.errors import InputError
from tide_jax.exits.remainders import WIDTHS
from tide_jax.model import Model
from tide_jax.sharding import check_rows, place

CONTEXT = 128  # tokens that the measured passes look back on


def passes(graphdef, params, state: DecodeState, tokens, speaks, count):
    """`count` passes over the same columns, through the LM head where `speaks`."""
    decoder = nnx.merge(graphdef, params)
    valid = jnp.ones(tokens.shape, bool)
    at = state.length[:, None] + 1 + jnp.arange(tokens.shape[1])

    def body(carry):
        done, tokens, state = carry
        after, result = step(decoder, {}, Plan(), state, Columns(tokens, valid))
        said = jax.lax.cond(
            speaks, lambda: choices(decoder, state, result.x, at), lambda: jnp.zeros(tokens.shape, jnp.int32)
        )
        return done + 1, said, dataclasses.replace(after, length=state.length)

    return jax.lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), tokens, state))[2]


def measure(model: Model, batch: int, *, rounds: int = 7, count: int = 8) -> StepTimes:
    """Step times at one batch size: medians over interleaved rounds of `count` passes each."""
    ids = np.arange(CONTEXT) % model.config.vocab_size
    programs, seconds = {}, {}
    speaking = {speaks: place(np.bool_(speaks), P(), model.mesh) for speaks in (True, False)}
    passes_each = place(np.int32(count), P(), model.mesh)
    for width in WIDTHS:
        state = new_state(
            model.config,
            tokens=[ids.tolist()] * batch,
            max_new_tokens=[1] * batch,
            thresholds=np.zeros((batch, 0), np.float32),
            stops=[],
            seeds=[0] * batch,
            temperature=[0.0] * batch,
            dtype=model.dtype,
            record_states=False,
            mesh=model.mesh,
        )
        slots = jnp.arange(state.slots.shape[1])
        state = dataclasses.replace(
            state,
            length=jnp.full(batch, CONTEXT, jnp.int32),
            slots=jnp.broadcast_to(jnp.where(slots < CONTEXT, slots, -1), state.slots.shape),
        )
        state = place_state(state, model.mesh)
        tokens = place(np.ones((batch, width), np.int32), P("batch"), model.mesh)
        args = (model.params, state, tokens, speaking[True], passes_each)
        program = compile_ahead(functools.partial(passes, model.graphdef), *args, state=1, mesh=model.mesh)
        programs[width] = [program, state, tokens]
    for round_ in range(rounds + 1):
        for width, entry in programs.items():
            program, state, tokens = entry
            for speaks, flag in speaking.items():
                began = time.perf_counter()
                state = jax.block_until_ready(program(model.params, state, tokens, flag, passes_each))
                taken = (time.perf_counter() - began) / count
                if round_:
                    seconds.setdefault((width, speaks), []).append(taken)
            entry[1] = state
    layer, head = [], []
    for width in WIDTHS:
        silent = float(np.median(seconds[width, False]))
        layer.append(silent / model.config.num_layers)
        head.append(max(float(np.median(seconds[width, True])) - silent, 1e-3 * silent))
    return StepTimes(layer=tuple(layer), head=tuple(head))


def warmup(
    model: Model, *, batches: int | Sequence[int] | None = None, progress: Callable = iter, save: bool = True
) -> dict[int, StepTimes]:
    """Measure what passes of 1, 4 and 8 columns cost, for `Verify("auto")`, and keep it beside the model.

    Args:
        model: a loaded model.
        batches: batch sizes to measure at; between them times are interpolated. None: 1 and 8, or on a mesh the
            smallest batches from there on that it shares evenly.
        progress: called with the list of batch sizes; returns them behind a progress bar.
        save: write `step_times.json` into the model's directory.

    Returns:
        Step times by batch size.

    Raises:
        InputError: a batch size that is none or that the model's mesh does not share evenly, or a model made in memory
            with `save`.

    Example:
        >>> times = tide.warmup(tide.load("demo_out/smollm2"))
        >>> sorted(times)
        [1, 8]
    """
    rows = 1 if model.mesh is None else model.mesh.shape["data"]
    batches = np.atleast_1d(np.asarray([-(-size // rows) * rows for size in (1, 8)] if batches is None else batches))
    if not batches.size or not np.issubdtype(batches.dtype, np.integer) or batches.min() < 1:
        raise InputError(f"batches {batches.tolist()!r}: give batch sizes of 1 or more.")
    if save and model.path is None:
        raise InputError("this model was made in memory: there is no directory to keep step times in. Use save=False.")
    for batch in batches:
        check_rows(model.mesh, int(batch))
    tables = {batch: measure(model, batch) for batch in progress(list(dict.fromkeys(batches.tolist())))}
    release_free_memory()
    if save:
        write_step_times(model.path, model.dtype.name, tables, model.mesh)
    return tables
