"""Model families: each is a reader of `config.json` and a table of weights over the one `Decoder`."""

from tide_jax.models.families.family import Family, Weight
from tide_jax.models.families.llama import LLAMA

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA,)}

__all__ = ["FAMILIES", "Family", "Weight"]
