"""Multi30k English-German in about an hour on two CPU cores: smaller batches, fewer updates."""

import dataclasses
from pathlib import Path

from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import load_config_file


def get_config() -> Config:
    """configs/multi30k.py with 6,000 updates of 4,096 tokens and a smaller vocabulary."""
    base = load_config_file(Path(__file__).with_name("multi30k.py"))
    replace = dataclasses.replace
    return replace(
        base,
        tokenizer=replace(base.tokenizer, vocab_size=8_000),
        batch=replace(base.batch, tokens=4096),
        model=replace(base.model, dropout=0.2),
        optimizer=replace(base.optimizer, peak_learning_rate=0.004, warmup_steps=1000),
        training=replace(base.training, steps=6000, eval_every=500, checkpoint_every=100),
        decoding=replace(base.decoding, length_penalty=0.6),
    )
