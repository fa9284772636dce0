"""Conversion between text and token ids, with SentencePiece."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import sentencepiece

from transformer_jax.errors import UserError
from transformer_jax.settings.config import TokenizerConfig
from transformer_jax.storage.files import local_path, write_atomically
from transformer_jax.tokenization.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.tokenization.subword_model import SubwordModel, with_symbols

T = TypeVar("T")

_MODEL, _SOURCE, _TARGET = "tokenizer.model", "tokenizer.source.model", "tokenizer.target.model"
_JSON, _VOCABULARY = "tokenizer.tokens.json", "tokenizer.vocab.json"
_TARGET_VOCABULARY = "tokenizer.target.vocab.json"
_LANGUAGES, _PRETRAINED = "tokenizer.languages.json", "tokenizer.pretrained.zip"
TOKENIZER_FILES = {
    _MODEL,
    _SOURCE,
    _TARGET,
    _JSON,
    _VOCABULARY,
    _TARGET_VOCABULARY,
    _LANGUAGES,
    _PRETRAINED,
}


class Languages(NamedTuple):
    """Languages of a many-to-many model."""

    tokens: Mapping[str, str] = {}
    """Token of each language code."""
    source: str = ""
    """Token before every source line by default; '': none."""
    target: str = ""
    """Token before every target line by default; '': none."""

    @property
    def tagged(self) -> bool:
        """True if source lines begin with the language of the target, as in MADLAD-400 (<2de>)."""
        return any(token.startswith("<2") for token in self.tokens.values())


@dataclass(eq=False)
class Tokenizer:
    """SentencePiece models for ``source`` and ``target``: one for both languages or one for each.

    The fields after the models are for pretrained models (``SubwordModel``). ``target`` is the same
    object as ``source`` if both languages share a model and their first token.
    """

    source_model: bytes
    """Contents of the model file."""
    target_model: bytes | None = None
    """None: both languages share ``source_model``."""
    _: KW_ONLY
    vocabulary: Sequence[str] = ()
    """The tokens of both languages, ordered by id, if ids differ from the piece ids."""
    target_vocabulary: Sequence[str] = ()
    """The tokens of the target, if ``vocabulary`` has those of the source only."""
    languages: Languages = Languages()
    """Tokens before a line."""
    pretrained: bytes = b""
    """The original files, which an export needs, as a zip archive."""

    def __post_init__(self) -> None:
        its, tagged = self.languages, self.languages.tagged
        source = self.source_model, self.vocabulary, its.source, its.tokens
        target = (
            self.target_model or self.source_model,
            self.target_vocabulary or self.vocabulary,
            its.target,
            {} if tagged else its.tokens,
        )
        self.source = self.target = SubwordModel(*source, tagged=tagged)
        if self.target_model or self.target_vocabulary or source != target:
            self.target = SubwordModel(*target)

    @classmethod
    def train(cls, pairs: Iterable[tuple[str, str]], config: TokenizerConfig) -> Tokenizer:
        """Train a tokenizer on sentence pairs, or load ``config.model`` if it is set.

        Reads ``pairs`` once and keeps at most ``config.max_training_sentences`` lines in memory
        (per language, if vocabularies are separate). Raises ``UserError`` if the text is empty or
        too small for ``config.vocab_size`` tokens, or if PAD, BOS, EOS and UNK do not have the ids
        0 to 3 in an existing model.
        """
        if config.model:
            files = [local_path(file) for file in (config.model, config.target_model) if file]
            return cls(*map(_read_given_model, files)).with_symbols(config.user_defined_symbols)
        most = config.max_training_sentences
        sample = _evenly_spread(pairs, max(1, most // 2) if config.joint else most)
        if config.joint:
            return cls(_learn(chain.from_iterable(sample), config))
        return cls(*(_learn((pair[side] for pair in sample), config) for side in (0, 1)))

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Load a saved tokenizer.

        Raises ``UserError`` if a file is corrupt.
        """
        directory = Path(directory)
        names = (_SOURCE, _TARGET) if (directory / _TARGET).exists() else (_MODEL,)
        if (directory / _JSON).exists():
            names = (_JSON,)
        original = directory / _PRETRAINED
        return cls(
            *(_read_model(directory / name) for name in names),
            vocabulary=_read_strings(directory / _VOCABULARY, _vocabulary),
            target_vocabulary=_read_strings(directory / _TARGET_VOCABULARY, _vocabulary),
            languages=_read_strings(directory / _LANGUAGES, _languages),
            pretrained=original.read_bytes() if original.exists() else b"",
        )

    @staticmethod
    def load_languages(directory: str | Path) -> Sequence[str]:
        """Return the language codes of a saved tokenizer, without loading the rest."""
        return list(_read_strings(Path(directory) / _LANGUAGES, _languages).tokens)

    def with_languages(self, source: str = "", target: str = "") -> Tokenizer:
        """Return a copy whose lines are in these languages by default ("": no change).

        Raises ``UserError`` for a language that the model does not have.
        """
        if not (source or target):
            return self
        its = self.languages
        new_source = self.source.first_token(source, "source_language") if source else its.source
        if its.tagged:
            tag = self.source.first_token(target) if target else its.source
            return replace(self, languages=its._replace(source=tag))
        new_target = self.target.first_token(target) if target else its.target
        return replace(self, languages=its._replace(source=new_source, target=new_target))

    def first_ids(
        self, source_language: str = "", target_language: str = "", name: str = ""
    ) -> tuple[list[int], list[int]]:
        """Return the ids before the source and before the target of a line in these languages.

        ``name`` of the line is for messages. Raises ``UserError`` for an unknown language, and for
        "" if the model has languages but no default.
        """
        tagged = self.source.tagged
        source = self.source.first_ids(source_language, f"{name}source_language")
        side = self.source if tagged else self.target
        target = side.first_ids(target_language, f"{name}target_language")
        return (target, []) if tagged else (source, target)

    def with_symbols(self, symbols: Sequence[str]) -> Tokenizer:
        """Return a copy with missing ``symbols`` appended. Existing ids do not change.

        As with ``TokenizerConfig.user_defined_symbols``, text is never split inside them. The files
        of a pretrained model do not describe a copy with new tokens, which has none.

        Raises ``UserError`` for a tokenizer.json file.
        """
        if not symbols:
            return self
        if self.source.is_json:
            raise UserError(
                f"tokenizer.user_defined_symbols contains {symbols[0]!r}; expected none, because "
                "this model has a tokenizer.json file."
            )
        models = (with_symbols(model, symbols) for model in self._models)
        changed: dict[str, Any] = dict(zip(("source_model", "target_model"), models))
        for name in ("vocabulary", "target_vocabulary"):
            tokens = getattr(self, name)
            if tokens and (new := [symbol for symbol in symbols if symbol not in tokens]):
                changed |= {name: (*tokens, *new), "pretrained": b""}
        return replace(self, **changed)

    @property
    def _models(self) -> list[bytes]:
        """Contents of the model files."""
        return [model for model in (self.source_model, self.target_model) if model is not None]

    @property
    def _files(self) -> dict[str, bytes]:
        """Names and contents of the files that ``save`` writes."""
        models = self._models
        names = (_MODEL,) if len(models) == 1 else (_SOURCE, _TARGET)
        names = (_JSON,) if self.source.is_json else names
        strings = {
            _VOCABULARY: self.vocabulary,
            _TARGET_VOCABULARY: self.target_vocabulary,
            _LANGUAGES: self.languages._asdict() if any(self.languages) else None,
        }
        files = {
            name: json.dumps(content, ensure_ascii=False, indent=0).encode()
            for name, content in strings.items()
            if content
        }
        if self.pretrained:
            files[_PRETRAINED] = self.pretrained
        return files | dict(zip(names, models))

    def save(self, directory: str | Path) -> None:
        """Save the tokenizer to a folder. Each file is written atomically."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES - self._files.keys():
            (directory / name).unlink(missing_ok=True)
        for name, content in self._files.items():
            write_atomically(directory / name, content)

    def __reduce__(self) -> tuple[Callable[[], Tokenizer], tuple[()]]:
        return partial(
            Tokenizer, **{each.name: getattr(self, each.name) for each in fields(self)}
        ), ()

    @property
    def joint(self) -> bool:
        """True if both languages share one vocabulary."""
        return self.target is self.source or bool(self.vocabulary) > bool(self.target_vocabulary)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the models and the vocabulary."""
        digests = (hashlib.sha256(content).digest() for content in self._files.values())
        return hashlib.sha256(b"".join(digests)).hexdigest()


def read_sentencepiece(path: Path) -> tuple[bytes, sentencepiece.SentencePieceProcessor]:
    """Read a SentencePiece model. Returns the file's contents and the model."""
    content = path.read_bytes()
    try:
        if not content:
            raise RuntimeError("the file is empty")
        return content, sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise UserError(
            f"{str(path)!r} is not a SentencePiece model or is corrupt ({error}); restore it, "
            "download it again or retrain it."
        ) from None


def _read_model(path: Path) -> bytes:
    return path.read_bytes() if path.name == _JSON else read_sentencepiece(path)[0]


def _read_given_model(path: Path) -> bytes:
    """Read a model in which PAD, BOS, EOS and UNK must have the ids 0 to 3."""
    model, its = read_sentencepiece(path)
    ids = its.pad_id(), its.bos_id(), its.eos_id(), its.unk_id()
    if ids != (PAD_ID, BOS_ID, EOS_ID, UNK_ID):
        raise UserError(
            f"{str(path)!r} has the ids {ids} for PAD, BOS, EOS and UNK; expected 0 to 3. Train it "
            "with spm_train --pad_id=0 --bos_id=1 --eos_id=2 --unk_id=3."
        )
    return model


def _read_strings(file: Path, kind: Callable[..., T]) -> T:
    """Read a JSON file of strings as ``kind``, which makes an empty one without an argument.

    Raises ``UserError`` if the file is corrupt.
    """
    if not file.exists():
        return kind()
    try:
        return kind(json.loads(file.read_bytes()))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{str(file)!r} is corrupt ({error}); restore it from a backup.") from None


def _vocabulary(tokens: Sequence[str] = ()) -> Sequence[str]:
    "".join(tokens)  # raises TypeError unless they are strings
    return tuple(tokens)


def _languages(tokens: Mapping[str, Any] | None = None) -> Languages:
    languages = Languages(**tokens or {})
    _vocabulary([*languages.tokens.values(), languages.source, languages.target])
    return languages


def _evenly_spread(pairs: Iterable[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """Keep every k-th pair, for the smallest power of two k that leaves at most ``most`` pairs."""
    kept: list[tuple[str, str]] = []
    stride = 1
    for index, pair in enumerate(pairs):
        if index % stride == 0:
            kept.append(pair)
        if len(kept) > most:
            kept, stride = kept[::2], 2 * stride
    return kept


def _learn(lines: Iterable[str], config: TokenizerConfig) -> bytes:
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
