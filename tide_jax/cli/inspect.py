"""`tide-jax inspect`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_jax.cli import output
from tide_jax.cli.options import Directory, Json

if TYPE_CHECKING:
    from rich.table import Table

    from tide_jax.checkpoint import Tree
    from tide_jax.models import DecoderConfig

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Say what is in a converted directory: model, size, what a token costs, origin, calibrated exits.

    The weights are not read.

    $ tide-jax inspect smollm2
    """

    model: Directory
    json: Json = False

    def run(self) -> None:
        """Read the manifest and the exit heads, and print them."""
        facts = described(self.model)
        if self.json:
            output.emit(facts)
        else:
            output.show(words(facts))


def described(directory: Path) -> dict[str, Any]:
    """Everything that is known about a converted directory, ready for JSON.

    Raises:
        InputError: not a converted model, or its exit heads belong to another.
    """
    import math

    import jax
    import jax.numpy as jnp
    from flax import nnx

    from tide_jax.checkpoint import part_trees, read_manifest, skeleton
    from tide_jax.exits.heads import FILE_NAME, load_heads

    manifest = read_manifest(directory)
    config = manifest.config
    _, abstract = skeleton(config, manifest.dtype)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract))
    heads = directory / FILE_NAME
    exits = None
    if heads.exists():
        found = load_heads(
            heads,
            fingerprint=manifest.fingerprint,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
        )
        exits = {
            "heads": sorted(found.heads),
            "degenerate": sorted(found.degenerate),
            "points": sorted(found.thresholds),
            "thresholds": {str(depth): value for depth, value in sorted(found.thresholds.items())},
        }
    return {
        "path": str(directory),
        "config": config.to_json(),
        "parameters": parameters,
        "dtype": manifest.dtype,
        "weight_bytes": parameters * jnp.dtype(manifest.dtype).itemsize,
        "per_token": per_token(config, part_trees(nnx.to_pure_dict(abstract)), jnp.dtype(manifest.dtype).itemsize),
        "files": sorted(path.name for path in directory.iterdir() if path.is_file()),
        "disk_bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
        "source": dict(manifest.source),
        "fingerprint": manifest.fingerprint,
        "eos_ids": list(manifest.eos_ids),
        "chat_template": (directory / "tokenizer" / "chat_template.jinja").is_file(),
        "exits": exits,
    }


def per_token(config: "DecoderConfig", parts: "dict[str, Tree]", itemsize: int) -> dict[str, int]:
    """What one token of one row costs: floating-point operations of the matrix products, and bytes of weights read.

    Attention adds, in each layer, operations and bytes of cache for every position that is looked back on.
    """
    from tide_jax.checkpoint import flat

    def size(tree: "Tree", smallest_rank: int) -> int:
        return sum(leaf.size for _, leaf in flat(tree) if leaf.ndim >= smallest_rank)

    layer, final = parts["layer_000"], parts["final"]
    head = size(parts["embedding"], 2) if config.tied_head else size(final, 2)
    last = head + size(final, 1) - size(final, 2)  # the final norm, and the head wherever it is kept
    return {
        "layer_flops": 2 * size(layer, 2),
        "layer_bytes": size(layer, 1) * itemsize,
        "head_flops": 2 * head,
        "head_bytes": last * itemsize,
        "flops": 2 * (config.num_layers * size(layer, 2) + head),
        "bytes": (config.num_layers * size(layer, 1) + last + config.hidden_size) * itemsize,
        "layer_flops_per_position": 4 * config.num_heads * config.head_dim,
        "kv_bytes_per_position": 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize,
    }


def words(facts: dict[str, Any]) -> "Table":
    """The facts as a table of two columns for people."""
    from rich.table import Table
    from rich.text import Text

    config, exits, token = facts["config"], facts["exits"], facts["per_token"]
    biases = [name for name in ("qkv_bias", "o_bias", "mlp_bias") if config[name]]
    rows = {
        "model": f"{config['family']}, {config['num_layers']} layers of width {config['hidden_size']}",
        "attention": f"{config['num_heads']} query heads, {config['num_kv_heads']} key/value heads of "
        f"{config['head_dim']}",
        "positions": _positions(config),
        "feed-forward": f"{'gated ' * config['gated']}{config['activation']}, width {config['ffn_size']}",
        "also": "; ".join([*map(_flat, biases), *_switches(config)]) or "nothing special",
        "vocabulary": f"{config['vocab_size']:,} tokens; LM head "
        + ("tied to the embedding" if config["tied_head"] else "of its own"),
        "context": f"{config['max_positions']:,} tokens",
        "weights": f"{facts['parameters']:,} parameters, {facts['dtype']}, {_size(facts['weight_bytes'])} "
        f"({_size(facts['disk_bytes'])} on disk)",
        "one token": f"{_number(token['flops'])}FLOP, {_size(token['bytes'])} of weights read at full depth; a layer "
        f"{_number(token['layer_flops'])}FLOP, {_size(token['layer_bytes'])}; the LM head "
        f"{_number(token['head_flops'])}FLOP, {_size(token['head_bytes'])}",
        "K/V cache": f"{_size(token['kv_bytes_per_position'])} a position, and "
        f"{_number(token['layer_flops_per_position'])}FLOP in each layer for every position looked back on",
        "source": ", ".join(f"{key} {_flat(value)}" for key, value in facts["source"].items()),
        "fingerprint": facts["fingerprint"],
        "stop ids": ", ".join(map(str, facts["eos_ids"])) or "none",
        "chat template": "yes" if facts["chat_template"] else "no",
        "exits": _exits(exits),
        "files": ", ".join(facts["files"]),
    }
    if "seconds" in facts:
        rows["converted in"] = f"{facts['seconds']:.1f} s"
    table = Table(title=Text(facts["path"]), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _positions(config: dict[str, Any]) -> str:
    """Each kind of layer: how many there are, their rotary embedding and their window."""
    if config["learned_positions"]:
        return f"learned, {config['learned_positions'] - config['position_offset']:,}"
    counts = [config["pattern"].count(index) for index in range(len(config["kinds"]))]
    said = []
    for kind, count in zip(config["kinds"], counts, strict=True):
        rope = kind["rope"]
        text = "none" if rope is None else f"rotary, base {rope['theta']:,.0f}"
        if rope is not None and rope["share"] < 1:
            text += f", {rope['share']:.0%} of each head"
        if rope is not None and rope["kind"] != "default":
            text += f", {rope['kind']}" + (f" × {rope['factor']:g}" if rope["factor"] > 1 else "")
        if kind["window"] is not None:
            text += f", window of {kind['window']:,} tokens"
        said.append(text if len(counts) == 1 else f"{count} layers: {text}")
    return "; ".join(said)


def _switches(config: dict[str, Any]) -> list[str]:
    """What a config has changed of the plain decoder."""
    from tide_jax.models import DecoderConfig

    plain = {field.name: field.default for field in dataclasses.fields(DecoderConfig)}
    names = ("norm", "norms", "residual", "qk_norm", "attention_scale", "attention_softcap", "embedding_scale",
             "residual_scale", "logit_divisor", "logit_softcap")  # fmt: skip
    return [f"{name} {config[name]}" for name in names if config[name] != plain[name]]


def _exits(exits: dict[str, Any] | None) -> str:
    if exits is None:
        return "not calibrated (tide-jax calibrate)"
    trained = f"heads after layer {', '.join(map(str, exits['heads']))}"
    if exits["degenerate"]:
        trained += f" (never used, too little to learn from: {', '.join(map(str, exits['degenerate']))})"
    if not exits["points"]:
        return f"{trained}; calibration chose no exit point"
    chosen = ", ".join(f"{depth} above {value:.3f}" for depth, value in exits["thresholds"].items())
    return f"{trained}; chosen points and thresholds: {chosen}"


def _flat(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _size(count: int) -> str:
    return _number(count) + "B"


def _number(count: int) -> str:
    """Three digits or four, and the prefix of the unit that follows."""
    scale, prefix = next((scale, prefix) for scale, prefix in _PREFIXES if count >= scale or scale == 1)
    return f"{count / scale:.{2 if scale == 1e9 else 1 if scale > 1 else 0}f} {prefix}"
