"""Glossaries: source terms whose translations must contain given target terms."""

from __future__ import annotations

import re
import unicodedata
from collections import ChainMap
from collections.abc import Collection, Mapping
from pathlib import Path

from transformer_jax.data.sources import read_lines
from transformer_jax.decoding.lexical_constraints import term_table
from transformer_jax.errors import UserError, short_repr
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.translation.requests import GlossaryTerms, check_text

Found = dict[str, list[tuple[str, list[int]]]]
"""Source terms, each with its target terms as text and as token ids."""

_UNSPACED = r"\u3001-\u30ff\u3400-\u9fff\uff00-\uffef\U00020000-\U0003ffff"  # Chinese, Japanese
# Accents, points and vowel signs, which are part of their word (Latin to Sinhala).
_MARKS = "".join(x for x in map(chr, range(0x300, 0xE00)) if unicodedata.category(x)[0] == "M")
_WORD = re.compile(rf"[{_UNSPACED}]|(?:[^\W{_UNSPACED}]|[{_MARKS}])+|[^\w\s]")


def read_glossary(path: str | Path) -> dict[str, list[str]]:
    """Read a TSV file (optionally ``.gz``, or a URL): a source term, then one or more target terms.
    Lines with the same source term add alternatives. Raises ``UserError`` for a line without tab.
    """
    terms: dict[str, list[str]] = {}
    for number, line in enumerate(read_lines(path), 1):
        source, *targets = (column.strip() for column in line.split("\t"))
        if source and not targets:
            raise UserError(
                f"{path}, line {number} is {short_repr(line)}; expected a source term and target "
                "terms, separated by tabs."
            )
        if source:
            terms.setdefault(source, []).extend(targets)
    return terms


class Glossary(Found):
    """Tokenized terms of a glossary."""

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
        for source, chosen in terms.items():
            where = f"{name}: {short_repr(source)}"
            targets = [chosen] if isinstance(chosen, str) else chosen
            if not isinstance(targets, list | tuple) or not targets:
                raise UserError(f"{where} is {short_repr(chosen)}; expected target terms.")
            found: list[tuple[str, list[int]]] = []
            for text in (source, *targets):
                check_text(text, where)
                if not text.strip():
                    raise UserError(f"{where} has the blank term {text!r}; remove it.")
            for text in targets:
                found += (pairs := _tokenized(text.strip(), target))
                if wrong := {*pairs[0][1]} & {*forbidden}:
                    raise UserError(
                        f"{where}: the target term {short_repr(text)} has tokens that cannot be "
                        f"generated ({' '.join(target.tokens(wrong))}); change it."
                    )
            term_table([[ids for _, ids in found]], where)
            self[" ".join(source.split())] = found
        self._longest = max(map(len, map(_WORD.findall, terms)), default=0)

    def found_in(self, text: str, *others: Glossary) -> Found:
        """Find the source terms that occur in a text as whole words, with any white space between
        them. If terms overlap, the first counts, and of those that begin together the longest.
        ``others`` add terms, and replace the target terms of the same source term.
        """
        terms = ChainMap(*others, self)
        longest = max(its._longest for its in (self, *others))
        text = " ".join(text.split()) if longest else ""
        spans = [word.span() for word in _WORD.finditer(text)]
        found, first = Found(), 0
        while first < len(spans):
            end = min(len(spans), first + longest)
            for last in range(end - 1, first - 1, -1):
                source = text[spans[first][0] : spans[last][1]]
                if source in terms:
                    found[source] = terms[source]
                    first = last
                    break
            first += 1
        return found


def unmet(found: Found, translation: str) -> tuple[str, ...]:
    """Return the source terms without any of their target terms in the translation."""
    text = f" {translation}"
    return tuple(
        source
        for source, targets in found.items()
        if not any(target in text for target, _ in targets)
    )


def _tokenized(text: str, target: SubwordModel) -> list[tuple[str, list[int]]]:
    """Tokenize a target term as after a space. A Chinese or Japanese term also as without it.
    Returns the decoded text, with the space if necessary, and token ids of each.
    """
    [before], [both] = target.encode(["a"], first=()), target.encode([f"a {text}"], first=())
    ids = both[len(before) :]
    decoded = target.decode(ids).strip()
    if not re.match(f"[{_UNSPACED}]", text):
        return [(f" {decoded}", ids)]
    tokens = [token.removeprefix("▁") for token in target.tokens(ids)]
    return [(decoded, ids), (decoded, target.ids(filter(None, tokens)))]
