"""Layer norm, RMS norm, and the residual connection around each sublayer (paper section 5.4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from transformer_jax.model import norm_kernel
from transformer_jax.model.dropout import DropoutKey, dropout, mask_key
from transformer_jax.settings.config import ModelConfig


class Norm(nnx.Module):
    """Layer norm over the last axis, or RMS norm: x / sqrt(mean(x^2)) times a scale (Zhang and
    Sennrich, 2019). Computed in float32; the output has the input's dtype.
    """

    def __init__(self, config: ModelConfig):
        """Initialize the scale to 1 and the bias, if any, to 0.

        The config's norm_type, norm_epsilon and norm_bias select the norm.
        """
        shape = (config.d_model,)
        self.is_rms = config.norm_type == "rms"
        use_bias = config.norm_bias and not self.is_rms
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(shape, jnp.float32)) if use_bias else None
        self.epsilon = config.norm_epsilon

    @jax.named_scope("norm")
    def __call__(self, x_BLD: Array) -> Array:
        """Normalize, then multiply by the scale and add the bias."""
        shape = (1,) * (x_BLD.ndim - 1) + (-1,)
        normalized = _rms_normalized if self.is_rms else _normalized
        y = normalized(x_BLD.astype(jnp.float32), self.epsilon) * self.scale[...].reshape(shape)
        if self.bias is not None:
            y += self.bias[...].reshape(shape)
        return y.astype(x_BLD.dtype)


def _rms_normalized(x_BLD: Array, epsilon: float) -> Array:
    """Normalize to mean square 1 over D."""
    mean_BL1 = jnp.square(x_BLD).mean(axis=-1, keepdims=True)
    return x_BLD * jax.lax.rsqrt(mean_BL1 + epsilon)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _normalized(x_BLD: Array, epsilon: float) -> Array:
    """Normalize to mean 0 and variance 1 over D; the backward pass reuses the statistics."""
    mean_BL1, inverse_BL1 = _statistics(x_BLD, epsilon)
    return (x_BLD - mean_BL1) * inverse_BL1


@_normalized.defjvp
def _normalized_jvp(
    epsilon: float, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    [x_BLD] = primals
    [dx_BLD] = tangents
    # Without the barrier, XLA would recompute the statistics in each kernel that needs them or, if
    # it cannot, store float32 arrays with the shape of x.
    mean_BL1, inverse_BL1 = jax.lax.optimization_barrier(_statistics(x_BLD, epsilon))
    normalized_BLD = (x_BLD - mean_BL1) * inverse_BL1
    along_BL1 = (dx_BLD * normalized_BLD).mean(axis=-1, keepdims=True)
    across_BLD = dx_BLD - dx_BLD.mean(axis=-1, keepdims=True) - normalized_BLD * along_BL1
    return normalized_BLD, across_BLD * inverse_BL1


def _statistics(x_BLD: Array, epsilon: float) -> tuple[Array, Array]:
    """Return the mean and 1 / standard deviation over D."""
    mean_BL1 = x_BLD.mean(axis=-1, keepdims=True)
    variance_BL1 = jnp.square(x_BLD - mean_BL1).mean(axis=-1, keepdims=True)
    return mean_BL1, jax.lax.rsqrt(variance_BL1 + epsilon)


class Residual(nnx.Module):
    """Residual connection around a sublayer, with dropout and post-norm or pre-norm.

    Computes LayerNorm(x + Dropout(Sublayer(x))) (section 5.4) or x +
    Dropout(Sublayer(LayerNorm(x))).
    """

    def __init__(self, config: ModelConfig):
        """Build from norm, dropout and the config fields that ``Norm`` uses."""
        self.norm = Norm(config)
        self.is_pre_norm = config.norm == "pre"
        self.dropout = config.dropout

    def __call__(
        self,
        x_BLD: Array,
        sublayer: Callable[..., Array],
        *,
        dropout_key: DropoutKey = None,
    ) -> Array:
        """Apply the sublayer with dropout, residual connection and norm. Returns [B, L, D].

        The sublayer is called with the same ``dropout_key``.
        """
        norm = self.norm
        rate = self.dropout
        y_BLD = sublayer(norm(x_BLD) if self.is_pre_norm else x_BLD, dropout_key=dropout_key)
        use_reference = self.is_pre_norm or rate == 0 or not norm_kernel.supports(x_BLD)
        with jax.named_scope("residual"):
            if use_reference or norm.bias is None or dropout_key is None:
                x_BLD = x_BLD + dropout(y_BLD, rate, dropout_key)
                return x_BLD if self.is_pre_norm else norm(x_BLD)
            # In training on a GPU, one fused kernel computes all of this.
            key = mask_key(dropout_key)
            weights = norm.scale[...], norm.bias[...]
            return jax.lax.platform_dependent(
                cuda=lambda: norm_kernel.residual_norm(
                    x_BLD, y_BLD, key, *weights, rate=rate, epsilon=norm.epsilon
                ),
                default=lambda: norm(x_BLD + dropout(y_BLD, rate, key)),
            )
