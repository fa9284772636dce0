"""Masks, scaled dot-product attention and multi-head attention (paper section 3.2).

Array names end with their shapes. The whole package uses these letters:

    B batch    S source length    T target length    L any length
    D d_model  H heads            K head width (d_k or d_v)    F d_ff
    V vocabulary    W beam width    N layers
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from transformer_jax.errors import UserError
from transformer_jax.model import attention_kernel
from transformer_jax.model.attention_kernel import MASKED
from transformer_jax.model.dropout import DropoutKey, dropout
from transformer_jax.model.matmul import compute_dtype, einsum, is_mixed, matmul_dtype
from transformer_jax.settings.checks import Fraction, PositiveInt, Size, check_sizes, checked
from transformer_jax.settings.config import ModelConfig


@checked
def attention_mask(
    query_segments_BT: Array,
    key_segments_BS: Array,
    *,
    causal: bool = False,
) -> Array:
    """Build the mask that lets each query attend to keys in its own segment.

    Args:
      query_segments_BT: int segment ids; 0 is padding, and tokens of one sentence share an id.
      key_segments_BS: segment ids of the keys.
      causal: also mask keys after the query's position. Requires S = T.

    Returns:
      bool [B, 1, T, S], True where attention is allowed. Axis 1 broadcasts over heads.
    """
    if causal:
        check_sizes({"query_segments_BL": query_segments_BT, "key_segments_BL": key_segments_BS})
    key_segments_B1S = key_segments_BS[:, None, :]
    mask_BTS = (query_segments_BT[:, :, None] == key_segments_B1S) & (key_segments_B1S > 0)
    if causal:
        mask_BTS &= jnp.tril(jnp.ones(mask_BTS.shape[1:], bool))[None]
    return mask_BTS[:, None]


@checked
@jax.named_scope("dot_product_attention")
def dot_product_attention(
    q_BTHK: Array,
    k_BSHK: Array,
    v_BSHK: Array,
    mask_BHTS: Array | None = None,
    bias_BHTS: Array | None = None,
    *,
    dropout_rate: float = 0.0,
    dropout_key: DropoutKey = None,
    module: nnx.Module | None = None,
) -> Array:
    """Compute softmax(q k^T / sqrt(d_k)) v (equation 1). Returns [B, T, H, K] with K = d_v.

    Args:
      mask_BHTS: bool, True where attention is allowed; axes B, H and T can be 1. None allows all
        positions. A fully masked query gets uniform weights.
      bias_BHTS: float32, added to the scores q k^T / sqrt(d_k); axis B can be 1.
      module: module that sows the attention weights before dropout, float32 [B, H, T, S], as an
        ``nnx.Intermediate`` named ``weights``; None: do not sow them.

    Raises:
      UserError: the mask is not bool, or an array does not have these axes.
    """
    q_BTHK = q_BTHK * jnp.asarray(q_BTHK.shape[-1] ** -0.5, q_BTHK.dtype)
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
    if bias_BHTS is not None:
        scores_BHTS += bias_BHTS
    if mask_BHTS is not None:
        scores_BHTS = jnp.where(mask_BHTS, scores_BHTS, MASKED)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1)
    if module is not None:
        module.sow(nnx.Intermediate, "weights", weights_BHTS)
    weights_BHTS = dropout(weights_BHTS.astype(v_BSHK.dtype), dropout_rate, dropout_key)
    # Otherwise, XLA's CPU backend would exchange the operands of a single sentence, and round
    # differently.
    out_BHTK = jax.lax.dot_general(weights_BHTS, v_BSHK, (((3,), (1,)), ((0, 1), (0, 2))))
    return out_BHTK.swapaxes(1, 2)


class Projection(nnx.Einsum):
    """Linear projection with float32 Xavier-uniform weights and an optional bias, computed in
    ``dtype``.

    Attributes:
      scale: scale of each output channel, if the kernel is int8 (``with_cast_weights``).
    """

    scale: nnx.Param[Array] | None = None

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        *,
        inputs: int = 1,
        use_bias: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Create weights of shape ``shape``; ``equation`` contracts their first ``inputs`` axes."""
        axes = range(len(shape))
        kernel_init = nnx.initializers.variance_scaling(
            1.0, "fan_avg", "uniform", in_axis=axes[:inputs], out_axis=axes[inputs:]
        )
        super().__init__(equation, shape, dtype=dtype, kernel_init=kernel_init, rngs=rngs)
        if use_bias:  # created here, because nnx.Einsum would use a random key for zeros
            self.bias = nnx.Param(jnp.zeros(shape[inputs:], jnp.float32))

    def __call__(self, x: Array) -> Array:  # type: ignore[override]
        """Project ``x``. In mixed precision on a CPU, and with int8, the result is float32."""
        inputs, weights = self.einsum_str.split("->")[0].split(",")
        check_sizes({f"weights_{weights}": self.kernel, f"the input_{inputs}": x})
        scale = None if self.scale is None else self.scale[...]
        if scale is None and (x.dtype != jnp.float32 or not is_mixed(self.dtype)):
            return super().__call__(x)
        kernel = self.kernel[...]
        y = einsum(self.einsum_str, x, kernel, dtype=jnp.bfloat16, result=jnp.float32, scale=scale)
        if self.bias is not None:
            y += jnp.broadcast_to(self.bias[...], y.shape)
        return y


def merge(*projections: Projection) -> Projection:
    """Merge projections of the same shape into one, with results side by side in the last axis."""
    merged = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *projections)
    merged.kernel_shape = merged.kernel.shape  # nnx.Einsum reads the bias's shape there
    return merged


class MultiHeadAttention(nnx.Module):
    """Multi-head attention (section 3.2.2)."""

    @checked
    def __init__(
        self,
        d_model: Size,
        num_heads: Size,
        *,
        d_k: PositiveInt | None = None,
        d_v: PositiveInt | None = None,
        use_bias: bool = False,
        dropout: Fraction = 0.0,
        dtype: Any = "auto",
        rngs: nnx.Rngs,
    ):
        """Create the projections. ``d_k`` and ``d_v`` default to ``d_model / num_heads``.

        ``dropout`` is applied to the attention weights. ``dtype`` is the data type of matmuls;
        "auto" chooses it as ``ModelConfig.dtype`` does. Raises ``UserError`` for invalid values.
        """
        if (d_k is None or d_v is None) and d_model % num_heads:
            raise UserError(
                f"d_model is {d_model}; expected a multiple of num_heads = {num_heads}, or "
                "explicit d_k and d_v."
            )
        d_k = d_k or d_model // num_heads
        d_v = d_v or d_model // num_heads
        dtype = matmul_dtype(dtype)
        projection = partial(Projection, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.query = projection("BLD,DHK->BLHK", (d_model, num_heads, d_k))
        self.key = projection("BLD,DHK->BLHK", (d_model, num_heads, d_k))
        self.value = projection("BLD,DHK->BLHK", (d_model, num_heads, d_v))
        self.output = projection("BLHK,HKD->BLD", (num_heads, d_v, d_model), inputs=2)
        self.qkv: Projection | None = nnx.data(None)  # see ``merge_projections``
        self.dropout = dropout
        # Factor of the queries, before their scores are divided by sqrt(d_k).
        self.query_scale = 1.0
        self.sow_weights = False

    @classmethod
    def from_config(cls, config: ModelConfig, *, rngs: nnx.Rngs) -> Self:
        """Create the attention of a layer in a model with this config."""
        attention = cls(
            config.d_model,
            config.num_heads,
            d_k=config.head_width_k,
            d_v=config.head_width_v,
            use_bias=config.attention_bias,
            dropout=config.attention_dropout,
            dtype=compute_dtype(config),
            rngs=rngs,
        )
        if not config.attention_scale:
            attention.query_scale = config.head_width_k**0.5
        return attention

    @checked
    @jax.named_scope("attention")
    def __call__(
        self,
        query_BTD: Array,
        memory_BSD: Array | None = None,
        mask_BHTS: Array | None = None,
        bias_BHTS: Array | None = None,
        *,
        dropout_key: DropoutKey = None,
    ) -> Array:
        """Attend from the queries to the memory (None: to the queries). Returns [B, T, D].

        Mask and bias have the same format as in ``dot_product_attention``. If the attribute
        ``sow_weights`` is True, ``nnx.capture`` collects the attention weights.
        """

        def reference() -> Array:
            q_BTHK, k_BSHK, v_BSHK = self.project(query_BTD, memory_BSD)
            return dot_product_attention(
                q_BTHK,
                k_BSHK,
                v_BSHK,
                mask_BHTS,
                bias_BHTS,
                dropout_rate=self.dropout,
                dropout_key=dropout_key,
                module=self if self.sow_weights else None,
            )

        def kernel() -> Array:
            arrays = self.project(query_BTD, memory_BSD, merged=True)
            return attention_kernel.short_attention(*arrays, mask_BHTS)

        drops_weights = self.dropout > 0 and dropout_key is not None
        needs_reference = self.sow_weights or drops_weights or bias_BHTS is not None
        if needs_reference or not attention_kernel.supports(
            query_BTD, self.query, self.value, mask_BHTS
        ):
            return self.output(reference())
        return self.output(jax.lax.platform_dependent(cuda=kernel, default=reference))

    @jax.named_scope("attention")
    def project(
        self, query_BTD: Array, memory_BSD: Array | None = None, *, merged: bool = False
    ) -> tuple[Array, ...]:
        """Project to queries, keys and values. ``memory_BSD=None``: the queries are the memory.

        With ``merged``, computes one matmul per input if keys and values are equally wide. The
        kernels read its result in place (``gpu.split_qkv``).
        """
        if not merged or self.query_scale != 1 or self.key.kernel.shape != self.value.kernel.shape:
            # Queries come last: gradients are summed in reverse order, which affects rounding.
            k_BSHK, v_BSHK = self.keys_values(query_BTD if memory_BSD is None else memory_BSD)
            return self.queries(query_BTD), k_BSHK, v_BSHK
        if memory_BSD is None:
            return ((self.qkv or merge(self.query, self.key, self.value))(query_BTD),)
        return self.queries(query_BTD), merge(self.key, self.value)(memory_BSD)

    def queries(self, query_BTD: Array) -> Array:
        """Project to queries [B, T, H, K]."""
        q_BTHK = self.query(query_BTD)
        return q_BTHK if self.query_scale == 1 else q_BTHK * self.query_scale

    def merge_projections(self) -> None:
        """Merge the weights for ``project``, to avoid merging them in each decoding step."""
        if self.key.kernel.shape == self.value.kernel.shape:
            self.qkv = merge(self.query, self.key, self.value)

    def keys_values(self, memory_BSD: Array) -> tuple[Array, Array]:
        """Project the memory to keys and values, both [B, S, H, K], for the KV cache."""
        return self.key(memory_BSD), self.value(memory_BSD)
