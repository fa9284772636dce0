"""WMT 2014 English-French, the paper's big model (sections 5.1, 6.1). Not yet run at full length.

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
    """configs/wmt14_big.py with dropout 0.1 (section 6.1); 32,000 BPE tokens for word pieces."""
    base = load_config_file(Path(__file__).with_name("wmt14_big.py"))
    replace = dataclasses.replace
    return replace(
        base,
        model=replace(base.model, dropout=0.1),
        tokenizer=replace(base.tokenizer, vocab_size=32_000),
        data=replace(
            base.data, train=_pairs("train"), dev=_pairs("validation"), test=_pairs("test")
        ),
    )
