"""`generate`: prompts in; text, tokens, and the depth each token really ran, out."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from tide_jax.decode.engine import Engine, Timings
from tide_jax.decode.plan import WIDTHS
from tide_jax.decode.prompts import Prompts, encode_prompts
from tide_jax.decode.proposers import Proposer
from tide_jax.decode.sampling import Sampling
from tide_jax.decode.state import DecodeState
from tide_jax.decode.verify import Verify
from tide_jax.errors import InputError
from tide_jax.exits import ExitRule, Never, NoScorer, Remainder, RouterScorer, Scorer
from tide_jax.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts:
    """What drafting and settling did; counted by executed work.

    Attributes:
        proposed: drafted tokens by their place in the draft (index 0: the first after the row's last token).
        accepted: those of them that the full model would have emitted too.
        corrected: drafted tokens that the full model replaced by its own.
        rounds: rounds, summed over rows.
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
        return cls(
            **{
                field.name: sum(getattr(one, field.name) for one in several)
                for field in dataclasses.fields(cls)
                if field.type == "int" or field.type is int
            },
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


def generate(
    model: Model,
    prompts: Prompts,
    *,
    max_new_tokens: int = 64,
    exits: ExitRule | None = None,
    exit_points: Sequence[int] | None = None,
    remainder: Remainder | None = None,
    propose: Proposer | None = None,
    verify: Verify | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    stop: int | Sequence[int] | None = None,
    seed: int | Sequence[int] = 0,
) -> Output:
    """Generate text, leaving layers out where the exit rule says so.

    Args:
        model: a loaded model.
        prompts: a string (raw text), a chat (list of `{"role", "content"}`), a list of either, or token ids.
        max_new_tokens: new tokens per prompt, at most.
        exits: when a token leaves; None: never.
        exit_points: depths (layers run) at which it may; None: those the rule names.
        remainder: what stands in for the layers that are not run; None: `ProjectKV()`, and under `verify` `Deferred`.
        propose: drafts without running layers, in place of the exits; needs `verify`.
        verify: the full model judges what the exits or `propose` draft, and the output is the full model's own.
        sampling: how tokens are chosen.
        stop: token ids (or one id) that end a row; None: the model's own; `[]`: none.
        seed: for sampling; one, or one per prompt, 0 … 2**32 − 1. A row's text depends on its prompt and its seed, not
            on its place or its neighbours: equal prompts with equal seeds give equal texts.

    Raises:
        InputError: a prompt that cannot be encoded or is too long, an exit point that does not exist, and the like.

    Example:
        >>> model = tide.load("demo_out/smollm2")
        >>> out = tide.generate(model, "The sky is", max_new_tokens=8, exits=tide.FixedDepth(24))
        >>> out.exit_depths.shape
        (1, 8)
    """
    if not isinstance(sampling, Sampling):
        raise InputError(f"sampling is {sampling!r}, expected Sampling(temperature=…).")
    rows = encode_prompts(model, prompts)
    check_capacity(model, rows, max_new_tokens)
    engine = engine_for(
        model, exits=exits, exit_points=exit_points, remainder=remainder, propose=propose, verify=verify
    )
    state = engine.start(
        rows,
        rule=Never() if exits is None else exits,
        max_new_tokens=max_new_tokens,
        stops=resolve_stops(model, stop),
        seeds=_resolve_seeds(seed, len(rows)),
        temperature=sampling.temperature,
    )
    state = engine.finish(state)
    return collect(engine, state, [len(row) for row in rows], max_new_tokens)


def check_capacity(model: Model, rows: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse runs that would leave the positions the model was trained on.

    Raises:
        InputError: they would, or `max_new_tokens` is not a count.
    """
    if not _is_integer(max_new_tokens) or max_new_tokens < 0:
        raise InputError(f"max_new_tokens is {max_new_tokens!r}; it must be an integer of 0 or more.")
    longest = max(map(len, rows))
    if longest + max_new_tokens > model.config.max_positions:
        raise InputError(
            f"a prompt of {longest} tokens and max_new_tokens {max_new_tokens} need {longest + max_new_tokens} "
            f"positions; this model has {model.config.max_positions}. Shorten the prompt or ask for fewer tokens."
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _resolve_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """One seed per row."""
    seeds = [seed] * rows if np.ndim(seed) == 0 else list(seed)
    if wrong := [one for one in seeds if not _is_integer(one)]:
        raise InputError(f"seed {wrong[0]!r} is not an integer.")
    if wrong := [one for one in seeds if not 0 <= one < 2**32]:
        raise InputError(f"seed {wrong[0]} is outside 0 … 2**32 − 1.")
    if len(seeds) != rows:
        raise InputError(f"{len(seeds)} seeds were given for {rows} prompts: give one, or one per prompt.")
    return [int(one) for one in seeds]


def engine_for(
    model: Model,
    *,
    exits: ExitRule | None,
    exit_points: Sequence[int] | None = None,
    remainder: Remainder | None = None,
    propose: Proposer | None = None,
    verify: Verify | None = None,
    record_states: bool = False,
) -> Engine:
    """The engine on which a rule runs at these points.

    A rule that needs no score runs on the program of the model's routers where every point has one, so that comparing
    depths and thresholds compiles once.
    """
    rule = Never() if exits is None else exits
    if not isinstance(rule, ExitRule):
        raise InputError(f"exits is {rule!r}, expected an exit rule such as FixedDepth(16).")
    if propose is not None and not isinstance(propose, Proposer):
        raise InputError(f"propose is {propose!r}, expected a proposer such as Ngram().")
    if remainder is not None and not isinstance(remainder, Remainder):
        raise InputError(f"remainder is {remainder!r}, expected a remainder such as ProjectKV().")
    if exit_points is not None and (np.ndim(exit_points) != 1 or not all(map(_is_integer, exit_points))):
        raise InputError(f"exit_points is {exit_points!r}, expected a list of depths, e.g. [8, 16, 24].")
    points = rule.default_points(model.exits) if exit_points is None else tuple(exit_points)
    points = tuple(depth for depth in points if exit_points is not None or depth != model.config.num_layers)
    scorer = rule.scorer
    if isinstance(scorer, NoScorer) and exit_points is not None:
        scorer = _shared_scorer(model, points)
    return Engine(
        model,
        exit_points=points,
        scorer=scorer,
        remainder=remainder,
        propose=propose,
        verify=verify,
        record_states=record_states,
    )


def _shared_scorer(model: Model, points: Sequence[int]) -> Scorer:
    heads = model.exits.heads if model.exits else {}
    routed = points and all(depth in heads and heads[depth].router is not None for depth in points)
    return RouterScorer() if routed else NoScorer()


def resolve_stops(model: Model, stop: int | Sequence[int] | None) -> list[int]:
    """Stop ids: the given ones, or the model's own.

    Raises:
        InputError: not a list of token ids.
    """
    if stop is None:
        return list(model.eos_ids)
    ids = [stop] if isinstance(stop, str) or np.ndim(stop) == 0 else list(stop)
    if wrong := [item for item in ids if not _is_integer(item)]:
        raise InputError(f"stop must be a list of token ids, got {wrong[0]!r}. Stop strings are not supported yet.")
    model.check_ids(np.asarray(ids, np.int64))
    return [int(item) for item in ids]


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
    lengths = np.diff(engine.edges)
    return Drafts(
        proposed=tally.proposed.tolist(),
        accepted=tally.accepted.tolist(),
        corrected=int(tally.corrected.sum()),
        passes=dict(zip(WIDTHS, tally.passes.tolist(), strict=True)),
        draft_layers=int(np.dot(lengths, np.asarray(state.segments_run))),
        settle_layers=int((tally.settled_segments @ lengths).sum()),
        rounds=int(tally.rounds.sum()),
        tokens=decoded,
    )
