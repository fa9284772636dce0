"""Small random models, with a tokenizer for the lines they translate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from transformer_jax.model.transformer import Transformer
from transformer_jax.runs.progress import Progress
from transformer_jax.runs.workdir import Workdir
from transformer_jax.settings.config import Config, ModelConfig, TokenizerConfig
from transformer_jax.settings.config_files import to_json
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.step import TrainState

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SHARPNESS = 4  # scales the logits, so that hypotheses differ clearly


def lines_of_words(count: int) -> list[str]:
    """Make lines of one to nine words."""
    return [" ".join(WORDS[(3 * i + j) % 10] for j in range(i % 9 + 1)) for i in range(count)]


def train_tokenizer(lines: list[str]) -> Tokenizer:
    """Train a tokenizer for lowercase sources and uppercase targets."""
    pairs = ((line, line.upper()) for line in lines)
    return Tokenizer.train(pairs, TokenizerConfig(vocab_size=50, algorithm="unigram"))


def make_model(tokenizer: Tokenizer, seed: int = 8, **settings: Any) -> Transformer:
    """Make a model for the tokenizer; ``settings`` are fields of ``ModelConfig``."""
    small = {"tie_embeddings": "none", "d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1}
    vocab_size = tokenizer.target.vocab_size
    config = ModelConfig(vocab_size=vocab_size, dtype="float32", **small | settings)
    model = Transformer(config, rngs=nnx.Rngs(seed))
    model.softmax_matrix[...] = model.softmax_matrix[...] * SHARPNESS
    return model


def write_run(
    folder: Path,
    config: Config,
    tokenizer: Tokenizer,
    models: Mapping[int, Transformer],
    *,
    best_step: int,
) -> None:
    """Write a work directory as training does, with a checkpoint of each model at its step."""
    (folder / "config.json").write_text(to_json(config))
    tokenizer.save(folder)
    workdir = Workdir(folder)
    workdir.config = config
    workdir.tokenizer = tokenizer
    checkpoints = workdir.checkpoints
    zero = jnp.int32(0)
    for step, model in models.items():
        state = TrainState(
            step=jnp.int32(step),
            parameters=nnx.to_pure_dict(nnx.split(model, nnx.Param)[1]),
            optimizer={"count": zero},
            ema=None,
            bad_steps=zero,
            bad_in_a_row=zero,
            seed=jnp.uint32(0),
        )
        checkpoints.save(state, Progress(best_step=best_step))
    checkpoints.wait()
