"""Kernels against XLA's own code for the same formula, on this machine's CPU.

    python benchmarks/kernels.py [--json] [--rounds 15]

A call is timed inside one jitted loop of dependent calls, of which the time of the same loop without the call is
subtracted: every call waits for the one before, as in decoding. Ratios are of medians over interleaved rounds; above 1
the kernel is faster. The weights stay in the caches of the CPU, as they would not beside a whole model.

`exit_route_n1_vs_xla` and `exit_route_n16_vs_xla` are the worse of widths 576 and 4,096, against the best of three XLA
forms of the formula.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable

import harness

CALLS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    harness.pin(options.threads)

    from tide_jax.kernels import status

    if not status().available:
        sys.exit(f"there is nothing to compare: {status().reason}")
    routes = {(n, d): measure_route(n, d, options.rounds) for d in (576, 4096) for n in (1, 2, 4, 8, 16, 32, 64)}
    moves = {(n, d): measure_moves(n, d, options.rounds) for d in (576, 4096) for n in (8, 64, 512)}

    def worst(n: int) -> float:
        return min(routes[n, d]["ratio"] for d in (576, 4096))

    result = {
        "exit_route_n1_vs_xla": worst(1),
        "exit_route_n16_vs_xla": worst(16),
        "exit_route": {f"n{n} d{d}": times for (n, d), times in routes.items()},
        "compact": {f"n{n} d{d}": times["compact"] for (n, d), times in moves.items()},
        "compact_normed": {f"n{n} d{d}": times["compact_normed"] for (n, d), times in moves.items()},
        "settings": {"dtype": "float32", "r": 128, "calls": CALLS, "rounds": options.rounds},
        "environment": harness.environment("jax", "jaxlib"),
    }
    harness.emit(result, as_json=options.json, lines=table(result))


def measure_route(n: int, d: int, rounds: int, r: int = 128) -> dict[str, object]:
    """Microseconds of one exit route of n rows, by the kernel and by three ways to write it for XLA."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tide_jax.kernels import Gate, Norm, exit_route
    from tide_jax.kernels.exit_route import decide, reference

    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape) / d**0.5, jnp.float32)  # noqa: E731
    x, scale, down, up = array(n, d), array(d), array(d, r), array(r)
    static = {"norm": Norm(eps=1e-5), "layers": 8}

    def elementwise(x, scale, bias, down, up, gate, *, norm, layers):
        """The dot as a product and a sum, which XLA fuses with the norm."""
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm.eps) * scale
        hidden = jax.nn.silu((normed[:, :, None] * down).sum(axis=1))
        return decide(jax.nn.sigmoid((hidden * up).sum(axis=-1)), gate, layers=layers)

    def scaled_after(x, scale, bias, down, up, gate, *, norm, layers):
        """The root mean square after the dot: fewer passes over the states."""
        inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm.eps)
        hidden = jax.nn.silu(inverse * ((x * scale) @ down))
        return decide(jax.nn.sigmoid((hidden * up).sum(axis=-1)), gate, layers=layers)

    forms = {
        "kernel": functools.partial(exit_route, use_kernels=True),
        "reference": reference,
        "scaled_after": scaled_after,
        "elementwise": elementwise,
    }

    def body(form: Callable | None, carry):
        x, gate, remaining = carry
        if form is None:
            return x + 1e-9 * gate.threshold[:, None], gate, remaining + 1
        route = form(x, scale, None, down, up, gate, **static)
        # What comes next needs what came out: every result, and the state itself.
        gate = gate._replace(exited=route.exited & (route.depth < 0), depth=route.depth)
        return x + 1e-9 * route.score[:, None], gate, remaining + route.remaining

    ones = jnp.ones(n, bool)
    start = (x, Gate(jnp.full(n, 0.5), ones, ~ones, jnp.full(n, 30, jnp.int32)), jnp.int32(0))
    return timed(
        {name: functools.partial(body, form) for name, form in (*forms.items(), ("empty", None))}, start, rounds
    )


def measure_moves(n: int, d: int, rounds: int) -> dict[str, dict[str, object]]:
    """Microseconds of gathering half of n rows, with and without the norm."""
    import jax.numpy as jnp
    import numpy as np

    from tide_jax.kernels import Norm, compact
    from tide_jax.kernels.compact import reference

    rng = np.random.default_rng(0)
    x, scale = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((n, d), (d,)))
    keep = jnp.asarray(rng.permutation(n) < n // 2)

    def gather(form: Callable | None, norm: Norm | None, carry):
        x, keep, seen = carry
        if form is None:
            return x.at[0, 0].add(1e-9), jnp.roll(keep, 1), seen + 1
        kept = form(x, keep, None if norm is None else scale, bucket=n // 2, norm=norm)
        return x.at[0, 0].add(1e-9 * kept.rows[0, 0]), jnp.roll(keep, 1), seen + kept.count + kept.index[-1]

    start = (x, keep, jnp.int32(0))
    results = {}
    for name, norm in (("compact", None), ("compact_normed", Norm(eps=1e-5))):
        variants = {"kernel": functools.partial(compact, use_kernels=True), "reference": reference, "empty": None}
        results[name] = timed({v: functools.partial(gather, f, norm) for v, f in variants.items()}, start, rounds)
    return results


def timed(bodies: dict[str, Callable], start, rounds: int) -> dict[str, object]:
    """Median microseconds of one call of each body but `empty`, whose time is taken off, and the best ratio."""
    import jax

    def loop(body: Callable, calls: int, carry):
        return jax.lax.fori_loop(0, calls, lambda _, carry: body(carry), carry)

    size = max(leaf.size for leaf in jax.tree.leaves(start))
    calls = CALLS if size < 1 << 18 else CALLS // 10
    programs = {
        name: jax.jit(functools.partial(loop, body, calls)).lower(start).compile() for name, body in bodies.items()
    }

    def once(name: str) -> float:
        began = time.perf_counter()
        jax.block_until_ready(programs[name](start))
        return (time.perf_counter() - began) / calls * 1e6

    times = {name: [] for name in programs}
    for round_ in range(rounds + 1):
        for name in programs:
            elapsed = once(name)
            if round_:
                times[name].append(elapsed)
    empty = harness.median(times.pop("empty"))
    micro = {name: harness.median(values) - empty for name, values in times.items()}
    best = min((name for name in micro if name != "kernel"), key=micro.get)
    return {"us": micro, "best_xla": best, "ratio": micro[best] / micro["kernel"]}


def table(result: dict) -> list[str]:
    """The result for people."""
    lines = [f"{'':<26}{'kernel µs':>11}{'XLA µs':>11}{'ratio':>8}"]
    for op in ("exit_route", "compact", "compact_normed"):
        for size, times in result[op].items():
            us, best = times["us"], times["best_xla"]
            lines.append(f"{op + ' ' + size:<26}{us['kernel']:>11.2f}{us[best]:>11.2f}{times['ratio']:>8.2f}  {best}")
    lines += [f"{name:<26}{result[name]:.2f}" for name in ("exit_route_n1_vs_xla", "exit_route_n16_vs_xla")]
    return [*lines, "", str(result["environment"])]


if __name__ == "__main__":
    main()
