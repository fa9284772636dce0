r"""Constituency parsing of an artificial language: six minutes on two CPU cores (docs/parsing.md).

    python examples/artificial_trees.py --trees 100000 --seed 1 | \
        python -m transformer_jax.parsing prepare --numbered --trees /dev/stdin \
        --output data/pcfg/train
    python examples/artificial_trees.py --trees 500 --seed 2 | \
        python -m transformer_jax.parsing prepare --numbered --trees /dev/stdin \
        --output data/pcfg/dev
"""

from transformer_jax.parsing.trees import bracket_symbols
from transformer_jax.settings.config import (
    BatchConfig,
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)


def _pairs(split: str) -> PairsConfig:
    return PairsConfig("text", (f"{split}.words",), (f"{split}.sequences",))


def get_config() -> Config:
    """2+2 layers of width 128. Each bracket and most words are one token; vocabulary of 2,800."""
    return Config(
        model=ModelConfig(d_model=128, d_ff=512, num_heads=4, num_layers=2, dropout=0.0),
        tokenizer=TokenizerConfig(
            vocab_size=2800,
            normalization="identity",
            user_defined_symbols=bracket_symbols("S A B C D E F G"),
        ),
        data=DataConfig(
            root="data/pcfg",
            train=_pairs("train"),
            dev=_pairs("dev"),
            max_source_length=128,
            max_target_length=128,
        ),
        batch=BatchConfig(tokens=2048, layout="packed", row_length=128),
        optimizer=OptimizerConfig(peak_learning_rate=0.003, warmup_steps=150, decay="linear"),
        training=TrainingConfig(
            steps=1500,
            label_smoothing=0.0,
            eval_every=500,
            checkpoint_every=250,
            bleu_sentences=0,
        ),
        decoding=DecodingConfig(beam_size=1, max_extra_length=100, batch_size=64),
    )
