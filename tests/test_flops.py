"""Training FLOPs, compared with manual counts."""

from typing import Any

import numpy as np

from benchmarks.train import model_flops
from transformer_jax.settings.config import ModelConfig


def test_flops_of_single_tokens_equal_a_manual_count() -> None:
    model = ModelConfig(vocab_size=50, d_model=16, d_ff=32, num_heads=2, num_layers=1)
    ones = np.full(3, 1)
    # One token: 4 + 4 + 4 D x D matmuls, two D x F matmuls per side, three attentions to one
    # position, and the softmax.
    by_hand = 2 * ((4 + 4 + 4) * 16 * 16 + 4 * 16 * 32 + 3 * 2 * 16 + 16 * 50)
    assert model_flops(model, ones, ones) == 3 * 3 * by_hand


def test_flops_depend_on_settings() -> None:
    def flops(S: int, T: int, **settings: Any) -> float:
        small = {"vocab_size": 50, "d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1}
        model = ModelConfig(**small | settings)
        return model_flops(model, np.full(1, S), np.full(1, T)) / (3 * 2)

    base = flops(5, 7)
    assert flops(5, 7, d_ff=64) - base == 2 * 16 * 32 * 12  # both feed-forward matmuls
    assert flops(5, 7, vocab_size=51) - base == 7 * 16
    # d_k 8 to 4: projections of queries and keys, and the scores, in three attentions
    narrower = 16 * 8 * (2 * 5 + 2 * 7 + 7 + 5) + 8 * (25 + 49 + 35)
    assert base - flops(5, 7, d_k=4) == narrower == base - flops(5, 7, d_v=4)
    assert flops(5, 7, activation="swiglu") - base == 16 * 32 * 12
    decoder = flops(5, 7, num_decoder_layers=2) - base
    assert decoder == 6 * 256 * 7 + 2 * 256 * 5 + 2 * 512 * 7 + 2 * 16 * (49 + 35)
