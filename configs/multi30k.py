"""Multi30k English-German image captions: the published tiny recipe (4+4 layers, joint BPE 10k).

Reads the lowercased, tokenized files of Multi30k's task 1 (data/task1/tok in
https://github.com/multi30k/dataset: train, val and test_2016_flickr, .en and .de, gzipped or not)
from data/multi30k, or from the folder in --data.root. BLEU is computed on these tokens.
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
    return PairsConfig("text", (f"{split}.lc.norm.tok.en*",), (f"{split}.lc.norm.tok.de*",))


def get_config() -> Config:
    """8,000 updates of 8,192 + 8,192 positions, average of up to 10 checkpoints, beam 5."""
    return Config(
        model=ModelConfig(d_model=128, d_ff=256, num_heads=4, num_layers=4, dropout=0.3),
        tokenizer=TokenizerConfig(vocab_size=10_000, normalization="identity"),
        data=DataConfig(
            root="data/multi30k",
            train=_pairs("train"),
            dev=_pairs("val"),
            test=_pairs("test_2016_flickr"),
            max_source_length=64,
            max_target_length=64,
        ),
        batch=BatchConfig(tokens=8192),
        optimizer=OptimizerConfig(peak_learning_rate=0.005, warmup_steps=2000),
        training=TrainingConfig(
            steps=8000,
            eval_every=480,
            checkpoint_every=60,  # about an epoch
            keep_checkpoints=10,
            bleu_tokenize="none",
            select_by="bleu",
        ),
        # The length penalty is tuned on dev. With the paper's 0.6, translations are too short.
        decoding=DecodingConfig(
            beam_size=5, length_penalty=1.3, max_source_length=64, batch_size=64
        ),
    )
