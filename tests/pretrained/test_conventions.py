"""Differences in convention: PyTorch or tutorial code with the same names but other results.

Each test shows a difference in the table of docs/from_the_paper.md and how to remove it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn
from torch.nn import functional as F

from transformer_jax import (
    PAD_ID,
    ModelConfig,
    MultiHeadAttention,
    OptimizerConfig,
    dot_product_attention,
    learning_rate_schedule,
    sinusoidal_positions,
    smoothed_cross_entropy,
)
from transformer_jax.export.pytorch import from_torch
from transformer_jax.model.norms import Norm

D, V = 64, 20
RNG = np.random.default_rng(0)


def test_layer_norm_by_the_unbiased_deviation() -> None:
    """The Annotated Transformer divides by std + eps, where std divides by D - 1."""
    x_BLD = RNG.standard_normal((2, 5, D), np.float32)
    x = torch.tensor(x_BLD)
    theirs_BLD = ((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)).numpy()
    norm = Norm(ModelConfig(d_model=D, norm_epsilon=1e-9))
    ours_BLD = np.asarray(norm(jnp.asarray(x_BLD)))
    np.testing.assert_allclose(ours_BLD, F.layer_norm(x, (D,), eps=1e-9), rtol=0, atol=2e-6)
    assert 5e-3 < np.abs(ours_BLD / theirs_BLD - 1).max() < 1e-2
    norm.scale[...] *= ((D - 1) / D) ** 0.5
    np.testing.assert_allclose(norm(jnp.asarray(x_BLD)), theirs_BLD, rtol=0, atol=5e-6)


def test_label_smoothing_spreads_over_all_tokens() -> None:
    """As in F.cross_entropy. The Annotated Transformer spreads epsilon over V - 2 tokens."""
    hidden_BTD = RNG.standard_normal((2, 3, D), np.float32)
    matrix_VD = RNG.standard_normal((V, D), np.float32) / D**0.5
    target_BT = np.array([[5, 6, 2], [7, 2, 0]])
    ours = smoothed_cross_entropy(jnp.asarray(hidden_BTD), matrix_VD, jnp.asarray(target_BT)).loss

    logits, target = torch.tensor(hidden_BTD @ matrix_VD.T).flatten(0, 1), torch.tensor(target_BT)
    target = target.flatten()
    settings = {"ignore_index": PAD_ID, "label_smoothing": 0.1, "reduction": "sum"}
    assert float(ours) == pytest.approx(F.cross_entropy(logits, target, **settings).item())
    goal = torch.full((6, V), 0.1 / (V - 2)).scatter(1, target[:, None], 0.9)
    goal[:, PAD_ID] = 0
    goal[target == PAD_ID] = 0
    annotated = -(goal * logits.log_softmax(-1)).sum().item()
    assert abs(float(ours) - annotated) > 0.01


def test_schedule_counts_steps_from_one() -> None:
    """LambdaLR counts from 0, where the formula divides by 0. Some code uses step 1 twice."""

    def rate(step: int) -> float:
        return D**-0.5 * min(step**-0.5, step * 10**-1.5)

    def by_torch(rate_of_count: Callable[[int], float]) -> list[float]:
        adam = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, rate_of_count)
        rates = []
        for _ in range(30):
            rates += schedule.get_last_lr()
            adam.step()
            schedule.step()
        return rates

    schedule = learning_rate_schedule(OptimizerConfig(warmup_steps=10), D)
    ours = np.asarray(schedule(np.arange(30)))
    np.testing.assert_allclose(ours, [rate(step) for step in range(1, 31)], rtol=1e-6)
    np.testing.assert_allclose(ours, by_torch(lambda count: rate(count + 1)), rtol=1e-6)
    twice = by_torch(lambda count: rate(max(count, 1)))
    np.testing.assert_allclose([ours[0], *ours[:-1]], twice, rtol=1e-6)


def test_a_query_that_sees_nothing_has_equal_weights_not_nan() -> None:
    """Masked scores are -1e30 here and -inf in PyTorch. Both give weight 0 beside other scores."""
    q, k, v = (RNG.standard_normal((1, 4, 2, 8), np.float32) for _ in range(3))
    mask_TS = np.tril(np.ones((4, 4), bool))
    mask_TS[0] = False
    ours_THK = np.asarray(dot_product_attention(q, k, v, jnp.asarray(mask_TS)[None, None]))[0]

    def theirs_THK(masked: float) -> np.ndarray:
        q_HTK, k_HSK, v_HSK = (torch.tensor(x[0]).transpose(0, 1) for x in (q, k, v))
        scores_HTS = (q_HTK @ k_HSK.mT / 8**0.5).masked_fill(~torch.tensor(mask_TS), masked)
        return (scores_HTS.softmax(-1) @ v_HSK).transpose(0, 1).numpy()

    for masked in (-np.inf, -1e9):
        np.testing.assert_allclose(ours_THK[1:], theirs_THK(masked)[1:], rtol=0, atol=1e-6)
    assert np.isnan(theirs_THK(-np.inf)[0]).all()
    for equal_HK in (ours_THK[0], theirs_THK(-1e9)[0]):
        np.testing.assert_allclose(equal_HK, v[0].mean(axis=0), rtol=0, atol=1e-6)


def test_angles_of_sinusoids_are_float64() -> None:
    """In float32, as in most PyTorch code, their error is 2e-5 at position 400."""
    width = 512
    exact_D = 400 * 10000.0 ** -(np.arange(0, width, 2) / width)
    half = torch.arange(0, width, 2, dtype=torch.float32)
    single_D = (400 * torch.exp(half * -(np.log(10000.0) / width))).sin().numpy()
    ours_D = sinusoidal_positions(401, width)[400, ::2]
    np.testing.assert_allclose(ours_D, np.sin(exact_D), rtol=0, atol=1e-7)
    assert 1e-5 < np.abs(single_D - ours_D).max() < 1e-4


def test_a_bias_of_the_keys_changes_nothing() -> None:
    """It shifts all scores of a query equally. Our attention has no biases by default."""
    theirs = nn.MultiheadAttention(D, 4, batch_first=True)
    x_BLD = RNG.standard_normal((2, 5, D), np.float32)
    x = torch.tensor(x_BLD)
    out = theirs(x, x, x)[0]
    (out**2).sum().backward()
    q_grad, k_grad, _ = theirs.in_proj_bias.grad.split(D)
    assert k_grad.abs().max() < 1e-5 * q_grad.abs().max()
    with torch.no_grad():
        theirs.in_proj_bias[D : 2 * D] = 1.0
    np.testing.assert_allclose(theirs(x, x, x)[0].detach(), out.detach(), rtol=0, atol=1e-5)
    assert MultiHeadAttention(D, 4, rngs=nnx.Rngs(0)).key.bias is None


def test_gelu_is_by_erf() -> None:
    """PyTorch defaults to erf and JAX to tanh. Each has its own name here."""
    x = np.linspace(-4, 4, 101, dtype=np.float32)
    exact, tanh = F.gelu(torch.tensor(x)), F.gelu(torch.tensor(x), approximate="tanh")
    assert 1e-4 < (exact - tanh).abs().max() < 1e-3
    for theirs, name in ((F.gelu, "gelu"), (nn.GELU("tanh"), "gelu_tanh")):
        transformer = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
        transformer.encoder.layers[0].activation = theirs
        transformer.decoder.layers[0].activation = theirs
        model = from_torch(transformer, torch.zeros(V, 8))
        assert model.config.activation == name


def test_nn_transformer_has_norms_after_its_stacks_and_dropout_inside_its_layers() -> None:
    """With post-norm, too. The paper has neither; each has a field here."""
    transformer = nn.Transformer(8, 2, 1, 1, 8, 0.3, batch_first=True)
    config = from_torch(transformer, torch.zeros(V, 8)).config
    assert (config.norm, config.final_norm) == ("post", True)
    assert (config.attention_dropout, config.feed_forward_dropout) == (0.3, 0.3)
    transformer.encoder.norm = transformer.decoder.norm = None
    assert from_torch(transformer, torch.zeros(V, 8)).config.final_norm is None
