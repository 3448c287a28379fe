"""The analytic model against numbers worked out by hand."""

import math

import pytest

from benchmarks.roofline import (
    CHIPS,
    LLAMA_8B,
    SMOLLM2,
    Chip,
    Shape,
    Work,
    draft_speedup,
    exit_point,
    exits_speedup,
    expected_tokens,
    head,
    layer,
    lookup_speedup,
    projected,
    resident,
    river,
    river_draft_speedup,
    river_speedup,
    step,
    worthwhile,
)

# d = 4, two query heads and one K/V head of 2, f = 8, 10 tokens, 3 layers:
# q, k, v, o: 4·4 + 4·2 + 4·2 + 4·4 = 48; MLP: 3·4·8 = 96.
TINY = Shape(layers=3, hidden=4, ffn=8, heads=2, kv_heads=1, head_dim=2, vocab=10)
SLOW = Chip(name="slow memory", bandwidth=1.0, rate=1e9, memory=1e9, host_predicates=True)
WEAK = Chip(name="slow arithmetic", bandwidth=1e9, rate=1.0, memory=1e9, host_predicates=False)


def test_sizes():
    assert TINY.layer_weights == 48 + 96
    assert TINY.head_weights == 40
    assert TINY.slot_elements == 4
    assert LLAMA_8B.layer_weights == 218_103_808
    # 8.03 billion parameters, but for the norms (65 vectors of 4,096).
    assert 32 * 218_103_808 + 2 * LLAMA_8B.head_weights + 65 * 4096 == 8_030_261_248
    assert 30 * SMOLLM2.layer_weights + SMOLLM2.head_weights + 61 * 576 == 134_515_008


def test_work_of_the_parts():
    # Two rows, five slots each: 144 weights and 2·5·4 cache elements of 2 bytes;
    # 2·144 operations for each row and 4·(2·2)·5 of attention.
    assert layer(TINY, batch=2, context=5) == Work(288 + 80, 576 + 160)
    # Three columns: the same bytes, three times the operations.
    assert layer(TINY, batch=2, context=5, columns=3) == Work(368, 3 * 736)
    assert layer(TINY, batch=2, context=5, weight_bytes=1.0) == Work(144 + 80, 736)
    assert head(TINY, batch=2, columns=3) == Work(80, 480)
    assert projected(TINY, batch=2) == Work(32, 64)
    assert exit_point(TINY, batch=2, bottleneck=3) == Work(48, 48)
    assert step(TINY, batch=2, context=5) == Work(3 * 368 + 80, 3 * 736 + 160)
    assert step(TINY, batch=2, context=5, depth=1) == Work(368 + 2 * 32 + 80, 736 + 2 * 64 + 160)
    # Eight bits: a byte a weight; four: 144 · 0.5625.
    assert river(TINY, batch=2, context=5, bits=8, switch=1) == Work(368 + 2 * (144 + 80) + 80, 3 * 736 + 160)
    assert river(TINY, batch=2, context=5, bits=4, switch=0).bytes == 3 * (81 + 80) + 80
    assert resident(TINY, batch=2, context=5) == 2 * (3 * 144 + 80 + 2 * 5 * 4 * 3)
    assert resident(TINY, batch=2, context=5, bits=8) == 2 * (3 * 144 + 80 + 120) + 3 * 144


def test_seconds_are_those_of_the_slower_side():
    assert Work(100, 7).seconds(SLOW) == 100
    assert Work(7, 100).seconds(WEAK) == 100


def test_exits():
    # Bytes, 2 rows: full 1,184; depth 1: 512; a router of 128: 4·128·4 = 2,048.
    free = exits_speedup(TINY, SLOW, batch=2, context=5, depth=1, points=1, sync=0.0)
    assert free == pytest.approx(1184 / (512 + 2048))
    waited = exits_speedup(TINY, SLOW, batch=2, context=5, depth=1, points=2, sync=10.0)
    assert waited == pytest.approx(1184 / (512 + 2 * 2048 + 20))
    # Two layers of 368, of which 2·32 are owed all the same; the test costs 2,048.
    assert worthwhile(TINY, SLOW, batch=2, context=5, skipped=2, sync=0.0) == pytest.approx(2048 / (2 * 368 - 64))
    assert worthwhile(TINY, SLOW, batch=2, context=5, skipped=2, sync=6.0) == pytest.approx(2054 / 672)
    # A chip that does not ask its host does not wait for it.
    known = worthwhile(TINY, WEAK, batch=2, context=5, skipped=2, sync=0.0)
    assert known == worthwhile(TINY, WEAK, batch=2, context=5, skipped=2, sync=6.0)
    with pytest.raises(ValueError, match="depth 3 is not an exit of 3"):
        exits_speedup(TINY, SLOW, batch=1, context=1, depth=3, points=1, sync=0.0)


def test_verification():
    assert expected_tokens(0.5, 4) == 1.875
    assert expected_tokens(1.0, 8) == 8
    # Memory alone: a pass of four columns reads what a pass of one does.
    assert lookup_speedup(TINY, SLOW, batch=2, context=5, width=4, acceptance=0.5) == pytest.approx(1.875)
    # Arithmetic alone: four columns cost four.
    assert lookup_speedup(TINY, WEAK, batch=2, context=5, width=4, acceptance=0.5) == pytest.approx(1.875 / 4)
    # Two passes of one layer (368) and one LM head (80), then two layers and the LM head (816); two predicates a pass.
    drafted = draft_speedup(TINY, SLOW, batch=2, context=5, width=2, acceptance=0.5, depth=1, sync=1.0)
    assert drafted == pytest.approx(1.5 * 1184 / (736 + 80 + 816 + 4))


def test_river():
    assert river_speedup(TINY, SLOW, batch=2, context=5, bits=8, switch=1) == pytest.approx(1184 / 896)
    # A draft reads 3·(144 + 80) + 80 = 752, the verification 1,184.
    made = river_draft_speedup(TINY, SLOW, batch=2, context=5, bits=8, width=2, acceptance=1.0)
    assert made == pytest.approx(2 * 1184 / (752 + 1184))


def test_known_models_on_known_chips():
    # Llama-3.1-8B at batch 1 reads 32 layers and the LM head: 15.01 GB, 4.48 ms from 3.35 TB/s.
    seconds = step(LLAMA_8B, batch=1, context=1).seconds(CHIPS["h100"])
    assert math.isclose(seconds, (32 * 218_103_808 + 525_336_576) * 2 / 3.35e12, rel_tol=1e-4)
    assert all(0 < chip.bandwidth < chip.rate for chip in CHIPS.values())
