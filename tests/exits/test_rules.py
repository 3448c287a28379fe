"""Exit rules: thresholds for the points of a program, and what cannot be one."""

import numpy as np
import pytest
from support.tiny import tiny_model, with_heads

import tide_jax as tide
from tide_jax.errors import InputError
from tide_jax.exits import ExitHead, ExitHeads, ExitRule
from tide_jax.exits.rules import LEAVE, STAY

POINTS = (3, 7, 11)


@pytest.fixture(scope="module")
def exits():
    heads = with_heads(tiny_model(num_layers=12), *POINTS).exits.heads
    return ExitHeads(heads={**heads, 5: ExitHead(projection=heads[3].projection)}, thresholds={11: 0.25, 3: 0.75})


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (tide.Never(), [STAY] * 3),
        (tide.FixedDepth(3), [LEAVE, STAY, STAY]),
        (tide.FixedDepth(11), [STAY, STAY, LEAVE]),
        (tide.FixedDepth(12), [STAY] * 3),
        (tide.RouterExit(0.5), [0.5] * 3),
        (tide.RouterExit(), [0.75, STAY, 0.25]),
        (tide.RouterExit({7: 0.1, 11: 3.0}), [STAY, 0.1, 3.0]),
    ],
    ids=repr,
)
def test_thresholds_by_point(exits, rule, wanted):
    assert isinstance(rule, ExitRule)
    made = rule.thresholds(POINTS, exits, 12)
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, np.array(wanted, np.float32))


def test_default_points(exits):
    assert tide.Never().default_points(exits) == ()
    assert tide.FixedDepth(7).default_points(exits) == (7,)
    assert tide.RouterExit().default_points(exits) == (3, 11)
    assert tide.RouterExit({7: 0.1}).default_points(exits) == (7,)
    assert tide.RouterExit(0.3).default_points(exits) == (3, 11)
    unchosen = ExitHeads(exits.heads, thresholds={})
    assert tide.RouterExit(0.3).default_points(unchosen) == POINTS
    with pytest.raises(InputError, match="this model has none"):
        tide.RouterExit().default_points(unchosen)
    with pytest.raises(InputError, match="needs calibrated exits"):
        tide.RouterExit(0.3).default_points(None)


@pytest.mark.parametrize(
    ("rule", "points", "words"),
    [
        (tide.FixedDepth(4), POINTS, ["FixedDepth(4)", "[3, 7, 11]", "12"]),
        (tide.RouterExit(0.5), (3, 4), ["[4]", "[3, 7, 11]"]),
        (tide.RouterExit({7: 0.1}), (3, 11), ["[7]", "[3, 11]"]),
        (tide.RouterExit({4: 0.1}), POINTS, ["[4]", "[3, 7, 11]"]),
        (tide.RouterExit(), (5, 7), ["[5]", "[3, 7, 11]"]),  # depth 5 has a projection and no router
    ],
    ids=repr,
)
def test_points_a_rule_cannot_serve_are_refused(exits, rule, points, words):
    with pytest.raises(InputError) as refusal:
        rule.thresholds(points, exits, 12)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), {3: 0.5, 7: -1.0}])
def test_thresholds_below_every_score_are_refused(threshold):
    with pytest.raises(InputError, match="-0.1|nan|-1.0"):
        tide.RouterExit(threshold)
