"""When two greedy runs may differ: only where the two best tokens of the full model are a tie in float64."""

import numpy as np
from support.tiny import Reference

TIE = 1e-4  # logits


def first_difference(model, prompt: list[int], got: list[int], wanted: list[int]) -> tuple[int, float] | None:
    """Where the token lists part, and by how much the full model prefers `wanted` there; None: they are equal.

    The logits are recomputed in float64. A tie is a difference below `TIE` between the two best tokens; what follows
    is not compared, because from there on the two prefixes differ.
    """
    if got == wanted:
        return None
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    if at in (len(got), len(wanted)):
        return at, np.inf
    _, logits = Reference(model).prefill([*prompt, *wanted[:at]])
    return at, float(np.max(logits) - min(logits[got[at]], logits[wanted[at]]))


def ties(model, prompt: list[int], got: list[int], wanted: list[int]) -> int:
    """0 when the token lists are equal, 1 when they part at a tie; anything else fails."""
    difference = first_difference(model, prompt, got, wanted)
    if difference is None:
        return 0
    at, margin = difference
    assert margin < TIE, f"token {at} is {got[at : at + 1]}, the full model says {wanted[at : at + 1]} by {margin:.2g}"
    return 1
