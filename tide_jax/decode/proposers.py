"""Proposers: drafts that run no layer of the model."""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tide_jax.errors import InputError
from tide_jax.exits.remainders import WIDEST


class Proposal(NamedTuple):
    """What may follow each row's last token.

    Attributes:
        tokens: proposed token ids.
        count: how many of them are meant; 0 where nothing is proposed.
    """

    tokens: Int[Array, "batch proposals"]
    count: Int[Array, " batch"]


@runtime_checkable
class Proposer(Protocol):
    """A hashable object whose `propose` is traced into the program. Whatever it proposes, only speed depends on it.

    Attributes:
        needs_states: it reads the final states of earlier tokens, so the engine must record them.
    """

    needs_states: bool

    def propose(
        self, tokens: Int[Array, "batch slots"], length: Int[Array, " batch"], states: Array | None
    ) -> Proposal:
        """At most 7 tokens that may follow `tokens[row, length[row]]`; what lies beyond is not known yet."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ngram:
    """What followed the last tokens when they last occurred, in the prompt or in the text so far (prompt lookup).

    The longest suffix of the text that occurs earlier is looked up, up to `longest` tokens and at least `shortest`; of
    several places with the same length, the latest. A text that has begun to repeat itself is continued periodically.
    All of it runs on the device, as comparisons of the token buffer with itself.

    Attributes:
        longest: tokens of suffix beyond which a longer match counts no more.
        shortest: tokens of suffix that must occur.

    Raises:
        InputError: not 1 ≤ shortest ≤ longest ≤ 64.

    Example:
        >>> tokens = jnp.array([[5, 6, 7, 8, 1, 5, 6, 0, 0]])
        >>> Ngram().propose(tokens, jnp.array([6]), None).tokens[0, :3].tolist()
        [7, 8, 1]
    """

    longest: int = 8
    shortest: int = 2
    needs_states = False

    def __post_init__(self):
        if not all(type(n) is int for n in (self.longest, self.shortest)) or not (
            1 <= self.shortest <= self.longest <= 64
        ):
            raise InputError(
                f"Ngram: shortest {self.shortest!r} and longest {self.longest!r} are lengths of a matching suffix in "
                "tokens, with 1 ≤ shortest ≤ longest ≤ 64."
            )

    def propose(self, tokens, length, states) -> Proposal:
        """See the class."""
        slots = tokens.shape[1]
        index = jnp.arange(slots)
        matched = jnp.zeros(tokens.shape, jnp.int32)
        same: Bool[Array, "batch slots"] = index[None, :] < length[:, None]
        for back in range(self.longest):
            own = jnp.take_along_axis(tokens, jnp.maximum(length - back, 0)[:, None], axis=1)
            earlier = jnp.roll(tokens, back, axis=1)
            same = same & (earlier == own) & (index >= back)[None, :]
            matched = matched + same
        # The longest match, and the latest of them: matched · slots + index orders by both.
        best = jnp.argmax(jnp.where(matched >= self.shortest, matched * slots + index, -1), axis=1)
        found = jnp.take_along_axis(matched, best[:, None], axis=1)[:, 0] >= self.shortest
        period = jnp.maximum(length - best, 1)
        places = best[:, None] + 1 + jnp.arange(WIDEST - 1)[None, :] % period[:, None]
        proposed = jnp.take_along_axis(tokens, jnp.minimum(places, slots - 1), axis=1)
        return Proposal(proposed, jnp.where(found, WIDEST - 1, 0).astype(jnp.int32))


def check_proposer(propose: object) -> None:
    """Refuse what is no proposer.

    Raises:
        InputError: a class instead of an object, no `propose`, or not hashable.
    """
    if isinstance(propose, type) or not isinstance(propose, Proposer) or type(propose).__hash__ is None:
        raise InputError(f"propose is {propose!r}, expected a proposer such as Ngram(), a hashable object.")


def propose(proposer: Proposer, tokens: Array, length: Array, states: Array | None) -> Proposal:
    """What a proposer proposes, checked, padded to 7 tokens, and with counts that can be.

    Raises:
        InputError: not int [batch, some] tokens and int [batch] counts.
    """
    proposal = tuple(proposer.propose(tokens, length, states))
    batch, shapes = tokens.shape[0], [jnp.shape(part) for part in proposal]
    fits = len(shapes) == 2 and len(shapes[0]) == 2 and shapes[0][0] == batch and shapes[1] == (batch,)
    if not fits or not all(jnp.issubdtype(jnp.asarray(part).dtype, jnp.integer) for part in proposal):
        raise InputError(
            f"{proposer!r} proposed arrays of shape {shapes}; expected integer tokens [batch, some] and counts [batch] "
            f"for a batch of {batch}."
        )
    drafted = jnp.asarray(proposal[0], jnp.int32)[:, : WIDEST - 1]
    most = drafted.shape[1]
    drafted = jnp.pad(drafted, ((0, 0), (0, WIDEST - 1 - most)))
    return Proposal(drafted, jnp.clip(proposal[1], 0, most).astype(jnp.int32))
