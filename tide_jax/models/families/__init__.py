"""Model families: each is a reader of `config.json` and a table of weights over the one `Decoder`."""

from tide_jax.models.families.falcon import FALCON
from tide_jax.models.families.family import Family, Weight
from tide_jax.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from tide_jax.models.families.gpt2 import GPT2
from tide_jax.models.families.gpt_neox import GPT_NEOX
from tide_jax.models.families.granite import GRANITE
from tide_jax.models.families.llama import LLAMA
from tide_jax.models.families.mistral import MINISTRAL, MISTRAL
from tide_jax.models.families.olmo2 import OLMO2
from tide_jax.models.families.opt import OPT
from tide_jax.models.families.phi3 import PHI3
from tide_jax.models.families.qwen import QWEN2, QWEN3
from tide_jax.models.families.smollm3 import SMOLLM3

_ALL = (
    LLAMA, MISTRAL, MINISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, GPT2, GPT_NEOX, OPT, FALCON, GRANITE, OLMO2,
    SMOLLM3,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
TYPES: dict[str, Family] = {kind: family for family in _ALL for kind in family.types}
"""The family of each `model_type`."""

__all__ = ["FAMILIES", "TYPES", "Family", "Weight"]
