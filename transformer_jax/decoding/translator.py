"""Text in, text out: one translation for every line, in the order of the lines."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from transformer_jax.checkpoint import load_model
from transformer_jax.config import Config, DecodingConfig
from transformer_jax.decoding.engine import Engine, Hypothesis, Sentence, check_decoding
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.special_ids import UNK_ID
from transformer_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# What closes a quotation or a bracket, and further end marks, belong to the sentence before.
_SENTENCE_END = re.compile(
    r"[.!?…؟۔।॥።](?:[\"'”’»)\]]|\s[”’»)\]])*\s++(?![.!?…؟۔।॥።”’»)\]])"  # here a space must follow
    r"|[。！？｡][。！？｡….!?」』）】〉》”’\"')\]]*\s*"
)
_SPACE = re.compile(r"\s+")
# The end of a text whose last letter is Chinese or Japanese (or that has nothing but their signs).
_UNSPACED_END = re.compile(r"[\u3001-\u30ff\u3400-\u9fff\uff00-\uffef\U00020000-\U0003ffff]\W*$")
_MOST_WARNINGS = 10


@dataclass(frozen=True)
class Request:
    """A line to translate, with wishes of its own."""

    text: str
    prefix: str = ""
    """What the translation must begin with."""
    number: int = 0
    """The line's number, for messages and for the random numbers of sampling; 0: its place in the
    stream, from 1.
    """


@dataclass(frozen=True)
class Translation:
    """One translation of one line."""

    text: str
    score: float
    """What the search ranks by: log_prob / ((c + length) / (c + 1))^alpha (``DecodingConfig``), if
    no other penalty is on. Of a line that was translated in parts: the mean of theirs.
    """
    log_prob: float
    """Natural logarithm of the probability of all tokens, the end symbol included."""
    length: int
    """Tokens, the end symbol included (one for each part of a line that was translated in
    parts).
    """
    tokens: tuple[str, ...] = ()
    """As in the vocabulary, without the end symbol; between parts of a long line it is there:
    ``length - 1`` tokens.
    """
    token_log_probs: tuple[float, ...] = ()
    """Log-probability of each token given those before it, the end symbol's included: ``length``
    numbers.
    """


class _Part(NamedTuple):
    """What is searched at a time: a line, or a part of one that is too long."""

    line: int
    sentence: Sentence


class Translator:
    """A model (or several, whose probabilities are averaged), the tokenizer and the settings of the
    search.

    What a line becomes depends on the line and the settings alone, not on its neighbours.

    Attributes:
      engine: the search itself, over token ids, with its compiled shapes and counts.
      num_failed: how many lines came out empty because the search found nothing.
      num_split: how many lines were translated in parts.
    """

    def __init__(
        self,
        model: Transformer | Sequence[Transformer],
        tokenizer: Tokenizer,
        config: DecodingConfig | None = None,
        *,
        devices: Sequence[jax.Device] = (),
    ):
        """The rows of a batch are spread over ``devices``, which ``config.batch_size`` must divide
        over; without any the search runs where the parameters are.

        Raises:
          UserError: settings that do not go together, or not with the model; a model with another
            vocabulary; no usable ``config.shortlist``.
        """
        models = [model] if isinstance(model, Transformer) else list(model)
        check_tokenizer(tokenizer, models)
        self.tokenizer = tokenizer
        self.config = DecodingConfig() if config is None else config
        suppress, shortlist = check_decoding(self.config, tokenizer)
        positions = [
            each.config.max_positions for each in models if each.config.positions == "learned"
        ]
        self._longest_prefix = min(
            [self.config.max_extra_length, *(count - 1 for count in positions)]
        )
        if self.config.min_length > self._longest_prefix:
            raise UserError(
                f"decoding.min_length is {self.config.min_length}; expected less than model.max_positions = {min(positions)}, "
                "where this model's learned positions end."
            )
        self.engine = Engine(
            models, self.config, suppress=suppress, shortlist=shortlist, devices=devices
        )
        self.num_failed = self.num_split = 0

    @classmethod
    def from_workdir(
        cls,
        workdir: str | Path | Sequence[str | Path],
        *,
        checkpoint: Literal["last", "best"] | int | None = None,
        average: int | None = None,
        devices: Sequence[jax.Device] = (),
        **settings: Any,
    ) -> Translator:
        """The translator of a training run, or of several whose models decode as one; ``settings``
        replace fields of the (first) run's ``decoding`` config.

        ``checkpoint`` and ``average`` choose the parameters as in ``load_model``.

        Raises:
          UserError: runs with different tokenizers.
        """
        config, models, tokenizer = load_runs(workdir, checkpoint=checkpoint, average=average)
        return cls(
            models, tokenizer, dataclasses.replace(config.decoding, **settings), devices=devices
        )

    @property
    def parameters(self) -> Any:
        """The model's, as ``nnx.to_pure_dict`` gives them (of several models a tuple of those).

        Assign newer ones (a training loop's), or ``nnx.State``, to translate with those; nothing is
        compiled again.
        """
        return (
            self.engine.parameters if len(self.engine.parameters) > 1 else self.engine.parameters[0]
        )

    @parameters.setter
    def parameters(self, parameters: Any) -> None:
        self.engine.parameters = (
            (parameters,) if isinstance(parameters, Mapping) else tuple(parameters)
        )

    @property
    def models(self) -> list[Transformer]:
        """The models, with the parameters they have now."""
        return self.engine.models

    def translate(self, lines: Iterable[str | Request]) -> list[str]:
        """The best translation of each line; for an empty line an empty one. Raises as ``stream``
        does.
        """
        return [translations[0].text for translations in self.stream(lines)]

    def stream(
        self, lines: Iterable[str | Request], *, num_hypotheses: int = 1, window: int | None = None
    ) -> Iterator[list[Translation]]:
        """For each line, in order, its ``num_hypotheses`` best translations, best first; at least
        one, fewer if no more exist.

        Holds ``window`` lines at a time (default: 100 batches). An empty line gives one empty
        translation, and so does a line for which the search finds none (with a warning and scores
        of NaN; see ``num_failed``). A line of more than ``config.max_source_length`` tokens, the
        end symbol included, is translated in parts, with a warning.

        Raises:
          UserError: at the call, ``lines`` that are a single one, or a number out of range; later,
            a prefix with tokens that the vocabulary lacks, or longer than the translation may be
            (with its line).
        """
        if isinstance(lines, str | Request):
            raise UserError(
                f"lines is {lines!r}; expected several lines, such as a list of this one."
            )
        check_window(window)
        if not 1 <= num_hypotheses <= self.config.beam_size:
            raise UserError(
                f"num_hypotheses is {num_hypotheses}; expected 1 to decoding.beam_size = {self.config.beam_size}."
            )
        return self._stream(iter(lines), num_hypotheses, window)

    def _stream(
        self, lines: Iterator[str | Request], num_hypotheses: int, window: int | None
    ) -> Iterator[list[Translation]]:
        first = 1
        while block := list(islice(lines, window or 100 * self.config.batch_size)):
            requests = [Request(line) if isinstance(line, str) else line for line in block]
            numbered = [
                r if r.number else dataclasses.replace(r, number=number)
                for number, r in enumerate(requests, first)
            ]
            yield from self._translate(numbered, num_hypotheses)
            first += len(block)

    def _translate(
        self, requests: list[Request], num_hypotheses: int
    ) -> Iterator[list[Translation]]:
        parts = list(self._parts(requests))
        found = self.engine.search([part.sentence for part in parts], num_hypotheses=num_hypotheses)
        of_line: list[list[list[Translation]]] = [[] for _ in requests]
        for part, hypotheses in zip(parts, found, strict=True):
            of_line[part.line].append([self._translation(hypothesis) for hypothesis in hypotheses])
        for request, its_parts in zip(requests, of_line, strict=True):
            if not all(its_parts):
                self.num_failed += 1
                warn_first(
                    self.num_failed,
                    "Line %d: the search found no translation; its output is empty.",
                    request.number,
                )
            yield self._join(its_parts)

    def _parts(self, requests: list[Request]) -> Iterator[_Part]:
        room = self.engine.longest_source - 1  # the end symbol takes one position
        encoded = self.tokenizer.encode_source([request.text for request in requests])
        for line, (request, tokens) in enumerate(zip(requests, encoded, strict=True)):
            prefix = self.prefix_tokens(request)
            if not request.text.strip():
                continue
            parts = [tokens] if len(tokens) <= room else self._split(request.text, room)
            if len(parts) > 1:
                self.num_split += 1
                said = "Line %d has %d tokens; more than %d are translated in parts, here %d."
                warn_first(self.num_split, said, request.number, len(tokens), room, len(parts))
            for index, part in enumerate(part for part in parts if part):
                seed = (request.number + 1_000_003 * index) % 2**32
                yield _Part(line, Sentence(part, prefix if index == 0 else [], seed))

    def _translation(self, hypothesis: Hypothesis) -> Translation:
        return Translation(
            self.tokenizer.decode_target(hypothesis.tokens),
            hypothesis.score,
            hypothesis.log_prob,
            len(hypothesis.tokens) + 1,
            tuple(self.tokenizer.target_tokens(hypothesis.tokens)),
            tuple(hypothesis.token_log_probs),
        )

    def prefix_tokens(self, request: Request) -> list[int]:
        """The tokens that the request forces, checked: ``UserError`` with its number as ``stream``
        tells.
        """
        [prefix] = self.tokenizer.encode_target([request.prefix])
        if UNK_ID in prefix:
            said = " ".join(self.tokenizer.target_tokens(prefix))
            raise UserError(
                f"Line {request.number}: prefix {request.prefix!r} has tokens that the vocabulary lacks ({said}); leave them "
                "out."
            )
        if len(prefix) > self._longest_prefix:
            raise UserError(
                f"Line {request.number}: prefix {request.prefix!r} has {len(prefix)} tokens; expected at most "
                f"{self._longest_prefix} (decoding.max_extra_length, or one less than model.max_positions of learned ones)."
            )
        return prefix

    def _split(self, line: str, room: int) -> list[list[int]]:
        """Parts of at most ``room`` tokens: as many whole sentences as fit; an over-long sentence
        ends anywhere between words, and an over-long word anywhere. A tag that the line begins with
        goes before each part.
        """
        tag, rest = self.tokenizer.source_tag(line)
        if len(tag) <= room // 2:  # otherwise it is no tag, whatever it is
            line, room = rest, room - len(tag)
        else:
            tag = []
        texts, tokens = [""], list[list[int]]([[]])
        for text, its_tokens in self._units(line, room):
            if len(tokens[-1]) + len(its_tokens) > room:
                texts.append("")
                tokens.append([])
            texts[-1] += text
            tokens[-1] += its_tokens
        # As one text a part has its own tokens, as a rule no more: a sentence that no space
        # precedes begins with one for it.
        whole = self.tokenizer.encode_source([text.strip() for text in texts])
        return [
            tag + (part if len(part) <= room else units)
            for part, units in zip(whole, tokens, strict=True)
        ]

    def _units(self, text: str, room: int) -> Iterator[tuple[str, list[int]]]:
        """``text`` cut as seldom as possible, so that each token of it, encoded by itself, has at
        most ``room`` tokens.
        """
        [tokens] = self.tokenizer.encode_source([text.strip()])
        if len(tokens) <= room or len(text) == 1:
            yield text, tokens[:room]
            return
        for places in (_SENTENCE_END.finditer(text), _SPACE.finditer(text)):
            ends = [place.end() for place in places if place.end() < len(text)]
            if ends:
                break
        else:
            ends = [len(text) // 2]
        for start, end in pairwise([0, *ends, len(text)]):
            yield from self._units(text[start:end], room)

    def _join(self, parts: list[list[Translation]]) -> list[Translation]:
        """The first-best of the parts as one line, then the second-best, as far as every part has
        one.
        """
        if len(parts) == 1 and parts[0]:
            return parts[0]
        joined = []
        for hypotheses in zip(*parts, strict=False):
            length = sum(hypothesis.length for hypothesis in hypotheses)
            log_prob = sum(hypothesis.log_prob for hypothesis in hypotheses)
            text = ""
            for hypothesis in hypotheses:
                text += (joint(text) if hypothesis.text else "") + hypothesis.text
            # so the best stay first
            score = sum(hypothesis.score for hypothesis in hypotheses) / len(hypotheses)
            tokens = tuple(
                token for hypothesis in hypotheses for token in (*hypothesis.tokens, "</s>")
            )[:-1]
            token_log_probs = tuple(
                x for hypothesis in hypotheses for x in hypothesis.token_log_probs
            )
            joined.append(Translation(text, score, log_prob, length, tokens, token_log_probs))
        unknown = math.nan if parts else 0.0  # nothing found; or nothing to translate
        return joined or [Translation("", unknown, unknown, 0)]


def load_runs(
    workdir: str | Path | Sequence[str | Path],
    *,
    checkpoint: Literal["last", "best"] | int | None,
    average: int | None,
) -> tuple[Config, list[Transformer], Tokenizer]:
    """Config and tokenizer of the first run, and the models of all. ``UserError`` for runs with
    different tokenizers.
    """
    workdirs = [workdir] if isinstance(workdir, str | Path) else list(workdir)
    loaded = [
        load_model(local_workdir(each), checkpoint=checkpoint, average=average) for each in workdirs
    ]
    config, _, tokenizer = loaded[0]
    for other, (_, _, its_tokenizer) in zip(workdirs, loaded, strict=True):
        if its_tokenizer.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{str(other)!r} has another vocabulary than {str(workdirs[0])!r}; expected models that were trained with "
                "the same tokenizer (train.py --tokenizer.model, --tokenizer.target-model)."
            )
    return config, [model for _, model, _ in loaded], tokenizer


def check_tokenizer(tokenizer: Tokenizer, models: Sequence[Transformer]) -> None:
    """``UserError`` unless every model has as many source and target tokens as the tokenizer."""
    tokens = tokenizer.source_vocab_size, tokenizer.target_vocab_size
    for model in models:
        rows = model.config.source_vocab_size or model.config.vocab_size, model.config.vocab_size
        if tokens != rows:
            raise UserError(
                f"The tokenizer has {tokens} source and target tokens, the model {rows}; expected those of one training run."
            )


def check_window(window: int | None) -> None:
    """``UserError`` unless so many lines can be held at a time."""
    if window is not None and window < 1:
        raise UserError(f"window is {window}; expected 1 or more.")


def joint(before: str) -> str:
    """What stands between a part of a translation and the next one: a space, but not after Chinese
    or Japanese.
    """
    return "" if not before or _UNSPACED_END.search(before) else " "


def warn_first(count: int, message: str, *arguments: Any) -> None:
    """Log the warning if it is one of the first few of its kind; a large file may have thousands,
    and the counts are there.
    """
    if count <= _MOST_WARNINGS:
        logger.warning(
            message + (" (Further ones are only counted.)" if count == _MOST_WARNINGS else ""),
            *arguments,
        )
