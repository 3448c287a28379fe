"""The verified promise: what may be asked of a run whose tokens the full model has judged."""

import dataclasses
from typing import Literal

from tide_jax.decode.control import StepTimes
from tide_jax.errors import InputError
from tide_jax.exits.remainders import check_width


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

    width: int | Literal["auto"] = 4
    times: StepTimes | None = None

    def __post_init__(self):
        if self.width != "auto":
            check_width(self.width, "Verify")
        if self.times is not None and not isinstance(self.times, StepTimes):
            raise InputError(f"Verify: times is {self.times!r}, expected StepTimes.")
