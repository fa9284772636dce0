"""WMT 2014 English-French, the paper's big model (sections 5.1, 6.1). Not yet run at full length.

Data as in configs/wmt14_en_fr_base.py.
"""

import dataclasses
from pathlib import Path

from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import load_config_file


def get_config() -> Config:
    """Text of configs/wmt14_en_fr_base.py, model of configs/wmt14_big.py with dropout 0.1."""
    big = load_config_file(Path(__file__).with_name("wmt14_big.py"))
    french = load_config_file(Path(__file__).with_name("wmt14_en_fr_base.py"))
    replace = dataclasses.replace
    return replace(
        big,
        model=replace(big.model, dropout=0.1),
        tokenizer=french.tokenizer,
        data=french.data,
    )
