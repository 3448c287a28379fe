"""Verified decoding of SmolLM2 on a CPU: the same tokens as the plain loop, and how much sooner.

    python benchmarks/verified.py [--json] [--model demo_out/smollm2] [--rounds 3]

Float32, greedy; only decode steps are counted. Every prompt is run by every variant of its group before the next, and a
group's ratio is that of the medians, over rounds, of its seconds. `copy_heavy_w4` has the width fixed at 4;
`copy_heavy`, `groups` and `batch8` leave it to the controller, after `tide-jax warmup`. The exit drafts are fixed at 4
columns.
"""

import argparse
import statistics
import sys
from pathlib import Path

import harness
import prompts as texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--model", type=Path, default=Path("demo_out/smollm2"), help="calibrated (make demo leaves it)")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.json")
    parser.add_argument("--wikipedia", type=Path, default=Path(".assets/wikipedia.jsonl"))
    parser.add_argument("--each", type=int, default=6, help="prompts per group")
    parser.add_argument("--new", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    harness.pin(options.threads)

    import numpy as np

    import tide_jax as tide

    model = tide.load(options.model, dtype="float32")
    if model.exits is None:
        sys.exit(f"{options.model} has no calibrated exits; run `make demo` first")
    print("measuring step times", file=sys.stderr)
    step_times = tide.warmup(model)
    prompts = texts.read_prompts(options.prompts, options.wikipedia, each=options.each)
    prompts = {group: [texts.encode(model, group, prompt) for prompt in some] for group, some in prompts.items()}
    batch = [row for group in ("chat", "reasoning", "code", "copy_heavy") for row in prompts[group][:2]]

    ngram = tide.Ngram()
    routed = {"exit_points": (8, 16, 24), "scorer": tide.RouterExit().scorer}
    never = tide.Never()
    variants = {
        "plain": Variant(tide.Engine(model), never),
        "ngram": Variant(tide.Engine(model, propose=ngram, verify=tide.Verify("auto")), never),
        "ngram_w4": Variant(tide.Engine(model, propose=ngram, verify=tide.Verify(4)), never),
        "ngram_w8": Variant(tide.Engine(model, propose=ngram, verify=tide.Verify(8)), never),
        "ngram_w1": Variant(tide.Engine(model, propose=ngram, verify=tide.Verify(1)), never),
        "fixed24_w4": Variant(tide.Engine(model, verify=tide.Verify(4), **routed), tide.FixedDepth(24)),
        "router_w4": Variant(tide.Engine(model, verify=tide.Verify(4), **routed), tide.RouterExit(0.5)),
        "router_project_w4": Variant(
            tide.Engine(model, verify=tide.Verify(4), remainder=tide.ProjectKV(), **routed), tide.RouterExit(0.5)
        ),
    }
    exits = ("fixed24_w4", "router_w4", "router_project_w4")
    jobs = [("batch8", batch, ("plain", "ngram"))]
    for group, rows in prompts.items():
        names = ("plain", "ngram", "ngram_w4", "ngram_w8") if group == "copy_heavy" else ("plain", "ngram")
        jobs += [(group, [row], names) for row in rows]
    jobs += [("width1", [row], ("plain", "ngram_w1")) for row in prompts["chat"][:2]]
    jobs += [("exits", [row], ("plain", *exits)) for group in ("chat", "copy_heavy") for row in prompts[group][:2]]

    runs: dict[tuple[str, str], Runs] = {}
    for round_ in range(options.rounds + 1):  # the first compiles, and is thrown away
        for number, (group, rows, names) in enumerate(jobs):
            print(
                f"\rround {round_}/{options.rounds} job {number + 1}/{len(jobs)} {group:<14}", end="", file=sys.stderr
            )
            tokens = None
            for name in names:
                new = 4 if not round_ else options.new
                outcome = variants[name].run(rows, new)
                if tokens is not None and round_ and not np.array_equal(tokens, outcome["tokens"]):
                    runs.setdefault((group, name), Runs()).differing += 1
                tokens = outcome["tokens"] if tokens is None else tokens
                if round_:
                    runs.setdefault((group, name), Runs()).add(round_, outcome)
    print(file=sys.stderr)

    def ratio(group: str, name: str) -> float:
        return runs[group, "plain"].seconds / runs[group, name].seconds

    groups = {group: ratio(group, "ngram") for group in prompts}
    result = {
        "copy_heavy_w4": ratio("copy_heavy", "ngram_w4"),
        "copy_heavy_w8": ratio("copy_heavy", "ngram_w8"),
        "copy_heavy": groups["copy_heavy"],
        "groups": groups,
        "worst_group": min(groups.values()),
        "batch8": ratio("batch8", "ngram"),
        "width1_overhead": 1 / ratio("width1", "ngram_w1") - 1,
        "exit_drafts": {name: ratio("exits", name) for name in exits},
        "identical": not any(run.differing for run in runs.values()),
        "runs": {f"{group}/{name}": run.summary() for (group, name), run in runs.items()},
        "compile_seconds": {name: round(variant.engine.timings.compile, 1) for name, variant in variants.items()},
        "step_times_ms": {
            batch: {"layer": [1e3 * t for t in times.layer], "head": [1e3 * t for t in times.head]}
            for batch, times in step_times.items()
        },
        "settings": {"dtype": "float32", "new_tokens": options.new, "prompts_per_group": options.each,
                     "rounds": options.rounds, "ngram": repr(ngram)},
        "environment": harness.environment("jax", "jaxlib", "flax"),
    }  # fmt: skip
    harness.emit(result, as_json=options.json, lines=table(result))


class Variant:
    """An engine with its rule; what one run of it took and did."""

    def __init__(self, engine, rule):
        self.engine = engine
        self.rule = rule

    def run(self, rows: list[list[int]], new: int) -> dict:
        """Decode a batch to its end."""
        from tide_jax.decode.output import collect

        timings = self.engine.timings
        state = self.engine.start(rows, rule=self.rule, max_new_tokens=new, stops=self.engine.model.eos_ids)
        seconds, predicted = timings.decode, timings.predicted
        state = self.engine.finish(state)
        output = collect(self.engine, state, [len(row) for row in rows], new)
        return {
            "seconds": timings.decode - seconds,
            "predicted": timings.predicted - predicted,
            "tokens": output.tokens,
            "decoded": sum(output.lengths) - len(rows),
            "drafts": output.stats.drafts,
        }


class Runs:
    """All runs of one variant over one group."""

    def __init__(self):
        self.outcomes: dict[int, list[dict]] = {}
        self.differing = 0

    def add(self, round_: int, outcome: dict) -> None:
        """One more prompt of a round."""
        self.outcomes.setdefault(round_, []).append(outcome)

    @property
    def seconds(self) -> float:
        """Median over rounds of the seconds of all prompts."""
        return statistics.median(sum(one["seconds"] for one in some) for some in self.outcomes.values())

    def summary(self) -> dict:
        """Speed, and what drafts were worth; counts are of one round, as every round does the same at fixed width."""
        last = self.outcomes[max(self.outcomes)]
        decoded = sum(one["decoded"] for one in last)
        summary = {"tokens": decoded, "tokens_per_second": decoded / self.seconds, "differing": self.differing}
        if last[0]["drafts"] is None:
            return summary
        from tide_jax.decode import Drafts

        drafts = Drafts.total([one["drafts"] for one in last])
        passes = sum(drafts.passes.values())
        predicted = statistics.median(sum(one["predicted"] for one in some) for some in self.outcomes.values())
        return {
            **summary,
            "predicted_tokens_per_second": decoded / predicted,
            **drafts.facts(),
            "share_of_passes": {width: count / passes for width, count in drafts.passes.items()},
        }


def table(result: dict) -> list[str]:
    """The result for people."""
    lines = [f"{'':<28}{'tokens/s':>9}{'predicted':>10}{'accepted':>9}   passes of 1 / 4 / 8 columns"]
    for name, run in result["runs"].items():
        line = f"{name:<28}{run['tokens_per_second']:9.1f}"
        if "passes" in run:
            shares = " / ".join(f"{share:.0%}" for share in run["share_of_passes"].values())
            line += f"{run['predicted_tokens_per_second']:10.1f}{run['acceptance_rate']:9.0%}   {shares}"
        lines.append(line)
    lines.append("")
    for name in ("copy_heavy_w4", "copy_heavy_w8", "copy_heavy", "worst_group", "batch8"):
        lines.append(f"{name:<28}{result[name]:9.2f} ×")
    lines += [f"{name:<28}{ratio:9.2f} ×" for name, ratio in result["exit_drafts"].items()]
    lines += [
        f"{'width1_overhead':<28}{result['width1_overhead']:+9.3f}",
        f"{'identical':<28}{result['identical']!s:>9}",
        "",
        str(result["environment"]),
    ]
    return lines


if __name__ == "__main__":
    main()
