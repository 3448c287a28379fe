"""When two greedy runs may differ: only where the two best tokens of the full model are a tie in float64."""

import numpy as np
from support.tiny import Reference

TIE = 1e-4  # logits


def ties(model, prompt: list[int], got: list[int], wanted: list[int]) -> int:
    """0 when the token lists are equal, 1 when they part at a tie; anything else fails.

    What follows a first difference is not compared: from there on the two prefixes differ.
    """
    if got == wanted:
        return 0
    at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b)
    _, logits = Reference(model).prefill([*prompt, *wanted[:at]])
    margin = float(np.diff(np.sort(logits)[-2:])[0])
    assert margin < TIE, f"token {at} is {got[at]}, the full model says {wanted[at]} by {margin:.2g}"
    assert {got[at], wanted[at]} == set(np.argsort(logits)[-2:].tolist())
    return 1
