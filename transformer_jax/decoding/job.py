"""What decode.py does: read a block of lines, translate or score it, write it, until the end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TypeAlias

from transformer_jax.cli import parse_shard
from transformer_jax.compilation_cache import keep_compiled
from transformer_jax.config import Config
from transformer_jax.data.sources import read_lines
from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.decoding.flags import Arguments
from transformer_jax.decoding.output_file import open_output
from transformer_jax.decoding.records import OutputFormat, Record, read_records
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.trained_models import blocks
from transformer_jax.decoding.translator import Translation, Translator
from transformer_jax.errors import UserError
from transformer_jax.evaluation import (
    check_bleu_language,
    check_bleu_tokenizer,
    evaluate,
)
from transformer_jax.model.layers import use_matmul_precision

logger = logging.getLogger(__name__)

Answer: TypeAlias = tuple[Record, list[Translation]]

_SECONDS_BETWEEN_REPORTS = 60


def run_job(arguments: Arguments, config: Config) -> None:
    """Do what the flags ask for; ``config`` is the first run's.

    Raises:
        UserError: the flags do not fit the model, or the input has a fault. What comes before a
            fault is written.
        OSError: a file cannot be read or written.
    """
    keep_compiled(arguments.compilation_cache)
    use_matmul_precision(config.model)
    asked, files = arguments.evaluation, arguments.files
    tokenize = asked.bleu_tokenize or config.training.bleu_tokenize
    language = asked.bleu_language or config.training.bleu_language
    shard, references = parse_shard(files.shard) if files.shard else (0, 1), None
    if asked.reference is not None:
        check_bleu_tokenizer(tokenize)  # before hours of work
        check_bleu_language(language)
        references = list(islice(read_lines(asked.reference), shard[0], None, shard[1]))
    job = _Job(arguments)
    records = read_records(
        files.input or sys.stdin.buffer,
        files.format,
        files.text_field,
        shard=shard,
        targets=asked.score,
    )
    best = job.write_answers(records, keep_best=references is not None)
    job.report()
    if references is not None:
        print(evaluate(best, references, tokenize=tokenize, language=language), file=sys.stderr)


class _Job:
    """The flags, and the models that they ask for.

    Attributes:
      models: a scorer if targets are scored.
      aligner: the same models as a scorer, if alignments are asked for.
    """

    def __init__(self, arguments: Arguments):
        self.files, self.results = arguments.files, arguments.results
        search, scoring = arguments.search, arguments.evaluation.score is not None
        self.format = OutputFormat(
            self.files.format,
            nbest=1 if scoring else self.results.nbest,
            scores=scoring,
            token_scores=self.results.token_scores or scoring,
            alignments=self.results.alignments,
        )
        devices = devices_for_rows(search.batch_size)
        task = Scorer if scoring else Translator
        models: Translator | Scorer = task.from_workdir(
            arguments.workdir,
            checkpoint=arguments.checkpoint,
            average=arguments.average,
            devices=devices,
            **vars(search),
        )
        self.models = models
        self.aligner = models if isinstance(models, Scorer) else None
        if self.results.alignments and isinstance(models, Translator):
            self.aligner = Scorer(models.models, models.tokenizer, models.config, devices=devices)
        if self.results.alignments and self.aligner is not None:  # before an output is emptied
            self.aligner.align([], layer=self.results.alignment_layer)

    def write_answers(self, records: Iterator[Record], *, keep_best: bool) -> list[str]:
        """Read a block, answer it, write it; returns the best texts if they are to be kept."""
        files, window, best = self.files, 1 if self.files.one_by_one else self.files.window, []
        start = reported = time.perf_counter()
        numbered = self.format.lines_per_sentence > 1
        first = list(islice(records, 1))  # an input that cannot be read leaves the output as it is
        with open_output(files.output, resume=files.resume, numbered=numbered) as (write, kept):
            if kept and keep_best:
                raise UserError(
                    f"{files.output} has {kept} sentences already, and --reference needs all in "
                    "one run; leave --resume or --reference out."
                )
            done = 0
            left = map(self._checked, _skip(chain(first, records), kept, files.output))
            for block in self.models.blocks(left, window):
                for record, translations in self._answers(block):
                    write(self.format.lines(record, translations))
                    if keep_best:
                        best.append(translations[0].text)
                done += len(block)
                if time.perf_counter() - reported > _SECONDS_BETWEEN_REPORTS:
                    reported = time.perf_counter()
                    logger.info("%d lines in %.0f s.", done, reported - start)
            logger.info("%d lines in %.1f s.", done, time.perf_counter() - start)
        return best

    def _checked(self, record: Record) -> Record:
        """The record, unless its prefix cannot be forced: what comes before it is written first."""
        if record.prefix and isinstance(self.models, Translator):
            self.models.prefix_tokens(record)
        return record

    def _answers(self, block: list[Record]) -> Iterable[Answer]:
        """Each record with its translations, best first, or its scored target; with alignments if
        they are asked for.
        """
        if isinstance(self.models, Translator):
            translations = list(self.models.stream(block, num_hypotheses=self.format.nbest))
        else:
            scored = self.models.score((record.text, record.target) for record in block)
            translations = [[translation] for translation in scored]
        answers = zip(block, translations, strict=True)
        return self._aligned(answers) if self.results.alignments else answers

    def _aligned(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        assert self.aligner is not None
        for some in blocks(answers, self.aligner.config.batch_size):  # weights take much memory
            pairs = [(record.text, t) for record, translations in some for t in translations]
            aligned = iter(self.aligner.align(pairs, layer=self.results.alignment_layer))
            for record, translations in some:
                yield record, list(islice(aligned, len(translations)))

    def report(self) -> None:
        """Log what did not go as it should."""
        if isinstance(self.models, Translator):
            for count, what in (
                (self.models.num_failed, "could not be translated; their output is empty"),
                (self.models.num_split, "were translated in segments"),
            ):
                if count:
                    logger.warning("%d lines %s.", count, what)


def _skip(records: Iterator[Record], count: int, output: str | None) -> Iterator[Record]:
    """The records after the ``count`` whose output is there already."""
    if count:
        logger.info("%d sentences were there already.", count)
    if (skipped := sum(1 for _ in islice(records, count))) < count:
        raise UserError(
            f"{output} has {count} sentences already, the input only {skipped}; "
            "expected the same input again."
        )
    return records
