"""WMT 2014 English-German, the paper's base model (sections 5 and 6.1). Not yet run at full length.

Reads wmt14_translate/de-en through TensorFlow Datasets, prepared in data/tfds or in the folder in
--data.root. (If it is missing, TFDS tries to download it, which is untested.) For plain text,
set --data.train.kind text --data.train.source train.en --data.train.target train.de, and the same
for data.dev (newstest2013) and data.test (newstest2014). --data.root is then the folder of these
files.
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
    return PairsConfig(
        "tfds", ("wmt14_translate/de-en",), source_field="en", target_field="de", split=split
    )


def get_config() -> Config:
    """100,000 steps of 25,000 + 25,000 tokens, average of 5 checkpoints, beam 4.

    The paper writes a checkpoint every 10 minutes. At about 0.4 seconds per step (section 5.2),
    that is every 1,500 steps.
    """
    return Config(
        model=ModelConfig(d_model=512, d_ff=2048, num_heads=8, num_layers=6, dropout=0.1),
        tokenizer=TokenizerConfig(vocab_size=37_000, algorithm="bpe", joint=True),
        data=DataConfig(
            root="data/tfds",
            train=_pairs("train"),
            dev=_pairs("validation"),  # newstest2013
            test=_pairs("test"),  # newstest2014
        ),
        batch=BatchConfig(tokens=25_000, buckets=24),
        optimizer=OptimizerConfig(warmup_steps=4000, beta1=0.9, beta2=0.98, epsilon=1e-9),
        training=TrainingConfig(
            steps=100_000,
            label_smoothing=0.1,
            eval_every=3000,
            checkpoint_every=1500,
            keep_checkpoints=5,
            average=5,
        ),
        decoding=DecodingConfig(
            beam_size=4, length_penalty=0.6, max_extra_length=50, batch_size=128
        ),
    )
