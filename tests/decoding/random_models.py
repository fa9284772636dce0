"""Small models of random weights, and a tokenizer for the lines that they translate."""

from __future__ import annotations

from typing import Any

from flax import nnx

from transformer_jax.config import ModelConfig, TokenizerConfig
from transformer_jax.model.transformer import Transformer
from transformer_jax.tokenizer import Tokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SHARPNESS = 4  # of the softmax, so that the hypotheses differ clearly


def lines_of_words(count: int) -> list[str]:
    """Lines of one to nine words."""
    return [" ".join(WORDS[(3 * i + j) % 10] for j in range(i % 9 + 1)) for i in range(count)]


def train_tokenizer(lines: list[str]) -> Tokenizer:
    """Of lower-case sources and upper-case targets."""
    pairs = ((line, line.upper()) for line in lines)
    return Tokenizer.train(pairs, TokenizerConfig(vocab_size=50, algorithm="unigram"))


def make_model(tokenizer: Tokenizer, seed: int = 8, **settings: Any) -> Transformer:
    """One of its vocabulary; ``settings`` are fields of ``ModelConfig``."""
    small = {"tie_embeddings": "none", "d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1}
    vocab_size = tokenizer.target_vocab_size
    config = ModelConfig(vocab_size=vocab_size, dtype="float32", **small | settings)
    model = Transformer(config, rngs=nnx.Rngs(seed))
    model.softmax_matrix[...] = model.softmax_matrix[...] * SHARPNESS
    return model
