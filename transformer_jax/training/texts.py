"""Texts of a run: opened and checked before training, and the sentence pairs to translate."""

from __future__ import annotations

from itertools import islice
from typing import TypeAlias

from transformer_jax.data.sources import ParallelText, TextPair, first_pairs, read_pairs
from transformer_jax.devices.distributed import is_first
from transformer_jax.errors import UserError, short_repr
from transformer_jax.settings.config import DataConfig, PairsConfig
from transformer_jax.tokenization.languages import format_languages

Pairs: TypeAlias = list[TextPair]


def open_texts(
    data: DataConfig, bleu_sentences: int
) -> tuple[dict[str, ParallelText], dict[str, Pairs]]:
    """Open the texts, and load the dev and test pairs that training will translate.

    Also reads the first training pair. Missing or invalid input is reported here, before the hours
    that preparing the training text can take.
    """
    if not data.train.is_given:
        raise UserError(
            "No training data is given; set data.train.source and data.train.target (text "
            "files), choose another data.train.kind and set its source, or pass a --config."
        )
    names = ("train", "dev", "test") if is_first() else ("dev", "test")
    texts = {}
    for name in names:
        pairs_config = getattr(data, name)
        if pairs_config.is_given:
            texts[name] = ParallelText(pairs_config, data.root)
    for name, text in texts.items():
        for item in text.config.items:
            if not any(islice(read_pairs(item, data.root), 1)):
                raise UserError(
                    f"data.{name} has no pairs in {short_repr(item.source)}. Check the "
                    f"files, or choose another data.{name}.kind."
                )
    pairs = {name: list(text.text_pairs()) for name, text in texts.items() if name != "train"}
    if "dev" in pairs:
        _check_dev_languages(data.train, {pair.languages for pair in pairs["dev"]})
        pairs["dev"] = first_pairs(pairs["dev"], bleu_sentences)
    return texts, pairs


def _check_dev_languages(train: PairsConfig, dev_languages: set[tuple[str, str]]) -> None:
    """Raise ``UserError`` if a pair of languages of the training set has no dev pairs."""
    if not (train.source_languages or train.target_languages):
        return
    for languages in train.language_pairs:
        if languages not in dev_languages:
            raise UserError(
                f"data.dev has no pairs with the languages {format_languages(languages)}, but "
                "data.train has; expected dev pairs for all of them, for loss and BLEU of each. "
                "Add some to data.dev and data.dev.source_languages and target_languages, such as "
                "lines taken out of the training set."
            )
