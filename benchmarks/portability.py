"""What one program is on five accelerators, none of which is here: compiled by XLA, and bounded by arithmetic.

    python benchmarks/portability.py --compile [--targets a100,v5e] [--layers 30]
    python benchmarks/portability.py --write docs/portability.md
    python benchmarks/portability.py --check docs/portability.md

`--compile` compiles the engine's programs for each target and keeps what XLA says of them in
`benchmarks/results/portability.json`; what it does not compile again stays as it was. `--write` makes the page from
that file and from the analytic model (`benchmarks/roofline.py`); `--check` says whether a page is what would be
written. Only `--compile` takes long, and only it needs the compilers.
"""

import argparse
import functools
import itertools
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks import roofline  # noqa: E402
from benchmarks.roofline import CHIPS, LLAMA_8B, Chip  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "portability.json"
KINDS = ("prefill", "plain", "routers", "verified")
BATCH, SLOTS = 1, 2048
DEPTHS = (8, 16, 24, 32)
SYNCS = (0.0, 5e-6, 20e-6)  # seconds of a round trip: assumed, to see what it would do
ACCEPTANCES = (0.3, 0.6, 0.9)
# What plain rounding to 4 and to 8 bits reached on SmolLM2-135M, and less.
RIVER_ACCEPTANCES = (0.6, 0.78, 0.97)
WIDTHS = (4, 8)
NO_FIT = "—"

# (chip, load, setting) -> one value, or one for each of what a table's text names
Values = Callable[[Chip, "Load", Any], list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile, and write what XLA says")
    parser.add_argument("--targets", default=",".join(CHIPS), help="those to compile for")
    parser.add_argument("--layers", type=int, default=30, help="of the SmolLM2-shaped model that is compiled")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page")
    parser.add_argument("--check", type=Path, metavar="PAGE", help="exit with 1 if the page would be another")
    options = parser.parse_args()
    if options.compile:
        compile_all(options.targets.split(","), options.layers)
    text = page(json.loads(RESULTS.read_text(encoding="utf-8")))
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    if options.check and options.check.read_text(encoding="utf-8") != text:
        print(f"{options.check} is not what --write makes: write it again.", file=sys.stderr)
        return 1
    return 0


# --- What XLA says ---------------------------------------------------------------------------------------------------


def compile_all(targets: Sequence[str], layers: int) -> None:
    """Compile every program for these targets; the results are on disk after each."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # as in tests/conftest.py: else JAX looks for the GPU
    import jax
    import jax.numpy as jnp
    from support import hlo, programs, topologies

    from tide_jax.kernels import register_cuda

    register_cuda()
    config = programs.smollm2_config(layers, SLOTS)
    points = tuple(sorted({max(layers * fifths // 5, 1) for fifths in (2, 3, 4)}))
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"programs": {}}
    for target, kind in itertools.product(targets, KINDS):
        if reason := topologies.available(target):
            sys.exit(reason)
        made = programs.program(kind, config, points=points, batch=BATCH, slots=SLOTS, dtype=jnp.bfloat16)
        began = time.perf_counter()
        executable = made.compile_for(target)
        seconds = time.perf_counter() - began
        memory, cost, text = executable.memory_analysis(), executable.cost_analysis() or {}, executable.as_text()
        found["programs"].setdefault(target, {})[kind] = {
            "compile_seconds": round(seconds, 1),
            "argument_bytes": memory.argument_size_in_bytes,
            "donated_bytes": memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "flops": cost.get("flops"),
            "conditionals": len(hlo.conditionals_in_loops(text)),
            "kernel_calls": sum(n for name, n in hlo.custom_call_targets(text).items() if name.startswith("tide_")),
            "layers": layers,
            "exit_points": points,
            "jax": jax.__version__,
        }
        RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(f"{target} {kind}: {seconds:.1f} s", file=sys.stderr)


# --- The page --------------------------------------------------------------------------------------------------------


def page(compiled: Mapping[str, Any]) -> str:
    """The whole page, from what was compiled and from the analytic model."""
    parts = [
        INTRODUCTION,
        "## The chips\n\nFrom their makers' data sheets; the rate is that of dense bfloat16 products.",
        table(
            ("chip", "TB/s", "TFLOP/s", "GB", "FLOP a byte"),
            ((c.name, f"{c.bandwidth / 1e12:.2f}", f"{c.rate / 1e12:.0f}", f"{c.memory / 1e9:.0f}",
              f"{c.rate / c.bandwidth:.0f}") for c in CHIPS.values()),
        ),
        *compiled_section(compiled["programs"]),
        *depth_section(),
        *step_section(),
        *exit_section(),
        *verification_section(),
        *river_section(),
        *limits_section(),
    ]  # fmt: skip
    return "\n\n".join(wrapped(block) for part in parts for block in part.split("\n\n")) + "\n"


def wrapped(block: str) -> str:
    """Lines of prose and of lists of at most 120 characters; tables and headings as they are."""
    if block.startswith(("|", "#")):
        return block
    fill = functools.partial(textwrap.fill, width=120, break_on_hyphens=False, break_long_words=False)
    if block.startswith("- "):
        return "\n".join(fill(line, subsequent_indent="  ") for line in block.splitlines())
    return fill(block)


INTRODUCTION = """\
# One program on GPUs and TPUs

This page is written by `python benchmarks/portability.py --write docs/portability.md`; a test compares it with what
that would write.

**Nothing here was timed on an accelerator.** There are two kinds of numbers. What XLA says of a program is real: each
was compiled by the compiler of the chip, without the chip. Times of steps, and everything derived from them, are
*bounds* by arithmetic (`benchmarks/roofline.py`): bytes over bandwidth or operations over rate, whichever is longer, on
one chip, with no time for launching anything. A real step takes longer, and small models take much longer."""


def compiled_section(programs: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """What was compiled."""
    first = next(iter(next(iter(programs.values())).values()))
    yield (
        f"## What XLA makes of the programs\n\nSmolLM2-135M's shape but for the number of layers, bfloat16, one "
        f"row, {SLOTS:,} cache slots, "
        f"compiled with jax {first['jax']} by the CPU of the machine that ran this (compile seconds are its own, under "
        "whatever else it did). `prefill` runs 32 columns; `plain` is the loop at full depth; `routers` leaves through "
        "learned exits; `verified` drafts by them, and settles four columns at a time. The state is donated: its bytes "
        "are among the arguments, and not needed a second time. *FLOP* is XLA's own count, which takes the body of a "
        "loop once; for GPUs it keeps none. *Branches* are conditionals in the loop, none of which XLA turned into a "
        "select; on a GPU each is a predicate that the host may have to read. *Kernels* are calls of this project's "
        "CUDA code; on a TPU there is none, and XLA compiles the specification."
    )
    rows = []
    for target, kinds in programs.items():
        for kind, seen in kinds.items():
            flops = NO_FIT if seen["flops"] is None else f"{seen['flops'] / 1e9:.2f}"
            rows.append((
                CHIPS[target].name, kind, seen["layers"], f"{seen['compile_seconds']:.0f}",
                *(f"{seen[name] / 1e6:.1f}" for name in ("argument_bytes", "donated_bytes", "temporary_bytes")),
                flops, seen["conditionals"], seen["kernel_calls"],
            ))  # fmt: skip
    yield table(
        ("chip", "program", "layers", "compile s", "arguments MB", "donated MB", "temporaries MB", "GFLOP", "branches",
         "kernels"),
        rows,
    )  # fmt: skip


def depth_section() -> Iterable[str]:
    """Bytes and times by depth."""
    yield (
        "## Depth\n\nLlama-3.1-8B's shape, one row with 1,024 positions: what one token reads and computes when it "
        "leaves after so many of 32 layers (the K/V of the others are projected from its state; routers not counted), "
        "and the least milliseconds that takes."
    )
    rows = []
    for depth in DEPTHS:
        work = roofline.step(LLAMA_8B, batch=1, context=1024, depth=depth)
        times = (f"{work.seconds(chip) * 1e3:.2f}" for chip in CHIPS.values())
        rows.append((depth, f"{work.bytes / 1e9:.2f}", f"{work.operations / 1e9:.1f}", *times))
    yield table(("depth", "GB", "GFLOP", *CHIPS), rows)


class Load(NamedTuple):
    """How busy a chip is: rows, and positions in the cache of each."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch} row{'s' * (self.batch > 1)} of {self.context:,} positions"

    def fits(self, chip: Chip, bits: int | None = None) -> bool:
        """Whether weights, caches and twins of so many bits are in the memory of one chip together."""
        return roofline.resident(LLAMA_8B, **self._asdict(), bits=bits) <= chip.memory


LOADS = tuple(itertools.starmap(Load, itertools.product((1, 8, 64), (1024, 32_768))))


def step_section() -> Iterable[str]:
    """The plain step at every load."""
    yield (
        "## Batch and context\n\nThe least milliseconds of one full-depth step of all rows, and what bounds it: *m* "
        f"memory, *a* arithmetic. {NO_FIT}: weights and caches are not in the memory of one chip. Everything below "
        "leaves such loads out."
    )
    rows = []
    for load in LOADS:
        work = roofline.step(LLAMA_8B, **load._asdict())
        gigabytes = roofline.resident(LLAMA_8B, **load._asdict()) / 1e9
        times = (f"{work.seconds(c) * 1e3:.2f} {bound(work, c)}" if load.fits(c) else NO_FIT for c in CHIPS.values())
        rows.append((load.batch, f"{load.context:,}", f"{gigabytes:.1f}", *times))
    yield table(("rows", "context", "GB", *CHIPS), rows)


def bound(work: roofline.Work, chip: Chip) -> str:
    """What this takes longest for on the chip."""
    return "m" if work.bytes / chip.bandwidth >= work.operations / chip.rate else "a"


def syncs(chip: Chip) -> Sequence[float]:
    """Seconds of a round trip for which numbers are given."""
    return SYNCS if chip.host_predicates else SYNCS[:1]


def exits(chip: Chip, load: Load, depth: int) -> list[float]:
    """Speed-up of leaving always, by the time of a round trip."""
    options = dict(load._asdict(), depth=depth, points=3)
    return [roofline.exits_speedup(LLAMA_8B, chip, **options, sync=sync) for sync in syncs(chip)]


def shares(chip: Chip, load: Load, skipped: int) -> list[float]:
    """Percent of steps in which all rows must leave, by the time of a round trip."""
    options = dict(load._asdict(), skipped=skipped)
    return [100 * roofline.worthwhile(LLAMA_8B, chip, **options, sync=sync) for sync in syncs(chip)]


def lookup(chip: Chip, load: Load, acceptance: float) -> list[float]:
    """Speed-up of drafts that cost nothing, by width."""
    options = dict(load._asdict(), acceptance=acceptance)
    return [roofline.lookup_speedup(LLAMA_8B, chip, **options, width=width) for width in WIDTHS]


def speculation(chip: Chip, load: Load, acceptance: float) -> list[float]:
    """Speed-up of drafts of 4 columns by the first 8 layers, by the time of a round trip."""
    options = dict(load._asdict(), width=4, depth=8, acceptance=acceptance)
    return [roofline.draft_speedup(LLAMA_8B, chip, **options, sync=sync) for sync in syncs(chip)]


def river(chip: Chip, load: Load, switch: int) -> list[float]:
    """Speed-up of twins of 8 and 4 bits from a layer on."""
    return [roofline.river_speedup(LLAMA_8B, chip, **load._asdict(), bits=bits, switch=switch) for bits in (8, 4)]


def river_draft(chip: Chip, load: Load, acceptance: float) -> list[float]:
    """Speed-up of verified drafts of 4 columns by twins of all layers, of 8 and 4 bits."""
    options = dict(load._asdict(), width=4, acceptance=acceptance)
    return [roofline.river_draft_speedup(LLAMA_8B, chip, **options, bits=bits) for bits in (8, 4)]


def grid(name: str, settings: Sequence[Any], values: Values, bits: int | None = None) -> str:
    """A table of the values at every load that fits some chip, for every setting of that name."""
    rows = []
    for load, setting in itertools.product(LOADS, settings):
        cells = [
            " / ".join(f"{value:.2f}" for value in values(chip, load, setting)) if load.fits(chip, bits) else NO_FIT
            for chip in CHIPS.values()
        ]
        if set(cells) != {NO_FIT}:
            rows.append((load.batch, f"{load.context:,}", setting, *cells))
    return table(("rows", "context", name, *CHIPS), rows)


def exit_section() -> Iterable[str]:
    """What leaving early can be worth."""
    yield (
        "## Exits\n\nHow many times faster decoding can get at most when *every* row leaves after 16 or 24 of 32 "
        "layers at every step, with three exit points. A segment is skipped only if no row needs it, so with "
        "independent rows that leave with probability p it is skipped with p to the power of their number. On a GPU "
        "the host may have to read each predicate: what that round trip takes is a parameter, 0 / 5 / 20 µs, assumed "
        "and not measured. On a TPU there is none."
    )
    yield grid("depth", (16, 24), exits)
    yield (
        "The least share of steps, in percent, in which the whole batch must leave at an exit point for its test to "
        "pay, by the number of layers skipped:"
    )
    yield grid("skipped", (8, 16), shares)


def verification_section() -> Iterable[str]:
    """What verified drafts can be worth."""
    yield (
        "## Verification\n\nDrafts that cost nothing (prompt lookup), each right with the same probability, settled in "
        "passes of 4 / 8 columns:"
    )
    yield grid("right", ACCEPTANCES, lookup)
    yield (
        "Self-speculation: drafts of 4 columns through the first 8 of 32 layers, whose work is not done again, with "
        "two predicates in each draft pass at 0 / 5 / 20 µs on a GPU:"
    )
    yield grid("right", ACCEPTANCES, speculation)


def river_section() -> Iterable[str]:
    """What twins of fewer bits can be worth."""
    yield (
        "## River\n\nTwins of 8 / 4 bits (groups of 64) from a layer on, unverified, for a kernel that reads them as "
        f"they are stored; such a kernel is not part of this project yet. {NO_FIT}: 8-bit twins are not in memory "
        "beside the model and its caches."
    )
    yield grid("real layers", (8, 16), river, bits=8)
    yield "Twins of all layers, of 8 / 4 bits, as a draft of 4 columns that the model verifies:"
    yield grid("right", RIVER_ACCEPTANCES, river_draft, bits=8)


def limits_section() -> Iterable[str]:
    """Where nothing can be gained, by the numbers above."""
    yield "## Where it cannot pay\n\n" + "\n".join(f"- {line}" for line in limits())


def limits() -> Iterable[str]:
    """One sentence for each finding, with the numbers of the model in it."""
    weights = roofline.resident(LLAMA_8B, batch=0, context=0)
    most = roofline.resident(LLAMA_8B, **LOADS[-1]._asdict())
    none = [chip.name for chip in CHIPS.values() if weights > chip.memory]
    yield (
        f"Llama-3.1-8B in bfloat16 is {weights / 1e9:.1f} GB, which is not in the memory of one {' or '.join(none)}; "
        f"with {LOADS[-1]} it is {most / 1e9:.0f} GB, for which none of these chips is enough. What several together "
        "would do is not on this page."
    )
    few, many, half = 8, 64, 0.5
    asked = [
        shares(chip, load, 8)[-1]
        for chip, load in itertools.product(CHIPS.values(), LOADS)
        if chip.host_predicates and load.batch == few and load.fits(chip)
    ]
    yield (
        f"Exits, in a batch: rows that leave independently {half:.0%} of the time leave all together in "
        f"{100 * half**few:.2f} % of the steps of {few} rows, and in {100 * half**many:.0e} % of those of {many}. If a "
        f"round trip took {SYNCS[-1] * 1e6:.0f} µs, the test before the last 8 layers would ask for "
        f"{min(asked):.2f} to {max(asked):.2f} % at {few} rows."
    )
    one = LOADS[0]
    head = roofline.head(LLAMA_8B, batch=1).bytes / roofline.layer(LLAMA_8B, **one._asdict()).bytes
    yield (
        f"Exits by a rule that reads the LM head: each test costs {head:.1f} layers on this model, three of them "
        f"{3 * head:.0f} of 32. A router reads {roofline.exit_point(LLAMA_8B, batch=1).bytes / 1e6:.1f} MB."
    )
    for acceptance, (index, width) in itertools.product(ACCEPTANCES, enumerate(WIDTHS)):
        yield losing(f"Prompt lookup, {width} columns, {acceptance:.0%} right", lookup, acceptance, index)
    for acceptance in ACCEPTANCES:
        what = f"Self-speculation through 8 of 32 layers, {acceptance:.0%} right, predicates for nothing"
        yield losing(what, speculation, acceptance)
    for acceptance, (index, bits) in itertools.product(RIVER_ACCEPTANCES, enumerate((8, 4))):
        what = f"Verified drafts by {bits}-bit twins, {acceptance:.0%} right"
        yield losing(what, river_draft, acceptance, index, bits=8)


def losing(what: str, values: Values, setting: Any, index: int = 0, bits: int | None = None) -> str:
    """Where a technique is no faster than the plain step, among the loads that fit."""
    found = {
        (load, chip.name): values(chip, load, setting)[index]
        for load, chip in itertools.product(LOADS, CHIPS.values())
        if load.fits(chip, bits)
    }
    lost = {key: value for key, value in found.items() if value <= 1}
    if not lost:
        return f"{what}: may pay everywhere; least {min(found.values()):.2f} ×."
    if len(lost) == len(found):
        return f"{what}: pays nowhere; best {max(found.values()):.2f} ×."
    loads: dict[Load, list[str]] = {}
    for (load, name), value in lost.items():
        loads.setdefault(load, []).append(f"{name} ({value:.2f} ×)")
    return (
        f"{what}: does not pay " + "; ".join(f"at {load} on {', '.join(names)}" for load, names in loads.items()) + "."
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, numbers to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
