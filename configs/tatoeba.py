"""English-German everyday sentences from Tatoeba: 164,000 short pairs, cased and untokenized.

Reads train, dev and test (train.en.gz, train.de.gz, ...) from data/tatoeba, or from the folder in
--data.root. BLEU is computed on detokenized text (sacreBLEU's 13a). For German to English, swap the
files: --data.train.source train.de.gz --data.train.target train.en.gz, and the same for dev and
test.
"""

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
    return PairsConfig("text", (f"{split}.en.gz",), (f"{split}.de.gz",))


def get_config() -> Config:
    """3+3 layers of width 256, joint vocabulary of 8,000, 44 epochs, average of 1 to 5."""
    return Config(
        model=ModelConfig(d_model=256, d_ff=1024, num_heads=4, num_layers=3, dropout=0.2),
        tokenizer=TokenizerConfig(vocab_size=8_000),
        data=DataConfig(
            root="data/tatoeba",
            train=_pairs("train"),
            dev=_pairs("dev"),
            test=_pairs("test"),
            max_source_length=64,
            max_target_length=64,
        ),
        batch=BatchConfig(tokens=8192),
        optimizer=OptimizerConfig(peak_learning_rate=0.002, warmup_steps=2000),
        training=TrainingConfig(
            steps=10_000, eval_every=1000, checkpoint_every=250, select_by="bleu"
        ),
        decoding=DecodingConfig(max_source_length=64, batch_size=64),
    )
