"""Fused projections, norms, caps and windows against independent formulas."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import tiny_model

from tide_jax.kernels.norm import Norm
from tide_jax.models import KV, Attendable, LayerKind
from tide_jax.models.blocks import Normalization, attention
from tide_jax.models.families import FAMILIES, Weight
from tide_jax.models.rope import rotate

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))


def test_row_orders_of_fused_projections():
    neox = Weight(source="x", part="layer", paths=("q", "k", "v"), split="heads")
    parts = neox.take(np.arange(12), [4, 4, 4], 2)
    assert [part.tolist() for part in parts] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    phi = Weight(source="x", part="layer", paths=("q", "k", "v"))
    assert [part.tolist() for part in phi.take(np.arange(12), [8, 2, 2], 2)] == [list(range(8)), [8, 9], [10, 11]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(shape=SHAPES, transpose=st.booleans(), split=st.sampled_from(["blocks", "heads"]))
def test_taking_apart_and_joining(shape, transpose, split):
    kv_heads, group, head_dim, inputs = shape
    sizes = [kv_heads * group * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    weight = Weight(source="x", part="layer", paths=("q", "k", "v"), transpose=transpose, split=split)
    stored_shape = weight.shape([(inputs, size) for size in sizes])
    stored = np.arange(np.prod(stored_shape)).reshape(stored_shape)
    parts = weight.take(stored, sizes, head_dim)
    assert [part.shape for part in parts] == [(inputs, size) for size in sizes]
    np.testing.assert_array_equal(weight.join(parts, head_dim), stored)
    rows = stored if transpose else stored.T  # [out, in]
    start = 0
    for row, channel in enumerate(rows):  # where each row must have gone, counted one by one
        if split == "blocks":
            which = 0 if row < sizes[0] else 1 if row < sizes[0] + sizes[1] else 2
            at = row - sum(sizes[:which])
        else:
            head, inside = divmod(row, (group + 2) * head_dim)
            slot, lane = divmod(inside, head_dim)
            which = 0 if slot < group else slot - group + 1
            at = (head * group + slot if which == 0 else head) * head_dim + lane
        np.testing.assert_array_equal(parts[which][:, at], channel)
        start += 1
    assert start == sum(sizes)


def test_norms_of_one_plus_scale_are_made_in_float32():
    norm = Normalization(4, Norm(kind="rms_one_plus", eps=1e-9), dtype=jnp.float32)
    np.testing.assert_allclose(norm(jnp.array([3.0, -4.0, 0.0, 0.0])), [1.2, -1.6, 0, 0], rtol=1e-6)
    half = Normalization(1, Norm(kind="rms_one_plus", eps=1e-9), dtype=jnp.bfloat16)
    half.scale.set_value(jnp.array([3.140625], jnp.bfloat16))
    assert float(half(jnp.array([2.0], jnp.float32))[0]) == pytest.approx(4.140625, rel=1e-6)


@pytest.mark.parametrize(("width", "factor"), [(3072, 55.5), (1152, 34.0), (640, 25.25), (2560, 50.5), (2304, 48.0)])
def test_gemma_rounds_the_factor_of_its_embeddings_to_the_dtype(width, factor):
    sizes = dict(vocab_size=9, hidden_size=width, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
                 num_key_value_heads=1, head_dim=2)  # fmt: skip
    scale = FAMILIES["gemma"].config(sizes).embedding_scale
    model = tiny_model(embedding_scale=1.0)
    assert float(jnp.asarray(scale, jnp.bfloat16)) == factor
    assert scale == pytest.approx(width**0.5) and model.config.embedding_scale == 1.0


def seen(cols, past=None):
    return Attendable(None, None, jnp.ones((1, cols), bool), jnp.tril(jnp.ones((1, cols, cols), bool)), past)


def test_scores_are_capped_before_the_mask():
    q, k = jnp.full((1, 1, 2, 1), 60.0), jnp.ones((1, 1, 2, 1))
    v = jnp.array([[[[1.0], [5.0]]]])
    mixed = attention(q, KV(k, v), None, seen(2), scale=1.0, softcap=50.0)
    assert float(mixed[0, 0, 0, 0]) == 1.0  # the second column is not seen by the first, whatever the cap
    assert 50 * np.tanh(60 / 50) == pytest.approx(41.682730) and 30 * np.tanh(45 / 30) == pytest.approx(27.154448)
    apart = attention(q, KV(k * jnp.array([[[[1.0], [0.5]]]]), v), None, seen(2), scale=1.0, softcap=50.0)
    high, low = 50 * np.tanh(60 / 50), 50 * np.tanh(30 / 50)
    share = 1 / (1 + np.exp(low - high))
    assert float(apart[0, 0, 1, 0]) == pytest.approx(share * 1 + (1 - share) * 5, rel=1e-5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(window=st.integers(1, 6), cols=st.integers(1, 5), gone=st.integers(0, 9))
def test_windows_count_the_token_itself(window, cols, gone):
    decoder = tiny_model(kinds=(LayerKind(rope=None, window=window), LayerKind(rope=None)), pattern=(0, 1) * 3)
    from flax import nnx

    decoder = nnx.merge(decoder.graphdef, decoder.params)
    positions = gone + jnp.arange(cols)[None]
    slots = jnp.where(jnp.arange(12) < gone, jnp.arange(12), -1)[None]
    near, far = decoder.view(positions, jnp.ones((1, cols), bool), slots)
    for col in range(cols):
        for other in range(cols):
            assert bool(far.now[0, col, other]) == (other <= col)
            assert bool(near.now[0, col, other]) == (other <= col and col - other < window)
        for slot in range(12):
            assert bool(far.past[0, col, slot]) == (slot < gone)
            assert bool(near.past[0, col, slot]) == (slot < gone and gone + col - slot < window)


def test_channels_beyond_the_rotated_share_are_left_alone():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 10)), jnp.float32)
    angles = np.random.default_rng(1).normal(size=(1, 3, 2))
    turned = np.asarray(rotate(x, jnp.cos(angles), jnp.sin(angles)))
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    pairs = (np.asarray(x[..., :2]) + 1j * np.asarray(x[..., 2:4])) * np.exp(1j * angles)[:, :, None]
    np.testing.assert_allclose(turned[..., :4], np.concatenate([pairs.real, pairs.imag], axis=-1), atol=1e-5)
