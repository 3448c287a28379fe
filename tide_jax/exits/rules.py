"""Exit rules: when a token leaves.

A rule is two things. A *scorer*, traced into the program, looks at the states at an exit point and gives each token a
score in [0, 1]. *Thresholds*, one per row and exit point, are arrays: a token leaves where its score is above the
threshold. So one compiled program serves every depth and every threshold of a scorer, and `Never` and `FixedDepth`,
which need no score, run on any of them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tide_jax.errors import InputError
from tide_jax.exits.heads import ExitHead, ExitHeads, route
from tide_jax.kernels import Gate, Route, decide, require
from tide_jax.models import Decoder

LEAVE = -1.0  # below every score
STAY = 2.0  # above every score


@runtime_checkable
class Scorer(Protocol):
    """A hashable object whose `route` is traced into the program at every exit point."""

    def route(
        self,
        depth: int,
        head: ExitHead,
        x: Float[Array, "batch cols embed"],
        positions: Int[Array, "batch cols"],
        decoder: Decoder,
        gate: Gate,
    ) -> Route:
        """Score the states x after `depth` layers, in [0, 1], and let those above their threshold leave.

        With scores of one's own: `tide_jax.kernels.decide(scores, gate, layers=depth)`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class NoScorer:
    """Every score is 0: thresholds alone decide."""

    def route(self, depth, head, x, positions, decoder, gate):
        """All scores are zero, float32 [batch, cols]."""
        return decide(jnp.zeros(x.shape[:2], jnp.float32), gate, layers=depth)


@dataclasses.dataclass(frozen=True)
class RouterScorer:
    """The calibrated router of the exit point.

    Attributes:
        use_kernels: None: the compiled kernel where it wins; True: always; False: never.
    """

    use_kernels: bool | None = None

    def route(self, depth, head, x, positions, decoder, gate):
        """By the router's probabilities, float32 [batch, cols]."""
        return route(head.router, x, decoder, gate, layers=depth, use_kernels=self.use_kernels)


@runtime_checkable
class ExitRule(Protocol):
    """When a token leaves."""

    @property
    def scorer(self) -> Scorer:
        """What is traced into the program; `NoScorer()` when thresholds alone decide."""
        ...

    def default_points(self, exits: ExitHeads | None) -> tuple[int, ...]:
        """The exit points this rule needs when the user named none."""
        ...

    def thresholds(self, points: Sequence[int], exits: ExitHeads | None, num_layers: int) -> np.ndarray:
        """Float32 [len(points)]: a token leaves at a point where its score is above this."""
        ...


@dataclasses.dataclass(frozen=True)
class Never:
    """No token leaves: the full model."""

    scorer = NoScorer()

    def default_points(self, exits: ExitHeads | None) -> tuple[int, ...]:
        """None."""
        return ()

    def thresholds(self, points: Sequence[int], exits: ExitHeads | None, num_layers: int) -> np.ndarray:
        """Above every score."""
        return np.full(len(points), STAY, np.float32)


@dataclasses.dataclass(frozen=True)
class FixedDepth:
    """Every token leaves after `layers` layers; `layers` equal to the model's depth is the full model.

    Where calibration left an exit projection at that depth, the token leaves through it.

    Example:
        >>> FixedDepth(8).thresholds((4, 8, 12), None, 16).tolist()
        [2.0, -1.0, 2.0]
    """

    layers: int
    scorer = NoScorer()

    def default_points(self, exits: ExitHeads | None) -> tuple[int, ...]:
        """The one depth it names."""
        return (self.layers,)

    def thresholds(self, points: Sequence[int], exits: ExitHeads | None, num_layers: int) -> np.ndarray:
        """Below every score at its depth, above elsewhere.

        Raises:
            InputError: the depth is not one of the exit points.
        """
        if self.layers != num_layers and self.layers not in points:
            raise InputError(
                f"FixedDepth({self.layers}) is not one of the exit points {list(points)} of this program (nor the "
                f"model's depth {num_layers}). Add {self.layers} to exit_points, or name one of them."
            )
        return np.array([LEAVE if depth == self.layers else STAY for depth in points], np.float32)


@dataclasses.dataclass(frozen=True)
class RouterExit:
    """A token leaves where its router's score is above the threshold (TIDE, arXiv 2603.21365).

    Attributes:
        threshold: one number for all exit points; a mapping depth -> threshold (points left out never fire); or None
            for the thresholds that `tide-jax calibrate` stored. Anything of 1 and more never fires.
        use_kernels: None: the compiled kernel where it wins; True: always, and it must be there; False: never.

    Raises:
        InputError: a threshold that is none, or `use_kernels=True` and there are none.
    """

    threshold: float | Mapping[int, float] | None = None
    use_kernels: bool | None = dataclasses.field(default=None, kw_only=True)

    @property
    def scorer(self) -> Scorer:
        """The router."""
        return RouterScorer(self.use_kernels)

    def __post_init__(self):
        if self.use_kernels:
            require()
        given = self.threshold.values() if isinstance(self.threshold, Mapping) else [self.threshold]
        for value in given:
            if value is not None and not (isinstance(value, int | float | np.number) and value >= 0):
                raise InputError(f"RouterExit: threshold {value!r} is not a number of 0 or more (the paper uses 0.85).")

    def default_points(self, exits: ExitHeads | None) -> tuple[int, ...]:
        """The points that its mapping names, or that calibration chose; with one number and none chosen, all routers.

        Raises:
            InputError: the model has no calibrated exits, or stored thresholds are asked for and there are none.
        """
        if isinstance(self.threshold, Mapping):
            return tuple(sorted(self.threshold))
        routers = _routers(exits)
        if self.threshold is None:
            self._stored(exits)
        return tuple(sorted(exits.thresholds or routers))

    def thresholds(self, points: Sequence[int], exits: ExitHeads | None, num_layers: int) -> np.ndarray:
        """One threshold per point.

        Raises:
            InputError: a point has no calibrated router, or the mapping names a depth that is none of the points.
        """
        if not len(points) and not isinstance(self.threshold, Mapping):
            return np.zeros(0, np.float32)
        routers = _routers(exits)
        chosen = self._stored(exits) if self.threshold is None else self.threshold
        if not isinstance(chosen, Mapping):
            chosen = dict.fromkeys(points, chosen)
        named = chosen if isinstance(self.threshold, Mapping) else points
        if missing := sorted({*points, *named} - set(routers)):
            raise InputError(
                f"RouterExit: no router is calibrated at depth {missing}; there are routers at {routers}. Name exit "
                "points among these, or run `tide-jax calibrate` again."
            )
        if absent := sorted(set(named) - set(points)):
            raise InputError(
                f"RouterExit has a threshold for depth {absent}, which is not one of the exit points {list(points)} of "
                "this program. Add it to exit_points, or leave it out."
            )
        return np.array(
            [STAY if depth in exits.degenerate else chosen.get(depth, STAY) for depth in points], np.float32
        )

    @staticmethod
    def _stored(exits: ExitHeads | None) -> Mapping[int, float]:
        if exits is None or not exits.thresholds:
            raise InputError(
                "RouterExit() uses the thresholds that calibration stored, and this model has none: either it was not "
                "calibrated, or no exit point kept the agreement that was asked for. Run `tide-jax calibrate`, if need "
                "be with a lower --agreement, or give a threshold."
            )
        return exits.thresholds


def _routers(exits: ExitHeads | None) -> list[int]:
    """Depths that have a router.

    Raises:
        InputError: the model has no calibrated exits.
    """
    routers = sorted(depth for depth, head in (exits.heads if exits else {}).items() if head.router is not None)
    if not routers:
        raise InputError(
            "RouterExit needs calibrated exits, and this model has none. Run `tide-jax calibrate DIR --data FILE`, "
            "or use FixedDepth."
        )
    return routers
