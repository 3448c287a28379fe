"""What a family is, and reading a config so that nothing in it is overlooked."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from tide_jax.errors import InputError
from tide_jax.models.config import DecoderConfig, RopeConfig

_ABSENT = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One row of a weight table.

    Attributes:
        source: pattern that a Hugging Face tensor name must match in full; group 1, if any, is the layer.
        part: `embedding`, `layer` or `final`.
        path: dotted path of the parameter inside its part.
        transpose: stored [out, in] there, [in, out] here.
    """

    source: re.Pattern[str]
    part: str
    path: str
    transpose: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        name: the `model_type` of its Hugging Face configs.
        config: reads `config.json`, as data.
        weights: the table.
        ignored: tensor names that hold no parameters (buffers that older exports carry).
    """

    name: str
    config: Callable[[Mapping[str, Any]], DecoderConfig]
    weights: tuple[Weight, ...]
    ignored: re.Pattern[str] = re.compile(r"(?!)")


INERT = frozenset({
    "model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range",
    "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id", "_name_or_path", "_attn_implementation_autoset", "output_attentions",
    "output_hidden_states", "return_dict", "torchscript", "use_bfloat16", "chunk_size_feed_forward", "tie_encoder_decoder",
    "id2label", "label2id", "problem_type", "transformers.js_config", "auto_map", "task_specific_params", "name_or_path",
    "finetuning_task", "tokenizer_class", "prefix", "is_decoder", "is_encoder_decoder", "_commit_hash",
})  # fmt: skip
"""Keys that do not change the arithmetic of inference."""


class ConfigReader:
    """Takes keys out of a `config.json`; what is left at the end is refused by name."""

    def __init__(self, data: Mapping[str, Any], family: str):
        self._left = {key: value for key, value in data.items() if key not in INERT and value is not None}
        self._family = family

    def take(self, key: str, kind: type, default: Any = _ABSENT) -> Any:
        """The value of a key.

        Raises:
            InputError: it is missing without a default, or not of its kind.
        """
        value = self._left.pop(key, default)
        if value is _ABSENT:
            raise InputError(f"config.json has no {key!r}, which a {self._family} model needs. The file is incomplete.")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise InputError(f"config.json: {key!r} is {value!r}, expected a {kind.__name__}.")
        return value

    def positive(self, key: str, kind: type, default: Any = _ABSENT) -> Any:
        """The value of a key that must be above 0.

        Raises:
            InputError: as `take`, or not above 0 and finite.
        """
        value = self.take(key, kind, default)
        if not 0 < value < float("inf"):
            raise InputError(f"config.json: {key!r} is {value!r}, it must be a finite number above 0.")
        return value

    def only(self, key: str, *accepted: Any) -> None:
        """Accept a switch only where it changes nothing here.

        Raises:
            InputError: its value is another one.
        """
        value = self._left.pop(key, accepted[0])
        if value not in accepted:
            raise InputError(
                f"config.json: {key} = {value!r} is not supported for {self._family} models "
                f"(supported: {', '.join(map(repr, accepted))}). Converting would give a model that computes something else."
            )

    def rope(self, max_positions: int, default_theta: float = 10_000.0) -> RopeConfig:
        """Rotary embedding from either spelling: `rope_theta` + `rope_scaling`, or `rope_parameters`.

        Raises:
            InputError: the two contradict each other, or a kind of scaling is unknown.
        """
        theta = self._left.pop("rope_theta", None)
        old, new = self._left.pop("rope_scaling", None), self._left.pop("rope_parameters", None)
        if old and new and old != {key: value for key, value in new.items() if key != "rope_theta"}:
            raise InputError(
                f"config.json: rope_scaling = {old!r} contradicts rope_parameters = {new!r}. Remove one of them."
            )
        scaling = dict(new or old or {})
        inner = scaling.pop("rope_theta", None)
        if theta is not None and inner is not None and float(theta) != float(inner):
            raise InputError(
                f"config.json: rope_theta = {theta!r} contradicts rope_parameters' {inner!r}. Remove one of them."
            )
        base = next((value for value in (inner, theta) if value is not None), default_theta)
        kinds = {scaling.pop(key) for key in ("type", "rope_type") if key in scaling} or {"default"}
        numbers = {
            "default": {},
            "linear": {"factor": "factor"},
            "llama3": {
                "factor": "factor",
                "low_freq_factor": "low_freq_factor",
                "high_freq_factor": "high_freq_factor",
                "original_max_position_embeddings": "original_max_positions",
            },
        }
        kind = kinds.pop()
        if kinds or kind not in numbers:
            raise InputError(
                f"config.json: rope scaling {sorted({kind, *kinds})} is not supported (supported: {', '.join(numbers)})."
            )
        if set(scaling) != set(numbers[kind]):
            raise InputError(
                f"config.json: {kind} rope scaling needs exactly {sorted(numbers[kind])}, got {sorted(scaling)}."
            )
        values = {numbers[kind][key]: value for key, value in scaling.items()}
        for key, value in {"rope_theta": base, **values}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise InputError(f"config.json: rope {key} is {value!r}, it must be a finite number above 0.")
        return RopeConfig(theta=float(base), kind=kind, **values)

    def finish(self) -> None:
        """Refuse what nobody took.

        Raises:
            InputError: keys that are neither honoured nor known to be inert.
        """
        if self._left:
            listed = ", ".join(f"{key} = {value!r}" for key, value in sorted(self._left.items()))
            raise InputError(
                f"config.json switches on something this converter does not know for {self._family} models: {listed}. "
                "It may change the arithmetic, so the model is refused rather than converted wrongly."
            )
