"""Reading the rotary embedding of a `config.json`: two spellings, five kinds of stretching."""

import math
from collections.abc import Mapping
from typing import Any

from tide_jax.errors import InputError
from tide_jax.models.config import RopeConfig

_KINDS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    kind: (frozenset(needed), frozenset(allowed))
    for kind, needed, allowed in (
        ("default", (), ()),
        ("linear", ("factor",), ()),
        ("llama3", ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
        (
            "yarn",
            ("factor", "original_max_position_embeddings"),
            ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        ),
        (
            "longrope",
            ("short_factor", "long_factor", "original_max_position_embeddings"),
            ("factor", "attention_factor"),
        ),
    )
}
"""For each kind of stretching, the keys it needs and those it may have."""

_NAMES = {"original_max_position_embeddings": "original_max_positions"}
_LEAST = {"rope_theta": 1.0, "factor": 1.0}


def read_rope(
    keys: Mapping[str, Any],
    head_dim: int,
    context: int,
    default_theta: float,
    share: float = 1.0,
    original: int | None = None,
) -> tuple[RopeConfig, int]:
    """The rotary embedding that these keys describe, and the context length in which it is exact.

    Args:
        keys: `rope_theta`, `share`, `rope_scaling` and `rope_parameters`, None for what is not said.
        head_dim: channels of a head.
        context: its length as the config names it.
        default_theta: base where nothing is said.
        share: of the channels that is rotated where nothing is said.
        original: the context before stretching where a table does not name it.

    Raises:
        InputError: two spellings contradict each other, a kind is unknown, or a number is senseless.
    """
    tables = {}
    for key in ("rope_scaling", "rope_parameters"):
        table = keys.get(key)
        if table is None or table == {}:
            continue
        tables[key] = _table(key, table, original)
    thetas = {"rope_theta": keys.get("rope_theta")} | {f"{key}.rope_theta": table[0] for key, table in tables.items()}
    shares = {"partial_rotary_factor": keys.get("share")} | {
        f"{key}.partial_rotary_factor": table[1] for key, table in tables.items()
    }
    readings = [table[2:] for table in tables.values()]
    if len(readings) == 2 and readings[0] != readings[1]:
        raise InputError(
            f"config.json: rope_scaling = {keys['rope_scaling']!r} contradicts rope_parameters = "
            f"{keys['rope_parameters']!r}. Remove one of them."
        )
    kind, numbers = readings[0] if readings else ("default", {})
    theta = _agreed("bases", thetas, default_theta)
    share = _agreed("rotated shares", shares, share)
    for key, value in {"rope_theta": theta, **numbers}.items():
        _check_number(key, value)
    if not isinstance(share, float) or not 0 < share <= 1:
        raise InputError(f"config.json: partial_rotary_factor is {share!r}, expected 0 … 1. Correct it there.")
    rotated = int(head_dim * share)
    if rotated % 2 or not rotated:
        raise InputError(
            f"config.json: {rotated} channels of a head of {head_dim} are rotated, but rotary embeddings turn pairs. "
            "Correct head_dim or partial_rotary_factor there."
        )
    config = {"theta": theta, "share": share}
    if kind == "longrope":
        return _longrope(config, numbers, rotated, context)
    if kind == "yarn":
        config |= _yarn_gain(numbers)
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise InputError(
            f"config.json: high_freq_factor {numbers['high_freq_factor']} must be above low_freq_factor "
            f"{numbers['low_freq_factor']}. Correct it there."
        )
    values = {_NAMES.get(key, key): value for key, value in numbers.items() if key not in _GAINS}
    if "original_max_positions" in values:
        values["original_max_positions"] = int(values["original_max_positions"])
    return RopeConfig(kind=kind, **config, **values), context


_GAINS = ("attention_factor", "mscale", "mscale_all_dim")


def _table(key: str, table: Any, original: int | None) -> tuple[Any, Any, str, dict[str, Any]]:
    """Base, rotated share, kind and numbers from one spelling; None for what it does not say.

    Raises:
        InputError: not an object, tables per kind of layer, an unknown kind, or other keys than the kind's.
    """
    if not isinstance(table, dict):
        raise InputError(f"config.json: {key} is {table!r}, expected an object. Correct it there.")
    lists = ("short_factor", "long_factor")
    if nested := [n for n, value in table.items() if isinstance(value, dict | list) and n not in lists]:
        raise InputError(
            f"config.json: {key} has a table of its own for {nested[0]!r}; one rotary embedding per kind of "
            "layer is not supported for this family."
        )
    left = {name: value for name, value in table.items() if value is not None}
    theta, share = left.pop("rope_theta", None), left.pop("partial_rotary_factor", None)
    kinds = sorted({str(left.pop(name)) for name in ("type", "rope_type") if name in left}) or ["default"]
    kinds = ["longrope" if kind == "su" else kind for kind in kinds]  # as the first Phi-3 spelled it
    if len(kinds) > 1 or kinds[0] not in _KINDS:
        dynamic = " The base of 'dynamic' depends on the length of the text, so its cached keys would have to change."
        raise InputError(
            f"config.json: {key} of kind {' and '.join(map(repr, kinds))} is not supported (supported: "
            f"{', '.join(_KINDS)}). Converting would give a model that loses long contexts."
            f"{dynamic if kinds == ['dynamic'] else ''}"
        )
    needed, allowed = _KINDS[kinds[0]]
    if original is not None and "original_max_position_embeddings" in needed:
        left.setdefault("original_max_position_embeddings", original)
    if not needed <= set(left) <= needed | allowed:
        raise InputError(
            f"config.json: {key} of kind {kinds[0]!r} needs exactly {sorted(needed)}"
            f"{f' and may have {sorted(allowed)}' if allowed else ''}, got {sorted(left)}. Correct it there."
        )
    return theta, share, kinds[0], {name: as_float(value) for name, value in left.items()}


def _agreed(what: str, named: Mapping[str, Any], default: float) -> Any:
    """The one value among these.

    Raises:
        InputError: they differ.
    """
    given = {key: as_float(value) for key, value in named.items() if value is not None}
    value = next(iter(given.values()), default)
    if any(other != value for other in given.values()):
        raise InputError(f"config.json: the {what} of the rotary embedding contradict each other: {given}. Keep one.")
    return value


def _check_number(key: str, value: Any) -> None:
    """Refuse what would raise frequencies without bound instead of lowering them, or is no number at all."""
    if key == "truncate":
        sound = isinstance(value, bool)
    elif key in ("short_factor", "long_factor"):
        numbers = [as_float(one) for one in value] if isinstance(value, list) else [None]
        sound = all(isinstance(one, float) and 0 < one < math.inf for one in numbers)
    else:
        least = _LEAST.get(key, 0.0)
        sound = isinstance(value, float) and value < math.inf and (value >= least if least else value > 0)
        sound = sound and (key != "original_max_position_embeddings" or value.is_integer())
    if not sound:
        bound = "of at least 1" if key in _LEAST else "above 0"
        raise InputError(
            f"config.json: the rotary embedding's {_NAMES.get(key, key)} is {value!r}, it must be a finite number "
            f"{bound} (and a position a whole one). Correct it there."
        )


def _longrope(
    config: dict[str, float], numbers: Mapping[str, Any], rotated: int, context: int
) -> tuple[RopeConfig, int]:
    """LongRoPE: a factor for every frequency, another set of them for texts beyond the original context.

    Keys that are in a cache cannot change over to the other set. So the short factors are used, and where the two
    differ the context ends where they do.

    Raises:
        InputError: another number of factors than frequencies.
    """
    short, long = numbers["short_factor"], numbers["long_factor"]
    if len(short) != rotated // 2 or len(long) != rotated // 2:
        raise InputError(
            f"config.json: the rotary embedding has {rotated // 2} frequencies, but {len(short)} short and {len(long)} "
            "long factors. Correct it there."
        )
    original = int(numbers["original_max_position_embeddings"])
    factor = numbers.get("factor", context / original)
    stretched = factor > 1 and original > 1
    gain = numbers.get("attention_factor", math.sqrt(1 + math.log(factor) / math.log(original)) if stretched else 1.0)
    factors = tuple(float(one) for one in short)
    context = context if short == long else min(original, context)
    return RopeConfig(kind="factors", factors=factors, gain=gain, **config), context


def _yarn_gain(numbers: Mapping[str, float]) -> dict[str, float]:
    """The factor of cosines and sines (arXiv 2309.00071, section 3.4)."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(numbers["factor"]) + 1.0

    if "attention_factor" in numbers:
        return {"gain": numbers["attention_factor"]}
    if "mscale" in numbers and "mscale_all_dim" in numbers:
        return {"gain": of(numbers["mscale"]) / of(numbers["mscale_all_dim"])}
    return {"gain": of(1.0)}


def as_float(value: Any) -> Any:
    """An integer as a float, infinity where it has none; anything else unchanged."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return float(value) if abs(value) < 2**1000 else math.inf
