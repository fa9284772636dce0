"""Positional encodings: sinusoids."""

import jax.numpy as jnp
import numpy as np

from transformer_jax.model.positions import segment_positions, sinusoidal_positions


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


def test_segment_positions() -> None:
    np.testing.assert_array_equal(
        segment_positions(jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 3, 3, 3]])),
        [[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 0, 1, 2]],
    )
