"""WMT 2014 English-French, the paper's base model (Table 2: 38.1 BLEU). Not yet run at full length.

It reads wmt14_translate/fr-en through TensorFlow Datasets, prepared in data/tfds or the folder that
--data.root names; plain text as in configs/wmt14_base.py.
"""

import dataclasses
from pathlib import Path

from transformer_jax.config import Config, PairsConfig
from transformer_jax.config_io import load_config_file


def _pairs(split: str) -> PairsConfig:
    return PairsConfig(
        "tfds", ("wmt14_translate/fr-en",), source_field="en", target_field="fr", split=split
    )


def get_config() -> Config:
    """configs/wmt14_base.py on other text (section 5.1).

    The paper has a vocabulary of 32,000 word pieces; ours is of 32,000 BPE tokens, which
    SentencePiece learns from 5,000,000 of the 36 million pairs.
    """
    base = load_config_file(Path(__file__).with_name("wmt14_base.py"))
    replace = dataclasses.replace
    return replace(
        base,
        tokenizer=replace(base.tokenizer, vocab_size=32_000),
        data=replace(
            base.data, train=_pairs("train"), dev=_pairs("validation"), test=_pairs("test")
        ),
        training=replace(base.training, bleu_language="fr"),
    )
