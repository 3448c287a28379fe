"""Early exit on a real model, speed beside quality, in minutes on two CPU cores.

    python examples/demo.py [OUT]        (or: make demo)

Converts SmolLM2-135M-Instruct, calibrates exits on Wikipedia paragraphs, and measures exit rules against the
full model on one compiled program. What OUT (default `demo_out`) holds already is used again.
"""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import assets

import tide_jax as tide
from calib import calibrate, read_texts
from tide_jax.cli import output
from tide_jax.cli.compare import answers
from tide_jax.plots import exit_depths
from tide_jax.progress import status, track

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences how a bicycle stays upright.",
    "Give me three tips for sleeping better.",
    "What is the difference between a list and a tuple in Python?",
)
POINTS = {8, 16, 24}
NEW_TOKENS = 64


def main(out: Path) -> None:
    """Run every stage that has not left its result in `out`."""
    clock = Clock()
    out.mkdir(parents=True, exist_ok=True)
    directory = out / "smollm2"
    with clock.stage("fetch the model and the texts"):
        data = Path(os.environ.get("TIDE_ASSETS", ".assets"))
        assets.main(data)
    with clock.stage("convert"):
        if not directory.exists():
            tide.convert(data / assets.GGUF, directory)
    with clock.stage("load"), status("loading"):
        model = tide.load(directory)
    with clock.stage("calibrate"):
        if model.exits is None:
            texts = read_texts(data / "wikipedia.jsonl", limit=192)
            questions = (Path(__file__).parent / "questions.txt").read_text(encoding="utf-8").splitlines()
            result = calibrate(model, texts, tokens_per_text=96, prompts=questions)
            result.save(directory)
            output.show(result.table())
            model = tide.load(directory)

    stored = model.exits.thresholds
    if stored:
        router, name = tide.RouterExit(), "router"
    else:
        router, name = tide.RouterExit(threshold=0.85), "router 0.85"
        output.note("calibration found no depth that keeps 95 % agreement: the routers run at the paper's 0.85")
    rules = {
        "full depth": tide.Never(),
        name: router,
        "24 layers": tide.FixedDepth(24),
        "16 layers": tide.FixedDepth(16),
    }
    bar = functools.partial(track, description="questions")
    with clock.stage("compile, and answer at full depth"):
        output.note("compiling one program for all rules")
        yardstick = tide.Yardstick(
            model,
            [[{"role": "user", "content": question}] for question in QUESTIONS],
            rule=router,
            exit_points=sorted(POINTS | set(stored)),
            max_new_tokens=NEW_TOKENS,
            progress=bar,
        )
    reports = {}
    for label, rule in rules.items():
        with clock.stage(f"measure {label}"):
            reports[label] = yardstick.measure(rule, progress=bar)

    output.show(summary(reports), *answers(QUESTIONS, {label: report.texts for label, report in reports.items()}))
    picture = out / "exit_depths.png"
    with clock.stage("draw"):
        exit_depths(
            [model.tokenizer.token_text(token) for token in reports[name].tokens[0]],
            reports[name].exit_depths[0].tolist(),
            num_layers=model.config.num_layers,
            path=picture,
            title=f"{QUESTIONS[0]}  ({name})",
        )
    output.note(f"\nlayers run by each token of the first answer: {picture}\n")
    clock.report()


def summary(reports: dict[str, tide.Report]):
    """One row per rule: what it gained, and what it cost."""
    from rich.table import Table

    positions = next(iter(reports.values())).positions
    table = Table(title=f"\nSmolLM2-135M-Instruct, {len(QUESTIONS)} questions, {positions} tokens of its own answers")
    table.add_column("")
    for heading in (
        "tokens/s",
        "layers run",
        "agreement",
        "tokens before\nthe texts differ",
        "longest\nrepeat",
    ):
        table.add_column(heading, justify="right")
    for label, report in reports.items():
        table.add_row(
            label,
            f"{report.tokens_per_second:.1f}",
            f"{report.mean_depth:.1f}",
            f"{100 * report.agreement:.1f} %",
            "–" if report.texts == report.full_texts else f"{report.first_divergence:.1f}",
            f"{report.longest_repeat:.1f}",
        )
    table.caption = (
        "agreement: same choice as the full model, along the full model's own answer. "
        "A long repeat means the text goes round in circles."
    )
    return table


class Clock:
    """Wall time of each stage."""

    def __init__(self):
        self._stages: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        began = time.perf_counter()
        yield
        self._stages[name] = time.perf_counter() - began

    def report(self) -> None:
        """Print every stage and the total."""
        for name, seconds in {**self._stages, "total": sum(self._stages.values())}.items():
            output.note(f"{seconds:7.1f} s  {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo_out"))
