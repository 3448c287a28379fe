"""The verified promise: what may be asked of a run whose tokens the full model has judged, and what that means."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from tide_jax.decode.control import StepTimes
from tide_jax.decode.plan import Rounds
from tide_jax.decode.proposers import Proposer, check_proposer
from tide_jax.errors import InputError
from tide_jax.exits import Deferred, Remainder
from tide_jax.exits.remainders import WIDTHS, check_width


@dataclasses.dataclass(frozen=True)
class Verify:
    """Emit only what the full model would have emitted; everything else of the run is a draft.

    A round drafts up to `width` − 1 tokens per row and judges them in one pass of the full model over `width` columns:
    the longest agreeing prefix is kept and one token of the full model's own is added, so that a round never yields
    less than one token per row (speculative decoding, arXiv 2211.17192; with the model's own shallow layers as draft,
    arXiv 2309.08168). Draws at a temperature are verified alike: the noise of a position does not depend on how its
    token came about, so the text is the one that the plain loop draws.

    Attributes:
        width: columns per round, 1 … 8; "auto": each round has the number, among 1, 4 and 8, that acceptance so far and
            measured step times say is fastest.
        times: measured step times for "auto"; None: those that `tide-jax warmup` left beside the model.

    Raises:
        InputError: a width that caches have no slack for.

    Example:
        >>> out = tide.generate(model, "The sky is", exits=tide.FixedDepth(16), verify=tide.Verify(4))
    """

    width: int | np.integer | Literal["auto"] = 4
    times: StepTimes | None = None

    def __post_init__(self):
        if not isinstance(self.width, str) or self.width != "auto":
            check_width(self.width, "Verify")
        if self.times is not None and not isinstance(self.times, StepTimes):
            raise InputError(
                f"Verify: times is {self.times!r}, expected StepTimes: of what warmup() returns, those of one batch."
            )


def plan_rounds(
    points: Sequence[int], remainder: Remainder | None, propose: Proposer | None, verify: Verify | None
) -> tuple[Rounds | None, int]:
    """How a run drafts and settles, and in how many columns; None and 1: it does not.

    Raises:
        InputError: it is not clear what drafts, or in which width.
    """
    if propose is not None:
        check_proposer(propose)
    if verify is None:
        if propose is not None:
            raise InputError(
                f"{propose!r} guesses without running the model, so its tokens must be verified: give "
                "verify=Verify(width=4) (--verify 4) with it."
            )
        if not isinstance(remainder, Deferred) or not points:
            return None, 1
        return Rounds(bodies=(_body(remainder.width),), compare=False), int(remainder.width)
    if not isinstance(verify, Verify):
        raise InputError(f"verify is {verify!r}, expected Verify(4), or another width of 1 to 8 columns.")
    if propose is None and not points:
        raise InputError(
            "Verify needs a draft: give an exit rule with exit points, such as exits=FixedDepth(16) (--exits fixed:16) "
            "or propose=Ngram() (--propose ngram)."
        )
    if propose is not None and points:
        raise InputError(
            f"both {propose!r} and exits at {list(points)} would draft. Give one of them; the full model judges it."
        )
    if isinstance(remainder, Deferred) and verify.width not in ("auto", remainder.width):
        raise InputError(
            f"{remainder!r} and {verify!r} name different widths. Leave the remainder out: Verify defers by itself."
        )
    if verify.width == "auto":
        return Rounds(bodies=WIDTHS[1:], compare=True, proposer=propose, adaptive=True), WIDTHS[-1]
    return Rounds(bodies=(_body(verify.width),), compare=True, proposer=propose), int(verify.width)


def _body(width: int) -> int:
    """The compiled width of settling passes that holds so many columns."""
    return next(body for body in WIDTHS[1:] if width <= body)
