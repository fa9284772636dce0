"""Tiny random models and tokenizers. Hypotheses differ and end before the length limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import (
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    TokenizerConfig,
)
from transformer_jax.tokenization.special_ids import EOS_ID
from transformer_jax.tokenization.tokenizer import Tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORDS += ["eleven", "twelve"]


@pytest.fixture(scope="session")
def lines() -> list[str]:
    """Sentences with the same number of words."""
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, 5)) for _ in range(60)]


@pytest.fixture(scope="session")
def joint(lines: list[str]) -> Tokenizer:
    """One vocabulary for both languages."""
    return Tokenizer.train([(line, line.upper()) for line in lines], TokenizerConfig(vocab_size=64))


@pytest.fixture(scope="session")
def separate(lines: list[str]) -> Tokenizer:
    """A vocabulary for each language."""
    return Tokenizer.train(
        [(line, line.upper()) for line in lines], TokenizerConfig(vocab_size=40, joint=False)
    )


@pytest.fixture(scope="session")
def make() -> Callable[..., tuple[Config, Transformer]]:
    """``make(tokenizer, seed, **fields of ModelConfig)``: a config and a random model."""

    def build(tokenizer: Tokenizer, seed: int = 0, **fields: Any) -> tuple[Config, Transformer]:
        sizes = {"d_model": 16, "d_ff": 24, "num_heads": 2, "num_layers": 2, "dtype": "float32"}
        vocabulary = {
            "vocab_size": tokenizer.target.vocab_size,
            "source_vocab_size": None if tokenizer.joint else tokenizer.source.vocab_size,
        }
        config = Config(
            model=ModelConfig(**(sizes | vocabulary | fields)),
            tokenizer=TokenizerConfig(joint=tokenizer.joint),
            data=DataConfig(max_source_length=24, max_target_length=24),
            decoding=DecodingConfig(
                beam_size=4,
                length_penalty=0.0,
                max_extra_length=10,
                max_source_length=24,
                batch_size=8,
            ),
        )
        model = Transformer(config.model, rngs=nnx.Rngs(seed))
        graph, state = nnx.split(model, nnx.Param)
        rng = np.random.default_rng(seed)

        def sharpen(path: Any, x: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path)
            if "matrix" in name or "kernel" in name:
                return (2.5 if "softmax_matrix" in name else 1.7) * x
            noise = 0.3 * rng.standard_normal(x.shape).astype(np.float32)
            if "softmax_bias" in name:
                noise[EOS_ID] += 3.0  # translations end before the length limit
            return x + noise

        return config, nnx.merge(graph, jax.tree_util.tree_map_with_path(sharpen, state))

    return build


@pytest.fixture(scope="session")
def logits() -> Callable[..., np.ndarray]:
    """``logits(model, source_BS, target_BT)``, op by op, so that models share compiled code."""

    def compute(model: Transformer, source_BS: np.ndarray, target_BT: np.ndarray) -> np.ndarray:
        return np.asarray(model(jnp.asarray(source_BS), jnp.asarray(target_BT)))

    return compute
