"""What a run has to show: text, tokens, depths, and the work that was really done for them."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from tide_jax.decode.control import executed
from tide_jax.decode.engine import Engine, Timings
from tide_jax.decode.state import DecodeState
from tide_jax.exits.remainders import WIDTHS
from tide_jax.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts:
    """What drafting and settling did; counted by executed work.

    Attributes:
        proposed: drafted tokens by their place in the draft (index 0: the first after the row's last token).
        accepted: those of them that the full model would have emitted too.
        corrected: drafted tokens that the full model replaced by its own.
        rounds: rounds, summed over rows. A column that ran all layers is emitted at once, and its row may draft on in
            the same round.
        tokens: tokens that they yielded.
        passes: executed passes by columns per row; those of more than 1 are settling passes of the full model.
        draft_layers: layers run by passes of one column, summed.
        settle_layers: layers run by settling passes, summed.
    """

    proposed: list[int]
    accepted: list[int]
    corrected: int
    rounds: int
    tokens: int
    passes: dict[int, int]
    draft_layers: int
    settle_layers: int

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens by proposed ones; NaN where nothing was proposed."""
        return sum(self.accepted) / sum(self.proposed) if sum(self.proposed) else float("nan")

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a row gains in a round; NaN without rounds."""
        return self.tokens / self.rounds if self.rounds else float("nan")

    @classmethod
    def total(cls, several: Sequence["Drafts"]) -> "Drafts":
        """The sum of several runs."""
        counts = ("corrected", "rounds", "tokens", "draft_layers", "settle_layers")
        return cls(
            **{name: sum(getattr(one, name) for one in several) for name in counts},
            proposed=[sum(column) for column in zip(*(one.proposed for one in several), strict=True)],
            accepted=[sum(column) for column in zip(*(one.accepted for one in several), strict=True)],
            passes={width: sum(one.passes[width] for one in several) for width in WIDTHS},
        )

    def facts(self) -> dict[str, object]:
        """Everything as JSON-ready data."""
        return {
            **dataclasses.asdict(self),
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What a run did.

    Attributes:
        mean_depth: exit depth per generated token, averaged over all rows.
        histogram: generated tokens by exit depth.
        executed_segments: how often each segment between exit points ran, in decode steps; a segment runs when any
            row of the batch needs it.
        executed_layers: layers run in decode steps, summed: the work that was really done.
        steps: decode steps, or rounds.
        new_tokens: generated tokens, all rows.
        tokens_per_second: tokens of the decode steps (the first of each row comes from the prefill) by their seconds.
        timings: seconds by phase; compilation is never inside another phase.
        flagged: rows in which a non-finite value was met.
        predicted_tokens_per_second: what the measured step times predicted; 0 where there are none.
        drafts: what drafting and settling did; None where every step emits its token at once.
    """

    mean_depth: float
    histogram: dict[int, int]
    executed_segments: list[int]
    executed_layers: int
    steps: int
    new_tokens: int
    tokens_per_second: float
    timings: Timings
    flagged: list[int]
    predicted_tokens_per_second: float = 0.0
    drafts: Drafts | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Generated text.

    Attributes:
        text: one string per prompt, without the stop token; empty strings when the model has no tokenizer.
        tokens: int32 [batch, new]; the stop token is kept; padding after it.
        exit_depths: int32 [batch, new] layers run, 1 … L; 0 after the end of a row. Of a token that was drafted, the
            layers that its draft ran; L for every token that the full model chose.
        lengths: new tokens of each row.
        stats: what the run did.
    """

    text: list[str]
    tokens: np.ndarray
    exit_depths: np.ndarray
    lengths: list[int]
    stats: Stats


def collect(engine: Engine, state: DecodeState, starts: Sequence[int], max_new_tokens: int) -> Output:
    """The host's view of a finished state whose rows were prompted with `starts` tokens."""
    model = engine.model
    buffer, depths = np.asarray(state.tokens), np.asarray(state.depths)
    tokens = np.full((len(starts), max_new_tokens), _pad(model), np.int32)
    ran = np.zeros((len(starts), max_new_tokens), np.int32)
    lengths, text = [], []
    for row, begin in enumerate(starts):
        made = depths[row, begin : begin + max_new_tokens]
        count = int((made > 0).sum())
        ids = buffer[row, begin : begin + count]
        tokens[row, :count], ran[row, :count] = ids, made[:count]
        lengths.append(count)
        if model.tokenizer is not None:
            stopped = count and ids[-1] in np.asarray(state.stops[row])
            text.append(model.tokenizer.decode(ids[: count - bool(stopped)].tolist()))
        else:
            text.append("")
    return Output(text=text, tokens=tokens, exit_depths=ran, lengths=lengths, stats=_stats(engine, state, ran))


def _pad(model: Model) -> int:
    if model.tokenizer is not None and model.tokenizer.pad_id is not None:
        return model.tokenizer.pad_id
    return model.eos_ids[0] if model.eos_ids else 0


def _stats(engine: Engine, state: DecodeState, ran: np.ndarray) -> Stats:
    made = ran[ran > 0]
    depths, counts = np.unique(made, return_counts=True)
    decoded = int((ran[:, 1:] > 0).sum())
    timings = dataclasses.replace(engine.timings)
    drafts = None
    if state.rounds is not None:
        drafts = _drafts(engine, state, decoded)
    segments = np.asarray(state.segments_run)
    if drafts is not None:
        segments = segments + np.asarray(state.rounds.tally.settled_segments).sum(axis=0)
    return Stats(
        mean_depth=float(made.mean()) if made.size else 0.0,
        histogram={int(depth): int(count) for depth, count in zip(depths, counts, strict=True)},
        executed_segments=segments.tolist(),
        executed_layers=int(np.dot(np.diff(engine.edges), segments)),
        steps=int(state.steps),
        new_tokens=int(made.size),
        tokens_per_second=decoded / timings.decode if decoded and timings.decode else 0.0,
        timings=timings,
        flagged=[int(row) for row in np.flatnonzero(np.asarray(state.flagged))],
        predicted_tokens_per_second=decoded / timings.predicted if decoded and timings.predicted else 0.0,
        drafts=drafts,
    )


def _drafts(engine: Engine, state: DecodeState, decoded: int) -> Drafts:
    tally = jax.tree.map(np.asarray, state.rounds.tally)
    layers, _ = executed(tally, state.segments_run, engine.edges)
    return Drafts(
        proposed=tally.proposed.tolist(),
        accepted=tally.accepted.tolist(),
        corrected=int(tally.corrected),
        passes=dict(zip(WIDTHS, tally.passes.tolist(), strict=True)),
        draft_layers=int(layers[0]),
        settle_layers=int(layers[1:].sum()),
        rounds=int(tally.rounds.sum()),
        tokens=decoded,
    )
