"""Cross-attention weights add up to 1, pass over padding, and are those of decoding step by
step.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.alignment import cross_attention_weights
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID


def padded(rows, length):
    array_BL = np.full((len(rows), length), PAD_ID, np.int32)
    for row, tokens in zip(array_BL, rows, strict=True):
        row[: len(tokens) + 1] = [*tokens, EOS_ID]
    return array_BL


SOURCE_BS = padded([[4, 5, 6, 7, 8], [9], []], 8)
TARGET_BT = padded([[7, 7, 4], [5, 6, 8, 9, 4], [6]], 7)


@pytest.fixture(scope="module", params=["post", "pre"])
def model(request):
    config = ModelConfig(
        vocab_size=10,
        d_model=16,
        d_ff=16,
        num_heads=2,
        num_layers=2,
        dtype="float32",
        norm=request.param,
    )
    return Transformer(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def weights_BTS(model):
    return np.asarray(nnx.jit(cross_attention_weights)(model, SOURCE_BS, TARGET_BT))


def test_real_rows_add_up_to_one_and_padding_has_none(weights_BTS):
    assert weights_BTS.shape == (3, 7, 8) and weights_BTS.dtype == np.float32
    np.testing.assert_allclose(weights_BTS.sum(-1), TARGET_BT != PAD_ID, atol=1e-5)
    assert (
        weights_BTS[np.broadcast_to((SOURCE_BS == PAD_ID)[:, None], weights_BTS.shape)] == 0
    ).all()


def test_decoding_step_by_step_looks_there_too(model, weights_BTS):
    step = nnx.jit(lambda model, tokens_BW, cache: model.decode_step(tokens_BW, cache))
    memory_BSD = nnx.jit(lambda model, source_BS: model.encode(source_BS))(model, SOURCE_BS)
    cache = model.start_cache(
        memory_BSD, SOURCE_BS != PAD_ID, beam_size=1, max_length=7, keep_attention=True
    )
    inputs_BT = np.pad(TARGET_BT[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)
    for t in range(7):
        _, cache = step(model, jnp.asarray(inputs_BT[:, t : t + 1]), cache)
        real_B = TARGET_BT[:, t] != PAD_ID
        np.testing.assert_allclose(
            weights_BTS[real_B, t], np.asarray(cache.attention_BWS)[real_B, 0], atol=1e-5
        )


def test_a_layer_that_is_not_there(model):
    with pytest.raises(
        UserError, match="alignment layer is -3; expected one of the decoder's, -2 to 1"
    ):
        cross_attention_weights(model, SOURCE_BS, TARGET_BT, layer=-3)
