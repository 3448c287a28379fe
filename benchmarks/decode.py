"""Decode speed of SmolLM2 on a CPU: against transformers, at three depths, and the cost of exits that never fire.

    python benchmarks/decode.py [--json] [--model demo_out/smollm2] [--rounds 7]

Float32, batch 1, greedy, 64 new tokens; only decode steps are counted (the first token comes from the prefill). Ratios
are of medians over interleaved rounds in one process. Beside each depth stands its byte ceiling: bytes of weights and
K/V that a token at full depth reads, divided by those at that depth. Quality is not measured here: `tide-jax compare`
says what the text of these depths is worth.
"""

import argparse
import sys
import time
from pathlib import Path

import harness

NEW = 64
PROMPT = [{"role": "user", "content": "Explain how a refrigerator works."}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--model", type=Path, default=Path("demo_out/smollm2"), help="calibrated (make demo leaves it)")
    parser.add_argument("--gguf", type=Path, default=Path(".assets/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    harness.pin(options.threads)

    import tide_jax as tide

    model = tide.load(options.model, dtype="float32")
    if model.exits is None or not model.exits.thresholds:
        sys.exit(f"{options.model} has no calibrated exit points; run `make demo` first")
    ids = model.tokenizer.encode_chat(PROMPT)
    stored = tuple(sorted(model.exits.thresholds))
    fixed = tide.Engine(model, exit_points=(8, 16, 24))
    routed = tide.Engine(model, exit_points=stored, scorer=tide.RouterExit().scorer)

    def ours(engine: tide.Engine, rule) -> float:
        state = engine.start([ids], rule=rule, max_new_tokens=NEW)
        before = engine.timings.decode
        engine.run(state, NEW - 1)
        return engine.timings.decode - before

    variants = {
        "full": lambda: ours(plain, tide.Never()),
        "depth24": lambda: ours(fixed, tide.FixedDepth(24)),
        "depth16": lambda: ours(fixed, tide.FixedDepth(16)),
        "depth8": lambda: ours(fixed, tide.FixedDepth(8)),
        "never_fires": lambda: ours(routed, tide.RouterExit(threshold=2.0)),
        **transformers_variants(options.gguf, ids, options.threads),
    }
    plain = tide.Engine(model)
    seconds = harness.interleaved(variants, rounds=options.rounds)
    speed = {name: (NEW - 1) / harness.median(values) for name, values in seconds.items()}
    best = max(("transformers_dynamic", "transformers_static"), key=lambda name: speed[name])
    ratio = lambda a, b: harness.median(seconds[b]) / harness.median(seconds[a])  # noqa: E731
    ceiling = {depth: round(ceilings(model.config, depth, len(ids) + NEW // 2), 3) for depth in (24, 16, 8)}
    result = {
        "full_vs_transformers": ratio("full", best),
        "depth24_vs_full": ratio("depth24", "full"),
        "depth16_vs_full": ratio("depth16", "full"),
        "depth8_vs_full": ratio("depth8", "full"),
        "never_overhead": 1 / ratio("never_fires", "full") - 1,
        "byte_ceilings": {f"depth{depth}": value for depth, value in ceiling.items()},
        "tokens_per_second": speed,
        "seconds": seconds,
        "exit_points": {"never_fires": stored, "fixed": (8, 16, 24)},
        "transformers_cache": best.removeprefix("transformers_"),
        "settings": {"dtype": "float32", "batch": 1, "new_tokens": NEW, "prompt_tokens": len(ids),
                     "rounds": options.rounds},
        "environment": harness.environment("jax", "jaxlib", "flax", "torch", "transformers"),
    }  # fmt: skip
    lines = [f"{name:<24}{value:8.1f} tokens/s" for name, value in speed.items()]
    lines += [
        "",
        f"full_vs_transformers    {result['full_vs_transformers']:.2f}  ({best})",
        *(
            f"depth{d}_vs_full{'':<9}{result[f'depth{d}_vs_full']:.2f}  (byte ceiling {ceiling[d]:.2f})"
            for d in ceiling
        ),
        f"never_overhead          {result['never_overhead']:+.3f}  (exit points {list(stored)})",
        "",
        str(result["environment"]),
    ]
    harness.emit(result, as_json=options.json, lines=lines)


def ceilings(config, depth: int, context: int) -> float:
    """Bytes per token at full depth over those at `depth`, where a layer left out still reads its K/V projections."""
    d, hd = config.hidden_size, config.head_dim
    kv = 2 * d * config.num_kv_heads * hd
    cache = 2 * context * config.num_kv_heads * hd
    layer = 2 * d * config.num_heads * hd + kv + 3 * d * config.ffn_size
    head = config.vocab_size * d
    full = config.num_layers * (layer + cache) + head
    return full / (depth * (layer + cache) + (config.num_layers - depth) * kv + head)


def transformers_variants(gguf: Path, ids: list[int], threads: int):
    """transformers' `generate`, SDPA, float32, with a dynamic and a static cache; decode steps only."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    prompt = torch.tensor([ids])

    def timed(new: int, cache: str) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new,
                min_new_tokens=new, cache_implementation=cache, disable_compile=True,
            )  # fmt: skip
        return time.perf_counter() - began

    return {
        f"transformers_{cache}": lambda cache=cache: timed(NEW, cache) - timed(1, cache)
        for cache in ("dynamic", "static")
    }


if __name__ == "__main__":
    main()
