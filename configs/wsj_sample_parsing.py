r"""Constituency parsing on the free sample of the Penn Treebank: 3,914 trees, 1/12 of the treebank.

NLTK provides the sample (nltk.download("treebank"); wsj_0001.mrg to wsj_0199.mrg). The first 3,400
trees, and recombinations of them, are the training set. The next 250 trees are the dev set, and the
last 264 the test set:

    python -m transformer_jax.parsing prepare --numbered --trees treebank/combined/*.mrg \
        --output data/wsj_sample/all
    cd data/wsj_sample
    for F in words sequences mrg; do
        head -n 3400 all.$F > train.$F; tail -n 264 all.$F > test.$F
        head -n 3650 all.$F | tail -n 250 > dev.$F
    done
    cd ../..
    python examples/recombined_trees.py --like data/wsj_sample/train.mrg --trees 60000 --seed 1 | \
        python -m transformer_jax.parsing prepare --numbered --trees /dev/stdin \
        --output data/wsj_sample/more
"""

import dataclasses
from pathlib import Path

from transformer_jax.settings.config import (
    BatchConfig,
    Config,
    DecodingConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TrainingConfig,
)
from transformer_jax.settings.config_files import load_config_file


def get_config() -> Config:
    """A small model: 2+2 layers of width 128, vocabulary of 2,000 tokens."""
    base = load_config_file(Path(__file__).with_name("wsj_parsing.py"))
    replace = dataclasses.replace
    names = ("train",) * 4 + ("more",)
    train = PairsConfig(
        "text",
        tuple(f"{name}.words" for name in names),
        tuple(f"{name}.sequences" for name in names),
    )
    return replace(
        base,
        model=ModelConfig(d_model=128, d_ff=512, num_heads=4, num_layers=2, dropout=0.0),
        tokenizer=replace(base.tokenizer, vocab_size=2000),
        data=replace(
            base.data,
            root="data/wsj_sample",
            train=train,
            max_source_length=160,
            max_target_length=160,
        ),
        batch=BatchConfig(tokens=2560, layout="packed", row_length=160),
        optimizer=OptimizerConfig(peak_learning_rate=0.003, warmup_steps=150, decay="linear"),
        training=TrainingConfig(steps=1200, eval_every=200, checkpoint_every=50, bleu_sentences=0),
        decoding=DecodingConfig(
            beam_size=10, length_penalty=1.0, max_extra_length=300, max_source_length=1024
        ),
    )
