"""Dropout: rate, mean and random bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.model.dropout import DropoutKeys, dropout, keep_mask
from transformer_jax.model.layers import EncoderLayer
from transformer_jax.settings.config import ModelConfig


def dropped(x: np.ndarray, rate: float, key: jax.Array) -> np.ndarray:
    return np.asarray(jax.jit(dropout, static_argnums=1)(x, rate, key))


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_dropout_rate_and_mean(rate: float) -> None:
    x = np.ones((200, 501), np.float32)
    y = dropped(x, rate, jax.random.key(1))
    assert y.shape == x.shape
    assert float((y == 0).mean()) == pytest.approx(rate, abs=0.01)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.01)


def test_dropout_without_a_key_or_rate_is_the_identity() -> None:
    x = jnp.ones((3, 4))
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


@pytest.mark.parametrize("rate", [-0.1, 1.0, 10.0])
def test_rates_out_of_range(rate: float) -> None:
    with pytest.raises(AssertionError, match=f"dropout rate is {rate}; expected a value in "):
        dropout(jnp.ones((3, 4)), rate, jax.random.key(0))


def test_masks_of_a_key_never_change() -> None:
    kept = (dropped(np.ones((3, 5), np.float32), 0.5, jax.random.key(0)) != 0).astype(int)
    np.testing.assert_array_equal(kept, [[0, 0, 0, 0, 0], [0, 0, 1, 1, 0], [1, 0, 1, 0, 1]])


def test_random_bits_are_unbiased_and_independent() -> None:
    """Each quarter of the last axis uses its own half of a random word."""
    keys = DropoutKeys(jax.random.key(0))
    masks = np.stack([keep_mask((64, 16, 256), 0.3, keys()) for _ in range(3)])
    quarters = np.moveaxis(masks.reshape(3, 64, 16, 4, 64), 3, 1).reshape(12, -1)
    np.testing.assert_allclose(
        quarters.mean(axis=1), 0.7, atol=4 * np.sqrt(0.21 / quarters.shape[1])
    )
    correlation = np.corrcoef(quarters) - np.eye(12)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(quarters.shape[1])
    rows = np.corrcoef(masks[0].reshape(64, -1)) - np.eye(64)
    assert np.abs(rows).max() < 4.5 / np.sqrt(16 * 256)


@pytest.mark.parametrize("rate", [2**-16, 1 - 2**-16])
def test_rates_are_exact_to_one_in_65536(rate: float) -> None:
    share = (dropped(np.ones((2**16, 64), np.float32), rate, jax.random.key(0)) == 0).mean()
    assert share == pytest.approx(rate, abs=4 * (2**-16 / 2**22) ** 0.5)


def test_each_call_draws_a_new_mask_unless_the_rate_is_0() -> None:
    ones, keys, key = jnp.ones((3, 5)), DropoutKeys(jax.random.key(0)), jax.random.key(0)
    assert dropout(ones, 0.0, keys) is ones
    first, second = dropout(ones, 0.5, keys), dropout(ones, 0.5, keys)
    np.testing.assert_array_equal(first, dropout(ones, 0.5, jax.random.fold_in(key, 0)))
    np.testing.assert_array_equal(second, dropout(ones, 0.5, jax.random.fold_in(key, 1)))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("key", [0, nnx.Rngs(0)], ids=["seed", "Rngs"])
def test_invalid_random_keys(key: Any) -> None:
    config = ModelConfig(d_model=8, num_heads=2, d_ff=8)
    layer = EncoderLayer(config, rngs=nnx.Rngs(0))
    with pytest.raises(
        TypeError, match="(invalid PRNG key data: .* Got 0|unexpected PRNG key type .*Rngs)"
    ):
        dropout(jnp.ones(3), 0.5, key)
    with pytest.raises(UserError, match=r"(?s)dropout_key is .*; expected None or a "):
        layer(jnp.ones((1, 3, 8)), None, dropout_key=key)


def test_gradient_passes_where_the_mask_is_true() -> None:
    x, key = np.arange(1, 9, dtype=np.float32), jax.random.key(3)
    y, gradient = jax.jit(jax.value_and_grad(lambda x: dropout(x, 0.25, key).sum()))(x)
    kept = dropped(x, 0.25, key) != 0
    assert 0 < kept.sum() < 8
    np.testing.assert_allclose(gradient, kept / 0.75, rtol=1e-6)
    np.testing.assert_allclose(y, (x * kept).sum() / 0.75, rtol=1e-6)
