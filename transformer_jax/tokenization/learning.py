"""Training of SentencePiece models."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Mapping
from typing import TypeVar

import sentencepiece

from transformer_jax.errors import UserError
from transformer_jax.settings.config import TokenizerConfig
from transformer_jax.tokenization.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID

T = TypeVar("T")


def evenly_spread(pairs: Iterable[T], limit: int) -> list[T]:
    """Keep every k-th pair, for the smallest power of two k that leaves at most ``limit`` pairs."""
    sample: list[T] = []
    stride = 1
    for index, pair in enumerate(pairs):
        if index % stride == 0:
            sample.append(pair)
        if len(sample) > limit:
            sample = sample[::2]
            stride *= 2
    return sample


def learn_sentencepiece(lines: Iterable[str], config: TokenizerConfig) -> bytes:
    """Train a SentencePiece model on ``lines``. Returns the contents of its file.

    Raises ``UserError`` if the text is empty or too small for ``config.vocab_size`` tokens.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=config.algorithm,
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            byte_fallback=config.byte_fallback,
            normalization_rule_name=config.normalization,
            remove_extra_whitespaces=config.normalization != "identity",
            user_defined_symbols=list(config.user_defined_symbols),
            pad_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            num_threads=16,  # fixed, because unigram models depend on it
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            "SentencePiece, which skips empty lines and lines of more than 4,192 bytes, cannot "
            f"learn {config.vocab_size} tokens (tokenizer.vocab_size) from the training text with "
            f"tokenizer.character_coverage = {config.character_coverage}: {error}"
        ) from None
    return model.getvalue()


def learn_merges(word_counts: Mapping[str, int], count: int) -> list[str]:
    """Learn ``count`` merges of BPE from counts of words, which can have any characters. Returns
    the merged strings in the order in which they are made.

    Raises ``UserError`` if the words have fewer merges.
    """
    characters = {character for word in word_counts for character in word}
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8") as file:
        file.writelines(f"{word}\t{times}\n" for word, times in word_counts.items())
        file.flush()
        try:
            sentencepiece.SentencePieceTrainer.train(
                input=file.name,
                input_format="tsv",
                model_writer=model,
                model_type="bpe",
                vocab_size=1 + len(characters) + count,
                character_coverage=1.0,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                split_by_unicode_script=False,
                split_by_number=False,
                unk_id=0,
                bos_id=-1,
                eos_id=-1,
                minloglevel=2,
            )
        except RuntimeError:
            raise UserError(
                f"The training text in the new language has fewer than {count} different merges of "
                "subwords; expected a lower tokenizer.new_pieces, or more text."
            ) from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [processor.id_to_piece(number) for number in range(1, 1 + count)]
