"""The frozen description of a decoder: everything that changes its arithmetic, and nothing else."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tide_jax.kernels.norm import Norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base, and how its inverse frequencies are stretched.

    Attributes:
        theta: base of the geometric series of frequencies.
        share: of the channels of a head that are rotated, the first ones; the others stay as they are.
        kind: `default` (none), `linear` (all divided by `factor`), `llama3` (low frequencies divided, high kept, a
            smooth ramp between; Llama 3.1 model card), `yarn` (the same with another ramp; arXiv 2309.00071, section
            3.2) or `factors` (each divided by its own; LongRoPE, arXiv 2402.13753).
        factor: the divisor of `linear`, `llama3` and `yarn`.
        low_freq_factor: `llama3`: wavelengths above `original_max_positions / low_freq_factor` are divided.
        high_freq_factor: `llama3`: wavelengths below `original_max_positions / high_freq_factor` are kept.
        beta_fast: `yarn`: frequencies that turn more often than this within the original context are kept.
        beta_slow: `yarn`: frequencies that turn less often than this are divided.
        truncate: `yarn`: the ends of the ramp are whole channels.
        original_max_positions: `llama3`, `yarn`: the context length, in tokens, of the model before stretching.
        factors: `factors`: the divisor of every frequency.
        gain: cosines and sines are multiplied by it.
    """

    theta: float = 10_000.0
    share: float = 1.0
    kind: Literal["default", "linear", "llama3", "yarn", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()
    gain: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What one layer's attention may have different from another's.

    Attributes:
        rope: rotary position embedding; None: the layer knows no positions.
        window: tokens that a token sees, itself included; None: all before it.
    """

    rope: RopeConfig | None
    window: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of one decoder.

    Attributes:
        family: which table in `tide_jax.models.families` the weights came through.
        vocab_size: rows of the token embedding.
        hidden_size: width d of the hidden state.
        ffn_size: width of the feed-forward layer.
        num_layers: depth L; public depths count layers run, 1 … L.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: channels per head; not necessarily `hidden_size / num_heads`.
        norm_eps: added under the root in every norm.
        kinds: the kinds of layers there are.
        max_positions: context length in tokens that the model was made for.
        tied_head: the LM head is the token embedding.
        pattern: the kind of each layer, as an index of `kinds`; empty: all are the first.
        learned_positions: rows of a table of position embeddings; 0: there is none.
        position_offset: the row of position 0.
        norm: see `tide_jax.kernels.Norm`.
        norms: what is normed: what enters attention and MLP (`pre`), what comes out of them (`post`), or both.
        residual: the MLP reads what attention has added to (`sequential`), or both read what enters the layer
            (`parallel`), through one norm (`shared`).
        qk_norm: RMSNorm of queries and keys: of each head, of all heads together, or none.
        activation: of the MLP; `gelu_tanh` is its approximation (arXiv 1606.08415, section 2).
        gated: the MLP multiplies the activation by a second projection (arXiv 2002.05202).
        qkv_bias: q, k and v projections carry biases.
        o_bias: o projections carry biases.
        mlp_bias: projections of the MLP carry biases.
        attention_scale: factor of the attention scores; None: 1 / √head_dim.
        attention_softcap: scores are cap · tanh(score / cap); None: not capped.
        embedding_scale: factor of the token embeddings where they enter the first layer.
        residual_scale: factor of what attention and MLP add.
        logit_divisor: logits are divided by it.
        logit_softcap: as for attention scores.
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
    kinds: tuple[LayerKind, ...]
    max_positions: int
    tied_head: bool
    pattern: tuple[int, ...] = ()
    learned_positions: int = 0
    position_offset: int = 0
    norm: Literal["rms", "rms_one_plus", "layer"] = "rms"
    norms: Literal["pre", "post", "both"] = "pre"
    residual: Literal["sequential", "parallel", "shared"] = "sequential"
    qk_norm: Literal["none", "head", "heads"] = "none"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_softcap: float | None = None

    @property
    def axis_counts(self) -> dict[str, int]:
        """What there is along each logical axis that can be shared by devices (`tide_jax.sharding`)."""
        return {
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "mlp": self.ffn_size,
            "vocab": self.vocab_size,
        }

    def norm_of(self, size: int) -> tuple[int, Norm]:
        """Width and kind of a norm of so many channels."""
        return size, Norm(kind=self.norm, eps=self.norm_eps)

    def kind_of(self, layer: int) -> int:
        """Index in `kinds` of a layer, counted from 0."""
        return self.pattern[layer] if self.pattern else 0

    def to_json(self) -> dict[str, object]:
        """The config as JSON-ready data; `from_json` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> "DecoderConfig":
        """The config that `to_json` wrote.

        Raises:
            TypeError: a key is missing or unknown, or a value has another type.
        """
        config = _read(cls, "config", data)
        if not config.kinds or len(config.pattern) not in (0, config.num_layers):
            raise TypeError(f"'pattern' has {len(config.pattern)} layers of {len(config.kinds)} kinds")
        if any(kind >= len(config.kinds) for kind in config.pattern):
            raise TypeError(f"'pattern' is {list(config.pattern)!r}")
        return config


# Fields that may be 0; every other number is above it.
_FROM_ZERO = {"pattern", "learned_positions", "position_offset"}


def _read(kind: Any, name: str, value: Any) -> Any:
    """The value of a field of this type, from JSON data.

    Raises:
        TypeError: it has another type, lacks a field or has one too much, or is a number out of range.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(args[0], name, value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_read(args[0], name, item) for item in value)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        if wrong := sorted(hints.keys() ^ value.keys(), key=str):
            raise TypeError(f"{wrong[0]!r} is {'missing' if wrong[0] in hints else 'unknown'}")
        return kind(**{field: _read(hint, field, value[field]) for field, hint in hints.items()})
    if origin is Literal:
        sound = type(value) is str and value in args
    else:
        low = value >= 0 if name in _FROM_ZERO and type(value) is kind else True
        number = kind in (int, float) and type(value) is kind
        sound = type(value) is kind and low and (not number or name in _FROM_ZERO or 0 < value < float("inf"))
    if not sound:
        raise TypeError(f"{name!r} is {value!r}")
    return value
