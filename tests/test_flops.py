"""Model FLOPs of training: manual counts, and XLA's count for the compiled step."""

from typing import Any

import jax
import pytest

from transformer_jax.data.loader import abstract_batch
from transformer_jax.devices.sharding import batch_sharding, make_mesh
from transformer_jax.settings.config import Config, MeshConfig, ModelConfig, TrainingConfig
from transformer_jax.training.metrics import peak_tflops, training_flops
from transformer_jax.training.step import make_step_functions


def small(r_drop: float = 0.0, **settings: Any) -> Config:
    default = {"vocab_size": 50, "d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1}
    return Config(model=ModelConfig(**default | settings), training=TrainingConfig(r_drop=r_drop))


def test_flops_of_single_tokens_equal_a_manual_count() -> None:
    # One token: 4 + 4 + 4 D x D matmuls, two D x F matmuls per side, three attentions to one
    # position, and the softmax.
    by_hand = 2 * ((4 + 4 + 4) * 16 * 16 + 4 * 16 * 32 + 3 * 2 * 16 + 16 * 50)
    assert training_flops(small(), 3, 1, 1) == 3 * 3 * by_hand
    assert training_flops(small(r_drop=1.0), 3, 1, 1) == 2 * 3 * 3 * by_hand


def test_flops_depend_on_settings() -> None:
    def flops(S: int, T: int, **settings: Any) -> float:
        return training_flops(small(**settings), 1, S, T) / (3 * 2)

    base = flops(5, 7)
    assert flops(5, 7, d_ff=64) - base == 2 * 16 * 32 * 12  # both feed-forward matmuls
    assert flops(5, 7, vocab_size=51) - base == 7 * 16
    # d_k 8 to 4: projections of queries and keys, and the scores, in three attentions
    narrower = 16 * 8 * (2 * 5 + 2 * 7 + 7 + 5) + 8 * (25 + 49 + 35)
    assert base - flops(5, 7, d_k=4) == narrower == base - flops(5, 7, d_v=4)
    assert flops(5, 7, activation="swiglu") - base == 16 * 32 * 12
    decoder = flops(5, 7, num_decoder_layers=2) - base
    assert decoder == 6 * 256 * 7 + 2 * 256 * 5 + 2 * 512 * 7 + 2 * 16 * (49 + 35)


@pytest.mark.cpu("other backends count library calls as no FLOPs")
@pytest.mark.parametrize(
    "settings",
    [
        {"num_decoder_layers": 2},
        {"activation": "swiglu", "d_k": 16, "d_v": 64, "norm": "pre"},
    ],
)
def test_flops_are_nearly_those_that_xla_counts(settings: dict[str, Any]) -> None:
    """Which include norms, softmax and Adam, but count the body of a loop once: so the vocabulary
    fits into one chunk of the loss. Dropout is off, because random bits are integer operations.
    """
    sizes = {"vocab_size": 500, "d_model": 256, "d_ff": 1024, "num_heads": 4, "dropout": 0.0}
    config = small(**sizes | {"dtype": "float32"} | settings)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    functions = make_step_functions(config, mesh)
    shape = 16, 48, 64
    batch = abstract_batch(shape, batch_sharding(mesh), packed=False)
    compiled = functions.train_step.lower(functions.abstract_state, batch).compile()
    counted = compiled.cost_analysis()["flops"]
    assert training_flops(config, *shape) == pytest.approx(counted, rel=0.03)
    assert training_flops(config, *shape) < counted


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", None),  # slower than SXM
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("cpu", None),
    ],
)
def test_peaks(kind: str, peak: float | None) -> None:
    assert peak_tflops(kind) == peak
