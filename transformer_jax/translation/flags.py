"""Flags of decode.py, checked before JAX is imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from transformer_jax.cli import flag_values, parse_flags
from transformer_jax.data.text_files import COMPRESSED_SUFFIX
from transformer_jax.errors import UserError
from transformer_jax.settings.checks import PositiveInt, Rule, Section
from transformer_jax.settings.config import Config, DecodingConfig, EngineName
from transformer_jax.settings.config_files import load_config_file
from transformer_jax.storage.files import check_not_input, existing_folder, is_url
from transformer_jax.translation.documents.formats import FORMATS, FormatName
from transformer_jax.translation.input_file import Format
from transformer_jax.translation.output_formats import FIELD_NAMES, OutputFlags
from transformer_jax.translation.requests import check_patterns

_UNNAMED = tyro.conf.arg(name="")  # a group of flags without a prefix


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
    markup: FormatName | None = None
    """Text and JSONL: the text of each line is a document in this format."""
    protect: tuple[str, ...] = ()
    """HTML and XML: regular expressions of more text that passes unchanged, such as '[0-9]+'.
    Placeholders such as {name}, {{x}} and %s, URLs and e-mail addresses do in any case."""
    split: bool = False
    """Text and JSONL: divide each line into sentences and translate each alone. By default, a line
    is one sentence; models that were trained on sentences often translate only the first one."""
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
    window: PositiveInt | None = None
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
            not (self.output or "").endswith(COMPRESSED_SUFFIX),
            f"a name without {COMPRESSED_SUFFIX}, because output is not compressed",
        )
        yield (
            "text_field",
            self.text_field not in FIELD_NAMES,
            "another field, because translation overwrites this one",
        )
        check_patterns(self.protect, "--protect")

    @property
    def shard_of(self) -> tuple[int, int]:
        """(i, n) of ``shard``."""
        number, _, count = self.shard.partition("/")
        return int(number), int(count)

    @property
    def is_document(self) -> bool:
        """Whether the whole input is a document."""
        return self.format in FORMATS

    @property
    def has_markup(self) -> bool:
        """Whether the texts are documents."""
        return bool(self.markup) or self.is_document


@dataclass(frozen=True)
class ScoringFlags:
    """Evaluation against given translations."""

    reference: str | None = None
    """File of reference translations; BLEU and chrF of the output are printed to stderr."""
    bleu_tokenize: str | None = None
    """sacreBLEU tokenizer for --reference. Default: the run's training.bleu_tokenize."""
    score_targets: str | None = None
    """File of targets, one per input line. Prints their log-probabilities instead of
    translating."""


@dataclass(frozen=True)
class Arguments:
    """Translate text line by line with a trained model, one output line per input line."""

    workdir: tuple[str, ...] = ()
    """Path or URL of a work directory or of one of its checkpoints. Several work directories form
    an ensemble, which averages the models' probabilities.
    """
    engine: EngineName = "jax"
    """Program that searches. jax: our exact search. ctranslate2: faster for small models on a CPU,
    with another stopping rule (docs/decoding.md). auto: ctranslate2 if it can do what is asked."""
    files: Annotated[Files, _UNNAMED] = Files()
    results: Annotated[OutputFlags, _UNNAMED] = OutputFlags()
    scoring: Annotated[ScoringFlags, _UNNAMED] = ScoringFlags()
    search: Annotated[DecodingConfig, _UNNAMED] = DecodingConfig()

    @property
    def jax_only(self) -> str:
        """A request that needs ``--engine jax``, as the beginning of a sentence; '': none."""
        if self.files.glossary:
            return "--glossary works"
        if self.results.token_scores:
            return "--token-scores works"
        if self.files.format == "jsonl" and self.engine == "auto":
            return "Glossaries, which lines of JSONL can have, work"
        return ""


def checked_flags(argv: Sequence[str] | None) -> tuple[Arguments, Config]:
    """Parse and check the flags. Returns the flags and the first run's config, with its search
    settings overridden by the flags.

    Work directories at URLs are copied to this machine first; the returned flags have local paths.

    Raises:
        UserError: invalid values, or a work directory without a config.
    """
    workdirs = tuple(_local_folder(workdir) for workdir in flag_values(argv, "workdir"))
    config = load_config_file(workdirs[0]) if workdirs else Config()
    arguments = parse_flags(Arguments, argv, defaults={"search": config.decoding})
    arguments = _with_dependent_defaults(replace(arguments, workdir=workdirs))
    _check_combinations(arguments)
    files = arguments.files
    scoring = arguments.scoring
    check_not_input(
        files.output or "/dev/stdout",
        files.input or "/dev/stdin",
        files.glossary,
        scoring.reference,
        scoring.score_targets,
    )
    return arguments, config


def _check_combinations(arguments: Arguments) -> None:
    """Raise ``UserError`` for flags that exclude each other."""
    files = arguments.files
    results = arguments.results
    scoring = arguments.scoring
    if results.alignments == "soft" and files.format == "text":
        raise UserError("--alignments is 'soft'; expected 'hard', or --format jsonl for matrices.")
    if results.nbest > arguments.search.beam_size:
        raise UserError(
            f"--nbest is {results.nbest}; expected at most {arguments.search.beam_size}, the value "
            "of --beam-size."
        )
    plain_results = OutputFlags(alignment_layer=results.alignment_layer)
    if files.has_markup and (results != plain_results or scoring.score_targets):
        raise UserError(
            "--nbest, --alignments, --token-scores and --score-targets do not apply to HTML and "
            "XML; omit them."
        )
    if files.is_document and (files.resume or files.shard != "0/1" or scoring.reference):
        raise UserError(
            f"--resume, --shard and --reference do not apply to --format {files.format}, because "
            "the input is one document; omit them."
        )


def _with_dependent_defaults(arguments: Arguments) -> Arguments:
    """Set the values that follow from other flags."""
    files = arguments.files
    results = arguments.results
    search = arguments.search
    if files.window is None and files.input is None and sys.stdin.isatty():
        files = replace(files, window=1)
    if files.window is not None:
        search = replace(search, batch_size=min(search.batch_size, files.window))
    if arguments.scoring.score_targets is not None:
        results = replace(results, nbest=1, token_scores=True)
    if search.method == "sample":
        search = replace(search, beam_size=results.nbest)
    return replace(arguments, files=files, results=results, search=search)


def _local_folder(workdir: str) -> str:
    """Return the local path of a work directory; a URL is copied to this machine."""
    if is_url(workdir):
        from transformer_jax.pretrained.loading import local_workdir  # imports JAX

        return str(local_workdir(workdir))
    return str(existing_folder(workdir))
