"""Prompt lookup against a search in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tide_jax as tide

SLOTS = 24


def search(tokens: list[int], longest: int, shortest: int) -> list[int]:
    """What followed the longest suffix that occurs earlier, the latest such place, going round from the end."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                rest = tokens[end:]
                return [rest[place % len(rest)] for place in range(7)]
    return []


texts = st.lists(st.integers(0, 3), min_size=1, max_size=SLOTS - 2)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(rows=st.lists(texts, min_size=3, max_size=3), lengths=st.sampled_from([(8, 2), (3, 1), (2, 2), (64, 64)]))
def test_it_finds_what_a_search_finds(rows, lengths):
    longest, shortest = lengths
    proposer = tide.Ngram(longest=longest, shortest=shortest)
    tokens = np.full((3, SLOTS), 1)  # what lies beyond a row's last token is never looked at
    for row, text in zip(tokens, rows, strict=True):
        row[: len(text)] = text
    proposal = run(proposer, jnp.asarray(tokens), jnp.asarray([len(text) - 1 for text in rows]))
    for text, drafted, count in zip(rows, *proposal, strict=True):
        wanted = search(text, longest, shortest)
        assert count == len(wanted)
        assert not wanted or drafted.tolist() == wanted


@functools.partial(jax.jit, static_argnums=0)
def run(proposer, tokens, length):
    return proposer.propose(tokens, length, None)


@pytest.mark.parametrize("lengths", [(0, 0), (4, 5), (65, 1), (3, -1)])
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(tide.InputError, match="1 ≤ shortest ≤ longest ≤ 64"):
        tide.Ngram(longest=lengths[0], shortest=lengths[1])
