"""Main loop of decode.py: read a block of lines, translate or score it, write the results.

JAX is imported only after the flags are validated.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import tyro

from transformer_jax.cli import flag_values, parse_flags
from transformer_jax.data.sources import read_lines
from transformer_jax.errors import UserError
from transformer_jax.settings.checks import Positive, Rule, Section
from transformer_jax.settings.config import Config, DecodingConfig
from transformer_jax.settings.config_files import load_config_file
from transformer_jax.storage.files import check_not_input, existing_folder, is_url
from transformer_jax.translation.output_file import open_output
from transformer_jax.translation.records import (
    OUTPUT_FIELDS,
    Format,
    Record,
    Results,
    Translation,
    blocks,
    check_patterns,
    read_records,
)

if TYPE_CHECKING:
    from transformer_jax.translation.scoring import Scorer
    from transformer_jax.translation.translator import Translator

logger = logging.getLogger(__name__)

_UNNAMED = tyro.conf.arg(name="")  # a group of flags without a prefix
Answers: TypeAlias = Iterator[tuple[Record, list[Translation]]]


@dataclass(frozen=True)
class Files(Section, prefix="--"):
    """Input and output files."""

    input: str | None = None
    """File or URL to translate, in UTF-8, optionally compressed (.gz). Default: stdin."""
    output: str | None = None
    """File to write. Default: stdout."""
    format: Format = "text"
    """text: one sentence per line. jsonl: one JSON object per line; its other fields are kept.
    html, xml: the input is one document."""
    markup: Literal["html", "xml"] | None = None
    """Text and JSONL: the text of each line is a document in this format."""
    protect: tuple[str, ...] = ()
    """HTML and XML: regular expressions of more text that passes unchanged, such as '[0-9]+'.
    Placeholders such as {name}, {{x}} and %s, URLs and e-mail addresses do in any case."""
    text_field: str = "text"
    """JSONL: the field to translate. If a line has a `prefix` field, its translation begins with
    that text."""
    glossary: str | None = None
    """TSV file of terms: a source term, then target terms (one or several alternatives), of which
    the translation of a line with the source term contains one. In JSONL, a `glossary` field adds
    terms for its line."""
    source_language: str = ""
    """Many-to-many models: language code of the input. A JSONL line can have its own in a field of
    this name. Default: that of the model."""
    target_language: str = ""
    """Many-to-many models: language code of the output, likewise."""
    resume: bool = False
    """Keep the complete sentences already in --output and continue after them."""
    shard: str = "0/1"
    """i/n: translate only lines i, i + n, i + 2n, ... (counting from 0). This splits the input
    among n processes."""
    window: Positive | None = None
    """Number of lines to read before translating them; use 1 if a program waits for each output
    line. Default: 1 at a terminal, otherwise 100 batches."""

    def rules(self) -> Iterator[Rule]:
        numbers = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        yield (
            "shard",
            numbers is not None and int(numbers[1]) < int(numbers[2]),
            "i/n with i from 0 to n - 1, such as 0/4, 1/4, 2/4, 3/4",
        )
        yield (
            "output",
            not (self.output or "").endswith(".gz"),
            "a name without .gz, because output is not compressed",
        )
        yield (
            "text_field",
            self.text_field not in OUTPUT_FIELDS,
            "another field, because translation overwrites this one",
        )
        check_patterns(self.protect, "--protect")

    @property
    def has_markup(self) -> bool:
        """Whether the texts are documents."""
        return bool(self.markup) or self.format in ("html", "xml")


@dataclass(frozen=True)
class ScoringFlags:
    """Evaluation against given translations."""

    reference: str | None = None
    """File of reference translations; BLEU and chrF of the output are printed to stderr."""
    bleu_tokenize: str | None = None
    """sacreBLEU tokenizer for --reference. Default: the run's training.bleu_tokenize."""
    score: str | None = None
    """File of targets, one per input line. Prints their log-probabilities instead of
    translating."""


@dataclass(frozen=True)
class Arguments:
    """Translate text line by line with a trained model, one output line per input line."""

    workdir: tuple[str, ...] = ()
    """Path or URL of a work directory or of one of its checkpoints. Several work directories form
    an ensemble, which averages the models' probabilities.
    """
    files: Annotated[Files, _UNNAMED] = Files()
    results: Annotated[Results, _UNNAMED] = Results()
    scoring: Annotated[ScoringFlags, _UNNAMED] = ScoringFlags()
    search: Annotated[DecodingConfig, _UNNAMED] = DecodingConfig()


def checked_flags(argv: Sequence[str] | None) -> tuple[Arguments, Config]:
    """Parse and check the flags. Returns the flags and the first run's config, with its search
    settings overridden by the flags.

    Work directories at URLs are copied to this machine first; the returned flags have local paths.

    Raises:
        UserError: invalid values, or a work directory without a config.
    """
    workdirs = tuple(local_copy(workdir) for workdir in flag_values(argv, "workdir"))
    config = load_config_file(workdirs[0]) if workdirs else Config()
    arguments = parse_flags(Arguments, argv, defaults={"search": config.decoding})
    arguments = _with_dependent_defaults(replace(arguments, workdir=workdirs))
    files, results, scoring = arguments.files, arguments.results, arguments.scoring
    if results.alignments == "soft" and files.format == "text":
        raise UserError("--alignments is 'soft'; expected 'hard', or --format jsonl for matrices.")
    if results.nbest > arguments.search.beam_size:
        raise UserError(
            f"--nbest is {results.nbest}; expected at most {arguments.search.beam_size}, the value "
            "of --beam-size."
        )
    others = results != Results(alignment_layer=results.alignment_layer) or scoring.score
    if files.has_markup and others:
        raise UserError(
            "--nbest, --alignments, --token-scores and --score do not apply to HTML and XML; omit "
            "them."
        )
    whole = files.format in ("html", "xml")
    if whole and (files.resume or files.shard != "0/1" or scoring.reference):
        raise UserError(
            f"--resume, --shard and --reference do not apply to --format {files.format}, because "
            "the input is one document; omit them."
        )
    output, source = files.output or "/dev/stdout", files.input or "/dev/stdin"
    check_not_input(output, source, files.glossary, scoring.reference, scoring.score)
    return arguments, config


def _with_dependent_defaults(arguments: Arguments) -> Arguments:
    """Set the values that follow from other flags."""
    files, results, search = arguments.files, arguments.results, arguments.search
    if files.window is None and files.input is None and sys.stdin.isatty():
        files = replace(files, window=1)
    if files.window is not None:
        search = replace(search, batch_size=min(search.batch_size, files.window))
    if arguments.scoring.score is not None:
        results = replace(results, nbest=1, token_scores=True)
    if search.method == "sample":
        search = replace(search, beam_size=results.nbest)
    return replace(arguments, files=files, results=results, search=search)


def local_copy(workdir: str) -> str:
    """Return the local path of a work directory; a URL is copied to this machine."""
    if is_url(workdir):
        from transformer_jax.pretrained.loading import local_workdir  # imports JAX

        return str(local_workdir(workdir))
    return str(existing_folder(workdir))


def decode(argv: Sequence[str] | None) -> None:
    """Run decode.py with these flags (None: ``sys.argv[1:]``).

    Raises:
        UserError: invalid flags or input. Output for lines before the invalid one is still written.
        OSError: a file cannot be read or written.
    """
    arguments, config = checked_flags(argv)
    files, asked = arguments.files, arguments.scoring
    tokenize = asked.bleu_tokenize or config.training.bleu_tokenize
    start, step = map(int, files.shard.split("/"))
    references, sizes = None, list[int]()
    source = files.input or "/dev/stdin"
    if asked.reference is not None:
        from transformer_jax.evaluation import bleu_metric, evaluate  # sacreBLEU is slow to import

        bleu_metric(tokenize)  # fail before hours of work
        references = list(islice(read_lines(asked.reference), start, None, step))
    answers = _load(arguments)
    sys.set_int_max_str_digits(0)  # fields that are passed through may have long numbers
    records = read_records(
        sys.stdin.buffer if files.input is None else files.input,
        files.format,
        files.text_field,
        markup=files.markup,
        shard=(start, step),
        targets=asked.score,
    )
    first = list(islice(records, 1))  # an unreadable input leaves the output unchanged
    results, text, best = arguments.results, files.format != "jsonl", []
    lines = partial(results.text, scores=asked.score is not None) if text else results.json
    numbered = text and results.nbest > 1
    with open_output(files.output, resume=files.resume, numbered=numbered) as (write, kept):
        if kept and references is not None:
            raise UserError(
                f"{files.output} already has {kept} sentences, but --reference needs all of them "
                "in one run; omit --resume or --reference."
            )
        # The last iterator yields nothing, but notes the input's size when its end is reached.
        at_end: Iterator[Any] = iter(lambda: sizes.append(_size(source)), None)  # type: ignore
        left = _skip(chain(first, records, at_end), kept, files.output)
        for record, translations in answers(left):
            write(lines(record, translations))
            if references is not None:
                best.append(translations[0].text)
    if (added := _size(source) - sizes[0]) > 0:
        said = "The input grew by %d bytes after its end was read. Translate them with --resume."
        logger.warning(said, added)
    if references is not None:
        print(evaluate(best, references, tokenize=tokenize), file=sys.stderr)


def _load(arguments: Arguments) -> Callable[[Iterator[Record]], Answers]:
    """Load the models. Returns a function that yields each record with its translations, best
    first, or with its scored target.
    """
    from transformer_jax.decoding.devices import devices_for_rows
    from transformer_jax.devices.compilation_cache import enable_compilation_cache
    from transformer_jax.translation.glossary import read_glossary
    from transformer_jax.translation.loading import load_models
    from transformer_jax.translation.markup import PLACEHOLDERS
    from transformer_jax.translation.scoring import Scorer
    from transformer_jax.translation.translator import Translator

    enable_compilation_cache()
    results, search, files = arguments.results, arguments.search, arguments.files
    size = files.window or 100 * search.batch_size
    devices = tuple(devices_for_rows(search.batch_size))
    layer = results.alignment_layer
    glossary = read_glossary(files.glossary) if files.glossary else None
    loaded = load_models(
        arguments.workdir,
        source_language=files.source_language,
        target_language=files.target_language,
        **vars(search),
    )
    models: Translator | Scorer
    if arguments.scoring.score is None:
        models = Translator(*loaded, devices=devices, glossary=glossary)
    else:
        models = Scorer(*loaded, devices=devices)
    aligner: Scorer | None = None
    if results.alignments:
        aligner = models if isinstance(models, Scorer) else models.scorer
        aligner.align([], layer=layer)  # fail before the output is truncated

    def answers(records: Iterator[Record]) -> Answers:
        for block in blocks(records, size):
            found: Iterable[list[Translation]]
            if isinstance(models, Scorer):
                scored = models.score([(record, record.target or "") for record in block])
                found = ([translation] for translation in scored)
            else:
                found = models.stream(
                    block,
                    num_hypotheses=results.nbest,
                    window=size,
                    layer=layer,
                    protect=(*PLACEHOLDERS, *files.protect),
                )
            together = zip(block, found)
            yield from together if aligner is None else _aligned(together, aligner, layer)

    return answers


def _aligned(answers: Answers, aligner: Scorer, layer: int | None) -> Answers:
    for block in blocks(answers, aligner.config.batch_size):  # attention weights are large
        pairs = [(record, t) for record, translations in block for t in translations]
        aligned = iter(aligner.align(pairs, layer=layer))
        for record, translations in block:
            yield record, list(islice(aligned, len(translations)))


def _size(source: str) -> int:
    """Return the size of a file in bytes, or 0 for a pipe or a URL."""
    return os.path.getsize(source) if os.path.isfile(source) else 0


def _skip(records: Iterator[Record], count: int, output: str | None) -> Iterator[Record]:
    """Skip the first ``count`` records, whose output already exists."""
    if count:
        logger.info("Skipping %d sentences that are already translated.", count)
    if (skipped := sum(1 for _ in islice(records, count))) < count:
        raise UserError(
            f"{output} already has {count} sentences, but the input has only {skipped}; "
            "expected the same input as before."
        )
    return records
