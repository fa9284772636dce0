"""Text in, text out: one translation for every line, in the order of the lines."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import jax

from transformer_jax.checkpoint import load_model
from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.engine import Engine, Hypothesis, Sentence, check_decoding
from transformer_jax.decoding.segments import joint, split
from transformer_jax.errors import UserError, shown
from transformer_jax.model.transformer import Transformer
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.special_ids import UNK_ID
from transformer_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MOST_WARNINGS = 10


@dataclass(frozen=True)
class Request:
    """A line to translate, with options of its own."""

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
    no other penalty is on. Of a line that was translated in segments: the mean of theirs.
    """
    log_prob: float
    """Natural logarithm of the probability of all tokens, EOS included."""
    length: int
    """Tokens, EOS included (one for each segment of an over-long line)."""
    tokens: tuple[str, ...] = ()
    """As in the vocabulary, without EOS; between segments of an over-long line it is there:
    ``length - 1`` tokens.
    """
    token_log_probs: tuple[float, ...] = ()
    """Log-probability of each token given those before it, EOS included: ``length`` numbers."""


class _Segment(NamedTuple):
    """What is searched at a time: a line, or a segment of one that is too long."""

    line: int
    sentence: Sentence


class TrainedModels:
    """What ``Translator`` and ``Scorer`` share: the models of one or several training runs.

    Attributes:
      num_damaged: how many damaged checkpoints older ones were used for.
    """

    config: DecodingConfig
    num_damaged = 0

    @classmethod
    def from_workdir(
        cls,
        workdir: str | Path | Sequence[str | Path],
        *,
        checkpoint: Literal["last", "best"] | int | None = None,
        average: int | None = None,
        strict: bool = False,
        devices: Sequence[jax.Device] = (),
        **settings: Any,
    ) -> Self:
        """The models of a training run, or of several that work as one.

        ``workdir`` is a folder or a URL; ``settings`` replace fields of the (first) run's
        ``decoding`` config; ``checkpoint``, ``average`` and ``strict`` choose the parameters as in
        ``load_model``.

        Raises:
          UserError: runs with different tokenizers; as ``load_model`` and the constructor.
        """
        workdirs = [workdir] if isinstance(workdir, str | Path) else list(workdir)
        choice: dict[str, Any] = {"average": average, "checkpoint": checkpoint, "strict": strict}
        damaged = set[Path]()
        loaded = [load_model(local_workdir(each), **choice, damaged=damaged) for each in workdirs]
        config, _, tokenizer = loaded[0]
        for other, (_, _, its_tokenizer) in zip(workdirs, loaded, strict=True):
            if its_tokenizer.fingerprint != tokenizer.fingerprint:
                raise UserError(
                    f"{str(other)!r} has another vocabulary than {str(workdirs[0])!r}; expected "
                    "models that were trained with the same tokenizer (train.py --tokenizer.model, "
                    "--tokenizer.target-model)."
                )
        models = [model for _, model, _ in loaded]
        decoding = dataclasses.replace(config.decoding, **settings)
        found = cls(models, tokenizer, decoding, devices=devices)  # type: ignore[call-arg]
        found.num_damaged = len(damaged)
        return found

    def numbered_blocks(
        self, items: Iterable[T], window: int | None
    ) -> Iterator[tuple[range, list[T]]]:
        """``window`` items (default: 100 batches) with their numbers from 1, and again."""
        items, size = iter(items), window or 100 * self.config.batch_size
        first = 1
        while block := list(islice(items, size)):
            yield range(first, first + len(block)), block
            first += len(block)


class Translator(TrainedModels):
    """A model (or several, whose probabilities are averaged), its tokenizer and search settings.

    A line's translation depends on the line and the settings alone, not on its neighbours.

    Attributes:
      engine: the search itself, over token ids, with its compiled shapes and counts.
      num_failed: how many lines came out empty because the search found nothing.
      num_split: how many lines were translated in segments.
    """

    def __init__(
        self,
        models: Transformer | Sequence[Transformer],
        tokenizer: Tokenizer,
        config: DecodingConfig | None = None,
        *,
        devices: Sequence[jax.Device] = (),
    ):
        """The rows of a batch are spread over ``devices``, which must divide ``config.batch_size``;
        without any the search runs where the parameters are.

        Raises:
          UserError: settings that do not go together, or not with the model; a model with another
            vocabulary; no usable ``config.shortlist``.
        """
        models = checked_models(models, tokenizer)
        self.tokenizer = tokenizer
        self.config = DecodingConfig() if config is None else config
        suppress, shortlist = check_decoding(self.config, tokenizer)
        positions = [m.config.max_positions for m in models if m.config.positions == "learned"]
        self._longest_prefix = min(
            [self.config.max_extra_length, *(count - 1 for count in positions)]
        )
        if self.config.min_length > self._longest_prefix:
            raise UserError(
                f"decoding.min_length is {self.config.min_length}; expected less than "
                f"model.max_positions = {min(positions)}, where this model's learned positions end."
            )
        self.engine = Engine(
            models, self.config, suppress=suppress, shortlist=shortlist, devices=devices
        )
        self.num_failed = self.num_split = 0

    def __repr__(self) -> str:
        count = len(self.engine.parameters)
        number = sum(leaf.size for leaf in jax.tree.leaves(self.engine.parameters))
        sampling = self.config.method == "sample"
        return (
            f"Translator({count} model{'s' * (count != 1)}, {number:,} parameters, "
            f"{self.tokenizer.source_vocab_size:,} source and "
            f"{self.tokenizer.target_vocab_size:,} target tokens, "
            f"{'sampling' if sampling else f'beam of {self.config.beam_size}'})"
        )

    @property
    def parameters(self) -> Any:
        """The model's, as ``nnx.to_pure_dict`` gives them (of several models a tuple of those).

        Assign newer ones (a training loop's), or ``nnx.State``, to translate with those; nothing is
        compiled again.
        """
        all_of_them = self.engine.parameters
        return all_of_them if len(all_of_them) > 1 else all_of_them[0]

    @parameters.setter
    def parameters(self, parameters: Any) -> None:
        one = isinstance(parameters, Mapping)
        self.engine.parameters = (parameters,) if one else tuple(parameters)

    @property
    def models(self) -> list[Transformer]:
        """The models, with the parameters they have now."""
        return self.engine.models

    def translate(self, lines: Iterable[str | Request]) -> list[str]:
        """The best translation of each line; an empty line gives an empty one. Raises as ``stream``
        does.
        """
        return [translations[0].text for translations in self.stream(lines)]

    def stream(
        self, lines: Iterable[str | Request], *, num_hypotheses: int = 1, window: int | None = None
    ) -> Iterator[list[Translation]]:
        """For each line, in order, its ``num_hypotheses`` best translations, best first; at least
        one, fewer if no more exist.

        Reads and translates ``window`` lines at a time (default: 100 batches). An empty line gives
        one empty translation, and so does a line for which the search finds none (with a warning
        and scores of NaN; see ``num_failed``). A line of more than ``config.max_source_length``
        tokens, EOS included, is translated in segments, with a warning.

        Raises:
          UserError: at the call, ``lines`` that are a single one, or a number out of range; later,
            with its number, a line that is no text, or a prefix with tokens that the vocabulary
            lacks or longer than the translation may be.
        """
        if isinstance(lines, str | bytes | Request):
            raise UserError(
                f"lines is {shown(lines)}; expected several lines, such as a list of this one."
            )
        check_window(window)
        if not 1 <= num_hypotheses <= self.config.beam_size:
            raise UserError(
                f"num_hypotheses is {num_hypotheses}; "
                f"expected 1 to decoding.beam_size = {self.config.beam_size}."
            )
        return self._stream(lines, num_hypotheses, window)

    def _stream(
        self, lines: Iterable[str | Request], num_hypotheses: int, window: int | None
    ) -> Iterator[list[Translation]]:
        for numbers, block in self.numbered_blocks(lines, window):
            requests = list(map(_numbered_request, block, numbers))
            yield from self._translate(requests, num_hypotheses)

    def _translate(
        self, requests: list[Request], num_hypotheses: int
    ) -> Iterator[list[Translation]]:
        segments = list(self._segments(requests))
        sentences = [segment.sentence for segment in segments]
        found = self.engine.search(sentences, num_hypotheses=num_hypotheses)
        of_line: list[list[list[Translation]]] = [[] for _ in requests]
        for segment, hypotheses in zip(segments, found, strict=True):
            of_line[segment.line].append([self._translation(each) for each in hypotheses])
        for request, its_segments in zip(requests, of_line, strict=True):
            if not all(its_segments):
                self.num_failed += 1
                warn_first(
                    self.num_failed,
                    "Line %d: the search found no translation; its output is empty.",
                    request.number,
                )
            yield _join(its_segments)

    def _segments(self, requests: list[Request]) -> Iterator[_Segment]:
        limit = self.engine.longest_source - 1  # EOS takes one position
        encoded = self.tokenizer.encode_source([request.text for request in requests])
        for line, (request, tokens) in enumerate(zip(requests, encoded, strict=True)):
            prefix = self.prefix_tokens(request)
            if not request.text.strip():
                continue
            segments = (
                [tokens] if len(tokens) <= limit else split(request.text, limit, self.tokenizer)
            )
            if len(segments) > 1:
                self.num_split += 1
                said = "Line %d has %d tokens; more than %d are translated in segments, here %d."
                warn_first(self.num_split, said, request.number, len(tokens), limit, len(segments))
            for index, segment in enumerate(filter(None, segments)):
                seed = (request.number + 1_000_003 * index) % 2**32
                yield _Segment(line, Sentence(segment, prefix if index == 0 else [], seed))

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
        """The token ids that the request forces; ``UserError`` if that cannot be done."""
        [prefix] = self.tokenizer.encode_target([request.prefix])
        said = f"Line {request.number}: prefix {shown(request.prefix)}"
        if UNK_ID in prefix:
            raise UserError(
                f"{said} has tokens that the vocabulary lacks "
                f"({' '.join(self.tokenizer.target_tokens(prefix))}); leave them out."
            )
        if len(prefix) > self._longest_prefix:
            raise UserError(
                f"{said} has {len(prefix)} tokens; expected at most {self._longest_prefix} "
                "(decoding.max_extra_length, or one less than model.max_positions of learned ones)."
            )
        return prefix


def _join(segments: list[list[Translation]]) -> list[Translation]:
    """The best of each segment as one line, then the second-best, while every segment has one."""
    if len(segments) == 1 and segments[0]:
        return segments[0]
    joined = []
    for hypotheses in zip(*segments, strict=False):
        text, tokens = "", list[str]()
        for hypothesis in hypotheses:
            text += (joint(text) if hypothesis.text else "") + hypothesis.text
            tokens += [*hypothesis.tokens, "</s>"]
        joined.append(
            Translation(
                text,
                # the mean, so the best stay first
                sum(hypothesis.score for hypothesis in hypotheses) / len(hypotheses),
                sum(hypothesis.log_prob for hypothesis in hypotheses),
                sum(hypothesis.length for hypothesis in hypotheses),
                tuple(tokens[:-1]),
                tuple(x for hypothesis in hypotheses for x in hypothesis.token_log_probs),
            )
        )
    unknown = math.nan if segments else 0.0  # nothing found; or nothing to translate
    return joined or [Translation("", unknown, unknown, 0)]


def _numbered_request(line: str | Request, place: int) -> Request:
    """The line as a request that has a number; ``UserError`` unless it is text."""
    request = line if isinstance(line, Request) else Request(line)
    if not request.number:
        request = dataclasses.replace(request, number=place)
    check_text(request.text, f"Line {request.number}")
    check_text(request.prefix, f"Line {request.number}: prefix")
    return request


def checked_models(
    models: Transformer | Sequence[Transformer], tokenizer: Tokenizer
) -> list[Transformer]:
    """The models; ``UserError`` unless each has as many tokens as the tokenizer."""
    models = [models] if isinstance(models, Transformer) else list(models)
    tokens = tokenizer.source_vocab_size, tokenizer.target_vocab_size
    for model in models:
        rows = model.config.source_vocab_size or model.config.vocab_size, model.config.vocab_size
        if tokens != rows:
            raise UserError(
                f"The tokenizer has {tokens} source and target tokens, the model {rows}; "
                "expected those of one training run."
            )
    return models


def check_window(window: int | None) -> None:
    """``UserError`` for fewer than one line at a time."""
    if window is not None and window < 1:
        raise UserError(f"window is {window}; expected 1 or more.")


def check_text(text: object, name: str) -> None:
    """``UserError`` unless ``text`` is a string of whole characters."""
    if not isinstance(text, str):
        raise UserError(f"{name} is {shown(text)}; expected text (a str).")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, written as \ud800
        raise UserError(f"{name} is not valid Unicode; expected whole characters.") from None


def warn_first(count: int, message: str, *arguments: Any) -> None:
    """Log the warning if its ``count`` is among the first few: a large file may have thousands."""
    if count <= _MOST_WARNINGS:
        last = " (Further ones are only counted.)" if count == _MOST_WARNINGS else ""
        logger.warning(message + last, *arguments)
