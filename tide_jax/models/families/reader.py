"""Reading a `config.json` so that nothing in it is overlooked."""

from collections.abc import Mapping, Sequence
from typing import Any

from tide_jax.errors import InputError
from tide_jax.models.config import LayerKind, RopeConfig
from tide_jax.models.families.rope import as_float, read_rope

_ABSENT = object()
_LARGEST = 2**31 - 1

_IGNORED = {
    "only training uses it": (
        "initializer_range init_std attention_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop dropout "
        "layerdrop classifier_dropout gradient_checkpointing"
    ),
    "the tokenizer and generation_config.json are read for it": (
        "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class "
        "prefix begin_suppress_tokens suppress_tokens forced_bos_token_id forced_eos_token_id"
    ),
    "it chooses what a call returns, not what is computed": (
        "use_cache output_attentions output_hidden_states return_dict torchscript is_decoder is_encoder_decoder "
        "tie_encoder_decoder chunk_size_feed_forward cross_attention_hidden_size cache_implementation pruned_heads "
        "use_bfloat16"
    ),
    "it says where the model comes from": (
        "model_type architectures transformers_version _name_or_path name_or_path _commit_hash "
        "transformers.js_config _attn_implementation_autoset _attn_implementation _attn_implementation_internal "
        "attn_implementation unsloth_version unsloth_fixed"
    ),
    "the tensors themselves say it": "torch_dtype dtype",
    "the same products in another order": "reorder_and_upcast_attn",
    "it belongs to another task than language modelling": (
        "id2label label2id num_labels problem_type finetuning_task task_specific_params summary_type "
        "summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
    ),
}
INERT: Mapping[str, str] = {key: reason for reason, keys in _IGNORED.items() for key in keys.split()}
"""Keys that do not change the arithmetic of inference, and why."""

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


class ConfigReader:
    """Takes keys out of a `config.json`; what is left at the end is refused by name."""

    def __init__(self, data: Mapping[str, Any], family: str):
        self._left = {key: value for key, value in data.items() if key not in INERT and value is not None}
        self._null = {key for key, value in data.items() if value is None}
        self._family = family

    def take(self, key: str, kind: type, default: Any = _ABSENT) -> Any:
        """The value of a key.

        Raises:
            InputError: it is missing without a default, or not of its kind.
        """
        value = self._left.pop(key, default)
        if value is _ABSENT:
            raise InputError(f"config.json has no {key!r}, which a {self._family} model needs. The file is incomplete.")
        if kind is float:
            value = as_float(value)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise InputError(f"config.json: {key!r} is {value!r}, expected {kind.__name__}. Correct it there.")
        return value

    def positive(self, key: str, kind: type, default: Any = _ABSENT) -> Any:
        """The value of a key that must be above 0.

        Raises:
            InputError: as `take`, or not above 0, or not finite, or an integer beyond 32 bits.
        """
        value = self.take(key, kind, default)
        if not 0 < value < (_LARGEST if kind is int else float("inf")):
            raise InputError(
                f"config.json: {key!r} is {value!r}, it must be a finite number above 0. Correct it there."
            )
        return value

    def optional(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key that must be above 0, or null for None.

        Raises:
            InputError: as `positive`.
        """
        if key in self._null or (key not in self._left and default is None):
            return None
        return self.positive(key, kind, default)

    def only(self, key: str, *accepted: Any) -> None:
        """Accept a switch only where it changes nothing here.

        Raises:
            InputError: its value is another one.
        """
        value = self._left.pop(key, accepted[0])
        if not any(value == one and type(value) is type(one) for one in accepted):
            raise InputError(
                f"config.json: {key} = {value!r} is not supported for {self._family} models (supported: "
                f"{', '.join(map(repr, accepted))}). Converting would give a model that computes something "
                "else."
            )

    def heads(self, *, kv_default: int | None = None, head_dim: int | None = None) -> dict[str, int]:
        """Width, heads and channels of a head, by the fields of `DecoderConfig`.

        Args:
            kv_default: K/V heads where the config names none; None: as many as query heads.
            head_dim: channels of a head where the config names none; None: width / heads.

        Raises:
            InputError: numbers that do not go together.
        """
        hidden, heads = self.positive("hidden_size", int), self.positive("num_attention_heads", int)
        as_many = kv_default is None or "num_key_value_heads" in self._null
        kv_heads = self.positive("num_key_value_heads", int, heads if as_many else kv_default)
        return self.checked_heads(hidden, heads, kv_heads, self.positive("head_dim", int, head_dim or hidden // heads))

    def checked_heads(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
        """The same from numbers.

        Raises:
            InputError: heads that are no multiple of K/V heads, or no channel a head.
        """
        if heads % kv_heads:
            raise InputError(
                f"config.json: {heads} attention heads are not a multiple of {kv_heads} key/value heads. Correct it "
                "there."
            )
        if not head_dim:
            raise InputError(f"config.json: a width of {hidden} is less than {heads} heads. Correct it there.")
        return {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}

    def activation(self, key: str, default: str) -> str:
        """The activation of the MLP, by our name.

        Raises:
            InputError: one that is not known.
        """
        value = self.take(key, str, default)
        if value not in _ACTIVATIONS:
            raise InputError(
                f"config.json: {key} = {value!r} is not supported for {self._family} models (supported: "
                f"{', '.join(_ACTIVATIONS)}). Converting would give a model that computes something else."
            )
        return _ACTIVATIONS[value]

    def rope(
        self,
        head_dim: int,
        context: int,
        *,
        default_theta: float = 10_000.0,
        share: float = 1.0,
        theta_key: str = "rope_theta",
        share_key: str = "partial_rotary_factor",
        original: int | None = None,
    ) -> tuple[RopeConfig, int]:
        """Rotary embedding from either spelling, `rope_theta` + `rope_scaling` or `rope_parameters`, and the context.

        Args:
            head_dim: channels of a head.
            context: its length as the config names it.
            default_theta: base where the config names none.
            share: of the channels that is rotated where the config says nothing.
            theta_key: what the base is called outside those two.
            share_key: what the rotated share is called outside those two.
            original: the context before stretching, where the config names it outside those two.

        Raises:
            InputError: the two contradict each other, a kind of scaling is unknown, or a number is senseless.
        """
        keys = {key: self._left.pop(key, None) for key in ("rope_scaling", "rope_parameters")}
        keys |= {"rope_theta": self._left.pop(theta_key, None), "share": self._left.pop(share_key, None)}
        return read_rope(keys, head_dim, context, default_theta, share, original)

    def ropes(self, head_dim: int, context: int) -> tuple[RopeConfig, RopeConfig, int]:
        """Rotary embeddings of full and of sliding layers (Gemma 3), and the context.

        Raises:
            InputError: as `rope`.
        """
        tables = self._left.pop("rope_parameters", None) or {}
        if not isinstance(tables, dict) or not set(tables) <= {"full_attention", "sliding_attention"}:
            raise InputError(
                f"config.json: rope_parameters is {tables!r}, expected a table for full_attention and one for "
                "sliding_attention. Correct it there."
            )
        full = {
            "rope_theta": self._left.pop("rope_theta", None),
            "rope_scaling": self._left.pop("rope_scaling", None),
            "rope_parameters": tables.get("full_attention"),
        }
        near = {
            "rope_theta": self._left.pop("rope_local_base_freq", None),
            "rope_parameters": tables.get("sliding_attention"),
        }
        far, context = read_rope(full, head_dim, context, 1_000_000.0)
        close, context = read_rope(near, head_dim, context, 10_000.0)
        return far, close, context

    def pattern(
        self, ropes: Sequence[RopeConfig | None], windows: Sequence[int | None]
    ) -> dict[str, tuple[LayerKind, ...] | tuple[int, ...]]:
        """`kinds` and `pattern` of a `DecoderConfig` from rotary embedding and window of every layer."""
        layers = [LayerKind(rope=rope, window=window) for rope, window in zip(ropes, windows, strict=True)]
        kinds = tuple(dict.fromkeys(layers))
        return {"kinds": kinds, "pattern": () if len(kinds) == 1 else tuple(map(kinds.index, layers))}

    def layer_types(self, layers: int, default: Sequence[str]) -> list[bool]:
        """For each layer, whether its attention slides.

        Raises:
            InputError: another number of layers, or a type that is not known.
        """
        types = self.take("layer_types", list, list(default))
        if len(types) != layers:
            raise InputError(f"config.json: layer_types names {len(types)} layers of {layers}. Correct it there.")
        known = ("full_attention", "sliding_attention")
        if strange := [name for name in types if name not in known]:
            raise InputError(
                f"config.json: layer_types has {strange[0]!r}, which is not supported for {self._family} models "
                f"(supported: {', '.join(known)})."
            )
        return [name == known[1] for name in types]

    def windows(self, window: int | None, sliding: Sequence[bool]) -> list[int | None]:
        """The window of each layer.

        Raises:
            InputError: a layer slides, but there is no window.
        """
        if any(sliding) and window is None:
            raise InputError("config.json: a layer is 'sliding_attention', but sliding_window is not set. Correct it.")
        return [window if slides else None for slides in sliding]

    def finish(self) -> None:
        """Refuse what nobody took.

        Raises:
            InputError: keys that are neither honoured nor known to be inert.
        """
        if self._left:
            listed = ", ".join(f"{key} = {value!r}" for key, value in sorted(self._left.items()))
            raise InputError(
                f"config.json switches on something this converter does not know for {self._family} models: "
                f"{listed}. It may change the arithmetic, so the model is refused rather than converted "
                "wrongly."
            )


def type_names(slides: Sequence[bool]) -> list[str]:
    """Layers as `layer_types` names them."""
    return ["sliding_attention" if yes else "full_attention" for yes in slides]
