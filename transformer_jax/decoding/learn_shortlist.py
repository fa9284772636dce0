"""Learn a shortlist from the training text of a run.

    python -m transformer_jax.decoding.learn_shortlist --workdir W [--top 100] [--frequent 100]

learns which tokens go together and writes ``W/shortlist.npz``.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from transformer_jax.cli import check_output, parse, run_program
from transformer_jax.config_io import load_config_file
from transformer_jax.data.corpus import prepare_corpus
from transformer_jax.decoding.lexicon import learn
from transformer_jax.decoding.shortlist import Shortlist
from transformer_jax.errors import UserError
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.storage import is_url
from transformer_jax.tokenizer import Tokenizer

# as a program its __name__ is another
log = logging.getLogger("transformer_jax.decoding.learn_shortlist")


@dataclass(frozen=True)
class Arguments:
    """Learn from a run's training text which target tokens a source token may need
    (docs/decoding.md).
    """

    workdir: str
    """Work directory of a training run."""
    top: int = 100
    """Likeliest target tokens of each source token."""
    frequent: int = 100
    """Most frequent target tokens, which any sentence may need."""
    pairs: int = 300_000
    """Learn from so many sentence pairs, spread over the training text."""
    output: str = ""
    """File to write. Default: shortlist.npz in the work directory."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _learn(argv))


def _learn(argv: list[str] | None) -> None:
    a = parse(Arguments, argv)
    if is_url(a.workdir) and not a.output:
        raise UserError(f"workdir is {a.workdir!r}; expected --output FILE with a URL.")
    output = Path(a.output or Path(a.workdir) / "shortlist.npz")
    if a.output:
        check_output(a.output)
    shortlist = learn_shortlist(a.workdir, top=a.top, frequent=a.frequent, max_pairs=a.pairs)
    shortlist.save(output)
    mean = len(shortlist.candidates) / (len(shortlist.offsets) - 1)
    log.info("%s: %.0f target tokens a source token on average.", output, mean)


def learn_shortlist(
    workdir: str | Path, *, top: int = 100, frequent: int = 100, max_pairs: int = 300_000
) -> Shortlist:
    """A shortlist from the training text of a run; ``UserError`` if there is no run, or it has
    none.
    """
    workdir = local_workdir(workdir)
    if not (workdir / "config.json").is_file():
        raise UserError(
            f"workdir is {str(workdir)!r}, which has no config.json; expected one written by train.py."
        )
    config, tokenizer = load_config_file(workdir / "config.json"), Tokenizer.load(workdir)
    if not config.data.train.is_given:
        raise UserError(
            f"The config of {str(workdir)!r} names no training text; expected data.train, or give a text table."
        )
    if top < 1 or frequent < 0 or max_pairs < 1:  # before the work
        raise UserError(
            f"top, frequent and pairs are {top}, {frequent} and {max_pairs}; expected at least 1, 0 and 1."
        )
    # that of the training run, if it is still there
    corpus = prepare_corpus(workdir, config, tokenizer, "train")
    sizes = {
        "source_vocab_size": tokenizer.source_vocab_size,
        "target_vocab_size": tokenizer.target_vocab_size,
    }
    return Shortlist.from_lexicon(
        learn(corpus, **sizes, max_pairs=max_pairs), tokenizer, top=top, frequent=frequent
    )


if __name__ == "__main__":
    sys.exit(main())
