"""`generate`: prompts in; text, tokens, and the depth each token really ran, out."""

from collections.abc import Sequence

import numpy as np

from tide_jax.decode.engine import Engine
from tide_jax.decode.output import Output, collect
from tide_jax.decode.prompts import Prompts, encode_prompts
from tide_jax.decode.proposers import Proposer
from tide_jax.decode.sampling import Sampling
from tide_jax.decode.verify import Verify
from tide_jax.errors import InputError
from tide_jax.exits import ExitRule, Never, NoScorer, Remainder, RouterScorer, Scorer
from tide_jax.model import Model


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
        record_states=record_states or getattr(propose, "needs_states", False),
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
