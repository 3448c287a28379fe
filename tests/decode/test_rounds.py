"""Rounds of drafting and settling: whatever the draft, verified tokens are those of the plain loop."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.exact import first_difference, ties
from support.tiny import (
    Reference,
    Scripted,
    cast,
    changed,
    counted_layers,
    poisoned,
    tiny_model,
    with_heads,
    with_script,
)

import tide_jax as tide
from tide_jax.decode.proposers import Proposal
from tide_jax.exits import ExitHead, ExitHeads, Projection

LAYERS, NEW = 4, 24
POINTS = (1, 2, 3)
PROMPTS = [
    [1, 2, 1, 2, 1], [4, 5, 6, 7, 8], [11, 3, 90], [60, 61, 62, 63, 64, 65, 66, 67, 68], [1], [9, 9, 9], [33, 34], [80],
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return with_heads(tiny_model(num_layers=LAYERS), *POINTS)


@pytest.fixture(scope="module")
def plain(model):
    """What the plain loop says, one row per prompt."""
    return tide.generate(model, PROMPTS, max_new_tokens=NEW, stop=[]).tokens


def scripted(model, seed: int = 0):
    """The model with exits at random places."""
    random = np.random.default_rng(seed)
    return with_script(model, {point: random.random(256) for point in POINTS})


@dataclasses.dataclass(frozen=True)
class Table:
    """Proposes what its table says for each row and position: right, wrong, right at the last place alone, or wrong at
    a place that differs from round to round, by row."""

    rows: tuple[tuple[int, ...], ...]
    needs_states = False

    @staticmethod
    def wrong(row, position, place, where=np.where):
        """Whether the draft that a row makes at a position is wrong at a place."""
        spoilt = (place == (7 * row + 5 * position) % 9, place < 0, place >= 0, place < 6)
        chosen = spoilt[0]
        for index in (1, 2, 3):
            chosen = where(row % 4 == index, spoilt[index], chosen)
        return chosen

    def propose(self, tokens, length, states):
        table = jnp.asarray(self.rows)[: tokens.shape[0]]
        place = jnp.arange(7)[None, :]
        at = jnp.minimum(length[:, None] + 1 + place, table.shape[1] - 1)
        right = jnp.take_along_axis(table, at, axis=1)
        wrong = self.wrong(jnp.arange(tokens.shape[0])[:, None], length[:, None], place, jnp.where)
        return Proposal(jnp.where(wrong, (right + 1) % 97, right), jnp.full(tokens.shape[0], 7))


def table(plain):
    """A `Table` that knows what the plain loop says."""
    width = max(map(len, PROMPTS)) + NEW + 8
    rows = [[*prompt, *row.tolist()] for prompt, row in zip(PROMPTS, plain, strict=True)]
    return Table(tuple(tuple(row + [0] * (width - len(row))) for row in rows))


DRAFTS = {
    "ngram": dict(propose=tide.Ngram(shortest=1)),
    "fixed": dict(exits=tide.FixedDepth(2), exit_points=POINTS),
    "router": dict(exits=tide.RouterExit(0.5), exit_points=POINTS),
    "project": dict(exits=tide.RouterExit(0.5), exit_points=POINTS, remainder=tide.ProjectKV()),
}


def check_every_stop(model, plain, batch, width, **draft):
    """Without a stop, and with each token of the first rows as the stop: the plain loop's tokens, cut there."""
    seen = {int(token) for row in plain[: min(batch, 2)] for token in row}
    for stop in [None, *sorted(seen)]:
        out = tide.generate(
            model, PROMPTS[:batch], max_new_tokens=NEW, stop=[] if stop is None else [stop], verify=tide.Verify(width),
            **draft,
        )  # fmt: skip
        for prompt, row, length, wanted in zip(PROMPTS, out.tokens, out.lengths, plain, strict=False):
            wanted = wanted.tolist()
            end = wanted.index(stop) + 1 if stop in wanted else NEW
            if not ties(model, prompt, row[:length].tolist(), wanted[:end]):
                assert length == end
                assert (row[end:] == row[-1]).all() or end == NEW
        assert out.stats.flagged == []
        drafts = out.stats.drafts
        assert drafts.passes[4] + drafts.passes[8] <= out.stats.new_tokens
        assert out.stats.steps <= max(out.lengths)


# Every draft with every batch and both widths of settling pass; the rest of the square in `make test-all`.
SOME = [("ngram", 1, 8), ("ngram", 8, 4), ("fixed", 8, 4), ("router", 3, 8), ("project", 3, 4)]
ALL = [(draft, batch, width) for draft in DRAFTS for batch in (1, 3, 8) for width in (4, 8)]


@pytest.mark.parametrize(
    ("draft", "batch", "width"),
    [case if case in SOME else pytest.param(*case, marks=pytest.mark.slow_all) for case in ALL],
)
def test_verified_tokens_are_those_of_the_plain_loop(model, plain, draft, batch, width):
    for masked in (width, width - 1, width // 2 + 1):
        check_every_stop(model, plain, batch, masked, **DRAFTS[draft])


@pytest.mark.parametrize("remainder", [None, tide.ProjectKV()], ids=["deferred", "project"])
def test_exits_at_any_mixture_of_depths_are_verified(model, plain, remainder):
    """Starts go down along a row, rows differ, and some columns run all layers."""
    for seed in range(4):
        check_every_stop(scripted(model, seed), plain, 3, 4, exits=Scripted(), exit_points=POINTS, remainder=remainder)


def expected(rows, width):
    """Rounds of each row, drafted tokens by place that are proposed and accepted, and corrections: in plain Python."""
    proposed, accepted, corrected, rounds = [0] * 7, [0] * 7, 0, []
    for index, prompt in enumerate(rows):
        position, end, taken = len(prompt), len(prompt) + NEW, 0
        while position + 1 < end:
            drafted = min(width, end - 1 - position) - 1
            wrong = [bool(Table.wrong(np.array(index), position, place)) for place in range(drafted)]
            right = wrong.index(True) if True in wrong else drafted
            for place in range(drafted):
                proposed[place] += 1
                accepted[place] += place < right
            corrected += right < drafted
            position, taken = position + right + 1, taken + 1
        rounds.append(taken)
    return rounds, proposed, accepted, corrected


@pytest.mark.parametrize(("batch", "width"), [(1, 8), (8, 4)])
def test_proposals_right_wrong_or_spoilt_at_every_place(model, plain, batch, width):
    proposer = table(plain)
    check_every_stop(model, plain, batch, width, propose=proposer)
    for masked in (width, width - 1):
        out = tide.generate(
            model, PROMPTS[:batch], max_new_tokens=NEW, stop=[], propose=proposer, verify=tide.Verify(masked)
        )
        rounds, proposed, accepted, corrected = expected(PROMPTS[:batch], masked)
        drafts = out.stats.drafts
        assert (drafts.proposed, drafts.accepted, drafts.corrected) == (proposed, accepted, corrected)
        assert drafts.acceptance_rate == sum(accepted) / sum(proposed)
        assert out.stats.steps == max(rounds)
        assert drafts.tokens_per_round == pytest.approx(batch * (NEW - 1) / sum(rounds))
        assert all(n == LAYERS for n in out.exit_depths.ravel())


def test_a_draft_of_nothing_but_nan_costs_time_and_nothing_else(model, plain):
    heads = {
        depth: ExitHead(head.router, Projection(jnp.full_like(head.projection.kernel, jnp.nan), head.projection.bias))
        for depth, head in model.exits.heads.items()
    }
    sick = tide.Model(model.graphdef, model.params, exits=ExitHeads(heads, {}))
    check_every_stop(sick, plain, 3, 4, exits=tide.FixedDepth(2), exit_points=POINTS)
    lossy = tide.generate(
        sick, PROMPTS[:3], max_new_tokens=NEW, stop=[], exits=tide.FixedDepth(2), remainder=tide.Deferred(4)
    )
    assert lossy.stats.flagged == [0, 1, 2]


@dataclasses.dataclass(frozen=True)
class Constant:
    """Proposes one token, over and over."""

    token: int
    needs_states = False

    def propose(self, tokens, length, states):
        batch = tokens.shape[0]
        return Proposal(jnp.full((batch, 7), self.token), jnp.full(batch, 7))


@pytest.mark.parametrize("value", [jnp.nan, pytest.param(jnp.inf, marks=pytest.mark.slow_all)])
def test_a_drafted_token_that_breaks_the_model_is_rolled_back_with_the_rest(value):
    """Its columns are judged in one pass with those before it, which must not see it."""
    sound = tiny_model(4, num_layers=LAYERS, tied_head=False)
    plain = tide.generate(sound, PROMPTS[:3], max_new_tokens=NEW, stop=[])
    lossy = tide.generate(
        sound, PROMPTS[:3], max_new_tokens=NEW, stop=[], exits=tide.FixedDepth(2), remainder=tide.Deferred(4)
    )
    never = set(range(97)) - set(plain.tokens.ravel().tolist()) - {token for row in PROMPTS for token in row}
    drafted = next(token for token in lossy.tokens.ravel().tolist() if token in never)

    def breaks(decoder):
        decoder.embedding[...] = decoder.embedding[...].at[drafted].set(value)

    sick = changed(sound, breaks)
    drafts = [
        dict(propose=Constant(drafted), verify=tide.Verify(8)),
        dict(exits=tide.FixedDepth(2), exit_points=POINTS, verify=tide.Verify(4)),
    ]
    for draft in drafts:
        out = tide.generate(sick, PROMPTS[:3], max_new_tokens=NEW, stop=[], **draft)
        assert out.tokens.tolist() == plain.tokens.tolist()
        assert out.stats.flagged == []
    # In the plain loop that token breaks its row, and the verified run says so too.
    for draft in ({}, drafts[1]):
        out = tide.generate(sick, [[1, drafted, 3], [4, 5]], max_new_tokens=NEW, stop=[], **draft)
        assert out.stats.flagged == [0]


def test_in_16_bits_runs_part_only_where_the_two_best_tokens_are_close(model):
    narrow = cast(model, jnp.bfloat16)
    plain = tide.generate(narrow, PROMPTS, max_new_tokens=NEW, stop=[])
    out = tide.generate(
        narrow, PROMPTS, max_new_tokens=NEW, stop=[], exits=tide.FixedDepth(2), exit_points=POINTS,
        verify=tide.Verify(4),
    )  # fmt: skip
    parted = [
        first_difference(narrow, prompt, got.tolist(), wanted.tolist())
        for prompt, got, wanted in zip(PROMPTS, out.tokens, plain.tokens, strict=True)
    ]
    assert all(one is None or one[1] < 0.1 for one in parted)
    assert sum(one is None for one in parted) > 4


def test_a_row_whose_full_model_breaks_is_flagged_and_breaks_no_other(model):
    def generate(rows, verify):
        return tide.generate(sick, rows, max_new_tokens=NEW, stop=[], exits=tide.FixedDepth(2), verify=verify)

    sick = poisoned(tiny_model(4, num_layers=LAYERS, tied_head=False), 50, jnp.nan)
    out = generate([[4, 5, 6], [7, 50, 8], [11, 3]], tide.Verify(4))
    assert out.stats.flagged == [1]
    alone = tide.generate(sick, [[4, 5, 6], [11, 3]], max_new_tokens=NEW, stop=[])
    np.testing.assert_array_equal(out.tokens[[0, 2]], alone.tokens)


class Drafter(Reference):
    """The reference with, at each position, what an exit would say there: earlier positions at full depth."""

    def say(self, token: int, depth: int) -> int:
        """The token after `token`, from `depth` layers of it; the state of the reference stays."""
        _, logits = copy.deepcopy(self).feed(token, depth)
        return int(logits.argmax())


def deferred_text(model, prompt, leaves):
    """Lossy exit with exact K/V: each position's token from its exit, every layer run in the end."""
    reference = Drafter(model)
    *before, token = prompt
    for one in before:
        reference.feed(one, LAYERS)
    tokens = [reference.say(token, LAYERS)]
    reference.feed(token, LAYERS)
    for position in range(len(prompt), len(prompt) + NEW - 1):
        tokens.append(reference.say(tokens[-1], leaves(position)))
        reference.feed(tokens[-2], LAYERS)
    return tokens


@pytest.mark.parametrize("width", [4, 8])
def test_deferred_exits_say_what_the_exits_say_with_exact_keys_and_values(model, width):
    """Which also means that no width and no neighbour changes the text."""
    wanted = [deferred_text(model, prompt, lambda position: 2) for prompt in PROMPTS[:3]]
    for masked in (width, width - 1, width - 2):
        out = tide.generate(
            model, PROMPTS[:3], max_new_tokens=NEW, stop=[], exits=tide.FixedDepth(2), remainder=tide.Deferred(masked)
        )
        assert out.tokens.tolist() == wanted
        assert set(out.exit_depths[:, 1:].ravel().tolist()) == {2}
        assert out.stats.drafts.proposed == [0] * 7
    # One exit point that doubts now and then: there the full model speaks.
    scores = np.random.default_rng(5).random(256)
    doubting = with_script(model, {2: scores})
    bare = tide.Model(model.graphdef, model.params)
    out = tide.generate(
        doubting, PROMPTS[:3], max_new_tokens=NEW, stop=[], exits=Scripted(), remainder=tide.Deferred(width)
    )
    for prompt, row, depths in zip(PROMPTS, out.tokens, out.exit_depths, strict=False):
        at = lambda position: 2 if scores[position] > 0.5 else LAYERS  # noqa: E731
        assert row.tolist() == deferred_text(bare, prompt, at)
        assert depths[1:].tolist() == [at(len(prompt) + i) for i in range(NEW - 1)]


def verified_rounds(model, prompt, depth, width):
    """Accepted drafts of each round of self-speculation at a fixed depth, by the reference alone."""
    reference = Drafter(model)
    *before, token = prompt
    for one in before:
        reference.feed(one, LAYERS)
    position, rounds = len(prompt), []
    pending = reference.say(token, LAYERS)
    reference.feed(token, LAYERS)
    while position + 1 < len(prompt) + NEW:
        columns = min(width, len(prompt) + NEW - 1 - position)
        drafting, drafted = copy.deepcopy(reference), [pending]
        for _ in range(columns - 1):
            _, logits = drafting.feed(drafted[-1], depth)
            drafted.append(int(logits.argmax()))
        right = 0
        for column in range(columns):
            _, logits = reference.feed(drafted[column], LAYERS)
            pending = int(logits.argmax())
            if column + 1 == columns or drafted[column + 1] != pending:
                break
            right += 1
        rounds.append((columns - 1, right))
        position += right + 1
    return rounds


def test_acceptance_of_self_speculation_is_that_of_the_reference(model):
    close = close_exit(model)
    for width in (2, 4):
        rounds = verified_rounds(close, PROMPTS[1], 3, width)
        out = tide.generate(
            close, PROMPTS[1], max_new_tokens=NEW, stop=[], exits=tide.FixedDepth(3), exit_points=POINTS,
            verify=tide.Verify(width),
        )  # fmt: skip
        for place in range(7):
            assert out.stats.drafts.proposed[place] == sum(columns > place for columns, _ in rounds)
            assert out.stats.drafts.accepted[place] == sum(right > place for _, right in rounds)
        assert out.stats.drafts.corrected == sum(right < columns for columns, right in rounds)
        assert 0 < out.stats.drafts.acceptance_rate < 1
        # Depths are those of the drafts, and of the full model for every token it chose itself.
        depths = [LAYERS]
        for _, right in rounds:
            depths += [3] * right + [LAYERS]
        assert out.exit_depths[0].tolist() == depths


@pytest.mark.parametrize(("batch", "width"), [(3, 8), pytest.param(1, 4, marks=pytest.mark.slow_all)])
def test_drafts_that_are_often_right(model, batch, width):
    close = close_exit(model)
    wanted = tide.generate(close, PROMPTS, max_new_tokens=NEW, stop=[]).tokens
    check_every_stop(close, wanted, batch, width, exits=tide.FixedDepth(3), exit_points=POINTS)
    out = tide.generate(
        close, PROMPTS, max_new_tokens=NEW, stop=[], exits=tide.FixedDepth(3), exit_points=POINTS,
        verify=tide.Verify(width),
    )  # fmt: skip
    drafts = out.stats.drafts
    assert all(0 < right < made for right, made in zip(drafts.accepted[:3], drafts.proposed[:3], strict=True))


def close_exit(model):
    """The model with a last layer that does little, so that its exit before that is often right."""

    def change(decoder):
        layer = decoder.layers[LAYERS - 1]
        for part in (layer.attention.o, layer.mlp.down):
            part.kernel[...] = 0.4 * part.kernel[...]

    return changed(tide.Model(model.graphdef, model.params), change)


@pytest.mark.parametrize("name", list(DRAFTS))
def test_the_device_runs_the_layers_that_are_counted_and_none_twice(model, monkeypatch, name):
    calls = counted_layers(monkeypatch)
    small = DRAFTS[name]
    for width in (4, 3):
        out = None
        for _ in range(2):  # the second is not compiled any more, but its prefill runs
            jax.effects_barrier()
            calls.clear()
            out = tide.generate(model, PROMPTS[:1], max_new_tokens=NEW, stop=[], verify=tide.Verify(width), **small)
            jax.effects_barrier()
        drafts = out.stats.drafts
        assert len(calls) - LAYERS == drafts.draft_layers + drafts.settle_layers == out.stats.executed_layers
        if name == "fixed":  # every draft stops after two layers, and its settling runs the other two
            alone = drafts.passes[1] - sum(drafts.proposed) - drafts.passes[4]
            assert drafts.settle_layers == 2 * drafts.passes[4]
            assert drafts.draft_layers == 2 * drafts.passes[1] + 2 * alone


def test_draws_at_a_temperature_are_those_of_the_plain_loop(model):
    def draw(**kwargs):
        sampling = tide.Sampling(temperature=0.8)
        out = tide.generate(
            model, PROMPTS[:3], max_new_tokens=NEW, stop=[], sampling=sampling, seed=[1, 2, 3], **kwargs
        )
        return out.tokens.tolist()

    wanted = draw()
    assert draw(propose=tide.Ngram(shortest=1), verify=tide.Verify(4)) == wanted
    assert draw(exits=tide.FixedDepth(2), exit_points=POINTS, verify=tide.Verify(4)) == wanted


def test_nothing_but_the_body_decides_what_is_compiled(model):
    """Widths, depths, thresholds, stops and temperatures are arrays."""
    engine = tide.Engine(model, exit_points=POINTS, verify=tide.Verify(4), scorer=tide.RouterExit(0.5).scorer)
    engine.finish(engine.start(PROMPTS[:3], rule=tide.FixedDepth(2), max_new_tokens=NEW))
    for width, rule in ((2, tide.FixedDepth(3)), (3, tide.RouterExit(0.3)), (1, tide.RouterExit(0.5))):
        out = tide.generate(
            model, PROMPTS[1:4], max_new_tokens=NEW - width, exits=rule, exit_points=POINTS, stop=[3, width],
            verify=tide.Verify(width), sampling=tide.Sampling(temperature=0.1 * width),
        )  # fmt: skip
        assert out.stats.timings.compiles == 0


def test_teacher_forcing_follows_the_given_tokens(model):
    given = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20, 21]]
    for draft in (dict(propose=tide.Ngram(shortest=1)), dict(exit_points=POINTS)):
        engine = tide.Engine(model, verify=tide.Verify(4), record_states=True, **draft)
        rule = tide.FixedDepth(2) if "exit_points" in draft else tide.Never()
        state = engine.finish(engine.start(PROMPTS[:2], rule=rule, max_new_tokens=12, continuations=given))
        bare = tide.Engine(model, record_states=True)
        other = bare.finish(bare.start(PROMPTS[:2], rule=tide.Never(), max_new_tokens=12, continuations=given))
        for row, (prompt, rest) in enumerate(zip(PROMPTS, given, strict=False)):
            new = slice(len(prompt), len(prompt) + 12)
            assert state.tokens[row, new].tolist()[: len(rest)] == rest
            assert state.choices[row, new].tolist() == other.choices[row, new].tolist()
            np.testing.assert_allclose(state.states[row, new], other.states[row, new], atol=1e-5)


def test_runs_of_few_rounds_join_up(model, plain):
    """As streaming will call it; the last tokens are reached by rounds narrower than the width."""
    engine = tide.Engine(model, exit_points=POINTS, verify=tide.Verify(4))
    state = engine.start(PROMPTS[:3], rule=tide.FixedDepth(2), max_new_tokens=[NEW, 1, 7])
    runs = 0
    while np.asarray(state.live).any():
        state, runs = engine.run(state, 2), runs + 1
    assert runs > 2 and state.length.tolist() == [len(p) + n - 1 for p, n in zip(PROMPTS, (NEW, 1, 7), strict=False)]
    for row, (prompt, new) in enumerate(zip(PROMPTS, (NEW, 1, 7), strict=False)):
        assert state.tokens[row, len(prompt) : len(prompt) + new].tolist() == plain[row, :new].tolist()
        assert (np.asarray(state.depths)[row, len(prompt) + new :] == 0).all()
