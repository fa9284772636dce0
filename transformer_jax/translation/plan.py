"""From a request to sentences for the search, and from their hypotheses to its translations.

::

    request ──► lines ──► parts ──► segments ──► plan.sentences ──► search
                                                                      │
    translations ◄── lines ◄── parts ◄── segments ◄── plan.join ◄── hypotheses

A *line* is the whole text or, in HTML and XML, the text of a block such as a paragraph. A *part* is
a sentence of a line, or a line that is not divided; it has a ``Translation`` of its own. A
*segment* is as much of a part as the model translates at once: all of it, unless it is too long.
``Sentence`` is the search's name for the tokens of a segment.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

import numpy as np

from transformer_jax.decoding.lexical_constraints import term_table
from transformer_jax.decoding.search import Hypothesis, Sentence
from transformer_jax.errors import UserError, short_repr
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.alignment import Alignment, concatenate_alignments
from transformer_jax.translation.glossary import Glossary, Terms, find_repetition, unmet_terms
from transformer_jax.translation.markup import PLACEHOLDERS, Document
from transformer_jax.translation.requests import GlossaryTerms, Request, Translation, check_text
from transformer_jax.translation.segments import Segment, cut_into_segments
from transformer_jax.translation.sentences import (
    DividedText,
    SentenceJoiner,
    as_one_sentence,
    divide,
)
from transformer_jax.translation.tags import TagCheck

logger = logging.getLogger(__name__)

# Distance between the sampling seeds of a part's segments.
_SEED_STRIDE = 1_000_003
# A document's lang attribute, which must be among the first characters.
_LANG_ATTRIBUTE = re.compile(r"<[^<>]*\s(?:xml:)?lang\s*=\s*[\"']?([A-Za-z]{2,3})")
_HEAD_SIZE = 4096
# Tokens of a translation for each token of its source and terms; more is suspicious.
_MAX_RATIO = 3
# Attention weights of a line, which grow quadratically.
_MAX_WEIGHTS = 2**22


def _join(
    pieces: Sequence[Segment | Part], translations: Sequence[Translation], after: str
) -> Translation:
    """Join the translations of consecutive segments or parts. Scores are added."""
    joiner = SentenceJoiner()
    tokens = list[str]()
    eos_token = ""
    for piece, translation in zip(pieces, translations, strict=True):
        joiner.add(piece.before, piece.source, translation.text)
        if translation.length:
            eos_token = translation.eos_token
            tokens += [*translation.tokens, eos_token]
    return Translation(
        joiner.text + after,
        sum(translation.score for translation in translations),
        sum(translation.log_prob for translation in translations),
        len(tokens),
        tuple(tokens[:-1]),
        tuple(chain.from_iterable(t.token_log_probs for t in translations)),
        unmet=_all_unmet(translations),
        eos_token=eos_token,
    )


def _all_unmet(translations: Iterable[Translation]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(t.unmet for t in translations)))


@dataclass(frozen=True)
class Part:
    """A text with a ``Translation`` of its own: a sentence, or a line that is not divided."""

    request: Request
    """The text with its options."""
    source: str
    """The text without the tag that begins every part of a tagged text."""
    before: str
    """Text between the previous part of the line and this one, usually whitespace."""
    segments: Sequence[Segment]
    """Empty if the text is blank."""
    sentences: Sequence[Sentence]
    """One for each segment."""
    after: str
    """Trailing text, which has no letters or digits."""
    terms: Terms
    """Terms of the glossaries that occur in the text."""
    needs_alignment: bool
    """The translation needs an alignment, because the line has tags or placeholders."""
    tokenizer: Tokenizer

    def join(self, hypotheses: Sequence[Sequence[Hypothesis]]) -> list[Translation]:
        """Return the part's translations, best first, from the hypotheses for its ``sentences``.
        Joins the best hypotheses of all segments, then the second-best hypotheses, and so on while
        every segment has one.

        If the search finds none, the only translation is empty, with a warning and NaN scores.
        """
        if not all(hypotheses):
            logger.warning(
                "%s: the search found no translation; its output is empty.", self.request.name
            )
        ranked = [self._joined(best) for best in zip(*hypotheses)]
        if not ranked:
            score = math.nan if hypotheses else 0.0
            ranked = [Translation(self.after, score, score, 0)]
        if self.terms:
            ranked = [dataclasses.replace(t, unmet=unmet_terms(self.terms, t.text)) for t in ranked]
            self._warn_of_terms(ranked[0])
        return ranked

    def _joined(self, hypotheses: Sequence[Hypothesis]) -> Translation:
        """Join hypotheses, one for each segment, into one translation."""
        translations = [
            Translation(
                self.tokenizer.target.decode(hypothesis.tokens),
                hypothesis.score,
                hypothesis.log_prob,
                len(hypothesis.tokens) + 1,
                tuple(self.tokenizer.target.tokens(hypothesis.tokens)),
                tuple(hypothesis.token_log_probs),
                eos_token=self.tokenizer.target.eos_token,
            )
            for hypothesis in hypotheses
        ]
        joined = _join(self.segments, translations, self.after)
        # the mean keeps the best translation first
        return dataclasses.replace(joined, score=joined.score / len(hypotheses))

    def _warn_of_terms(self, translation: Translation) -> None:
        """Log what is wrong with a translation that was forced to contain terms, if anything."""
        if translation.unmet:
            message = "%s: the translation lacks the glossary's terms for: %s."
            logger.warning(message, self.request.name, ", ".join(translation.unmet))
        num_source = sum(len(sentence.tokens) for sentence in self.sentences)
        longest = [max(len(target.ids) for target in targets) for targets in self.terms.values()]
        repeated = find_repetition(translation.tokens, self.terms)
        if repeated:
            problem = f"repeats {short_repr(repeated)}"
        elif translation.length > _MAX_RATIO * (num_source + sum(longest)):
            problem = f"has {translation.length} tokens, for {num_source} of the source"
        else:
            return
        message = (
            "%s: the translation %s. This happens if the model would never choose a "
            "glossary term by itself (%s); shorten the term, or add alternatives."
        )
        logger.warning(message, self.request.name, problem, short_repr(", ".join(self.terms)))


@dataclass(frozen=True)
class Line:
    """Parts of a text, and what stands after the last one."""

    parts: Sequence[Part]
    after: str = ""

    def join(self, translations: Sequence[Translation]) -> Translation:
        """Return the line's translation from those of its parts."""
        alignments = [
            _without_tag(part, t.alignment) for part, t in zip(self.parts, translations) if t.tokens
        ]
        joined = _join(self.parts, translations, self.after)
        return dataclasses.replace(joined, alignment=_concatenate_if_complete(alignments))


def _without_tag(part: Part, alignment: Alignment | None) -> Alignment | None:
    """Return the alignment to the text of a document, in which the part has no tag."""
    if alignment is None or not part.needs_alignment:
        return alignment
    tag, _ = part.tokenizer.source.split_tag(part.request.text)
    return alignment._replace(
        source=alignment.source[len(tag) :],
        weights_TS=alignment.weights_TS[:, len(tag) :],
        source_word_ids=alignment.source_word_ids[len(tag) :],
    )


def _concatenate_if_complete(alignments: Sequence[Alignment | None]) -> Alignment | None:
    """Concatenate alignments, or return None if one is missing or the matrix would be too large."""
    present = [alignment for alignment in alignments if alignment is not None]
    if not present or len(present) < len(alignments):
        return None
    num_source = sum(len(alignment.source) for alignment in present)
    num_target = sum(len(alignment.target) for alignment in present)
    return concatenate_alignments(present) if num_source * num_target <= _MAX_WEIGHTS else None


@dataclass(frozen=True)
class Plan:
    """How to translate a request.

    Attributes:
      document: the document whose lines these are; None: the text is one line.
    """

    request: Request
    lines: Sequence[Line]
    document: Document | None = None

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of all lines."""
        return [part for line in self.lines for part in line.parts]

    @property
    def sentences(self) -> list[Sentence]:
        """What to search: the segments of all parts. Empty if the text is blank."""
        return [sentence for part in self.parts for sentence in part.sentences]

    def join(self, hypotheses: Sequence[Sequence[Hypothesis]]) -> list[Translation]:
        """Return the translations of the request, best first, from hypotheses for ``sentences``."""
        return self.join_parts(self.join_segments(hypotheses))

    def join_segments(self, hypotheses: Sequence[Sequence[Hypothesis]]) -> list[list[Translation]]:
        """Return the translations of each part from hypotheses for ``sentences``."""
        remaining = iter(hypotheses)
        return [part.join(list(islice(remaining, len(part.sentences)))) for part in self.parts]

    def join_parts(self, translations: Sequence[Sequence[Translation]]) -> list[Translation]:
        """Return the translations of the request, best first, from those of its ``parts``.

        A part with fewer translations than others repeats its last one. The scores of several parts
        are added.
        """
        if self.document is None and len(translations) == 1:
            [line] = self.lines
            [part] = line.parts
            if not (part.before or line.after):
                return list(translations[0])
        count = max(map(len, translations), default=1)
        return [self._joined(translations, rank) for rank in range(count)]

    def _joined(self, translations: Sequence[Sequence[Translation]], rank: int) -> Translation:
        selected = iter([ranked[min(rank, len(ranked) - 1)] for ranked in translations])
        lines = [line.join(list(islice(selected, len(line.parts)))) for line in self.lines]
        if self.document is None:
            return lines[0]
        return Translation(
            self.document.join(lines),
            sum(line.score for line in lines),
            sum(line.log_prob for line in lines),
            0,
            unmet=_all_unmet(lines),
        )


@dataclass(frozen=True)
class PlanBuilder:
    """Makes plans for one model."""

    tokenizer: Tokenizer
    forbidden: frozenset[int]
    """Target tokens that the search cannot generate, such as UNK."""
    max_source_tokens: int
    """Maximum number of source tokens of a sentence, without EOS."""
    max_prefix_tokens: int
    """Maximum number of target tokens of a prefix."""
    no_terms_because: str
    """The reason that the search supports no glossaries; '': it does."""
    tags: TagCheck

    def glossary(self, terms: GlossaryTerms, name: str) -> Glossary:
        """Tokenize a glossary once for many requests. ``name`` is for messages. Raises
        ``UserError`` if a term is invalid.
        """
        if isinstance(terms, Glossary):
            return terms
        return Glossary(terms, self.tokenizer.target, name, self.forbidden)

    def plan(
        self,
        request: Request,
        glossary: Glossary,
        num_hypotheses: int = 1,
        *,
        split_sentences: bool | None = None,
        language: str = "",
        protect: Sequence[str] = PLACEHOLDERS,
    ) -> Plan:
        """Plan the translation of a request.

        Args:
          glossary: terms to which those of the request add.
          num_hypotheses: number of translations of each part.
          split_sentences: whether to divide the text into sentences, each of which is translated
            alone. None: a document is divided, and a line of plain text is one sentence.
          language: language of the text, by whose rules sentences end (``sentences.divide``).
            Default: the request's ``source_language``, the model's default, or the language that
            a document declares.
          protect: see ``Document``.

        Raises:
          UserError: the text, the prefix, a language or the glossary is invalid.
        """
        check_text(request.text, request.name)
        self.tags.check(request)
        request_glossary = self.glossary(request.glossary, f"{request.name}: glossary")
        language = (
            language
            or request.source_language
            or self._default_language
            or _declared_language(request)
        )
        is_one_part = split_sentences is None and request.format == "text"
        tag = "" if is_one_part else self.tokenizer.source.tag(request.text)
        glossaries = [glossary, request_glossary]
        parts = _PartMaker(self, request, glossaries, max(1, num_hypotheses), language, tag)
        text = request.text.removeprefix(tag)
        if request.format == "text":
            divided = _divide(text, request, split_sentences, language)
            plan = Plan(request, [parts.line(divided, needs_alignment=False)])
        else:
            document = Document(
                text, request.format, self.tokenizer, protect=protect, name=request.name
            )
            lines = list[Line]()
            for line in document.lines:
                divided = _divide(line.text, request, split_sentences, language)
                lines.append(parts.line(divided, needs_alignment=line.needs_alignment))
            plan = Plan(request, lines, document)
        parts.warn_of_long_parts()
        return plan

    @cached_property
    def _default_language(self) -> str:
        """Code of the model's default source language, if it has one."""
        languages = self.tokenizer.languages
        for code, token in languages.tokens.items():
            if token == languages.source:
                return code
        return ""


def _divide(
    text: str, request: Request, split_sentences: bool | None, language: str
) -> DividedText:
    """Divide a line. The parts of a document have all of its text."""
    is_plain = request.format == "text"
    if is_plain and split_sentences is None:  # exactly the text
        return DividedText([text], [""], "") if text.strip() else DividedText([], [], "")
    if split_sentences is False:
        return as_one_sentence(text)
    return divide(text, language=language, copy_symbols=is_plain)


def _declared_language(request: Request) -> str:
    """Return the code in a document's lang attribute, if it has one."""
    declared = (
        None if request.format == "text" else _LANG_ATTRIBUTE.search(request.text, 0, _HEAD_SIZE)
    )
    return declared[1] if declared else ""


class _PartMaker:
    """Makes the parts of one request in order."""

    def __init__(
        self,
        plan_builder: PlanBuilder,
        request: Request,
        glossaries: list[Glossary],
        num_hypotheses: int,
        language: str,
        tag: str,
    ):
        """``language`` is that of the text. ``tag`` begins every part."""
        self._language = language
        self._tag = tag
        self._plan_builder = plan_builder
        self._request = request
        self._glossaries = glossaries
        self._num_hypotheses = num_hypotheses
        self._affixes = request.affixes(plan_builder.tokenizer)
        self._unscored_prefix = self._affixes.before_target[
            : plan_builder.tokenizer.unscored_prefix_length
        ]
        self._next_prefix = self._unscored_prefix
        if prefix := self._encoded_prefix():
            self._next_prefix = self._affixes.target(prefix)
        self._long_parts = list[tuple[int, int]]()

    def line(self, divided: DividedText, *, needs_alignment: bool) -> Line:
        """Make a line of sentences."""
        parts = [
            self._make_part(sentence, before, needs_alignment)
            for sentence, before in zip(divided.sentences, divided.before)
        ]
        return Line(parts, divided.after)

    def _make_part(self, source: str, before: str, needs_alignment: bool) -> Part:
        """Make the next part. Only the first segment of all has the request's prefix."""
        request = dataclasses.replace(self._request, text=self._tag + source)
        segments, after = self._segments(request)
        terms = self._terms(request.text)
        sentences = list[Sentence]()
        for index, segment in enumerate(segments):
            segment_terms = terms if len(segments) == 1 else self._terms(segment.source)
            sentences.append(
                Sentence(
                    segment.tokens,
                    self._next_prefix,
                    seed=(max(1, request.line_number) + _SEED_STRIDE * index) % 2**32,
                    num_hypotheses=self._num_hypotheses,
                    terms=self._term_table(segment_terms),
                )
            )
            self._next_prefix = self._unscored_prefix  # the language begins every segment
        tokenizer = self._plan_builder.tokenizer
        return Part(
            request, source, before, segments, sentences, after, terms, needs_alignment, tokenizer
        )

    def warn_of_long_parts(self) -> None:
        """Say in one message which parts are translated in segments."""
        name = self._request.name
        max_tokens = self._plan_builder.max_source_tokens
        if len(self._long_parts) == 1:
            num_tokens, num_segments = self._long_parts[0]
            message = "%s has %d tokens; the maximum is %d, so it is translated in %d segments."
            logger.warning(message, name, num_tokens, max_tokens, num_segments)
        elif self._long_parts:
            message = "%s has %d sentences of more than %d tokens, which are cut into segments."
            logger.warning(message, name, len(self._long_parts), max_tokens)

    def _segments(self, request: Request) -> tuple[Sequence[Segment], str]:
        """Return the segments of a part, and the text after them."""
        plan_builder = self._plan_builder
        [text_ids] = plan_builder.tokenizer.source.encode([request.text])
        tokens = self._affixes.source(text_ids)
        if not tokens:
            return [], ""
        if len(tokens) <= plan_builder.max_source_tokens:
            return [Segment(request.text, tokens)], ""
        segments, after = cut_into_segments(
            request.text,
            plan_builder.max_source_tokens,
            plan_builder.tokenizer,
            self._affixes,
            self._language,
        )
        self._long_parts.append((len(tokens), len(segments)))
        return [segment for segment in segments if segment.tokens], after.rstrip()

    def _encoded_prefix(self) -> list[int]:
        """Return the token ids of the request's prefix, which is ignored if the text is blank."""
        request = self._request
        target = self._plan_builder.tokenizer.target
        check_text(request.prefix, f"{request.name}: prefix")
        if not request.prefix or not request.text.strip():
            return []
        [prefix] = target.encode([request.prefix])
        name = f"{request.name}: prefix {short_repr(request.prefix)}"
        if target.unk_id in prefix:
            tokens = short_repr(" ".join(target.tokens(prefix)))
            raise UserError(f"{name} has tokens outside the vocabulary ({tokens}); remove them.")
        max_tokens = self._plan_builder.max_prefix_tokens
        if len(prefix) > max_tokens:
            raise UserError(
                f"{name} has {len(prefix)} tokens; expected at most {max_tokens} "
                "(decoding.max_extra_length, decoding.max_length - 1 or, with learned positions, "
                "model.max_positions - 1)."
            )
        return prefix

    def _terms(self, text: str) -> Terms:
        glossary, request_glossary = self._glossaries
        return glossary.find_terms(text, request_glossary)

    def _term_table(self, terms: Terms) -> np.ndarray | None:
        if not terms:
            return None
        if self._plan_builder.no_terms_because:
            raise UserError(
                f"{self._plan_builder.no_terms_because}, because only our beam search can use a "
                "glossary."
            )
        alternatives = [[target.ids for target in targets] for targets in terms.values()]
        return term_table(alternatives, f"{self._request.name}: glossary")
