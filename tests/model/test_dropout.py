"""Dropout: its rate, its mean, its bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.dropout import Site, draw, dropout


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
    np.testing.assert_array_equal(kept, [[0, 0, 0, 0, 0], [0, 0, 1, 1, 0], [1, 0, 1, 0, 1]])


def test_every_random_bit_is_fair_and_drawn_for_itself() -> None:
    """Each quarter of the last axis has a random half word of its own: the rate is exact in all,
    and no two agree more often than chance has it.
    """
    sites = [Site((64, 16, 256), 0.3)] * 3
    masks = np.stack(draw(jax.random.key(0), sites, ahead=True))
    kept = np.moveaxis(masks.reshape(3, 64, 16, 4, 64), 3, 1).reshape(12, -1)
    np.testing.assert_allclose(kept.mean(axis=1), 0.7, atol=4 * np.sqrt(0.21 / kept.shape[1]))
    correlation = np.corrcoef(kept) - np.eye(12)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(kept.shape[1])
    rows = np.corrcoef(masks[0].reshape(64, -1)) - np.eye(64)
    assert np.abs(rows).max() < 4.5 / np.sqrt(16 * 256)


@pytest.mark.parametrize("rate", [2**-16, 1 - 2**-16])
def test_rates_are_exact_to_one_in_65536(rate: float) -> None:
    share = float((dropout(jnp.ones((2**16, 64)), rate, jax.random.key(0)) == 0).mean())
    assert share == pytest.approx(rate, abs=4 * (2**-16 / 2**22) ** 0.5)


def test_masks_drawn_ahead_are_those_of_the_keys() -> None:
    """Of every shape, also where the last axis is no multiple of four; none where the rate is 0."""
    sites = [Site((3, 5), 0.5), [Site((2, 4, 6), 0.2), Site((3, 5), 0.5)], Site((2, 4, 6), 0.0)]
    keys = draw(jax.random.key(0), sites, ahead=False)
    masks = draw(jax.random.key(0), sites, ahead=True)
    assert jax.tree.structure(keys) == jax.tree.structure(masks, is_leaf=lambda x: x is None)
    drawn = list(zip(jax.tree.leaves(keys), jax.tree.leaves(masks), strict=False))
    assert len(drawn) == 3 and masks[2] is None
    for (key, mask), site in zip(drawn, [sites[0], *sites[1]], strict=True):
        x = jax.random.normal(jax.random.key(1), site.shape)
        np.testing.assert_array_equal(dropout(x, site.rate, mask), dropout(x, site.rate, key))


def test_gradient_passes_where_the_mask_is_true() -> None:
    x, key = jnp.arange(1.0, 9.0), jax.random.key(3)
    y, gradient = jax.value_and_grad(lambda x: dropout(x, 0.25, key).sum())(x)
    kept = np.asarray(dropout(x, 0.25, key) != 0)
    assert 0 < kept.sum() < 8
    np.testing.assert_allclose(gradient, kept / 0.75, rtol=1e-6)
    np.testing.assert_allclose(y, (x * kept).sum() / 0.75, rtol=1e-6)
