"""Tokenizer of a model: one for each side, and the languages; its files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError, short_repr
from transformer_jax.settings.config import TokenizerConfig
from transformer_jax.storage.files import local_path, write_atomically
from transformer_jax.tokenization.languages import Affixes, Languages, Side
from transformer_jax.tokenization.learning import evenly_spread, learn_sentencepiece
from transformer_jax.tokenization.segmenters import (
    JsonSegmenter,
    SentencePieceSegmenter,
    read_segmenter,
    read_sentencepiece,
)
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.vocabulary import Vocabulary

# Files of a saved tokenizer. The manifest has vocabularies and languages, and names the others. A
# tokenizer that was trained here needs none: its SentencePiece models have everything.
_MANIFEST = "tokenizer.manifest.json"
_MODEL = "tokenizer.model"
_SOURCE = "tokenizer.source.model"
_TARGET = "tokenizer.target.model"
_JSON = "tokenizer.tokens.json"
_PRETRAINED = "tokenizer.pretrained.zip"
_OF_EARLIER_VERSIONS = ("tokenizer.vocab.json", "tokenizer.languages.json")
TOKENIZER_FILES = {_MANIFEST, _MODEL, _SOURCE, _TARGET, _JSON, _PRETRAINED}

_Model = bytes | SentencePieceSegmenter


@dataclass(eq=False)
class Tokenizer:
    """The tokenizers of ``source`` and ``target``, and the languages of a many-to-many model.

    ``target`` is the same object as ``source`` if both languages share everything.
    """

    source: SubwordModel
    """Segmenter and vocabulary of the source."""
    target: SubwordModel
    """Segmenter and vocabulary of the target."""
    _: KW_ONLY
    languages: Languages = field(default_factory=Languages)
    """Tokens around a source and before a target."""
    new_rows: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Ids of the tokens that fine-tuning added (languages, pieces). Each has the ids of the tokens
    whose mean its row in the embedding matrix starts from."""
    pretrained: bytes = b""
    """The original files of an imported model, which an export needs, as a zip archive."""

    def __post_init__(self) -> None:
        for name in ("pad_id", "eos_id"):
            ids = getattr(self.source, name), getattr(self.target, name)
            if ids[0] != ids[1]:
                raise UserError(
                    f"{name} is {ids[0]} in the source vocabulary and {ids[1]} in the target "
                    "vocabulary; expected the same id, because a model has one. Train both models "
                    "with the same ids (spm_train --pad_id=0 --bos_id=1 --eos_id=2 --unk_id=3)."
                )

    @classmethod
    def from_models(cls, source: _Model, target: _Model | None = None) -> Tokenizer:
        """Make a tokenizer from SentencePiece models or the contents of their files, with their own
        ids. ``target`` is None if there is one for both languages.
        """
        side = SubwordModel(source)
        return cls(side, side if target is None else SubwordModel(target))

    @classmethod
    def train(cls, pairs: Iterable[tuple[str, str]], config: TokenizerConfig) -> Tokenizer:
        """Train a tokenizer on sentence pairs, or load ``config.model`` if it is set.

        Reads ``pairs`` once and keeps at most ``config.max_training_sentences`` lines in memory
        (per language, if vocabularies are separate). Raises ``UserError`` if the text is empty or
        too small for ``config.vocab_size`` tokens.
        """
        tags = Languages().with_new(config.new_languages).tokens.values()
        symbols = tuple(dict.fromkeys([*config.user_defined_symbols, *tags]))
        config = replace(config, user_defined_symbols=symbols)
        if config.model:
            files = [local_path(file) for file in (config.model, config.target_model) if file]
            models = [read_sentencepiece(file).with_padding() for file in files]
            tokenizer = cls.from_models(*models).with_symbols(symbols)
        else:
            tokenizer = cls.from_models(*cls._learn(pairs, config))
        tokenizer = tokenizer.with_new_languages(config.new_languages)
        return replace(tokenizer, new_rows={})  # all rows are new

    @staticmethod
    def _learn(pairs: Iterable[tuple[str, str]], config: TokenizerConfig) -> list[bytes]:
        """Train one SentencePiece model, or one for each side."""
        limit = config.max_training_sentences
        sample = evenly_spread(pairs, max(1, limit // 2) if config.joint else limit)
        if config.joint:
            return [learn_sentencepiece(chain.from_iterable(sample), config)]
        sources = learn_sentencepiece((source for source, _ in sample), config)
        targets = learn_sentencepiece((target for _, target in sample), config)
        return [sources, targets]

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Load a saved tokenizer.

        Raises ``UserError`` if a file is corrupt or of an earlier version.
        """
        directory = Path(directory)
        file = directory / _MANIFEST
        if not file.exists():
            if any((directory / name).exists() for name in _OF_EARLIER_VERSIONS):
                raise UserError(
                    f"{str(directory)!r} was imported by an earlier version of transformer_jax, "
                    "which changed the token ids; import the model again (python -m "
                    "transformer_jax.pretrained import) and fine-tune it again."
                )
            names = (_SOURCE, _TARGET) if (directory / _TARGET).exists() else (_MODEL,)
            return cls.from_models(*(read_sentencepiece(directory / name) for name in names))
        try:
            manifest = json.loads(file.read_bytes())
            languages = Languages(**manifest["languages"]).checked()
            tags = [*languages.tokens.values()]
            sides = []
            for fields in (manifest["source"], manifest.get("target")):
                if fields is not None:
                    segmenter = read_segmenter(directory / Path(fields["model"]).name)
                    vocabulary = _vocabulary(fields["vocabulary"])
                    sides.append(SubwordModel(segmenter, vocabulary, languages=tags))
            original = manifest.get("pretrained")
            return cls(
                sides[0],
                sides[-1],
                languages=languages,
                new_rows={
                    int(number): [*map(int, start)]
                    for number, start in manifest.get("new_rows", {}).items()
                },
                pretrained=(directory / Path(original).name).read_bytes() if original else b"",
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{str(file)!r} is corrupt ({error}); restore it from a backup."
            ) from None

    def with_languages(self, source: str = "", target: str = "") -> Tokenizer:
        """Return a copy whose lines are in these languages by default ("": no change).

        Raises ``UserError`` for a language that the model does not have.
        """
        if not (source or target):
            return self
        return replace(self, languages=self.languages.with_defaults(source, target))

    def with_new_languages(self, entries: Sequence[str]) -> Tokenizer:
        """Return a copy with the languages of ``TokenizerConfig.new_languages``. Existing ids stay.
        The row of a language starts from its relative's or, without a relative, from the mean of
        all other languages. If source and target have separate vocabularies, it does not.

        Raises ``UserError`` if the model is imported and has no languages, if a code exists, or if
        a relative does not.
        """
        if not entries:
            return self
        if not (self.languages.tokens or self.source.has_own_vocabulary):
            raise UserError(
                f"tokenizer.new_languages is {short_repr(entries)}, but the pretrained model has "
                "no languages, or was imported for one pair; expected a model such as NLLB, "
                "M2M100, mBART-50 or MADLAD-400."
            )
        if not self.joint and any(":" in entry for entry in entries):
            raise UserError(
                f"tokenizer.new_languages is {short_repr(entries)}; expected codes without a "
                "relative, because source and target have separate vocabularies."
            )
        old_tokens = self.languages.tokens
        languages = self.languages.with_new(entries)
        new_tokens = [token for code, token in languages.tokens.items() if code not in old_tokens]
        example = next(iter(old_tokens.values()), "")
        source = self.source.with_languages(new_tokens, example)
        target = source if self.joint else self.target.with_languages(new_tokens, example)
        new_rows = dict(self.new_rows)
        if self.joint:
            for entry in entries:
                code, _, relative = entry.partition(":")
                relatives = [relative] if relative else old_tokens
                [number] = source.ids([languages.tokens[code]])
                new_rows[number] = source.ids([old_tokens[language] for language in relatives])
        return replace(self, source=source, target=target, languages=languages, new_rows=new_rows)

    def with_new_pieces(self, pieces: Sequence[str]) -> Tokenizer:
        """Return a copy with new subwords, spelled with ▁ for a space. Existing ids stay, and text
        without the new subwords is split as before.

        Raises ``UserError`` as ``SubwordModel.with_pieces``, and for separate vocabularies.
        """
        if not pieces:
            return self
        if self.target is not self.source:
            raise UserError(
                f"tokenizer.new_pieces has {len(pieces)} subwords; expected none, because source "
                "and target have a tokenizer each."
            )
        side = self.source.with_pieces(pieces)
        new_rows = dict(self.new_rows)
        for number, piece in zip(side.ids(pieces), pieces):
            new_rows[number] = self.source.part_ids(piece)
        return replace(self, source=side, target=side, new_rows=new_rows)

    def affixes(
        self, source_language: str = "", target_language: str = "", name: str = ""
    ) -> Affixes:
        """Return the ids around the source and before the target of a line in these languages.

        ``name`` of the line is for messages. Raises ``UserError`` for an unknown language, and for
        "" if the model has languages but no default.
        """
        tokens: dict[Side, str] = {
            "source": self.languages.token(source_language, f"{name}source_language"),
            "target": self.languages.token(target_language, f"{name}target_language"),
        }
        places = self.languages.places

        def ids(side: SubwordModel, languages: Sequence[Side]) -> list[int]:
            present = [tokens[language] for language in languages if tokens[language]]
            return list(chain(*side.encode(present))) if places.in_text else side.ids(present)

        after_source = ids(self.source, places.after_source)
        return Affixes(
            before_source=ids(self.source, places.before_source),
            after_source=[self.source.eos_id, *after_source] if places.after_source else [],
            before_target=ids(self.target, places.before_target),
        )

    @property
    def unscored_prefix_length(self) -> int:
        """Number of tokens at the beginning of a target that the search is forced to take, and that
        have no score.
        """
        languages = self.languages
        has_token = bool(languages.target or languages.tokens)
        return len(languages.places.before_target) if has_token and languages.forced else 0

    def with_symbols(self, symbols: Sequence[str]) -> Tokenizer:
        """Return a copy with missing ``symbols`` appended. Existing ids do not change.

        As with ``TokenizerConfig.user_defined_symbols``, text is never split inside them. The files
        of a pretrained model do not describe a copy with new tokens, which has none.

        Raises ``UserError`` for a tokenizer.json file.
        """
        if not symbols:
            return self
        source = self.source.with_symbols(symbols)
        target = source if self.target is self.source else self.target.with_symbols(symbols)
        sizes = self.source.vocab_size, self.target.vocab_size
        has_new = (source.vocab_size, target.vocab_size) != sizes
        is_imported = not self.source.has_own_vocabulary
        original = b"" if has_new and is_imported else self.pretrained
        return replace(self, source=source, target=target, pretrained=original)

    def _contents(self) -> dict[str, bytes]:
        """Return the names and contents of the files that ``save`` writes."""
        sides = [self.source] if self.target is self.source else [self.source, self.target]
        names = [_MODEL] if len(sides) == 1 else [_SOURCE, _TARGET]
        if isinstance(self.source.segmenter, JsonSegmenter):
            names = [_JSON] * len(sides)
        contents = {}
        has_own_vocabularies = all(side.has_own_vocabulary for side in sides)
        if not has_own_vocabularies or self.languages != Languages() or self.new_rows:
            fields = []
            for name, side in zip(names, sides):
                vocabulary = None if side.has_own_vocabulary else _fields_of(side.vocabulary)
                fields.append({"model": name, "vocabulary": vocabulary})
            manifest: dict[str, Any] = {
                "source": fields[0],
                "target": fields[1] if len(sides) > 1 else None,
                "languages": self.languages._asdict(),
                "pretrained": _PRETRAINED if self.pretrained else None,
            }
            if self.new_rows:
                manifest["new_rows"] = self.new_rows
            contents[_MANIFEST] = json.dumps(manifest, ensure_ascii=False, indent=0).encode()
        if self.pretrained:
            contents[_PRETRAINED] = self.pretrained
        return contents | {name: side.model for name, side in zip(names, sides)}

    def save(self, directory: str | Path) -> None:
        """Save the tokenizer to a folder. Each file is written atomically."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        contents = self._contents()
        for name in TOKENIZER_FILES - contents.keys():
            (directory / name).unlink(missing_ok=True)
        for name, content in contents.items():
            write_atomically(directory / name, content)

    @property
    def joint(self) -> bool:
        """True if both languages share one vocabulary."""
        return self.target is self.source or (
            not self.source.has_own_vocabulary
            and self.source.vocabulary.tokens == self.target.vocabulary.tokens
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the models, the vocabularies and the languages."""
        digests = (hashlib.sha256(content).digest() for content in self._contents().values())
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _fields_of(vocabulary: Vocabulary) -> dict[str, Any]:
    return {field.name: getattr(vocabulary, field.name) for field in dataclasses.fields(vocabulary)}


def _vocabulary(fields: dict[str, Any] | None) -> Vocabulary | None:
    if fields is None:
        return None
    tokens = tuple(fields["tokens"])
    "".join(tokens)  # raises TypeError unless they are strings
    ids = {name: tuple(map(int, fields[name])) for name in ("special", "languages")}
    return Vocabulary(**{**fields, "tokens": tokens, **ids})
