"""English to German number names: a few minutes of training on two CPU cores."""

from transformer_jax.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)


def get_config() -> Config:
    """100,000 pairs of numbers below a million; small numbers occur more often.

    Half of the pairs begin with a capital letter, and half end with a period. Numbers in dev and
    test do not occur in train.
    """
    return Config(
        model=ModelConfig(d_model=128, d_ff=512, num_heads=4, num_layers=2, dropout=0.0),
        tokenizer=TokenizerConfig(vocab_size=200),
        data=DataConfig(
            train=PairsConfig("numbers", split="train", limit=100_000),
            dev=PairsConfig("numbers", split="dev", limit=200),
            test=PairsConfig("numbers", split="test", limit=1000),
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
