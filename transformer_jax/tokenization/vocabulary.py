"""Vocabularies: pieces to token ids and back, with the ids of special tokens."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from transformer_jax.errors import UserError, short_repr
from transformer_jax.tokenization.segmenters import SentencePieceSegmenter


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, by id. Every model has its own ids for PAD, BOS, EOS and UNK."""

    tokens: tuple[str, ...]
    """Tokens by id; "" for an id without a token, which imported models can have."""
    pad_id: int
    """Padding. Text never has it."""
    eos_id: int
    """End of a source or target."""
    unk_id: int | None = None
    """Unknown text; None: text has no unknown parts."""
    bos_id: int | None = None
    """Beginning of a target in models trained here; None: the model has none."""
    special: tuple[int, ...] = ()
    """Other ids that ``SubwordModel.decode`` leaves out, such as languages."""
    languages: tuple[int, ...] = ()
    """Ids that are a part of no word, although ``SubwordModel.decode`` shows them (<2de>)."""

    def __post_init__(self) -> None:
        size = len(self.tokens)
        ids = {"pad_id": self.pad_id, "eos_id": self.eos_id}
        optional = {"unk_id": self.unk_id, "bos_id": self.bos_id}
        ids |= {name: number for name, number in optional.items() if number is not None}
        for name, number in ids.items():
            if type(number) is not int or not 0 <= number < size:
                raise UserError(
                    f"{name} of a vocabulary is {short_repr(number)}; expected the id of one of "
                    f"its {size} tokens."
                )
        for name in ("eos_id", "unk_id", "bos_id"):
            if ids.get(name) == self.pad_id:
                raise UserError(
                    f"pad_id and {name} of a vocabulary are both {self.pad_id}; expected different "
                    "tokens, because padding is masked. Add a token for padding."
                )
        if self.unk_id == self.eos_id:
            raise UserError(
                f"unk_id and eos_id of a vocabulary are both {self.eos_id}; expected different "
                "tokens, because EOS ends a line."
            )

    @classmethod
    def from_sentencepiece(
        cls, segmenter: SentencePieceSegmenter, languages: Container[str] = ()
    ) -> Vocabulary:
        """Return the vocabulary of a SentencePiece model's own ids. ``languages`` are tokens.

        Raises ``UserError`` if it has no PAD or EOS (``with_padding`` adds them).
        """
        processor = segmenter.processor
        return cls(
            tuple(segmenter.ids),
            processor.pad_id(),
            processor.eos_id(),
            processor.unk_id(),
            processor.bos_id() if processor.bos_id() >= 0 else None,
            languages=tuple(i for piece, i in segmenter.ids.items() if piece in languages),
        )

    @cached_property
    def id_of(self) -> dict[str, int]:
        """Ids by token."""
        return {self.name(i): i for i in reversed(range(len(self.tokens)))}

    @cached_property
    def non_text_ids(self) -> frozenset[int]:
        """Ids that text never has: PAD, BOS, EOS, and ids without a token."""
        ids = {i for i, token in enumerate(self.tokens) if not token}
        ids |= {self.pad_id, self.eos_id}
        if self.bos_id is not None:
            ids.add(self.bos_id)
        return frozenset(ids)

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Ids that are not text: special tokens, and ids without a token."""
        return self.non_text_ids | {*self.special}

    def name(self, number: int) -> str:
        """Return the token with this id, or <unused_ID>."""
        return self.tokens[number] or f"<unused_{number}>"

    def names(self, ids: Iterable[int]) -> list[str]:
        """Convert ids to tokens."""
        return [self.name(number) for number in ids]

    def ids(self, tokens: Iterable[str]) -> list[int]:
        """Convert tokens to ids. Unknown tokens become UNK.

        Raises ``UserError`` for an unknown token if the vocabulary has no UNK.
        """
        ids = [self.id_of.get(token, self.unk_id) for token in tokens]
        if None in ids:
            unknown = [token for token in tokens if token not in self.id_of]
            raise UserError(
                f"The vocabulary has no token {short_repr(unknown[:1])} and no token for unknown "
                "text; expected tokens of the vocabulary."
            )
        return ids  # type: ignore[return-value]

    def without_controls(self, ids: list[int]) -> list[int]:
        """Replace PAD, BOS, EOS and ids without a token by UNK, or leave them out without UNK: in
        a text, a word such as </s> is not a special token.
        """
        non_text_ids = self.non_text_ids
        if non_text_ids.isdisjoint(ids):
            return ids
        if self.unk_id is None:
            return [number for number in ids if number not in non_text_ids]
        return [self.unk_id if number in non_text_ids else number for number in ids]

    def with_tokens(self, new_tokens: Sequence[str]) -> Vocabulary:
        """Return a copy with the missing ones of ``new_tokens`` appended. Existing ids stay."""
        missing = [token for token in new_tokens if token not in self.id_of]
        return replace(self, tokens=(*self.tokens, *missing))

    def with_ids(self, new_ids: Mapping[str, int]) -> Vocabulary:
        """Return a copy with new tokens at ids that have none, or after the last one."""
        tokens = [*self.tokens]
        tokens += [""] * (max(new_ids.values()) + 1 - len(tokens))
        for token, number in new_ids.items():
            tokens[number] = token
        return replace(self, tokens=tuple(tokens))

    def with_language(self, token: str, number: int, model: int) -> Vocabulary:
        """Return a copy with the token of a new language (``with_ids``). ``model`` is the id of
        another language, which is special or not.
        """
        special = {*self.special, number} if model in self.special else self.special
        return replace(
            self.with_ids({token: number}),
            special=tuple(sorted(special)),
            languages=tuple(sorted({*self.languages, number})),
        )
