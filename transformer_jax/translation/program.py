"""Main loop of decode.py: read a window of lines, translate or score it, write the results.

JAX is imported only after the flags are validated.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, tee
from typing import TYPE_CHECKING, TypeAlias

from transformer_jax.data.text_files import read_lines
from transformer_jax.errors import UserError
from transformer_jax.settings.config import Config
from transformer_jax.translation.flags import Arguments, checked_flags
from transformer_jax.translation.input_file import Record, read_records
from transformer_jax.translation.output_file import open_output
from transformer_jax.translation.output_formats import output_writer
from transformer_jax.translation.requests import Translation, batched

if TYPE_CHECKING:
    from transformer_jax.translation.scoring import Scorer
    from transformer_jax.translation.translator import Translator

logger = logging.getLogger(__name__)

TranslatedRecords: TypeAlias = Iterator[tuple[Record, list[Translation]]]
TranslateFunction: TypeAlias = Callable[[Iterator[Record]], TranslatedRecords]


def decode(argv: Sequence[str] | None) -> None:
    """Run decode.py with these flags (None: ``sys.argv[1:]``).

    Raises:
        UserError: invalid flags or input. Output for lines before the invalid one is still written.
        OSError: a file cannot be read or written.
    """
    arguments, config = checked_flags(argv)
    files = arguments.files
    scoring = arguments.scoring
    evaluation = _Evaluation(arguments, config) if scoring.reference is not None else None
    translate = _load(arguments)
    source = _Input(arguments)
    writer = output_writer(
        arguments.results, files.format, log_probs=scoring.score_targets is not None
    )
    output = open_output(files.output, resume=files.resume, record_of_line=writer.record_of_line)
    with output as (write, num_complete):
        if num_complete and evaluation:
            raise UserError(
                f"{files.output} already has {num_complete} sentences, but --reference needs all "
                "of them in one run; omit --resume or --reference."
            )
        for record, translations in translate(source.records(skip=num_complete)):
            write(writer.text(record, translations))
            if evaluation:
                evaluation.hypotheses.append(translations[0].text)
    source.warn_if_grown()
    if evaluation:
        evaluation.print()


class _Input:
    """The records to translate."""

    def __init__(self, arguments: Arguments):
        """Read the first record, so that an unreadable input leaves the output unchanged."""
        files = arguments.files
        self._output = files.output
        self._path = files.input or "/dev/stdin"
        self._size_at_end = 0
        records = read_records(
            sys.stdin.buffer if files.input is None else files.input,
            files.format,
            files.text_field,
            markup=files.markup,
            shard=files.shard_of,
            targets=arguments.scoring.score_targets,
        )
        first = list(islice(records, 1))
        self._records = chain(first, records)

    def records(self, skip: int) -> Iterator[Record]:
        """Yield the records after the first ``skip``, whose output already exists."""
        if skip:
            logger.info("Skipping %d sentences that are already translated.", skip)
        skipped = sum(1 for _ in islice(self._records, skip))
        if skipped < skip:
            raise UserError(
                f"{self._output} already has {skip} sentences, but the input has only {skipped}; "
                "expected the same input as before."
            )
        yield from self._records
        self._size_at_end = self._size()

    def warn_if_grown(self) -> None:
        """Warn if text was added to the file after its end was read."""
        added = self._size() - self._size_at_end
        if added > 0:
            message = "The input grew by %d bytes after its end was read. "
            message += "Translate them with --resume."
            logger.warning(message, added)

    def _size(self) -> int:
        """Return the size of the file in bytes, or 0 for a pipe or a URL."""
        return os.path.getsize(self._path) if os.path.isfile(self._path) else 0


class _Evaluation:
    """Scores of the output against references.

    Attributes:
      hypotheses: the translations so far.
    """

    def __init__(self, arguments: Arguments, config: Config):
        from transformer_jax.evaluation import bleu_metric  # sacreBLEU is slow to import

        self.hypotheses = list[str]()
        self._tokenize = arguments.scoring.bleu_tokenize or config.training.bleu_tokenize
        bleu_metric(self._tokenize)  # fail before hours of work
        first, step = arguments.files.shard_of
        lines = read_lines(arguments.scoring.reference or "")
        self._references = list(islice(lines, first, None, step))

    def print(self) -> None:
        """Print BLEU, chrF and exact match to stderr."""
        from transformer_jax.evaluation import evaluate

        print(evaluate(self.hypotheses, self._references, tokenize=self._tokenize), file=sys.stderr)


def _load(arguments: Arguments) -> TranslateFunction:
    """Load the models. Returns a function that yields each record with its translations, best
    first, or with its scored target.
    """
    from transformer_jax.decoding.devices import devices_for_rows
    from transformer_jax.devices.compilation_cache import enable_compilation_cache
    from transformer_jax.translation.glossary import read_glossary
    from transformer_jax.translation.loading import load_models
    from transformer_jax.translation.scoring import Scorer
    from transformer_jax.translation.translator import Translator

    enable_compilation_cache()
    files = arguments.files
    devices = tuple(devices_for_rows(arguments.search.batch_size))
    glossary = read_glossary(files.glossary) if files.glossary else None
    settings = {
        "source_language": files.source_language,
        "target_language": files.target_language,
        **vars(arguments.search),
    }
    layer = arguments.results.alignment_layer
    size = files.window or 100 * arguments.search.batch_size
    translate: TranslateFunction
    if arguments.scoring.score_targets is None:
        translator = Translator.from_workdir(
            arguments.workdir,
            devices=devices,
            glossary=glossary,
            engine=arguments.engine,
            jax_only=arguments.jax_only,
            **settings,
        )
        translate = _make_translate_function(translator, arguments, size)
        if not arguments.results.alignments:
            return translate
        scorer = translator.scorer
    else:
        scorer = Scorer(*load_models(arguments.workdir, **settings), devices=devices)
        translate = _make_score_function(scorer, size)
        if not arguments.results.alignments:
            return translate
    scorer.align([], layer=layer)  # fail before the output is truncated
    return lambda records: _add_alignments(translate(records), scorer, layer)


def _make_translate_function(
    translator: Translator, arguments: Arguments, size: int
) -> TranslateFunction:
    """Return a function that translates ``size`` records at a time."""
    from transformer_jax.translation.markup import PLACEHOLDERS

    def translate(records: Iterator[Record]) -> TranslatedRecords:
        lines, records = tee(records)
        translated = translator.stream(
            lines,
            num_hypotheses=arguments.results.nbest,
            window=size,
            layer=arguments.results.alignment_layer,
            split_sentences=arguments.files.split or None,
            protect=(*PLACEHOLDERS, *arguments.files.protect),
        )
        for translations, record in zip(translated, records):
            yield record, translations
        translator.log_glossary()

    return translate


def _make_score_function(scorer: Scorer, size: int) -> TranslateFunction:
    """Return a function that scores the targets of ``size`` records at a time."""

    def score(records: Iterator[Record]) -> TranslatedRecords:
        for window in batched(records, size):
            scored = scorer.score([(record, record.target or "") for record in window])
            for record, translation in zip(window, scored):
                yield record, [translation]

    return score


def _add_alignments(
    translated_records: TranslatedRecords, scorer: Scorer, layer: int | None
) -> TranslatedRecords:
    """Add alignments, few records at a time, because attention weights are large."""
    for batch in batched(translated_records, scorer.config.batch_size):
        pairs = [(record, t) for record, translations in batch for t in translations]
        aligned = iter(scorer.align(pairs, layer=layer))
        for record, translations in batch:
            yield record, list(islice(aligned, len(translations)))
