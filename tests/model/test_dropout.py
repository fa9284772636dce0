"""Dropout: its rate, its mean, its bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.dropout import dropout


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_dropout_rate_and_mean(rate: float) -> None:
    x = jnp.ones((200, 501))
    y = dropout(x, rate, jax.random.key(1))
    assert y.shape == x.shape
    assert float((y == 0).mean()) == pytest.approx(rate, abs=0.01)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.01)


def test_dropout_without_a_key_or_rate_is_the_identity() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 4))
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_the_bits_stay_what_they_were() -> None:
    kept = np.asarray(dropout(jnp.ones((3, 5)), 0.5, jax.random.key(0)) != 0).astype(int)
    np.testing.assert_array_equal(kept, [[0, 0, 0, 1, 1], [1, 0, 0, 0, 1], [1, 1, 0, 0, 1]])
