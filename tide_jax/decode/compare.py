"""The yardstick: what an approximate run says along the full model's own greedy trajectory.

On-policy agreement ("would the full model have said this after that prefix?") rewards garbage: a model cut to a third
of its layers says "and, and, and", and the full model agrees. So the full model's tokens are fed to the exit engine,
which runs with its own approximate K/V, and at every generated position its choice is compared with the full model's.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from tide_jax.compat import use_mesh
from tide_jax.decode.generate import check_capacity, engine_for, resolve_stops
from tide_jax.decode.output import Drafts, collect
from tide_jax.decode.prompts import Prompts, encode_prompts
from tide_jax.decode.proposers import Proposer
from tide_jax.decode.verify import Verify
from tide_jax.errors import InputError
from tide_jax.exits import ExitRule, Never, Remainder
from tide_jax.model import Model

NOTHING = "every trajectory ended at its first token: nothing can be compared. Use other prompts."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """An approximate run against the full model. The first token of each prompt, which the prefill makes at full depth
    in both, is counted nowhere.

    Attributes:
        agreement: share of positions on the full model's greedy trajectory at which the choices are equal.
        positions: how many positions that is.
        first_divergence: tokens until the free run first differs from the full model's, averaged over prompts (a run
            that never differs counts its whole length).
        kl: KL(full ‖ exit) at the same positions, mean, nats.
        nll_gap: NLL of the full model's tokens under the exit engine minus under the full model, mean, nats.
        longest_repeat: longest n-gram, in tokens, that occurs twice in the free run, mean over prompts.
        full_longest_repeat: the same for the full model's text.
        mean_depth: layers run per token in the free run; of a drafted token, by its draft.
        forced_mean_depth: layers run per token on the full model's trajectory.
        histogram: tokens by depth in the free run.
        tokens_per_second: decode speed of the free run; `full_tokens_per_second` of the full model, same program.
        full_tokens_per_second: see above.
        drafts: what drafting and settling did in the free run, all prompts; None where nothing was drafted.
        texts: free-run text of each prompt.
        full_texts: the full model's text of each prompt.
        tokens: free-run token ids of each prompt.
        exit_depths: layers run for each of them.
    """

    agreement: float
    positions: int
    first_divergence: float
    kl: float
    nll_gap: float
    longest_repeat: float
    full_longest_repeat: float
    mean_depth: float
    forced_mean_depth: float
    histogram: dict[int, int]
    tokens_per_second: float
    full_tokens_per_second: float
    drafts: Drafts | None
    texts: list[str]
    full_texts: list[str]
    tokens: list[np.ndarray] = dataclasses.field(repr=False)
    exit_depths: list[np.ndarray] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One prompt under one rule; arrays have one entry per new token.

    Attributes:
        tokens: what was emitted, or forced.
        choices: what the model said.
        depths: layers run.
        states: final states that `choices` came from.
        text: `tokens` decoded.
        speed: decode tokens per second; 0 where no token was decoded.
        drafts: what drafting and settling did in the whole batch, with the first row of it; None with the others.
    """

    tokens: Int[np.ndarray, " new"]
    choices: Int[np.ndarray, " new"]
    depths: Int[np.ndarray, " new"]
    states: Float[np.ndarray, "new embed"]
    text: str
    speed: float
    drafts: Drafts | None


class Yardstick:
    """The full model's greedy trajectories on some prompts, against which any number of rules are measured.

    All rules run on one compiled program, so their speeds can be compared. Where tokens are drafted and settled, the
    full model runs on the plain loop.

    Args:
        model: a loaded model.
        prompts: as for `generate`.
        rule: a rule that needs the scorer of the program.
        exit_points: every depth that any of the rules will use.
        remainder: as for `generate`.
        propose: as for `generate`.
        verify: as for `generate`; agreement is then 1 but for ties of the full model's two best tokens.
        max_new_tokens: length of the trajectories, at least 2.
        stop: as for `generate`.
        batch: prompts per batch. Choices do not depend on it; speeds do, and 1 is what one user feels.
        progress: called with the list of batches; returns them behind a progress bar.
    """

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        *,
        rule: ExitRule,
        exit_points: Sequence[int] | None = None,
        remainder: Remainder | None = None,
        propose: Proposer | None = None,
        verify: Verify | None = None,
        max_new_tokens: int = 64,
        stop: Sequence[int] | None = None,
        batch: int = 1,
        progress: Callable = iter,
    ):
        if not isinstance(max_new_tokens, int) or max_new_tokens < 2:
            raise InputError(f"max_new_tokens is {max_new_tokens!r}; a comparison needs an integer of at least 2.")
        if batch < 1:
            raise InputError(f"batch is {batch}; it must be at least 1.")
        rows = encode_prompts(model, prompts)
        check_capacity(model, rows, max_new_tokens)
        self._model = model
        self._batches = [rows[begin : begin + batch] for begin in range(0, len(rows), batch)]
        self._new = max_new_tokens
        self._stops = resolve_stops(model, stop)
        self._engine = functools.partial(
            engine_for,
            model,
            exits=rule,
            exit_points=exit_points,
            remainder=remainder,
            propose=propose,
            verify=verify,
            record_states=True,
        )
        engine = self._engine()
        engine.thresholds(rule, 1)  # refuses a rule that these points cannot serve before anything is compiled
        self._full_engine = self._engine
        if engine.plan.rounds is not None:
            self._full_engine = functools.partial(engine_for, model, exits=None, record_states=True)
            self._run(self._batches[0], rule, warm=True)
        self._run(self._batches[0], None, warm=True)
        self._full = [self._run(rows, None) for rows in progress(self._batches)]

    def agreement(self, rule: ExitRule, *, progress: Callable = iter) -> dict[str, float]:
        """Agreement, positions and mean depth on the full model's trajectory alone, without a free run."""
        same, depths = [], []
        for rows, full in zip(progress(self._batches), self._full, strict=True):
            for run in self._run(rows, rule, [run.tokens for run in full]):
                same.append(run.choices[1:] == run.tokens[1:])
                depths.append(run.depths[1:])
        same, depths = np.concatenate(same), np.concatenate(depths)
        if not same.size:
            raise InputError(NOTHING)
        return {"agreement": float(same.mean()), "positions": int(same.size), "mean_depth": float(depths.mean())}

    def measure(self, rule: ExitRule, *, progress: Callable = iter) -> Report:
        """The yardstick of one rule."""
        free, forced = [], []
        for rows, full in zip(progress(self._batches), self._full, strict=True):
            free += self._run(rows, rule)
            forced += self._run(rows, rule, [run.tokens for run in full])
        return self._report([run for runs in self._full for run in runs], free, forced)

    def _run(
        self,
        rows: list[list[int]],
        rule: ExitRule | None,
        trajectories: list[np.ndarray] | None = None,
        *,
        warm: bool = False,
    ) -> list[_Run]:
        """Run a batch freely, or along given trajectories, by a rule, or the full model where it is None.

        `warm` stops after a step: by then everything is compiled, and every page has been touched.
        """
        engine = self._full_engine() if rule is None else self._engine()
        wanted = [self._new] * len(rows) if trajectories is None else [len(tokens) for tokens in trajectories]
        state = engine.start(
            rows, rule=rule or Never(), max_new_tokens=wanted, stops=self._stops, continuations=trajectories
        )
        state = engine.run(state, 1) if warm else engine.finish(state)
        output = collect(engine, state, [len(row) for row in rows], self._new)
        choices, states = np.asarray(state.choices), np.asarray(state.states)
        runs = []
        for index, (row, length) in enumerate(zip(rows, output.lengths, strict=True)):
            new = slice(len(row), len(row) + length)
            runs.append(
                _Run(
                    tokens=output.tokens[index, :length],
                    choices=choices[index, new],
                    depths=output.exit_depths[index, :length],
                    states=states[index, new],
                    text=output.text[index],
                    speed=output.stats.tokens_per_second,
                    drafts=output.stats.drafts if index == 0 else None,
                )
            )
        return runs

    def _report(self, full: list[_Run], free: list[_Run], forced: list[_Run]) -> Report:
        same = np.concatenate([run.choices[1:] == run.tokens[1:] for run in forced])
        if not same.size:
            raise InputError(NOTHING)
        measured = [self._divergence(a, b) for a, b in zip(full, forced, strict=True)]
        depths = np.concatenate([run.depths[1:] for run in free])
        values, counts = np.unique(depths, return_counts=True)
        return Report(
            agreement=float(same.mean()),
            positions=int(same.size),
            first_divergence=float(
                np.mean([_first_difference(a.tokens, b.tokens) for a, b in zip(free, full, strict=True)])
            ),
            kl=float(np.concatenate([kl for kl, _ in measured]).mean()),
            nll_gap=float(np.concatenate([gap for _, gap in measured]).mean()),
            longest_repeat=float(np.mean([longest_repeat(run.tokens.tolist()) for run in free])),
            full_longest_repeat=float(np.mean([longest_repeat(run.tokens.tolist()) for run in full])),
            mean_depth=float(depths.mean()),
            forced_mean_depth=float(np.concatenate([run.depths[1:] for run in forced]).mean()),
            histogram={int(depth): int(count) for depth, count in zip(values, counts, strict=True)},
            tokens_per_second=_speed(free),
            full_tokens_per_second=_speed(full),
            drafts=Drafts.total(drafts) if (drafts := [run.drafts for run in free if run.drafts]) else None,
            texts=[run.text for run in free],
            full_texts=[run.text for run in full],
            tokens=[run.tokens for run in free],
            exit_depths=[run.depths for run in free],
        )

    def _divergence(self, full: _Run, forced: _Run) -> tuple[np.ndarray, np.ndarray]:
        """KL and NLL gap at every position after the first, in one shape for all prompts."""
        pad = lambda array: np.pad(array, ((0, self._new - len(array)), *[(0, 0)] * (array.ndim - 1)))  # noqa: E731
        with use_mesh(self._model.mesh):
            kl, gap = _divergence(
                self._model.graphdef, self._model.params, pad(full.states), pad(forced.states), pad(full.tokens)
            )
        keep = slice(1, len(full.tokens))
        return np.asarray(kl)[keep], np.asarray(gap)[keep]


def compare(
    model: Model,
    prompts: Prompts,
    *,
    exits: ExitRule | None,
    exit_points: Sequence[int] | None = None,
    remainder: Remainder | None = None,
    propose: Proposer | None = None,
    verify: Verify | None = None,
    max_new_tokens: int = 64,
    stop: Sequence[int] | None = None,
    progress: Callable = iter,
) -> Report:
    """Measure an exit rule against the full model: speed beside quality.

    Args are those of `generate`; decoding is greedy, prompt by prompt.

    Raises:
        InputError: as `generate`.

    Example:
        >>> report = tide.compare(model, ["The sky is"], exits=tide.FixedDepth(24), max_new_tokens=16)
        >>> 0 <= report.agreement <= 1
        True
    """
    exits = exits or Never()
    yardstick = Yardstick(
        model,
        prompts,
        rule=exits,
        exit_points=exit_points,
        remainder=remainder,
        propose=propose,
        verify=verify,
        max_new_tokens=max_new_tokens,
        stop=stop,
        progress=progress,
    )
    return yardstick.measure(exits, progress=progress)


def longest_repeat(tokens: Sequence[int]) -> int:
    """Length of the longest n-gram that occurs at two places in the sequence (they may overlap); 0 when none does.

    Example:
        >>> longest_repeat([5, 1, 2, 3, 9, 1, 2, 3])
        3
        >>> longest_repeat([7, 7, 7, 7])
        3
    """
    best = 0
    previous = [0] * (len(tokens) + 1)  # longest common suffix of tokens[:i] and tokens[:j + 1]
    for i in range(1, len(tokens)):
        current = [0] * (len(tokens) + 1)
        for j in range(i):
            if tokens[i] == tokens[j]:
                current[j + 1] = previous[j] + 1
                best = max(best, current[j + 1])
        previous = current
    return best


def _first_difference(one: Int[np.ndarray, " some"], other: Int[np.ndarray, " others"]) -> int:
    """How many leading tokens two runs share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _speed(runs: Sequence[_Run]) -> float:
    """Decode tokens per second: the median over prompts of each run's own."""
    return float(np.median([run.speed for run in runs if run.speed] or [0.0]))


@functools.partial(jax.jit, static_argnames="graphdef")
def _divergence(
    graphdef,
    params,
    full: Float[Array, "new embed"],
    other: Float[Array, "new embed"],
    tokens: Int[Array, " new"],
) -> tuple[Float[Array, " new"], Float[Array, " new"]]:
    """KL(full ‖ other), and the difference of the NLL of `tokens`, at every position, nats."""
    decoder = nnx.merge(graphdef, params)
    p, q = jax.nn.log_softmax(decoder.logits(full)), jax.nn.log_softmax(decoder.logits(other))
    gap = jnp.take_along_axis(p - q, tokens[:, None], axis=1)[:, 0]
    return (jnp.exp(p) * (p - q)).sum(axis=1), gap
