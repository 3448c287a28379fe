"""What is static about a program: everything else is an array, and changes without a compilation."""

import dataclasses

from tide_jax.decode.proposers import Proposer
from tide_jax.exits import NoScorer, ProjectKV, Remainder, Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """How tokens are drafted, and settled by passes of the full model over several columns.

    Attributes:
        bodies: the widths above 1 that settle passes are compiled for, ascending. Each is a copy of all layers.
        compare: keep only what the full model would have emitted (verified); otherwise settling only completes the K/V.
        proposer: drafts without running layers; None: the exit heads draft.
        adaptive: the width of every round is chosen on the device, from acceptance so far and measured step times.
    """

    bodies: tuple[int, ...]
    compare: bool
    proposer: Proposer | None = None
    adaptive: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is static about a program; depths taken, thresholds and widths within a body are arrays.

    Attributes:
        points: exit points, in layers run, ascending, each 1 … L − 1.
        scorer: gives each token a score at each point.
        remainder: stands in for layers that are not run.
        rounds: None: every step emits its token at once.
    """

    points: tuple[int, ...] = ()
    scorer: Scorer = NoScorer()
    remainder: Remainder = ProjectKV()
    rounds: Rounds | None = None
