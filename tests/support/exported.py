"""Engines that save every program they run, and engines that run nothing but saved programs.

`python -m support.exported DIRECTORY` prints what each engine makes of the programs in the directory, as JSON.
"""

import json
import sys
from pathlib import Path

import jax
from support.tiny import tiny_model, with_heads

import tide_jax as tide
from tide_jax.decode.export import load_program, save_program

PROMPTS = [[5, 17, 40], [8, 2], [61, 30, 7, 7, 12]]
POINTS = (2, 4)
RULE = tide.RouterExit(threshold=0.5)
ENGINES = {
    "plain": ({}, tide.Never()),
    "routers": ({"exit_points": POINTS, "scorer": RULE.scorer}, RULE),
    "verified": ({"exit_points": POINTS, "scorer": RULE.scorer, "verify": tide.Verify(4)}, RULE),
}


class Saving(tide.Engine):
    """Saves the programs that it runs as `directory/FUNCTION`."""

    directory: Path

    def _call(self, function, state, *args):
        traced = _with_plan(function, self)
        save_program(self.directory / function.__name__, traced, self.model.params, self._heads, state, *args)
        return super()._call(function, state, *args)


class Loaded(tide.Engine):
    """Runs the programs in `directory`, and never traces one of its own."""

    directory: Path

    def _call(self, function, state, *args):
        program = load_program(self.directory / function.__name__)
        return jax.block_until_ready(program(self.model.params, self._heads, state, *args)), 0.0


def _with_plan(function, engine):
    return lambda *args: function(engine.model.graphdef, engine.plan, *args)


def answers(kind: type[tide.Engine], name: str, directory: Path) -> dict[str, list]:
    """Tokens and depths of an engine of this kind, by position."""
    options, rule = ENGINES[name]
    engine = kind(with_heads(tiny_model(3), *POINTS), **options)
    engine.directory = directory
    state = engine.finish(engine.start(PROMPTS, rule=rule, max_new_tokens=12))
    return {"tokens": state.tokens.tolist(), "depths": state.depths.tolist()}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    print(json.dumps({name: answers(Loaded, name, root / name) for name in ENGINES}))
