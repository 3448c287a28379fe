"""What verification refuses, and at once."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import tiny_model, with_heads

import tide_jax as tide
from tide_jax.decode.proposers import Proposal

MODEL = with_heads(tiny_model(), 2, 4)


@pytest.mark.parametrize("width", [0, 9, 16, -1, True])
def test_a_width_beyond_the_slack_of_the_caches(width):
    with pytest.raises(tide.InputError, match=r"Verify: width .* between 1 and 8"):
        tide.Verify(width)
    with pytest.raises(tide.InputError, match=r"Deferred: width .* between 2 and 8"):
        tide.Deferred(width)


def test_widths_of_numpy_and_a_queue_of_one():
    assert tide.Verify(np.int64(4)).width == 4
    with pytest.raises(tide.InputError, match=r"Deferred: width 1 .* between 2 and 8"):
        tide.Deferred(1)


@dataclasses.dataclass(frozen=True)
class FromStates:
    """A proposer that reads the final states of earlier tokens."""

    needs_states = True

    def propose(self, tokens, length, states):
        assert states.shape[:2] == tokens.shape
        return Proposal(jnp.zeros((tokens.shape[0], 1), jnp.int32), jnp.ones(tokens.shape[0], jnp.int32))


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
    ],
)
def test_what_is_not_clear_is_refused_by_name(arguments, message):
    with pytest.raises(tide.InputError, match=message):
        tide.generate(MODEL, [[1, 2, 3]], **arguments)


def test_a_proposer_that_needs_states_the_engine_does_not_keep():
    with pytest.raises(tide.InputError, match="which this engine does not keep"):
        tide.Engine(MODEL, propose=FromStates(), verify=tide.Verify(4))
    out = tide.generate(MODEL, [[1, 2, 3]], max_new_tokens=8, propose=FromStates(), verify=tide.Verify(4))
    assert out.stats.drafts.proposed[0] > 0


@dataclasses.dataclass(frozen=True)
class Odd:
    """A proposer of the given arrays."""

    tokens: tuple
    count: object
    kind: type = np.int32
    needs_states = False

    def propose(self, tokens, length, states):
        return jnp.asarray(self.tokens, self.kind), jnp.asarray(self.count)


@pytest.mark.parametrize(
    "odd",
    [Odd(((1, 2),) * 2, (2, 2, 2)), Odd((1, 2), (1,)), Odd(((1, 2),), (2,), np.float32), Odd(((1, 2),), (2.0,))],
    ids=range(4),
)
def test_proposals_of_another_form_are_refused(odd):
    with pytest.raises(tide.InputError, match=r"expected integer tokens \[batch, some\] and counts \[batch\]"):
        tide.generate(MODEL, [[1, 2, 3]], max_new_tokens=8, propose=odd, verify=tide.Verify(8))


@pytest.mark.parametrize("count", [-3, 0, 2, 9])
def test_counts_and_tokens_that_cannot_be_only_cost_time(count):
    plain = tide.generate(MODEL, [[1, 2, 3], [4]], max_new_tokens=12, stop=[])
    odd = Odd(((-1, 10**6), (96, 97)), (count, count))
    out = tide.generate(MODEL, [[1, 2, 3], [4]], max_new_tokens=12, stop=[], propose=odd, verify=tide.Verify(8))
    assert out.tokens.tolist() == plain.tokens.tolist() and out.stats.steps == 11
    assert sum(out.stats.drafts.proposed[2:]) == 0


def test_times_that_are_none():
    for layer in ((1.0, 2.0), (1.0, 2.0, 0.0), (1.0, float("nan"), 2.0), (1.0, float("inf"), 2.0)):
        with pytest.raises(tide.InputError, match="3 positive numbers"):
            tide.decode.StepTimes(layer=layer, head=(1.0, 1.0, 1.0))
