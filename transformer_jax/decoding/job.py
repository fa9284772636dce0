"""What decode.py does: read a block of lines, translate or score it, write it, until the end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice, repeat

from transformer_jax.cli import parse_shard
from transformer_jax.compilation_cache import keep_compiled
from transformer_jax.config import Config
from transformer_jax.data.sources import read_lines
from transformer_jax.decoding.alignment import align
from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.decoding.flags import Arguments
from transformer_jax.decoding.output_file import open_output
from transformer_jax.decoding.records import Alignment, OutputFormat, Record, Records
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.trained_models import blocks
from transformer_jax.decoding.translator import Translation, Translator
from transformer_jax.errors import UserError
from transformer_jax.evaluation import check_pairs, evaluate
from transformer_jax.model.layers import use_matmul_precision

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_REPORTS = 60


def run_job(arguments: Arguments, config: Config) -> None:
    """Do what the flags ask for; ``config`` is the first run's.

    Raises:
        UserError: the flags do not fit the model, or the input has a fault. What comes before a
            fault in a stream is written.
    """
    keep_compiled(arguments.compilation_cache)
    use_matmul_precision(config.model)
    reference = arguments.evaluation.reference
    references = None if reference is None else list(read_lines(reference))
    job = _Job(arguments)
    records = job.open_records(references)
    start = time.perf_counter()
    best = job.write_answers(records, keep_best=references is not None)
    job.report(time.perf_counter() - start)
    if references is not None:
        asked, training = arguments.evaluation, config.training
        tokenize = asked.bleu_tokenize or training.bleu_tokenize
        language = asked.bleu_language or training.bleu_language
        scores = evaluate(best, references, tokenize=tokenize, language=language)
        print(scores, file=sys.stderr)


class _Job:
    """The flags, and the models that they ask for.

    Attributes:
      models: what came from the work directories.
      translator: that, unless targets are scored.
      scorer: that, if targets are scored; with alignments another one of the same models.
    """

    def __init__(self, arguments: Arguments):
        self.files, self.results = arguments.files, arguments.results
        self.targets, search = arguments.evaluation.score, arguments.search
        self.window = 1 if self.files.one_by_one else self.files.window or 100 * search.batch_size
        self.devices = devices_for_rows(search.batch_size)
        task = Translator if self.targets is None else Scorer
        models: Translator | Scorer = task.from_workdir(
            arguments.workdir,
            checkpoint=arguments.checkpoint,
            average=arguments.average,
            devices=self.devices,
            **vars(search),
        )
        self.models = models
        self.translator = models if isinstance(models, Translator) else None
        self.scorer = models if isinstance(models, Scorer) else None
        if self.results.alignments and isinstance(models, Translator):
            self.scorer = Scorer(
                models.models, models.tokenizer, models.config, devices=self.devices
            )
        if self.results.alignments and self.scorer is not None:
            self.scorer.check_layer(self.results.alignment_layer)

    def open_records(self, references: list[str] | None) -> Iterable[Record]:
        """The input. A file is read to its end, so that its faults show before any work; a stream
        is held in memory if that is to be done, or if it is needed again.
        """
        files = self.files
        source = files.input or sys.stdin.buffer
        shard = parse_shard(files.shard) if files.shard else (0, 1)
        records: Iterable[Record] = Records(
            source, files.format, files.text_field, shard, self.targets
        )
        if files.input is None:
            if references is None and self.targets is None:
                return records
            records = list(records)
        count = sum(1 for _ in self._checked(records))
        if references is not None:
            check_pairs(range(count), references)
        return records

    def write_answers(self, records: Iterable[Record], *, keep_best: bool) -> list[str]:
        """Read a block, answer it, write it; returns the best texts if they are to be kept."""
        files, results, scoring = self.files, self.results, self.targets is not None
        token_scores = results.token_scores or (scoring and files.format == "jsonl")
        form = OutputFormat(files.format, results.nbest, scoring, token_scores, results.alignments)
        best = []
        start = reported = time.perf_counter()
        numbered = form.lines_per_sentence > 1
        with open_output(files.output, resume=files.resume, numbered=numbered) as (write, kept):
            done = kept
            records = self._checked(_skip(records, kept, files.output))
            for block in blocks(records, self.window):
                for record, translations, alignments in self._answers(block):
                    write(form.lines(record, translations, alignments))
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

    def _answers(
        self, block: list[Record]
    ) -> Iterable[tuple[Record, list[Translation], list[Alignment | None] | None]]:
        """Each record with its translations, best first, or its scored target; with alignments if
        they are asked for.
        """
        if self.translator is not None:
            nbest, window = self.results.nbest, len(block)
            translations = list(self.translator.stream(block, num_hypotheses=nbest, window=window))
        else:
            assert self.scorer is not None
            pairs = [(record.text, record.target) for record in block]
            numbers = [record.number for record in block]
            translations = [[scored] for scored in self.scorer.score(pairs, numbers=numbers)]
        alignments: Iterable[list[Alignment | None] | None] = repeat(None)
        if self.scorer is not None and self.results.alignments:
            results = list(zip(block, translations, strict=True))
            alignments = align(results, self.scorer, layer=self.results.alignment_layer)
        return zip(block, translations, alignments)

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
