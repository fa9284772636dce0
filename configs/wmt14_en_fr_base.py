"""WMT 2014 English-French, the paper's base model (Table 2: 38.1 BLEU). Not yet run at full length.

Reads wmt14_translate/fr-en through TensorFlow Datasets, prepared in data/tfds or in the folder in
--data.root. For plain text, see configs/wmt14_base.py.
"""

import dataclasses
from pathlib import Path

from transformer_jax.settings.config import Config, PairsConfig
from transformer_jax.settings.config_files import load_config_file


def _pairs(split: str) -> PairsConfig:
    return PairsConfig(
        "tfds", ("wmt14_translate/fr-en",), source_field="en", target_field="fr", split=split
    )


def get_config() -> Config:
    """configs/wmt14_base.py on English-French text (section 5.1).

    The paper uses a vocabulary of 32,000 word pieces. This recipe uses 32,000 BPE tokens, which
    SentencePiece learns from at most 5,000,000 sentences.
    """
    base = load_config_file(Path(__file__).with_name("wmt14_base.py"))
    replace = dataclasses.replace
    return replace(
        base,
        tokenizer=replace(base.tokenizer, vocab_size=32_000),
        data=replace(
            base.data, train=_pairs("train"), dev=_pairs("validation"), test=_pairs("test")
        ),
    )
