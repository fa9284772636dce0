"""Translate lines of text with a trained model: one line out for each line in, and nothing else on stdout."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

if TYPE_CHECKING:
    from transformer_jax.decoding.translator import Translation

logger = logging.getLogger("transformer_jax.decode")


@dataclass(frozen=True)
class Arguments:
    """Translate lines of text with a trained model: one line out for each line in."""

    workdir: str
    """Work directory of a training run."""
    input: str | None = None
    """File to translate, UTF-8, .gz too. Default: stdin."""
    output: str | None = None
    """File to write. Default: stdout."""
    beam_size: int | None = None
    """Hypotheses kept for a sentence; 1: greedy. Default: the run's decoding.beam_size."""
    length_penalty: float | None = None
    """alpha in log P / ((5 + length) / 6)^alpha. Default: the run's decoding.length_penalty."""
    batch_size: int | None = None
    """Sentences searched at a time. Default: the run's decoding.batch_size, or 1 when lines are typed at a terminal."""
    checkpoint: Literal["last", "best"] | int = "last"
    """The newest checkpoint, the best on dev, or that of a step."""
    average: int | None = None
    """Take the mean of so many checkpoints, up to the chosen one. Default: the run's training.average, 1 unless last."""
    nbest: int = 1
    """More than 1: so many lines a sentence, best first, as `number ||| translation ||| score`."""
    reference: str | None = None
    """File of reference translations: BLEU and chrF of the output go to stderr."""
    bleu_tokenize: str | None = None
    """sacreBLEU's tokenisation for --reference. Default: the run's training.bleu_tokenize."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status: 0, 2 (wrong input), 130 (Ctrl-C), 141 (nobody reads the output)."""
    # Imports stand where they are needed: --help and wrong flags answer at once, and Ctrl-C is quiet from the start.
    try:
        import tyro

        arguments = tyro.cli(Arguments, prog="decode.py", args=argv)
        logging.basicConfig(stream=sys.stderr, format="%(message)s", force=True)
        logging.getLogger("transformer_jax").setLevel(logging.INFO)
        from transformer_jax.errors import UserError

        try:
            _decode(arguments)
        except BrokenPipeError:
            # What is still buffered would fail once more when the interpreter shuts down.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _decode(arguments: Arguments) -> None:
    import jax

    from transformer_jax.config_files import from_json
    from transformer_jax.data.sources import read_lines
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.errors import UserError
    from transformer_jax.evaluation import bleu, check_pairs, chrf

    config_file = Path(arguments.workdir) / "config.json"
    if not config_file.is_file():
        raise UserError(
            f"workdir is {arguments.workdir!r}, which has no config.json; expected a work directory written by train.py."
        )
    training = from_json(config_file.read_text()).training
    if training.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(training.compilation_cache).expanduser()))

    for name in ("input", "reference"):
        path = getattr(arguments, name)
        if path is not None and not Path(path).is_file():
            raise UserError(f"{name} is {path!r}, which does not exist; expected a text file.")
        if path is not None and arguments.output is not None and Path(path).resolve() == Path(arguments.output).resolve():
            raise UserError(f"output and {name} are both {path!r}; expected another file for the output.")
    lines: Iterable[str] = read_lines(arguments.input or sys.stdin.buffer)
    references = list(read_lines(arguments.reference)) if arguments.reference else None
    if references is not None:
        lines = list(lines)
        check_pairs(lines, references)  # before the work, not after it

    at_terminal = arguments.input is None and sys.stdin.isatty()
    settings = {
        "beam_size": arguments.beam_size,
        "length_penalty": arguments.length_penalty,
        "batch_size": 1 if at_terminal and arguments.batch_size is None else arguments.batch_size,
    }
    translator = Translator.from_workdir(
        arguments.workdir,
        checkpoint=arguments.checkpoint,
        average=arguments.average,
        **{name: value for name, value in settings.items() if value is not None},
    )
    results = translator.stream(lines, num_hypotheses=arguments.nbest, window=1 if at_terminal else None)
    start = time.perf_counter()
    with nullcontext(sys.stdout.buffer) if arguments.output is None else open(arguments.output, "wb") as output:
        best = _write(results, output, nbest=arguments.nbest, keep=references is not None)
    logger.info("%.1f s; %d shapes compiled.", time.perf_counter() - start, translator.num_compiled)
    if references is not None:
        for score in (
            bleu(best, references, tokenize=arguments.bleu_tokenize or training.bleu_tokenize),
            chrf(best, references),
        ):
            print(score, file=sys.stderr)


def _write(results: Iterable[list[Translation]], output: BinaryIO, *, nbest: int, keep: bool) -> list[str]:
    """Write translations as they come; returns the best ones, if they are to be kept."""
    best = []
    for number, translations in enumerate(results):
        for t in translations:
            text = t.text if nbest == 1 else f"{number} ||| {t.text} ||| {t.score:.4f}"
            output.write(text.encode() + b"\n")
        output.flush()
        if keep:
            best.append(translations[0].text)
    return best


if __name__ == "__main__":
    sys.exit(main())
