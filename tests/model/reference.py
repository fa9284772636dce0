"""Comparison with a reference implementation: values and gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Function = Callable[..., jax.Array]


def with_gradients(
    function: Function, inputs: Sequence[Any], cotangent: jax.Array | None = None
) -> list[np.ndarray]:
    """Compute the result and each input's gradient, as float32; the cotangent is 1 by default."""

    @jax.jit
    def run(*inputs: Any) -> tuple[jax.Array, ...]:
        out, gradient = jax.vjp(function, *inputs)
        return out, *gradient(jnp.ones_like(out) if cotangent is None else cotangent)

    return [np.asarray(x, np.float32) for x in run(*inputs)]


def against_reference(
    ours: Function,
    reference: Function,
    inputs: Sequence[Any],
    tolerance: Mapping[str, float],
    *,
    of_gradients: Mapping[str, float] | None = None,
    cotangent: jax.Array | None = None,
) -> None:
    """Assert that both functions have the same result and the same gradient for each input.

    ``tolerance`` holds rtol and atol, also for gradients unless ``of_gradients`` is given.
    """
    found, expected = (with_gradients(f, inputs, cotangent) for f in (ours, reference))
    np.testing.assert_allclose(found[0], expected[0], **tolerance)
    for gradient, wanted in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(gradient, wanted, **(of_gradients or tolerance))
