"""What verification refuses, and at once."""

import dataclasses

import pytest
from support.tiny import tiny_model, with_heads

import tide_jax as tide

MODEL = with_heads(tiny_model(), 2, 4)


@pytest.mark.parametrize("width", [0, 9, 16, -1, True])
def test_a_width_beyond_the_slack_of_the_caches(width):
    with pytest.raises(tide.InputError, match=r"Verify: width .* between 1 and 8"):
        tide.Verify(width)
    with pytest.raises(tide.InputError, match=r"Deferred: width .* between 1 and 8"):
        tide.Deferred(width)


@dataclasses.dataclass(frozen=True)
class FromStates:
    """A proposer that reads the final states of earlier tokens."""

    needs_states = True

    def propose(self, tokens, length, states):
        raise AssertionError("never reached")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(verify=tide.Verify(4)), "needs a draft"),
        (dict(verify=tide.Verify(4), exits=tide.Never()), "needs a draft"),
        (dict(verify=tide.Verify(4), exits=tide.FixedDepth(6)), "needs a draft"),
        (dict(propose=tide.Ngram()), "must be verified"),
        (dict(propose=tide.Ngram(), verify=tide.Verify(4), exits=tide.FixedDepth(4)), "Give one of them"),
        (dict(exits=tide.FixedDepth(4), verify=tide.Verify("auto")), "tide-jax warmup"),
        (dict(exits=tide.FixedDepth(4), verify=tide.Verify(4), remainder=tide.Deferred(8)), "different widths"),
        (dict(exits=tide.FixedDepth(3), exit_points=[2, 4], verify=tide.Verify(4)), r"exit points \[2, 4\]"),
        (dict(propose=FromStates(), verify=tide.Verify(4)), "which this engine does not keep"),
    ],
)
def test_what_is_not_clear_is_refused_by_name(arguments, message):
    with pytest.raises(tide.InputError, match=message):
        tide.generate(MODEL, [[1, 2, 3]], **arguments)


def test_times_that_are_none():
    for layer in ((1.0, 2.0), (1.0, 2.0, 0.0)):
        with pytest.raises(tide.InputError, match="3 positive numbers"):
            tide.decode.StepTimes(layer=layer, head=(1.0, 1.0, 1.0))
