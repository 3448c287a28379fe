"""The yardstick: what an approximate run says along the full model's own greedy trajectory.

On-policy agreement ("would the full model have said this after that prefix?") rewards garbage: a model cut to a third of
its layers says "and, and, and", and the full model agrees. So the full model's tokens are fed to the exit engine, which
runs with its own approximate K/V, and at every generated position its choice is compared with the full model's.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from tide_jax.decode.engine import Engine
from tide_jax.decode.generate import Output, check_capacity, collect, engine_for, resolve_stops
from tide_jax.decode.prompts import Prompts, encode_prompts
from tide_jax.errors import InputError
from tide_jax.exits import ExitRule, Never, ProjectKV, Remainder
from tide_jax.model import Model


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
        mean_depth: layers run per token in the free run.
        forced_mean_depth: layers run per token on the full model's trajectory.
        histogram: tokens by depth in the free run.
        tokens_per_second: decode speed of the free run; `full_tokens_per_second` of the full model, same program.
        full_tokens_per_second: see above.
        texts: free-run text of each prompt.
        full_texts: the full model's text of each prompt.
        outputs: the free runs themselves.
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
    texts: list[str]
    full_texts: list[str]
    outputs: list[Output] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One prompt, one rule: the output, and what was recorded at each new position."""

    output: Output
    choices: Int[np.ndarray, " new"]
    states: Float[np.ndarray, "new embed"]
    seconds: float


class Yardstick:
    """The full model's greedy trajectories on some prompts, against which any number of rules are measured.

    All rules run on one compiled program, prompt by prompt (batch 1), so their speeds can be compared.

    Args:
        model: a loaded model.
        prompts: as for `generate`.
        exit_points: every depth that any of the rules will use.
        rule: a rule that needs the scorer of the program.
        remainder: stands in for the layers that are not run.
        max_new_tokens: length of the trajectories, at least 2.
        stop: as for `generate`.
        progress: called with each list of work items; returns them behind a progress bar.
    """

    def __init__(
        self,
        model: Model,
        prompts: Prompts,
        *,
        rule: ExitRule,
        exit_points: Sequence[int] | None = None,
        remainder: Remainder = ProjectKV(),  # noqa: B008 - frozen
        max_new_tokens: int = 64,
        stop: Sequence[int] | None = None,
        progress: Callable = iter,
    ):
        self._model = model
        self._rows = encode_prompts(model, prompts)
        check_capacity(model, self._rows, max_new_tokens)
        if max_new_tokens < 2:
            raise InputError(f"max_new_tokens is {max_new_tokens}; a comparison needs at least 2.")
        self._new = max_new_tokens
        self._stops = resolve_stops(model, stop)
        self._progress = progress
        self._engine = lambda: engine_for(
            model, exits=rule, exit_points=exit_points, remainder=remainder, record_states=True
        )
        self._run(self._engine(), self._rows[0], Never(), None)  # compile, and touch every page once
        self._full = [self._run(self._engine(), row, Never(), None) for row in progress(self._rows)]

    @property
    def full_outputs(self) -> list[Output]:
        """The full model's runs."""
        return [run.output for run in self._full]

    def agreement(self, rule: ExitRule, *, progress: Callable = iter) -> dict[str, float]:
        """Agreement, positions and mean depth on the full model's trajectory alone, without a free run."""
        same, depths = [], []
        for row, full in zip(progress(self._rows), self._full, strict=True):
            length = full.output.lengths[0]
            forced = self._run(self._engine(), row, rule, full.output.tokens[0, :length])
            same.append(forced.choices[1:length] == full.output.tokens[0, 1:length])
            depths.append(forced.output.exit_depths[0, 1:length])
        same, depths = np.concatenate(same), np.concatenate(depths)
        return {"agreement": float(same.mean()), "positions": int(same.size), "mean_depth": float(depths.mean())}

    def measure(self, rule: ExitRule) -> Report:
        """The yardstick of one rule."""
        free, forced = [], []
        for row, full in zip(self._progress(self._rows), self._full, strict=True):
            free.append(self._run(self._engine(), row, rule, None))
            forced.append(self._run(self._engine(), row, rule, full.output.tokens[0, : full.output.lengths[0]]))
        return self._report(free, forced)

    def _run(self, engine: Engine, row: list[int], rule: ExitRule, trajectory: np.ndarray | None) -> _Run:
        state = engine.start(
            [row],
            rule=rule,
            max_new_tokens=self._new if trajectory is None else len(trajectory),
            stops=self._stops,
            continuations=None if trajectory is None else [trajectory],
        )
        state = engine.run(state, self._new)
        new = slice(len(row), len(row) + self._new)
        return _Run(
            collect(engine, state, [len(row)], self._new),
            np.asarray(state.choices)[0, new],
            np.asarray(state.states[0, new]),
            engine.timings.decode,
        )

    def _report(self, free: list[_Run], forced: list[_Run]) -> Report:
        same, kls, gaps = [], [], []
        for full, other in zip(self._full, forced, strict=True):
            keep = slice(1, full.output.lengths[0])
            tokens = full.output.tokens[0]
            same.append(other.choices[keep] == tokens[keep])
            kl, gap = _divergence(self._model.graphdef, self._model.params, full.states, other.states, tokens)
            kls.append(np.asarray(kl)[keep])
            gaps.append(np.asarray(gap)[keep])
        same = np.concatenate(same)
        if not same.size:
            raise InputError("every trajectory ended at its first token, so there is nothing to compare. Use other prompts.")
        texts = [run.output.tokens[0, : run.output.lengths[0]].tolist() for run in free]
        full_texts = [run.output.tokens[0, : run.output.lengths[0]].tolist() for run in self._full]
        depths = np.concatenate([run.output.exit_depths[0, 1 : run.output.lengths[0]] for run in free])
        forced_depths = np.concatenate([run.output.exit_depths[0, 1 : run.output.lengths[0]] for run in forced])
        values, counts = np.unique(depths, return_counts=True)
        return Report(
            agreement=float(same.mean()),
            positions=int(same.size),
            first_divergence=float(np.mean([_first_difference(a, b) for a, b in zip(texts, full_texts, strict=True)])),
            kl=float(np.concatenate(kls).mean()),
            nll_gap=float(np.concatenate(gaps).mean()),
            longest_repeat=float(np.mean([longest_repeat(ids) for ids in texts])),
            full_longest_repeat=float(np.mean([longest_repeat(ids) for ids in full_texts])),
            mean_depth=float(depths.mean()),
            forced_mean_depth=float(forced_depths.mean()),
            histogram={int(depth): int(count) for depth, count in zip(values, counts, strict=True)},
            tokens_per_second=_speed(free),
            full_tokens_per_second=_speed(self._full),
            texts=[run.output.text[0] for run in free],
            full_texts=[run.output.text[0] for run in self._full],
            outputs=[run.output for run in free],
        )


def compare(
    model: Model,
    prompts: Prompts,
    *,
    exits: ExitRule,
    exit_points: Sequence[int] | None = None,
    remainder: Remainder = ProjectKV(),  # noqa: B008 - frozen
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
    yardstick = Yardstick(
        model,
        prompts,
        rule=exits,
        exit_points=exit_points,
        remainder=remainder,
        max_new_tokens=max_new_tokens,
        stop=stop,
        progress=progress,
    )
    return yardstick.measure(exits)


def longest_repeat(tokens: Sequence[int]) -> int:
    """Length of the longest n-gram that occurs at two places in the sequence (they may overlap); 0 when none does.

    Example:
        >>> longest_repeat([5, 1, 2, 3, 9, 1, 2, 3])
        3
        >>> longest_repeat([7, 7, 7, 7])
        3
    """
    best = 0
    previous = [0] * (len(tokens) + 1)
    for i in range(1, len(tokens)):
        current = [0] * (len(tokens) + 1)
        for j in range(i):
            if tokens[i] == tokens[j]:
                current[j + 1] = previous[j] + 1
                best = max(best, current[j + 1])
        previous = current
    return best


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two runs share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _speed(runs: Sequence[_Run]) -> float:
    """Decode tokens per second: the median over prompts of each run's own."""
    return float(np.median([(run.output.lengths[0] - 1) / run.seconds for run in runs if run.output.lengths[0] > 1]))


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
