"""Skipping is real: layers are counted on the device, and one program serves every depth."""

import jax
import numpy as np
import pytest
from support.tiny import Scripted, ScriptedScorer, counted_layers, tiny_model, with_heads, with_script

import tide_jax as tide
from tide_jax.decode import engine as engines
from tide_jax.decode.output import collect

LAYERS, NEW = 6, 12
POINTS = (1, 3, 5)
EDGES = (0, *POINTS, LAYERS)
PROMPTS = [[4, 5, 6, 7, 8], [11, 3, 90], [1]]
RULES = [
    tide.FixedDepth(1),
    tide.FixedDepth(3),
    Scripted(),
    tide.FixedDepth(5),
    tide.FixedDepth(6),
    tide.Never(),
]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_device_runs_what_the_deepest_row_needs_and_one_program_serves_all_depths(monkeypatch, batch):
    calls = counted_layers(monkeypatch)
    random = np.random.default_rng(1)
    model = with_script(tiny_model(), {point: random.random(256) < 0.4 for point in POINTS})
    engine = engines.Engine(model, exit_points=POINTS, scorer=ScriptedScorer())
    wanted = [NEW, NEW - 4, 2][:batch]
    seen = set()
    for rule in RULES:
        state = engine.start(PROMPTS[:batch], rule=rule, max_new_tokens=wanted)
        jax.effects_barrier()
        calls.clear()
        state = engine.run(state, NEW - 1)
        jax.effects_barrier()
        out = collect(engine, state, [len(prompt) for prompt in PROMPTS[:batch]], NEW)
        deepest = out.exit_depths[:, 1:].max(axis=0)
        assert len(calls) == deepest.sum()
        assert out.stats.executed_layers == deepest.sum()
        assert out.stats.executed_segments == [int((deepest > edge).sum()) for edge in EDGES[:-1]]
        assert out.stats.steps == NEW - 1 and out.lengths == wanted
        seen |= set(np.unique(out.exit_depths[0, 1:]).tolist())
    assert seen == {1, 3, 5, LAYERS}
    assert engine.timings.compiles == len(engines._PROGRAMS) == 2  # the prefill and the loop


def test_generate_compiles_once_for_all_depths_thresholds_and_lengths(monkeypatch):
    monkeypatch.setattr(engines, "_PROGRAMS", {})
    model = with_heads(tiny_model(), *POINTS)
    first = tide.generate(model, PROMPTS, exits=tide.RouterExit(0.5), exit_points=POINTS, max_new_tokens=NEW)
    assert first.stats.timings.compiles == len(engines._PROGRAMS) == 2
    for rule in (
        tide.RouterExit(0.45),
        tide.RouterExit({3: 0.5}),
        tide.FixedDepth(1),
        tide.FixedDepth(6),
        None,
    ):
        for index, new in enumerate((3, 20)):
            prompts = [[*prompt, 1, 2, 3][: 4 + index] for prompt in PROMPTS]
            out = tide.generate(
                model,
                prompts,
                exits=rule,
                exit_points=POINTS,
                max_new_tokens=new,
                seed=[7, 8, index],
                sampling=tide.Sampling(temperature=0.5 * index),
                stop=[5, index],
            )
            assert out.stats.timings.compiles == out.stats.timings.compile == 0
    assert len(engines._PROGRAMS) == 2
