"""What decode.py does: read a block of lines, translate or score it, write it, until the end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeAlias

from transformer_jax.cli import parse_shard
from transformer_jax.compilation_cache import keep_compiled
from transformer_jax.config import Config
from transformer_jax.data.sources import read_lines
from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.decoding.flags import Arguments
from transformer_jax.decoding.output_file import open_output
from transformer_jax.decoding.records import OutputFormat, Record, Records
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.trained_models import blocks
from transformer_jax.decoding.translator import Translation, Translator
from transformer_jax.errors import UserError
from transformer_jax.evaluation import (
    check_bleu_language,
    check_bleu_tokenizer,
    check_pairs,
    evaluate,
)
from transformer_jax.model.layers import use_matmul_precision
from transformer_jax.storage import kind_of, to_path

logger = logging.getLogger(__name__)

Answer: TypeAlias = tuple[Record, list[Translation]]

_SECONDS_BETWEEN_REPORTS = 60


def run_job(arguments: Arguments, config: Config) -> None:
    """Do what the flags ask for; ``config`` is the first run's.

    Raises:
        UserError: the flags do not fit the model, or the input has a fault. What comes before a
            fault in a stream is written.
        OSError: a file cannot be read or written.
    """
    keep_compiled(arguments.compilation_cache)
    use_matmul_precision(config.model)
    asked = arguments.evaluation
    tokenize = asked.bleu_tokenize or config.training.bleu_tokenize
    language = asked.bleu_language or config.training.bleu_language
    if asked.reference is not None:  # before hours of work
        check_bleu_tokenizer(tokenize)
        check_bleu_language(language)
    job = _Job(arguments)
    records, references = job.open_records()
    start = time.perf_counter()
    best = job.write_answers(records, keep_best=references is not None)
    job.report(time.perf_counter() - start)
    if references is not None:
        print(evaluate(best, references, tokenize=tokenize, language=language), file=sys.stderr)


class _Job:
    """The flags, and the models that they ask for.

    Attributes:
      models: what came from the work directories.
      translator: that, unless targets are scored.
      scorer: that, if targets are scored; with alignments another one of the same models.
    """

    def __init__(self, arguments: Arguments):
        self.files, self.results = arguments.files, arguments.results
        self.evaluation, search = arguments.evaluation, arguments.search
        self.shard = parse_shard(self.files.shard) if self.files.shard else (0, 1)
        scoring, jsonl = self.evaluation.score is not None, self.files.format == "jsonl"
        self.format = OutputFormat(
            self.files.format,
            nbest=1 if scoring else self.results.nbest,
            scores=scoring,
            token_scores=self.results.token_scores or (scoring and jsonl),
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
        self.translator = models if isinstance(models, Translator) else None
        self.scorer = models if isinstance(models, Scorer) else None
        if self.results.alignments and isinstance(models, Translator):
            self.scorer = Scorer(models.models, models.tokenizer, models.config, devices=devices)
        if self.results.alignments and self.scorer is not None:
            self.scorer.check_layer(self.results.alignment_layer)

    def open_records(self) -> tuple[Iterable[Record], list[str] | None]:
        """The input, and its reference translations.

        A file is read to its end, so that its faults show before any work; a stream is held in
        memory if that is to be done.
        """
        files, reference, target = self.files, self.evaluation.reference, self.evaluation.score
        source = files.input or sys.stdin.buffer
        records: Iterable[Record] = Records(
            source, files.format, files.text_field, self.shard, target
        )
        if isinstance(source, str) and kind_of(to_path(source)) != "other":
            count = sum(1 for _ in self._checked(records))
        elif reference is None and target is None:
            return self._checked(records), None
        else:
            records = list(self._checked(records))
            count = len(records)
        if reference is None:
            return records, None
        references = list(islice(read_lines(reference), self.shard[0], None, self.shard[1]))
        check_pairs(range(count), references)
        return records, references

    def write_answers(self, records: Iterable[Record], *, keep_best: bool) -> list[str]:
        """Read a block, answer it, write it; returns the best texts if they are to be kept."""
        files, window, best = self.files, 1 if self.files.one_by_one else self.files.window, []
        start = reported = time.perf_counter()
        numbered = self.format.lines_per_sentence > 1
        with open_output(files.output, resume=files.resume, numbered=numbered) as (write, kept):
            if kept and keep_best:
                raise UserError(
                    f"{files.output} has {kept} sentences already, and --reference needs all in "
                    "one run; leave --resume or --reference out."
                )
            done = kept
            for block in self.models.blocks(_skip(records, kept, files.output), window):
                for record, translations in self._answers(block):
                    write(self.format.lines(record, translations))
                    if keep_best:
                        best.append(translations[0].text)
                done += len(block)
                if time.perf_counter() - reported > _SECONDS_BETWEEN_REPORTS:
                    reported = time.perf_counter()
                    logger.info("%d lines in %.0f s.", done - kept, reported - start)
        return best

    def _checked(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records; ``UserError`` at one whose prefix cannot be forced."""
        for record in records:
            if record.prefix and self.translator is not None:
                self.translator.prefix_tokens(record)
            yield record

    def _answers(self, block: list[Record]) -> Iterable[Answer]:
        """Each record with its translations, best first, or its scored target; with alignments if
        they are asked for.
        """
        if self.translator is not None:
            nbest, window = self.format.nbest, len(block)
            translations = list(self.translator.stream(block, num_hypotheses=nbest, window=window))
        else:
            assert self.scorer is not None
            pairs = [(record.text, record.target) for record in block]
            numbers = [record.number for record in block]
            translations = [[scored] for scored in self.scorer.score(pairs, numbers=numbers)]
        answers = zip(block, translations, strict=True)
        return self._aligned(answers) if self.results.alignments else answers

    def _aligned(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        assert self.scorer is not None
        for some in blocks(answers, self.scorer.config.batch_size):  # weights take much memory
            pairs = [(record.text, t) for record, translations in some for t in translations]
            aligned = iter(self.scorer.align(pairs, layer=self.results.alignment_layer))
            for record, translations in some:
                yield record, list(islice(aligned, len(translations)))

    def report(self, seconds: float) -> None:
        """Log what did not go as it should, and how long it took."""
        counts, compiled = list[tuple[int, str]](), 0
        if self.translator is not None:
            compiled += self.translator.engine.num_compiled
            empty = "lines could not be translated; their output is empty"
            counts.append((self.translator.num_failed, empty))
            counts.append((self.translator.num_split, "lines were translated in segments"))
        if self.scorer is not None:
            compiled += self.scorer.num_compiled
            unscored = "lines were too long to be scored; their figure is nan"
            counts.append((self.scorer.num_failed, unscored))
        for count, what in counts:
            if count:
                logger.warning("%d %s.", count, what)
        logger.info("%.1f s; functions compiled: %d.", seconds, compiled)


def _skip(records: Iterable[Record], count: int, output: str | None) -> Iterator[Record]:
    """The records after the ``count`` whose output is there already."""
    if count:
        logger.info("%d sentences were there already.", count)
    records = iter(records)
    if (skipped := sum(1 for _ in islice(records, count))) < count:
        raise UserError(
            f"{output} has {count} sentences already, the input only {skipped}; "
            "expected the same input again."
        )
    return records
