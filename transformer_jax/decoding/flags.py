"""The flags of decode.py; none of this loads JAX."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from transformer_jax.cli import flag_values, flags_given, parse_flags
from transformer_jax.config import Config, DecodingConfig
from transformer_jax.config_checks import Positive, Section
from transformer_jax.config_io import load_config_file
from transformer_jax.errors import UserError
from transformer_jax.storage import is_url, local_path

COMMON = (
    "workdir",
    "checkpoint",
    "average",
    "files.input",
    "files.output",
    "files.format",
    "files.resume",
    "results.nbest",
    "results.alignments",
    "evaluation.reference",
    "evaluation.score",
    "search.beam_size",
    "search.length_penalty",
    "search.batch_size",
)


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
    shard: str | None = None
    """i/n: translate lines i, i + n, i + 2n, ... only (from 0); other processes translate the
    others."""
    window: Positive | None = None
    """Lines that are read, then translated, at a time; 1 for a program that waits for each answer.
    Default: 1 at a terminal, otherwise 100 batches."""

    @property
    def one_by_one(self) -> bool:
        """Whether each line is answered before the next one is read."""
        at_terminal = self.input is None and sys.stdin.isatty()
        return self.window == 1 or (self.window is None and at_terminal)


@dataclass(frozen=True)
class Results(Section):
    """What is written about a translation."""

    nbest: Positive = 1
    """More than 1: this many lines a sentence, best first, as `number ||| translation ||| score`;
    JSONL: `hypotheses`. Sampling draws as many, if --beam-size does not ask for more."""
    alignments: Literal["hard", "soft"] | None = None
    """hard: after each translation ` ||| 0-0 1-2`, source word - target word. soft (JSONL): a
    matrix over tokens."""
    alignment_layer: int = -1
    """Decoder layer whose attention is the alignment; negative: from the last."""
    token_scores: bool = False
    """JSONL: each token and its log-probability."""


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
    """Translate lines of text with a trained model: one line out for each line in.

    `--help` shows common flags, `--help all` every flag, `--help SECTION` one of

    files, results, evaluation, search.
    """

    workdir: tuple[str, ...] = ()
    """Work directory of a training run, or its URL; several: their models translate together (mean
    of their probabilities)."""
    checkpoint: Literal["last", "best"] | int | None = None
    """The newest checkpoint, the best on the dev set, or that of a step. Default: the newest; the
    best if early stopping ended the run."""
    average: int | None = None
    """Take the mean of this many checkpoints, up to the chosen one. Default: the run's
    training.average; with --checkpoint best or a step, 1."""
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
    workdirs = tuple(checked_workdir(workdir) for workdir in flag_values(argv, "workdir"))
    config = load_config_file(f"{workdirs[0]}/config.json") if workdirs else Config()
    arguments = parse_flags(Arguments, argv, defaults={"search": config.decoding}, common=COMMON)
    given, nbest, implied = flags_given(argv), arguments.results.nbest, dict[str, Any]()
    if arguments.files.one_by_one and "batch-size" not in given:
        implied["batch_size"] = 1
    by_default = config.decoding.method == "beam" and "beam-size" not in given
    if arguments.search.method == "sample" and by_default:
        implied["beam_size"] = nbest  # the run's is no number of samples
    search = dataclasses.replace(arguments.search, **implied)
    if arguments.evaluation.score is None and nbest > search.beam_size:
        raise UserError(
            f"nbest is {nbest}; expected at most {search.beam_size}, the value of --beam-size."
        )
    _check_output(arguments)
    return dataclasses.replace(arguments, workdir=workdirs, search=search), config


def _check_output(arguments: Arguments) -> None:
    """``UserError`` if the output would overwrite an input, or be taken for compressed."""
    output = arguments.files.output
    if output is None:
        return
    if output.endswith(".gz"):
        raise UserError(
            f"output is {output!r}, but what is written is not compressed; "
            "expected a name without .gz."
        )
    inputs = arguments.files.input, arguments.evaluation.reference, arguments.evaluation.score
    for path in filter(None, inputs):
        if Path(path).resolve() == Path(output).resolve():
            raise UserError(f"output is {output!r}, which is read; expected another file.")


def checked_workdir(workdir: str) -> str:
    """The folder with a run's config; a URL is copied to this machine."""
    if is_url(workdir):
        from transformer_jax.remote_workdir import local_workdir  # loads JAX

        return str(local_workdir(workdir))
    folder = local_path(workdir)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"workdir is {workdir!r}, which has no config.json; "
            "expected a work directory written by train.py."
        )
    return str(folder)
