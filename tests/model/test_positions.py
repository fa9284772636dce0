"""Positions by themselves: sinusoids, rotations."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.model.positions import (
    rotated,
    segment_positions,
    sinusoidal_positions,
)


def test_sinusoids() -> None:
    table = sinusoidal_positions(50, 8)
    np.testing.assert_allclose(table[7, 0], np.sin(7), rtol=1e-6)
    np.testing.assert_allclose(table[7, 5], np.cos(7 / 10000 ** (4 / 8)), rtol=1e-6)
    # PE(pos + k) is a linear function of PE(pos) (section 3.5): rotations by a fixed angle.
    k, frequency = 3, 10000 ** (-2 / 8)
    rotation = np.array(
        [
            [np.cos(k * frequency), np.sin(k * frequency)],
            [-np.sin(k * frequency), np.cos(k * frequency)],
        ]
    )
    np.testing.assert_allclose(table[k:, 2:4], table[:-k, 2:4] @ rotation.T, atol=1e-5)
    split = sinusoidal_positions(50, 8, layout="split")
    np.testing.assert_allclose(split[7, [0, 3, 4]], [np.sin(7), np.sin(7e-4), np.cos(7)], rtol=1e-5)


def test_segment_positions() -> None:
    np.testing.assert_array_equal(
        segment_positions(jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3]])),
        [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 0, 1, 2]],
    )


def test_rotated_scores_depend_on_the_distance_alone() -> None:
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 8))

    def score(at: int, of: int) -> jax.Array:
        return (rotated(q, jnp.array([[at]])) * rotated(k, jnp.array([[of]]))).sum(axis=-1)

    np.testing.assert_allclose(score(12, 5), score(7, 0), rtol=1e-5)
    assert not np.allclose(score(12, 5), score(12, 6), rtol=1e-2)
    np.testing.assert_array_equal(rotated(q, jnp.array([[0]])), q)


def test_rotation_turns_a_dimension_of_each_half() -> None:
    """Dimension i by position / 10000^(2i / K)."""
    x = np.zeros((1, 1, 1, 4), np.float32)
    x[..., 1] = 1.0
    angle = 7 / 10000 ** (2 / 4)
    turned = rotated(jnp.asarray(x), jnp.array([[7]])).ravel()
    np.testing.assert_allclose(turned, [0, np.cos(angle), 0, np.sin(angle)], rtol=1e-5)
