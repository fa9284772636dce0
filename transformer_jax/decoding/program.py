"""What decode.py does: read a block of lines, translate or score it, write it, until the end.

JAX is loaded once the flags are known to be right.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import tyro

from transformer_jax.cli import flag_values, flags_given, parse_flags
from transformer_jax.config import Config, DecodingConfig
from transformer_jax.config_checks import Positive, Rule, Section
from transformer_jax.config_io import load_config_file
from transformer_jax.data.sources import read_lines
from transformer_jax.decoding.output_file import open_output
from transformer_jax.decoding.records import (
    OUTPUT_FIELDS,
    Record,
    Results,
    Translation,
    blocks,
    read_records,
)
from transformer_jax.errors import UserError
from transformer_jax.storage import is_url, local_path

if TYPE_CHECKING:
    from transformer_jax.decoding.scoring import Scorer
    from transformer_jax.decoding.translator import Translator

logger = logging.getLogger(__name__)

Answers: TypeAlias = Iterator[tuple[Record, list[Translation]]]


@dataclass(frozen=True)
class Files(Section):
    """What is read and written."""

    input: str | None = None
    """File to translate, UTF-8, .gz too, or its URL. Default: stdin."""
    output: str | None = None
    """File to write. Default: stdout."""
    format: Literal["text", "jsonl"] = "text"
    """text: a sentence a line. jsonl: an object a line; its other fields are kept."""
    text_field: str = "text"
    """JSONL: the field to translate. A field `prefix` forces the beginning of the translation."""
    resume: bool = False
    """Keep the complete sentences of --output and continue after them."""
    shard: str = "0/1"
    """i/n: translate lines i, i + n, i + 2n, ... only (from 0); other processes translate the
    others."""
    window: Positive | None = None
    """Lines that are read, then translated, at a time; 1 for a program that waits for each answer.
    Default: 1 at a terminal, otherwise 100 batches."""

    @property
    def part(self) -> tuple[int, int]:
        """``shard`` as two numbers: ``0/4``, the first of four, is (0, 4)."""
        i, _, n = self.shard.partition("/")
        return int(i), int(n)

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
            "a name without .gz, as what is written is not compressed",
        )
        yield (
            "text_field",
            self.text_field not in OUTPUT_FIELDS,
            "another field, as translating writes this one",
        )


@dataclass(frozen=True)
class Evaluation:
    """Comparing with given translations."""

    reference: str | None = None
    """File of reference translations: BLEU and chrF of the output go to stderr."""
    bleu_tokenize: str | None = None
    """sacreBLEU's tokenisation for --reference. Default: the run's training.bleu_tokenize."""
    bleu_language: str | None = None
    """The target language (de, fr, ...): BLEU with --reference also as the paper has it, of Moses'
    tokens with compounds split. Default: the run's training.bleu_language."""
    score: str | None = None
    """File of targets, a line for each input line: print their log-probabilities instead of
    translating."""


@dataclass(frozen=True)
class Arguments:
    """Translate lines of text with a trained model: one line out for each line in."""

    workdir: tuple[str, ...] = ()
    """Work directory of a training run, or the folder of one of its checkpoints, or the URL of
    either; several: their models translate together (mean of their probabilities)."""
    average: int | None = None
    """Take the mean of this many checkpoints, up to the chosen one. Default: what the end of
    training chose; of a single checkpoint's folder, itself."""
    compilation_cache: str = "auto"
    """Folder where compiled functions are kept between runs. off: they are not. auto:
    JAX_COMPILATION_CACHE_DIR, or else transformer_jax/compiled in the user's cache folder
    (XDG_CACHE_HOME or ~/.cache)."""
    files: Annotated[Files, tyro.conf.arg(name="")] = field(default_factory=Files)
    results: Annotated[Results, tyro.conf.arg(name="")] = field(default_factory=Results)
    evaluation: Annotated[Evaluation, tyro.conf.arg(name="")] = field(default_factory=Evaluation)
    search: Annotated[DecodingConfig, tyro.conf.arg(name="")] = field(
        default_factory=DecodingConfig
    )


def checked_flags(argv: Sequence[str]) -> tuple[Arguments, Config]:
    """The flags, and the config of the first run, whose search settings they replace.

    Work directories at URLs are copied to this machine first, and replaced by their copies.

    Raises:
        UserError: values that cannot work, or a work directory without a config.
    """
    workdirs = tuple(local_copy(workdir) for workdir in flag_values(argv, "workdir"))
    config = load_config_file(workdirs[0]) if workdirs else Config()
    arguments = parse_flags(Arguments, argv, defaults={"search": config.decoding})
    files, results, evaluation = arguments.files, arguments.results, arguments.evaluation
    search, given = arguments.search, flags_given(argv)
    if files.window is None and files.input is None and sys.stdin.isatty():
        files = dataclasses.replace(files, window=1)
    if files.window == 1 and "batch-size" not in given:
        search = dataclasses.replace(search, batch_size=1)
    by_default = config.decoding.method == "beam" and "beam-size" not in given
    if search.method == "sample" and by_default:  # the run's is no number of samples
        search = dataclasses.replace(search, beam_size=results.nbest)
    if evaluation.score is not None:
        results = dataclasses.replace(results, nbest=1, token_scores=True)
    if results.nbest > search.beam_size:
        raise UserError(
            f"nbest is {results.nbest}; expected at most {search.beam_size}, the value of "
            "--beam-size."
        )
    inputs = filter(None, (files.input, evaluation.reference, evaluation.score))
    if files.output and Path(files.output).resolve() in [Path(path).resolve() for path in inputs]:
        raise UserError(f"output is {files.output!r}, which is read; expected another file.")
    return dataclasses.replace(
        arguments, workdir=workdirs, files=files, results=results, search=search
    ), config


def local_copy(workdir: str) -> str:
    """The path of a work directory; a URL is copied to this machine."""
    if is_url(workdir):
        from transformer_jax.remote_workdir import local_workdir  # loads JAX

        return str(local_workdir(workdir))
    return str(local_path(workdir))


def decode(argv: Sequence[str]) -> None:
    """Do what the flags ask for.

    Raises:
        UserError: wrong flags, or the input has a fault. What comes before a fault is written.
        OSError: a file cannot be read or written.
    """
    arguments, config = checked_flags(argv)
    files, asked = arguments.files, arguments.evaluation
    tokenize = asked.bleu_tokenize or config.training.bleu_tokenize
    language = asked.bleu_language or config.training.bleu_language
    shard, references = files.part, None
    if asked.reference is not None:
        from transformer_jax.evaluation import check_bleu, evaluate  # sacreBLEU is slow to import

        check_bleu(tokenize, language)  # before hours of work
        references = list(islice(read_lines(asked.reference), shard[0], None, shard[1]))
    size = _size(files.input)
    answers = _load(arguments, config)
    sys.set_int_max_str_digits(0)  # fields that are passed through may have long numbers
    records = read_records(
        files.input or sys.stdin.buffer,
        files.format,
        files.text_field,
        shard=shard,
        targets=asked.score,
    )
    first = list(islice(records, 1))  # an input that cannot be read leaves the output as it is
    results, text, best = arguments.results, files.format == "text", []
    lines = partial(results.text, scores=asked.score is not None) if text else results.json
    numbered = text and results.nbest > 1
    with open_output(files.output, resume=files.resume, numbered=numbered) as (write, kept):
        if kept and references is not None:
            raise UserError(
                f"{files.output} has {kept} sentences already, and --reference needs all in "
                "one run; leave --resume or --reference out."
            )
        left = _skip(chain(first, records), kept, files.output)
        for record, translations in answers(left):
            write(lines(record, translations))
            if references is not None:
                best.append(translations[0].text)
    if _size(files.input) != size:
        said = "%s has changed meanwhile; --resume translates lines that have been appended."
        logger.warning(said, files.input)
    if references is not None:
        print(evaluate(best, references, tokenize=tokenize, language=language), file=sys.stderr)


def _size(file: str | None) -> int:
    """Bytes of a file on this machine; 0 for anything else."""
    return Path(file).stat().st_size if file and Path(file).is_file() else 0


def _load(arguments: Arguments, config: Config) -> Callable[[Iterator[Record]], Answers]:
    """The models, as a function that gives each record its translations, best first, or scores its
    target.
    """
    from transformer_jax.compilation_cache import keep_compiled
    from transformer_jax.decoding.devices import devices_for_rows
    from transformer_jax.decoding.scoring import Scorer
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.model.layers import use_matmul_precision

    keep_compiled(arguments.compilation_cache)
    use_matmul_precision(config.model)
    results, search = arguments.results, arguments.search
    size = arguments.files.window or 100 * search.batch_size
    devices = tuple(devices_for_rows(search.batch_size))
    task = Translator if arguments.evaluation.score is None else Scorer
    models: Translator | Scorer = task.from_workdir(
        arguments.workdir, average=arguments.average, devices=devices, **vars(search)
    )
    aligner: Scorer | None = None
    if results.alignments:
        aligner = (
            models
            if isinstance(models, Scorer)
            else Scorer(models.model, models.tokenizer, models.config, devices=devices)
        )
        aligner.align([], layer=results.alignment_layer)  # before an output is emptied

    def answers(records: Iterator[Record]) -> Answers:
        for block in blocks(records, size):
            found: Iterable[list[Translation]]
            if isinstance(models, Scorer):
                scored = models.score([(record.text, record.target) for record in block])
                found = ([translation] for translation in scored)
            else:
                found = models.stream(block, num_hypotheses=results.nbest, window=size)
            together = zip(block, found)
            layer = results.alignment_layer
            yield from together if aligner is None else _aligned(together, aligner, layer)

    return answers


def _aligned(answers: Answers, aligner: Scorer, layer: int) -> Answers:
    for block in blocks(answers, aligner.config.batch_size):  # weights take much memory
        pairs = [(record.text, t) for record, translations in block for t in translations]
        aligned = iter(aligner.align(pairs, layer=layer))
        for record, translations in block:
            yield record, list(islice(aligned, len(translations)))


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
