"""Text in, text out: lines are grouped by length, searched in batches of few fixed shapes, and put back in order."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.beam_search import SearchResult, beam_search, length_divisor
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import DecoderCache, Transformer
from transformer_jax.saved_model import load_model
from transformer_jax.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer

logger = logging.getLogger(__name__)

_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])\s*")


@dataclass(frozen=True)
class Translation:
    """One translation of one line."""

    text: str
    score: float
    """log_prob / ((5 + length) / 6)^alpha: what the search ranks by."""
    log_prob: float
    """Natural logarithm of the probability of all pieces, the end symbol included."""
    length: int
    """Pieces, the end symbol included."""


@dataclass
class _Part:
    """What is searched at a time: a line, or a part of one that is too long."""

    line: int
    pieces: list[int]
    hypotheses: list[Translation] = field(default_factory=list)


class Translator:
    """A model, its tokenizer and the settings of the search.

    What a line becomes depends on the line and the settings alone: it is searched in the shape for its own length, and the
    rows of a batch do not touch. Each shape (``config.batch_size`` rows of one of ``lengths``) is compiled once.

    Attributes:
      parameters: the model's, as ``nnx.to_pure_dict`` gives them. Assign newer ones (a training loop's) to translate with
        those; nothing is compiled again.
      lengths: source lengths, end symbol included, that shapes are made for.
      num_compiled: how many shapes have been compiled so far.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: DecodingConfig | None = None,
        *,
        batch_sharding: jax.sharding.Sharding | None = None,
    ):
        """With ``batch_sharding`` the rows of a batch are spread over devices, which ``config.batch_size`` must divide over.

        Without it every device that holds the parameters does the whole work.
        """
        self.tokenizer = tokenizer
        self.config = DecodingConfig() if config is None else config
        self.batch_sharding = batch_sharding
        self._graph, state = nnx.split(model, nnx.Param)
        self.parameters = nnx.to_pure_dict(state)
        self._check(model)
        # Learned positions end somewhere.
        self._max_positions = model.config.max_positions if model.config.positions == "learned" else None
        self.lengths = _source_lengths(min(filter(None, (self.config.max_source_length, self._max_positions))))
        self.num_compiled = 0
        self._search = jax.jit(self._search_batch, static_argnames="num_hypotheses")

    @classmethod
    def from_workdir(
        cls,
        workdir: str | Path,
        *,
        checkpoint: Literal["last", "best"] | int = "last",
        average: int | None = None,
        **settings: Any,
    ) -> Translator:
        """The translator of a training run; ``settings`` replace fields of its ``decoding`` config.

        ``checkpoint`` and ``average`` choose the parameters as in ``load_model``.
        """
        config, model, tokenizer = load_model(workdir, checkpoint=checkpoint, average=average)
        return cls(model, tokenizer, dataclasses.replace(config.decoding, **settings))

    def translate(self, lines: Iterable[str]) -> list[str]:
        """The best translation of each line; for an empty line an empty one."""
        return [translations[0].text for translations in self.stream(lines)]

    def stream(
        self, lines: Iterable[str], *, num_hypotheses: int = 1, window: int | None = None
    ) -> Iterator[list[Translation]]:
        """For each line, in order, its ``num_hypotheses`` best translations, best first; at least one, fewer if no more exist.

        Holds ``window`` lines at a time (default: 100 batches). An empty line gives one empty translation. A line of more than
        ``config.max_source_length`` pieces is translated in parts, with a warning.
        """
        if not 1 <= num_hypotheses <= self.config.beam_size:
            raise UserError(f"num_hypotheses is {num_hypotheses}; expected 1 to decoding.beam_size = {self.config.beam_size}.")
        lines, first = iter(lines), 1
        while block := list(islice(lines, window or 100 * self.config.batch_size)):
            yield from self._translate(block, first, num_hypotheses)
            first += len(block)

    def _translate(self, lines: list[str], first: int, num_hypotheses: int) -> Iterator[list[Translation]]:
        parts = list(self._parts(lines, first))
        # The device gets all batches before the first result is waited for.
        running = [(batch, self._start(batch, length, num_hypotheses)) for length, batch in self._batches(parts)]
        for batch, result in running:
            fields = [np.asarray(values) for values in result]
            for part, *row in zip(batch, *fields, strict=False):  # the rows left over are padding
                part.hypotheses = self._hypotheses(*row)
        of_line: list[list[_Part]] = [[] for _ in lines]
        for part in parts:
            of_line[part.line].append(part)
        for number, its_parts in enumerate(of_line, first):
            if not all(part.hypotheses for part in its_parts):
                logger.warning("Line %d: the search found no translation; its output is empty.", number)
            yield self._join([part.hypotheses for part in its_parts])

    def _parts(self, lines: list[str], first: int) -> Iterator[_Part]:
        room = self.lengths[-1] - 1  # the end symbol takes one position
        for number, (line, pieces) in enumerate(zip(lines, self.tokenizer.encode_source(lines), strict=True)):
            if not line.strip():
                continue
            parts = [pieces] if len(pieces) <= room else self._split(line, room)
            if len(parts) > 1:
                logger.warning(
                    "Line %d has %d pieces; more than %d are translated in parts, here %d.",
                    first + number,
                    len(pieces),
                    room,
                    len(parts),
                )
            yield from (_Part(number, part) for part in parts if part)

    def _split(self, line: str, room: int) -> list[list[int]]:
        """Parts of at most ``room`` pieces: as many whole sentences as fit; an over-long sentence ends anywhere between words,
        and an over-long word anywhere."""
        units: list[list[int]] = []
        sentences = _SENTENCE_END.split(line)
        for sentence, pieces in zip(sentences, self.tokenizer.encode_source(sentences), strict=True):
            if len(pieces) <= room:
                units.append(pieces)
                continue
            for word in self.tokenizer.encode_source(sentence.split()):
                units += [word[start : start + room] for start in range(0, len(word), room)]
        parts: list[list[int]] = [[]]
        for unit in units:
            if len(parts[-1]) + len(unit) > room:
                parts.append([])
            parts[-1] += unit
        return parts

    def _batches(self, parts: list[_Part]) -> Iterator[tuple[int, list[_Part]]]:
        """(source length, at most ``batch_size`` parts of that shape), the longest first."""
        shapes: dict[int, list[_Part]] = {length: [] for length in self.lengths}
        for part in sorted(parts, key=lambda part: -len(part.pieces)):
            shapes[next(length for length in self.lengths if len(part.pieces) < length)].append(part)
        for length in reversed(self.lengths):
            for start in range(0, len(shapes[length]), self.config.batch_size):
                yield length, shapes[length][start : start + self.config.batch_size]

    def _start(self, batch: list[_Part], length: int, num_hypotheses: int) -> SearchResult:
        """Hand a batch to the device. Rows that are missing are padding, which ends at once."""
        source_BS = np.full((self.config.batch_size, length), PAD_ID, np.int32)
        for row, part in zip(source_BS, batch, strict=False):
            row[: len(part.pieces) + 1] = [*part.pieces, EOS_ID]
        on_device = jax.device_put(source_BS, self.batch_sharding) if self.batch_sharding else source_BS
        return self._search(self.parameters, on_device, num_hypotheses=num_hypotheses)

    def _search_batch(self, parameters: Any, source_BS: jax.Array, *, num_hypotheses: int) -> SearchResult:
        batch_size, source_length = source_BS.shape
        self.num_compiled += 1  # this runs when a shape is traced, which is once
        logger.info("Compiling the search for %d sentences of up to %d pieces.", batch_size, source_length)
        model = nnx.merge(self._graph, parameters)
        mask_BS = source_BS != PAD_ID
        lengths_B = mask_BS.sum(axis=1)
        max_length = source_length + self.config.max_extra_length
        if self._max_positions is not None:
            max_length = min(max_length, self._max_positions)
        cache = model.start_cache(model.encode(source_BS), mask_BS, beam_size=self.config.beam_size, max_length=max_length)
        return beam_search(
            model.decode_step,
            cache,
            batch_size=batch_size,
            beam_size=self.config.beam_size,
            max_length=max_length,
            max_lengths_B=jnp.where(lengths_B == 0, 0, lengths_B + self.config.max_extra_length),
            length_penalty=self.config.length_penalty,
            num_hypotheses=num_hypotheses,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=PAD_ID,
            reorder=DecoderCache.reorder,
        )

    def _hypotheses(
        self, tokens_NL: np.ndarray, scores_N: np.ndarray, log_probs_N: np.ndarray, lengths_N: np.ndarray
    ) -> list[Translation]:
        return [
            Translation(self.tokenizer.decode_target(tokens[:length].tolist()), float(score), float(log_prob), int(length))
            for tokens, score, log_prob, length in zip(tokens_NL, scores_N, log_probs_N, lengths_N, strict=True)
            if length
        ]

    def _join(self, parts: list[list[Translation]]) -> list[Translation]:
        """The first-best of the parts as one line, then the second-best, as far as every part has one."""
        if len(parts) == 1 and parts[0]:
            return parts[0]
        joined = []
        for hypotheses in zip(*parts, strict=False):
            length = sum(hypothesis.length for hypothesis in hypotheses)
            log_prob = sum(hypothesis.log_prob for hypothesis in hypotheses)
            text = " ".join(hypothesis.text for hypothesis in hypotheses if hypothesis.text)
            score = log_prob / float(length_divisor(length, self.config.length_penalty))
            joined.append(Translation(text, score, log_prob, length))
        return joined or [Translation("", 0.0, 0.0, 0)]

    def _check(self, model: Transformer) -> None:
        config, tokenizer = model.config, self.tokenizer
        pieces = tokenizer.source_vocab_size, tokenizer.target_vocab_size
        rows = config.source_vocab_size or config.vocab_size, config.vocab_size
        if pieces != rows:
            raise UserError(
                f"The tokenizer has {pieces} source and target pieces, the model {rows}; expected those of one training run."
            )
        if self.config.beam_size > config.vocab_size:
            raise UserError(
                f"decoding.beam_size is {self.config.beam_size}; expected at most {config.vocab_size}, the pieces there are."
            )


def _source_lengths(longest: int) -> tuple[int, ...]:
    """16, 24, 32, 48, 64, 96, ... and the longest."""
    steps = (width << i for i in range(longest.bit_length()) for width in (16, 24))
    return (*(length for length in steps if length < longest), longest)
