"""Glossaries: source terms whose translations must contain given target terms.

A text is compared with the source terms word by word, in a tree of their words, so the time is
linear in the length of the text, whatever the size of the glossary.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from transformer_jax.data.text_files import read_lines
from transformer_jax.decoding.lexical_constraints import term_table
from transformer_jax.errors import UserError, short_repr
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.translation.requests import GlossaryTerms, check_text
from transformer_jax.translation.scripts import CHINESE_JAPANESE, UNSPACED

MAX_WORDS = 64
"""Maximum number of words of a source term."""


class TargetTerm(NamedTuple):
    """One of the target terms for a source term."""

    text: str
    """The decoded term, with a space before it unless it can occur without one."""
    ids: list[int]


Terms: TypeAlias = dict[str, list[TargetTerm]]
"""Source terms, each with its target terms."""

# Accents, points and vowel signs, which are part of their word (Latin to Khmer).
_COMBINING_MARKS = "".join(
    character
    for character in map(chr, range(0x300, 0x1800))
    if unicodedata.category(character)[0] == "M"
)
_WORD = re.compile(
    rf"[{UNSPACED}][{_COMBINING_MARKS}]*|(?:[^\W{UNSPACED}]|[{_COMBINING_MARKS}])+|[^\w\s]"
)
# Other forms of apostrophes, quotation marks and hyphens, and invisible characters.
_NORMALIZED_CHARACTERS = str.maketrans(
    dict.fromkeys("’‘ʼ‛＇", "'")
    | dict.fromkeys("“”„‟＂", '"')
    | dict.fromkeys("‐‑", "-")
    | dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff", None)
)


def read_glossary(path: str | Path) -> dict[str, list[str]]:
    """Read a TSV file (optionally ``.gz``, or a URL): a source term, then one or more target terms.
    Empty columns are ignored. Lines with the same source term add alternatives.

    Raises ``UserError`` for a line without a target term.
    """
    terms: dict[str, list[str]] = {}
    for line_number, line in enumerate(read_lines(path), 1):
        source, *columns = (column.strip() for column in line.split("\t"))
        targets = [column for column in columns if column]
        if not source and not targets:
            continue
        if not source or not targets:
            raise UserError(
                f"{path}, line {line_number} is {short_repr(line)}; expected a source term and "
                "target terms, separated by tabs."
            )
        terms.setdefault(source, []).extend(targets)
    return {source: list(dict.fromkeys(targets)) for source, targets in terms.items()}


def split_words(text: str) -> list[str]:
    """Return the words of a text as they are compared: in Unicode's composed form, with plain
    apostrophes and hyphens. A word after white space, except the first, begins with a space.
    """
    text = unicodedata.normalize("NFC", text).translate(_NORMALIZED_CHARACTERS)
    words = list[str]()
    end = 0
    for word in _WORD.finditer(text):
        is_spaced = bool(words) and word.start() > end
        words.append(" " * is_spaced + word[0])
        end = word.end()
    return words


class _TermNode:
    """A node of the tree of source terms: the words so far."""

    __slots__ = ("next_nodes", "source")

    def __init__(self) -> None:
        self.next_nodes = dict[str, _TermNode]()
        self.source = ""
        """The source term that ends here, if any."""


class Glossary(dict[str, list[TargetTerm]]):
    """Tokenized terms of a glossary: target terms by source term."""

    def __init__(
        self, terms: GlossaryTerms, target: SubwordModel, name: str, forbidden: Collection[int]
    ):
        """Tokenize the target terms. ``name`` is for messages.

        Raises ``UserError`` if a term is not text, is blank, is too long, or has tokens that are
        ``forbidden``, such as UNK.
        """
        if not isinstance(terms, Mapping):
            raise UserError(f"{name} is {short_repr(terms)}; expected target terms by source term.")
        super().__init__()
        self._root = _TermNode()
        self._used_terms = set[str]()
        for source, targets in terms.items():
            location = f"{name}: {short_repr(source)}"
            texts = _check_term(source, targets, location)
            words = split_words(source)
            if len(words) > MAX_WORDS:
                raise UserError(
                    f"{location} has {len(words)} words; expected a source term of at most "
                    f"{MAX_WORDS}."
                )
            alternatives = list[TargetTerm]()
            for text in texts:
                alternatives += _tokenize_term(text, target, location, forbidden)
            # raises an error for too many
            term_table([[term.ids for term in alternatives]], location)
            self._add(words, " ".join(source.split()), alternatives)

    @property
    def num_used(self) -> int:
        """Number of source terms that have occurred in a text."""
        return len(self._used_terms)

    def find_terms(self, text: str, extra: Glossary | None = None) -> Terms:
        """Find the source terms that occur in a text as whole words, with any white space between
        them. If terms overlap, the first counts, and of those that begin together the longest.
        ``extra`` adds terms, and replaces the target terms of the same source term.
        """
        glossaries = [self] if extra is None else [extra, self]
        glossaries = [glossary for glossary in glossaries if glossary]
        terms: Terms = {}
        if not glossaries:
            return terms
        words = split_words(text)
        first = 0
        while first < len(words):
            longest = 0
            for glossary in glossaries:
                length, source = glossary._longest_at(words, first)
                if length > longest:
                    longest = length
                    best_source = source
                    owner = glossary
            if longest:
                owner._used_terms.add(best_source)
                terms[best_source] = owner[best_source]
            first += max(1, longest)
        return terms

    def _add(self, words: Sequence[str], source: str, targets: list[TargetTerm]) -> None:
        """Add a term; two source terms with the same words are one, with the targets of both."""
        node = self._root
        for word in words:
            node = node.next_nodes.setdefault(word, _TermNode())
        node.source = node.source or source
        known_targets = self.setdefault(node.source, [])
        known_targets += [term for term in targets if term not in known_targets]

    def _longest_at(self, words: Sequence[str], first: int) -> tuple[int, str]:
        """Return the number of words of the longest source term that begins at a word, and the
        term.
        """
        length = 0
        source = ""
        node = self._root.next_nodes.get(words[first].removeprefix(" "))
        index = first + 1
        while node is not None:
            if node.source:
                length = index - first
                source = node.source
            node = node.next_nodes.get(words[index]) if index < len(words) else None
            index += 1
        return length, source


def unmet_terms(terms: Mapping[str, list[TargetTerm]], translation: str) -> tuple[str, ...]:
    """Return the source terms without any of their target terms in the translation."""
    text = f" {translation}"
    return tuple(
        source
        for source, targets in terms.items()
        if not any(target.text in text for target in targets)
    )


def _check_term(source: Any, targets: Any, location: str) -> list[str]:
    """Return the target terms of a source term without repeats, or raise ``UserError``."""
    texts = [targets] if isinstance(targets, str) else targets
    if not isinstance(texts, list | tuple) or not texts:
        raise UserError(f"{location} is {short_repr(targets)}; expected target terms.")
    for text in (source, *texts):
        check_text(text, location)
        if not text.strip():
            raise UserError(f"{location} has the blank term {text!r}; remove it.")
    if not split_words(source):
        raise UserError(f"{location} has no visible character; remove it.")
    return list(dict.fromkeys(text.strip() for text in texts))


def _tokenize_term(
    text: str, target: SubwordModel, location: str, forbidden: Collection[int]
) -> list[TargetTerm]:
    """Tokenize a target term as after a space. A Chinese or Japanese term also as without it."""
    [without_term] = target.encode(["a"])
    [with_term] = target.encode([f"a {text}"])
    ids = with_term[len(without_term) :]
    forbidden_ids = {*ids} & {*forbidden}
    if forbidden_ids:
        raise UserError(
            f"{location}: the target term {short_repr(text)} has tokens that cannot be "
            f"generated ({' '.join(target.tokens(forbidden_ids))}); change it."
        )
    text = target.decode(ids).strip()
    if not re.match(f"[{CHINESE_JAPANESE}]", text):
        return [TargetTerm(f" {text}", ids)]
    tokens = [token.removeprefix("▁") for token in target.tokens(ids)]
    unspaced = target.ids(token for token in tokens if token)
    return [TargetTerm(text, ids), TargetTerm(text, unspaced)]


def find_repetition(tokens: Sequence[str], terms: Terms) -> str:
    """Return what a translation says four or more times in a row, if anything: up to four tokens
    that no target term repeats. A model that is forced to use a term it would never say does this.
    """
    repeated = _REPETITION.search("\0".join(tokens) + "\0")
    if repeated is None:
        return ""
    phrase = repeated[1].replace("\0", "").replace("▁", " ").strip() or " "
    texts = [term.text for targets in terms.values() for term in targets]
    return "" if any(text.count(phrase) > 3 for text in texts) else phrase


# Up to four tokens, each with its end, again at least three times.
_REPETITION = re.compile(r"(?:^|(?<=\0))((?:[^\0]+\0){1,4}?)\1{3,}")
