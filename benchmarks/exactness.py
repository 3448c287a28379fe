"""Does verified decoding say what the plain loop says? SmolLM2, float32, greedy, every kind of draft.

    python benchmarks/exactness.py [--json] [--model demo_out/smollm2] [--each 76] [--new 128]

Prompts of five kinds, in batches of 25, end-of-text not looked at. A first difference counts as a fault, unless the two
best tokens of the full model there, recomputed in float64 by independent numpy formulas, are less than 1e-4 apart: then
it is a tie, and its row is compared no further.
"""

import argparse
import functools
import sys
import time
from pathlib import Path

import harness
import prompts as texts

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

BATCH = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--model", type=Path, default=Path("demo_out/smollm2"), help="calibrated (make demo leaves it)")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.json")
    parser.add_argument("--wikipedia", type=Path, default=Path(".assets/wikipedia.jsonl"))
    parser.add_argument("--each", type=int, default=76, help="prompts per kind; there are 48 without a passage in them")
    parser.add_argument("--new", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    harness.pin(options.threads)

    import tide_jax as tide

    model = tide.load(options.model, dtype="float32")
    if model.exits is None:
        sys.exit(f"{options.model} has no calibrated exits; run `make demo` first")
    groups = texts.read_prompts(options.prompts, options.wikipedia, each=options.each)
    rows = [texts.encode(model, group, prompt) for group, some in groups.items() for prompt in some]
    generate = functools.partial(tide.generate, model, max_new_tokens=options.new, stop=[])
    routed = {"exits": tide.RouterExit(0.5), "exit_points": (8, 16, 24), "verify": tide.Verify(4)}
    drafts = {
        "ngram": {"propose": tide.Ngram(), "verify": tide.Verify(8)},
        "fixed24": {**routed, "exits": tide.FixedDepth(24)},
        "router": routed,
        "router_project": {**routed, "remainder": tide.ProjectKV()},
    }
    plain = run(generate, rows, "plain")
    result = {"prompts": len(rows), "new_tokens": options.new, "drafts": {}}
    for name, arguments in drafts.items():
        began = time.perf_counter()
        outs = run(functools.partial(generate, **arguments), rows, name)
        total = tide.decode.Drafts.total([out.stats.drafts for out in outs])
        tied, faults = differences(model, rows, tokens(plain), tokens(outs))
        result["drafts"][name] = {
            "tokens": len(rows) * options.new,
            "faults": faults,
            "ties": tied,
            "seconds": time.perf_counter() - began,
            **total.facts(),
        }
    result["environment"] = harness.environment("jax", "jaxlib", "flax")
    lines = [f"{'':<16}{'tokens':>8}{'faults':>8}{'ties':>6}{'accepted':>10}"]
    lines += [
        f"{name:<16}{one['tokens']:8}{one['faults']:8}{one['ties']:6}{one['acceptance_rate']:10.0%}"
        for name, one in result["drafts"].items()
    ]
    harness.emit(result, as_json=options.json, lines=[*lines, "", str(result["environment"])])


def run(generate, rows: list[list[int]], name: str) -> list:
    """Every prompt, in batches of rows of similar length."""
    outs = []
    for begin in range(0, len(rows), BATCH):
        print(f"\r{name:<16} {begin}/{len(rows)}", end="", file=sys.stderr)
        outs.append(generate(rows[begin : begin + BATCH]))
    print(file=sys.stderr)
    return outs


def tokens(outs: list) -> list[list[int]]:
    """The new tokens of each prompt."""
    return [row.tolist() for out in outs for row in out.tokens]


def differences(model, rows, wanted, got) -> tuple[int, int]:
    """Rows that part from the plain loop at a tie, and at anything else."""
    from support.exact import TIE, first_difference

    parted = [first_difference(model, *row) for row in zip(rows, got, wanted, strict=True)]
    margins = [at[1] for at in parted if at is not None]
    return sum(margin < TIE for margin in margins), sum(not margin < TIE for margin in margins)


if __name__ == "__main__":
    main()
