"""Positional encodings: sinusoids, relative bias. Buckets: tests/pretrained/test_families.py."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.model.positions import RelativeBias, segment_positions, sinusoidal_positions
from transformer_jax.settings.config import ModelConfig


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


def test_sinusoids_of_tensor2tensor() -> None:
    """All sines first; the longest wavelength is exactly 10000 times the shortest."""
    table = sinusoidal_positions(50, 8, "tensor2tensor")
    for i in range(4):
        angle = 7 / 10000 ** (i / 3)
        np.testing.assert_allclose(table[7, [i, 4 + i]], [np.sin(angle), np.cos(angle)], rtol=1e-6)
    np.testing.assert_allclose(sinusoidal_positions(3, 2, "tensor2tensor")[:, 0], np.sin(range(3)))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_of_a_step_equals_that_of_a_row(bidirectional: bool) -> None:
    config = ModelConfig(
        **{"d_model": 6, "num_heads": 2, "positions": "relative"},
        **{"relative_buckets": 9, "relative_distance": 7},
    )
    bias = RelativeBias(config, bidirectional=bidirectional, rngs=nnx.Rngs(0))
    square_HLL, steps_BHL = (
        np.asarray(bias.between_all(20))[0],
        np.asarray(bias.at_positions(jnp.arange(20), 20)),
    )
    for t in range(20):
        np.testing.assert_array_equal(steps_BHL[t, :, : t + 1], square_HLL[:, t, : t + 1])
    # Biases depend on the distance alone, up to ``relative_distance``.
    np.testing.assert_array_equal(square_HLL[:, 1:, 1:], square_HLL[:, :-1, :-1])
    np.testing.assert_array_equal(square_HLL[:, 7:, 0], square_HLL[:, 7:8, 0].repeat(13, axis=1))
    later_HL = square_HLL[:, 0, 1:]
    assert (later_HL != square_HLL[:, :1, 0]).all() == bidirectional


@pytest.mark.parametrize(
    "fields", [{"relative_buckets": 3}, {"relative_buckets": 32, "relative_distance": 16}]
)
def test_relative_buckets_out_of_range(fields: dict[str, int]) -> None:
    with pytest.raises(UserError, match="relative_(buckets|distance)"):
        ModelConfig(positions="relative", **fields)
