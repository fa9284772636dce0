"""Multi30k in several directions in one model: English to German and French, German to English.

Reads the raw files of Multi30k's task 1 (data/task1/raw in https://github.com/multi30k/dataset:
train, val and test_2016_flickr, .en, .de and .fr, gzipped or not) from data/multi30k, or from the
folder in --data.root. The language of the target is a tag in front of the source, such as <2de>.
"""

from dataclasses import replace
from pathlib import Path

from transformer_jax.errors import UserError
from transformer_jax.settings.config import Config, PairsConfig
from transformer_jax.settings.config_files import load_config_file


def get_config(directions: str = "en-de,en-fr,de-en") -> Config:
    """configs/multi30k.py with 8,000 updates for each direction; multi30k_many:en-fr has one."""
    sides = [direction.split("-") for direction in directions.split(",")]
    if wrong := ["-".join(side) for side in sides if len(side) != 2]:
        raise UserError(f"{wrong[0]!r} is not a direction; expected one such as en-de.")
    sources, targets = zip(*sides)

    def pairs(split: str) -> PairsConfig:
        source, target = (tuple(f"{split}.{code}*" for code in side) for side in (sources, targets))
        languages = {"source_languages": sources, "target_languages": targets}
        return PairsConfig("text", source, target, **languages)

    base = load_config_file(Path(__file__).with_name("multi30k.py"))
    count = len(sides)
    return replace(
        base,
        tokenizer=replace(
            base.tokenizer,
            normalization="nmt_nfkc",
            new_languages=tuple(dict.fromkeys([*targets, *sources])),
        ),
        data=replace(
            base.data,
            train=replace(pairs("train"), weights=(1.0,) * count),
            dev=pairs("val"),
            test=pairs("test_2016_flickr"),
        ),
        training=replace(
            base.training,
            steps=8000 * count,
            eval_every=480 * count,
            checkpoint_every=60 * count,  # about an epoch
            bleu_tokenize="13a",
            select_by="loss",  # BLEU of several languages together is not comparable
        ),
    )
