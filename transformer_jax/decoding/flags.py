"""The flags of decode.py, and the checks that need no model: none of this loads JAX."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from transformer_jax.cli import check_output, flag_values, flags_given, parse_flags, parse_shard
from transformer_jax.config import Config, DecodingConfig
from transformer_jax.config_io import flatten, load_config_file
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
# Fields that the output may add.
_OUTPUT_FIELDS = (
    "translation",
    "score",
    "log_prob",
    "hypotheses",
    "tokens",
    "token_scores",
    "source_tokens",
    "alignment",
)
# Flags that say nothing without another one.
_NEEDS = {
    "resume": "--output",
    "alignment_layer": "--alignments",
    "bleu_tokenize": "--reference",
    "bleu_language": "--reference",
    "text_field": "--format jsonl",
    "token_scores": "--format jsonl",
}
_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_SCORING = ("length_penalty", "length_offset", "batch_size")


@dataclass(frozen=True)
class Files:
    """What is read and written."""

    input: str | None = None
    """File to translate, UTF-8, .gz too. Default: stdin."""
    output: str | None = None
    """File to write. Default: stdout."""
    format: Literal["text", "jsonl"] = "text"
    """text: a sentence a line. jsonl: an object a line; its other fields come out unchanged."""
    text_field: str = "text"
    """JSONL: the field to translate. A field `prefix` forces the beginning of the translation."""
    resume: bool = False
    """Keep the complete sentences of --output and continue after them."""
    shard: str | None = None
    """i/n: translate lines i, i + n, i + 2n, ... only (from 0); other processes translate the
    others."""
    window: int | None = None
    """Lines that are read, then translated, at a time; 1 for a program that waits for each answer.
    Default: 1 at a terminal, otherwise 100 batches."""

    @property
    def one_by_one(self) -> bool:
        """Whether each line is answered before the next one is read."""
        at_terminal = self.input is None and sys.stdin.isatty()
        return self.window == 1 or (self.window is None and at_terminal)


@dataclass(frozen=True)
class Results:
    """What is written about a translation."""

    nbest: int = 1
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
    """The flags, checked, and the config of the first run, whose search settings they replace.

    Work directories at URLs are copied to this machine first, and replaced by their copies.

    Raises:
        UserError: flags that contradict each other, do nothing, or name files that are not there.
    """
    workdirs = tuple(checked_workdir(workdir) for workdir in flag_values(argv, "workdir"))
    config = load_config_file(f"{workdirs[0]}/config.json") if workdirs else Config()
    arguments = parse_flags(Arguments, argv, defaults={"search": config.decoding}, common=COMMON)
    typed = {name.replace("-", "_") for name in flags_given(argv)}
    implied: dict[str, Any] = {}
    if arguments.files.one_by_one and "batch_size" not in typed:
        implied["batch_size"] = 1
    by_default = config.decoding.method == "beam" and "beam_size" not in typed
    if arguments.search.method == "sample" and by_default:
        implied["beam_size"] = max(1, arguments.results.nbest)  # the run's is no number of samples
    search = dataclasses.replace(arguments.search, **implied)
    arguments = dataclasses.replace(arguments, workdir=workdirs, search=search)
    _check_effects(arguments, typed)
    _check_values(arguments, config)
    return arguments, config


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


def _check_effects(arguments: Arguments, typed: set[str]) -> None:
    """Refuse flags that would do nothing, or that cannot go together."""
    search = typed & vars(arguments.search).keys()
    values, defaults = flatten(arguments), flatten(Arguments())
    given = search | {
        name.partition(".")[2]
        for name in values
        if name.startswith(("files.", "results.", "evaluation.")) and values[name] != defaults[name]
    }
    for name in sorted(given & _NEEDS.keys()):
        if _NEEDS[name].split()[0].removeprefix("--") not in given:
            raise UserError(f"{_flag(name)} is given without {_NEEDS[name]}, which it needs.")
    if arguments.results.alignments == "soft" and "format" not in given:
        raise UserError("--alignments soft is given without --format jsonl, which it needs.")
    for name, excluded, reason in (
        ("score", search - set(_SCORING) | {"nbest", "reference"}, "which searches nothing"),
        ("reference", {"resume", "shard"}, "which needs the whole output of one run"),
    ):
        for other in sorted(excluded & given) if name in given else ():
            raise UserError(
                f"{_flag(other)} is given with {_flag(name)}, {reason}; leave one of them out."
            )
    for name in sorted(search.intersection(_SAMPLING)):
        if arguments.search.method != "sample":
            value = getattr(arguments.search, name)
            raise UserError(
                f"{name} is {value} without sampling; expected --method sample with it."
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_values(arguments: Arguments, config: Config) -> None:
    """Refuse values that cannot work, whatever the model."""
    files, results, evaluation = arguments.files, arguments.results, arguments.evaluation
    if not arguments.workdir:
        raise UserError("--workdir is missing; expected a work directory written by train.py.")
    if files.window is not None and files.window < 1:
        raise UserError(f"window is {files.window}; expected 1 or more.")
    if files.text_field in (*_OUTPUT_FIELDS, "prefix"):
        raise UserError(
            f"text_field is {files.text_field!r}; expected another name: this one is what a "
            "translation begins with, or a field of the output."
        )
    beam_size = arguments.search.beam_size
    if evaluation.score is None and not 1 <= results.nbest <= beam_size:
        raise UserError(f"nbest is {results.nbest}; expected 1 to {beam_size}, the --beam-size.")
    inputs = {
        "input": files.input,
        "reference": evaluation.reference,
        "score": evaluation.score,
    }
    for name, path in inputs.items():
        if path is None:
            continue
        if not Path(path).is_file():
            what = "is no regular file" if Path(path).exists() else "does not exist"
            or_stdin = " or stdin" * (name == "input")
            raise UserError(f"{name} is {path!r}, which {what}; expected a file{or_stdin}.")
        if files.output is not None and Path(path).resolve() == Path(files.output).resolve():
            raise UserError(
                f"output and {name} are both {path!r}; expected another file for the output."
            )
    if files.output is not None:
        check_output(files.output)
        if files.output.endswith(".gz"):  # readers would take it for compressed
            raise UserError(
                f"output is {files.output!r}, but what is written is not compressed; "
                "expected a name without .gz."
            )
    if files.shard is not None:
        parse_shard(files.shard)
    if evaluation.reference is not None:
        from transformer_jax.evaluation import check_bleu_language, check_bleu_tokenizer

        check_bleu_tokenizer(evaluation.bleu_tokenize or config.training.bleu_tokenize)
        check_bleu_language(evaluation.bleu_language or "")
