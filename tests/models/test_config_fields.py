"""Every field of the Hugging Face config classes is read, refused, or ignored for a stated reason."""

import pytest
from support.variants import VARIANTS

from tide_jax.errors import InputError
from tide_jax.models.families import FAMILIES
from tide_jax.models.families.reader import INERT

DERIVED = ("layer_types", "no_rope_layers")  # what transformers makes of other fields and writes beside them


def others(value):
    """Values that say something else."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 + 2, value + 0.5, "x"]
    if isinstance(value, dict):
        return [{**value, "unknown": 1.0}]
    return [3, True, 0.5, "x", ["x"], {"unknown": 1.0}]


def reading(family, config):
    try:
        return FAMILIES[family].config(config)
    except InputError as error:
        return str(error)


@pytest.mark.torch
@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_field_is_overlooked(family):
    import transformers

    handled, fields = set(), set()
    for variant in (one for one in VARIANTS if one.family == family):
        full = getattr(transformers, variant.config)(**variant.values).to_dict()
        fields |= full.keys()
        for config in (full, {key: value for key, value in full.items() if key not in DERIVED}):
            plain = reading(family, config)
            assert not isinstance(plain, str), plain
            for key, value in config.items():
                if any(reading(family, config | {key: other}) != plain for other in others(value)):
                    handled.add(key)
    assert fields - handled - INERT.keys() == set()
    assert all(INERT.values())
