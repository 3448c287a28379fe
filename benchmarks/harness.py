"""What every benchmark here does alike: pin threads, interleave, take medians, and say where it ran."""

import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping


def pin(threads: int) -> list[int]:
    """Bind this process to its first `threads` CPUs; call before jax or torch starts."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cpus)
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))
    return cpus


def environment(*packages: str) -> dict[str, object]:
    """Versions, machine and load."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "cpu": names[0] if names else platform.processor(),
        "cpus_used": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def interleaved(variants: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant in each round, all variants once per round, after one round that is thrown away.

    Each callable runs once and returns the seconds it wants counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(rounds + 1):
        for name, run in variants.items():
            print(f"\rround {round_}/{rounds} {name:<24}", end="", file=sys.stderr)
            time.sleep(0.2)  # thread pools of the other library go to sleep
            value = run()
            if round_:
                seconds[name].append(value)
    print(file=sys.stderr)
    return seconds


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def emit(result: Mapping[str, object], *, as_json: bool, lines: list[str]) -> None:
    """One JSON object on standard output, or lines for people. What is not a number is null in JSON."""
    print(json.dumps(_plain(result), indent=2, allow_nan=False) if as_json else "\n".join(lines))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
