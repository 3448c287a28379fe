"""What a family is, and reading a config so that nothing in it is overlooked."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from tide_jax.errors import InputError
from tide_jax.models.config import DecoderConfig, RopeConfig

_ABSENT = object()
_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One row of a weight table.

    Attributes:
        source: the Hugging Face tensor name; `{layer}` stands for the number of the layer.
        part: `embedding`, `layer` or `final`.
        path: dotted path of the parameter inside its part.
        transpose: stored [out, in] there, [in, out] here.
    """

    source: str
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
        ignored: pattern of tensor names that hold no parameters (buffers that older exports carry).
    """

    name: str
    config: Callable[[Mapping[str, Any]], DecoderConfig]
    weights: tuple[Weight, ...]
    ignored: re.Pattern[str] = re.compile(r"(?!)")

    def locate(self, name: str) -> tuple[Weight, int | None] | None:
        """The row of a Hugging Face tensor name and its layer; None for a name that the table does not have.

        Example:
            >>> FAMILIES["llama"].locate("model.layers.7.mlp.up_proj.weight")[1]
            7
        """
        for weight in self.weights:
            before, layered, after = weight.source.partition("{layer}")
            match = re.fullmatch(f"{re.escape(before)}{'(0|[1-9][0-9]{0,5})' * bool(layered)}{re.escape(after)}", name)
            if match:
                return weight, int(match[1]) if layered else None
        return None


INERT = frozenset({
    "model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "_name_or_path",
    "_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict",
    "torchscript", "use_bfloat16", "chunk_size_feed_forward", "tie_encoder_decoder", "id2label", "label2id",
    "problem_type", "transformers.js_config", "task_specific_params", "name_or_path", "finetuning_task",
    "tokenizer_class", "prefix", "is_decoder", "is_encoder_decoder", "_commit_hash",
})  # fmt: skip
"""Keys that do not change the arithmetic of inference."""

_ROPE_NUMBERS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    },
}
"""For each kind of scaling, the names of its numbers there and here."""


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
        if kind is float:
            value = _number(value)
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

    def only(self, key: str, *accepted: Any) -> None:
        """Accept a switch only where it changes nothing here.

        Raises:
            InputError: its value is another one.
        """
        value = self._left.pop(key, accepted[0])
        if value not in accepted:
            raise InputError(
                f"config.json: {key} = {value!r} is not supported for {self._family} models (supported: "
                f"{', '.join(map(repr, accepted))}). Converting would give a model that computes something "
                "else."
            )

    def rope(self, default_theta: float = 10_000.0) -> RopeConfig:
        """Rotary embedding from either spelling: `rope_theta` + `rope_scaling`, or `rope_parameters`.

        Raises:
            InputError: the two contradict each other, a kind of scaling is unknown, or a number is senseless.
        """
        spelled = {key: self._left.pop(key, None) for key in ("rope_scaling", "rope_parameters")}
        thetas = {"rope_theta": self._left.pop("rope_theta", None)}
        read = {}
        for key, table in spelled.items():
            if not table and not isinstance(table, dict | None):
                raise InputError(f"config.json: {key} is {table!r}, expected an object. Correct it there.")
            if table:
                inner, *read[key] = _scaling(key, table)
                thetas[f"{key}.rope_theta"] = inner
        if len(read) == 2 and read["rope_scaling"] != read["rope_parameters"]:
            raise InputError(
                f"config.json: rope_scaling = {spelled['rope_scaling']!r} contradicts rope_parameters = "
                f"{spelled['rope_parameters']!r}. Remove one of them."
            )
        named = {key: _number(theta) for key, theta in thetas.items() if theta is not None}
        theta = next(iter(named.values()), default_theta)
        if any(other != theta for other in named.values()):
            raise InputError(
                f"config.json: the bases of the rotary embedding contradict each other: {named}. Keep one."
            )
        kind, values = next(iter(read.values()), ("default", {}))
        # A base or factor below 1 would raise frequencies without bound instead of lowering them.
        for key, value in {"rope_theta": theta, **values}.items():
            least = 1 if key in ("rope_theta", "factor") else 0
            sound = isinstance(value, float) and value < float("inf") and (value > 0 if least == 0 else value >= least)
            if not sound or (key == "original_max_positions" and not value.is_integer()):
                raise InputError(
                    f"config.json: the rotary embedding's {key} is {value!r}, it must be a finite number "
                    f"{'of at least 1' if least else 'above 0'} (and a position a whole one). Correct it "
                    "there."
                )
        if kind == "llama3":
            if values["high_freq_factor"] <= values["low_freq_factor"]:
                raise InputError(
                    f"config.json: high_freq_factor {values['high_freq_factor']} must be above "
                    f"low_freq_factor {values['low_freq_factor']}. Correct it there."
                )
            values["original_max_positions"] = int(values["original_max_positions"])
        return RopeConfig(theta=theta, kind=kind, **values)

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


def _number(value: Any) -> Any:
    """An integer as a float, infinity where it has none; anything else unchanged."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return float(value) if abs(value) < 2**1000 else float("inf")


def _scaling(key: str, table: Any) -> tuple[Any, str, dict[str, Any]]:
    """Base or None, kind of scaling, and its numbers by our names, from one spelling.

    Raises:
        InputError: not an object, tables per kind of layer, an unknown kind, or other keys than the kind's.
    """
    if not isinstance(table, dict):
        raise InputError(f"config.json: {key} is {table!r}, expected an object. Correct it there.")
    if nested := [name for name, value in table.items() if isinstance(value, dict | list)]:
        raise InputError(
            f"config.json: {key} has a table of its own for {nested[0]!r}; one rotary embedding per kind of "
            "layer is not supported."
        )
    left = dict(table)
    theta = left.pop("rope_theta", None)
    kinds = sorted({str(left.pop(name)) for name in ("type", "rope_type") if name in left}) or ["default"]
    if len(kinds) > 1 or kinds[0] not in _ROPE_NUMBERS:
        raise InputError(
            f"config.json: {key} of kind {' and '.join(map(repr, kinds))} is not supported (supported: "
            f"{', '.join(_ROPE_NUMBERS)}). Converting would give a model that loses long contexts."
        )
    names = _ROPE_NUMBERS[kinds[0]]
    if set(left) != set(names):
        raise InputError(
            f"config.json: {key} of kind {kinds[0]!r} needs exactly {sorted(names)}, got {sorted(left)}. "
            "Correct it there."
        )
    return theta, kinds[0], {names[name]: _number(value) for name, value in left.items()}
