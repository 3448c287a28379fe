"""Remainders: the general path of a step agrees with the short cut for those whose rows follow the held state."""

import dataclasses

import numpy as np
from support.tiny import tiny_model, with_heads

import tide_jax as tide


@dataclasses.dataclass(frozen=True)
class Explicit:
    """`ProjectKV` without the promise that lets a step skip the selects of K/V rows."""

    rows_follow_state = False
    defers = False

    def fill(self, index, layer, x, past, view, positions, valid):
        assert past.k.shape[1] == 2 and 0 <= index < 6
        return x, layer.project_kv(x, view)


def test_rows_chosen_by_select_are_the_rows_of_the_held_state():
    model = with_heads(tiny_model(), 1, 3, 5)
    prompts = [[1, 2, 3, 4], [9, 8], [50, 60, 70]]
    runs = [
        tide.generate(
            model,
            prompts,
            exits=tide.RouterExit(threshold=0.5),
            exit_points=[1, 3, 5],
            max_new_tokens=12,
            stop=[],
            remainder=remainder,
        )
        for remainder in (tide.ProjectKV(), Explicit())
    ]
    assert len(set(runs[0].exit_depths[:, 1:].ravel())) > 1
    np.testing.assert_array_equal(runs[0].tokens, runs[1].tokens)
    np.testing.assert_array_equal(runs[0].exit_depths, runs[1].exit_depths)
