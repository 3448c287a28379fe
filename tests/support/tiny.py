"""Tiny random models for tests that are about logic, not about language."""

import jax
import jax.numpy as jnp
from flax import nnx

import tide_jax as tide
from tide_jax.models import Decoder, DecoderConfig, RopeConfig


def tiny_config(**changes) -> DecoderConfig:
    """Six layers with sizes that differ from each other, so that a swapped axis shows."""
    values = dict(
        family="llama", vocab_size=97, hidden_size=24, ffn_size=40, num_layers=6, num_heads=6, num_kv_heads=2,
        head_dim=8, norm_eps=1e-5, rope=RopeConfig(theta=10_000.0), max_positions=512, tied_head=True,
    )  # fmt: skip
    return DecoderConfig(**{**values, **changes})


def tiny_model(seed: int = 0, dtype=jnp.float32, **changes) -> tide.Model:
    """A model with random weights and random norm scales, no tokenizer."""
    decoder = Decoder(tiny_config(**changes), dtype=dtype, rngs=nnx.Rngs(seed))
    graphdef, params = nnx.split(decoder)
    keys = iter(jax.random.split(jax.random.key(seed + 1), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(next(keys), a.shape, a.dtype), params)
    return tide.Model(graphdef, params)
