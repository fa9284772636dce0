"""English to German number names: a few minutes of training on two CPU cores.

Reads the files that ``python examples/number_names.py`` writes in data/numbers, or in the folder in
--data.root.
"""

from transformer_jax.settings.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)


def _pairs(split: str) -> PairsConfig:
    return PairsConfig("text", (f"{split}.en",), (f"{split}.de",))


def get_config() -> Config:
    """100,000 pairs of numbers below a million; small numbers occur more often.

    Half of the pairs begin with a capital letter, and half end with a period. Numbers in dev and
    test do not occur in train.
    """
    return Config(
        model=ModelConfig(d_model=128, d_ff=512, num_heads=4, num_layers=2, dropout=0.0),
        tokenizer=TokenizerConfig(vocab_size=200),
        data=DataConfig(
            root="data/numbers",
            train=_pairs("train"),
            dev=_pairs("dev"),
            test=_pairs("test"),
            max_source_length=40,
            max_target_length=40,
        ),
        batch=BatchConfig(tokens=4096, buckets=3),
        optimizer=OptimizerConfig(peak_learning_rate=0.003, warmup_steps=200, clip_norm=1.0),
        training=TrainingConfig(
            steps=900,
            eval_every=300,
            checkpoint_every=100,
            keep_checkpoints=3,
            bleu_tokenize="char",  # a German number is one word, so BLEU counts characters
        ),
    )
