"""The frozen description of a decoder: everything that changes its arithmetic, and nothing else."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base, and how its inverse frequencies are stretched.

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: `default` (none), `linear` (all divided by `factor`) or `llama3` (low frequencies divided, high
            kept, a smooth ramp between; Llama 3.1 model card).
        factor: the divisor of `linear` and `llama3`.
        low_freq_factor: `llama3`: wavelengths above `original_max_positions / low_freq_factor` are divided.
        high_freq_factor: `llama3`: wavelengths below `original_max_positions / high_freq_factor` are kept.
        original_max_positions: `llama3`: the context length, in tokens, of the model before stretching.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of one decoder.

    Attributes:
        family: which table in `tide_jax.models.families` the weights came through.
        vocab_size: rows of the token embedding.
        hidden_size: width d of the hidden state.
        ffn_size: width of the gated feed-forward layer.
        num_layers: depth L; public depths count layers run, 1 … L.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: channels per head; not necessarily `hidden_size / num_heads`.
        norm_eps: added to the mean square inside RMSNorm.
        rope: rotary position embedding.
        max_positions: context length in tokens that the model was made for.
        tied_head: the LM head is the token embedding.
        attention_bias: q, k, v and o projections carry biases.
        mlp_bias: gate, up and down projections carry biases.
    """

    family: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    tied_head: bool
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def axis_counts(self) -> dict[str, int]:
        """What there is along each logical axis that can be shared by devices (`tide_jax.sharding`)."""
        return {
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "mlp": self.ffn_size,
            "vocab": self.vocab_size,
        }

    def to_json(self) -> dict[str, object]:
        """The config as JSON-ready data; `from_json` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> "DecoderConfig":
        """The config that `to_json` wrote.

        Raises:
            TypeError: a key is missing or unknown, or a value has another type.
        """
        data = dict(data)
        rope = data.get("rope")
        if not isinstance(rope, dict):
            raise TypeError(f"'rope' is {rope!r}")
        return cls(**_checked(cls, {**data, "rope": RopeConfig(**_checked(RopeConfig, rope))}))


def _checked(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    """The data itself.

    Raises:
        TypeError: a field is missing or unknown, or holds a value of another type or a number not above 0.
    """
    kinds = get_type_hints(cls)
    if wrong := sorted(kinds.keys() ^ data.keys()):
        raise TypeError(f"{wrong[0]!r} is {'missing' if wrong[0] in kinds else 'unknown'}")
    for name, kind in kinds.items():
        value = data[name]
        if get_origin(kind) is Literal:
            sound = value in get_args(kind)
        else:
            sound = type(value) is kind and (kind not in (int, float) or 0 < value < float("inf"))
        if not sound:
            raise TypeError(f"{name!r} is {value!r}")
    return data
