"""All that a running batch is: one pytree, donated from step to step."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Key

from tide_jax.exits.remainders import WIDEST, WIDTHS
from tide_jax.models import KV, DecoderConfig
from tide_jax.sharding import named_sharding, place

SLACK = 2 * WIDEST  # slots past a row's last token, where masked columns may write: as many again after those skipped
CACHE_AXES = P("batch", "kv_heads")
# What has no row for each row of the batch.
_OF_THE_BATCH = {
    "segments_run",
    "steps",
    *(
        f"rounds.tally.{name}"
        for name in ("passes", "lm_heads", "settled_segments", "proposed", "accepted", "corrected")
    ),
    *(f"rounds.control.{name}" for name in ("layer", "head", "draft_layers")),
}


class Tally(NamedTuple):
    """What rounds of drafting and settling did, counted on the device.

    Attributes:
        passes: passes of 1, 4 and 8 columns that were executed.
        lm_heads: passes of each width that went through the LM head.
        settled_segments: how often each segment between exit points was executed by passes of each width above 1
            (those of width 1 are in `DecodeState.segments_run`).
        proposed: drafted tokens by their place in the draft.
        accepted: those of them that the full model would have emitted.
        corrected: tokens at which the full model's choice replaced a drafted one.
        rounds: rounds that each row took part in.
    """

    passes: Int[Array, " widths"]
    lm_heads: Int[Array, " widths"]
    settled_segments: Int[Array, "widths segments"]
    proposed: Int[Array, " proposals"]
    accepted: Int[Array, " proposals"]
    corrected: Int[Array, ""]
    rounds: Int[Array, " batch"]


class Control(NamedTuple):
    """What the width of the next round is chosen from.

    Attributes:
        layer: seconds of one layer in a pass of 1, 4 and 8 columns, at this batch size.
        head: seconds of the LM head in such passes.
        accepted: exponentially weighted count of accepted drafts of each row.
        tried: the same of drafts up to the first wrong one.
        offers: exponential average, per row, of how often there is something to draft.
        draft_layers: layers that a pass of drafting runs, exponentially averaged.
    """

    layer: Float[Array, " widths"]
    head: Float[Array, " widths"]
    accepted: Float[Array, " batch"]
    tried: Float[Array, " batch"]
    offers: Float[Array, " batch"]
    draft_layers: Float[Array, ""]


class RoundState(NamedTuple):
    """The part of a batch that drafts and settles.

    Attributes:
        width: columns per round of each row, at most; 1: no drafting.
        tally: counters.
        control: None: widths stay as they are.
    """

    width: Int[Array, " batch"]
    tally: Tally
    control: Control | None


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """A batch of rows in the middle of decoding. Every row starts at slot 0 and has its own length.

    Attributes:
        caches: one K/V cache per layer. What lies beyond `length` is masked, and finite.
        slots: the position stored in each cache slot, −1 where none; a slot counts iff 0 ≤ position < length.
        length: positions of the row whose K/V rows are in the cache.
        live: the row still wants tokens.
        given: tokens known in advance: the prompt, or a whole trajectory when the row is teacher-forced.
        limit: tokens, prompt included, at which the row ends.
        tokens: prompt and generated tokens by position.
        choices: what the model said at each position, whether or not it was followed; 0 inside the prompt.
        depths: layers run for the state that `choices` came from; 0 where nothing was chosen.
        states: the state `choices` came from (after the exit projection, before the final norm); None: not recorded.
        keys: PRNG key of the row's seed and prompt.
        temperature: 0 is greedy.
        stops: token ids that end the row, padded with −1.
        thresholds: a token leaves at an exit point where its score is above the row's threshold.
        flagged: a non-finite K/V row was met and written as zeros, or a final state was not finite.
        segments_run: how often each segment between exit points was executed.
        steps: decode steps executed; a round of drafting and settling is one.
        rounds: drafting and settling; None: every step emits its token at once.
    """

    caches: tuple[KV, ...]
    slots: Int[Array, "batch slots"]
    length: Int[Array, " batch"]
    live: Bool[Array, " batch"]
    given: Int[Array, " batch"]
    limit: Int[Array, " batch"]
    tokens: Int[Array, "batch slots"]
    choices: Int[Array, "batch slots"]
    depths: Int[Array, "batch slots"]
    states: Float[Array, "batch slots embed"] | None
    keys: Key[Array, " batch"]
    temperature: Float[Array, " batch"]
    stops: Int[Array, "batch stops"]
    thresholds: Float[Array, "batch points"]
    flagged: Bool[Array, " batch"]
    segments_run: Int[Array, " segments"]
    steps: Int[Array, ""]
    rounds: RoundState | None = None

    def tree_flatten_with_keys(self):
        """The fields by name."""
        names = [field.name for field in dataclasses.fields(self)]
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], None

    @classmethod
    def tree_unflatten(cls, _, values):
        """Without `__init__`: JAX rebuilds trees around things that are no arrays, which a checked one refuses."""
        state = object.__new__(cls)
        for field, value in zip(dataclasses.fields(cls), values, strict=True):
            object.__setattr__(state, field.name, value)
        return state


def bucket(count: int, smallest: int) -> int:
    """The smallest power of two that is at least `count` and `smallest`: few shapes, few compilations."""
    return max(smallest, 1 << max(count - 1, 0).bit_length())


def logical_axes(state: DecodeState) -> DecodeState:
    """The logical axes of every array of a state."""

    def axes(path: tuple, _: object) -> P:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return CACHE_AXES if name.startswith("caches") else P() if name in _OF_THE_BATCH else P("batch")

    return jax.tree_util.tree_map_with_path(axes, state)


def place_state(state: DecodeState, mesh: Mesh | None) -> DecodeState:
    """The state on the devices of the mesh, where it is not there already; None: as it is."""
    return state if mesh is None else place(state, logical_axes(state), mesh)


def new_state(
    config: DecoderConfig,
    *,
    tokens: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    thresholds: Float[np.ndarray, "batch points"],
    stops: Sequence[int],
    seeds: Sequence[int],
    temperature: Sequence[float],
    dtype: DTypeLike,
    record_states: bool,
    mesh: Mesh | None = None,
) -> DecodeState:
    """An empty-cache state for rows whose `tokens` are known; cache slots are a power of two (≥ 256).

    Everything but caches and recorded states is made on the host, so that a new batch costs no compilation. On a mesh
    these are made in their shares; all else is placed when it is used.
    """
    batch = len(tokens)
    given = np.array([len(row) for row in tokens], np.int32)
    limit = given + np.asarray(max_new_tokens, np.int32)
    slots = bucket(int(limit.max()) + SLACK, 256)
    padded = np.zeros((batch, slots), np.int32)
    for row, ids in zip(padded, tokens, strict=True):
        row[: len(ids)] = ids
    ends = np.full((batch, bucket(len(stops), 4)), -1, np.int32)
    ends[:, : len(stops)] = stops
    empty = (batch, config.num_kv_heads, slots, config.head_dim)
    # The prompt enters the key, so that rows of one batch with one seed do not share their noise.
    prompts = [zlib.crc32(np.asarray(row, np.int32)) for row in tokens]
    keys = jnp.stack([jax.random.fold_in(jax.random.key(seed), of) for seed, of in zip(seeds, prompts, strict=True)])
    zeros = functools.partial(jnp.zeros, empty, dtype, device=named_sharding(mesh, CACHE_AXES, empty))
    kept = (batch, slots, config.hidden_size)
    return DecodeState(
        caches=tuple(KV(zeros(), zeros()) for _ in range(config.num_layers)),
        slots=jnp.full((batch, slots), -1, jnp.int32),
        length=jnp.zeros(batch, jnp.int32),
        live=jnp.asarray(limit > given),
        given=jnp.asarray(given),
        limit=jnp.asarray(limit),
        tokens=jnp.asarray(padded),
        choices=jnp.zeros((batch, slots), jnp.int32),
        depths=jnp.zeros((batch, slots), jnp.int32),
        states=jnp.zeros(kept, dtype, device=named_sharding(mesh, P("batch"), kept)) if record_states else None,
        keys=keys,
        temperature=jnp.asarray(temperature, jnp.float32),
        stops=jnp.asarray(ends),
        thresholds=jnp.asarray(thresholds, jnp.float32),
        flagged=jnp.zeros(batch, bool),
        segments_run=jnp.zeros(thresholds.shape[1] + 1, jnp.int32),
        steps=jnp.zeros((), jnp.int32),
    )


def new_rounds(batch: int, segments: int, *, width: int, control: Control | None) -> RoundState:
    """Rounds of a fixed width (which `control` may change), nothing counted yet."""
    return RoundState(
        width=jnp.full(batch, width, jnp.int32),
        tally=Tally(
            passes=jnp.zeros(len(WIDTHS), jnp.int32),
            lm_heads=jnp.zeros(len(WIDTHS), jnp.int32),
            settled_segments=jnp.zeros((len(WIDTHS), segments), jnp.int32),
            proposed=jnp.zeros(WIDEST - 1, jnp.int32),
            accepted=jnp.zeros(WIDEST - 1, jnp.int32),
            corrected=jnp.zeros((), jnp.int32),
            rounds=jnp.zeros(batch, jnp.int32),
        ),
        control=control,
    )
