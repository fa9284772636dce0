"""Tokenise the training text ahead of training, in parts that many processes or machines work on at
the same time:

    python -m transformer_jax.data.prepare --config C --workdir W --tokenizer-only python -m
    transformer_jax.data.prepare --config C --workdir W --part 0/16    # and 1/16 to 15/16, anywhere
    python train.py --config C --workdir W --data.parts 16

All see the same work directory (or ``data.cache`` and a copy of it). A part is whole files; see
``parts.py``.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from transformer_jax.cli import run_program
from transformer_jax.config import Config
from transformer_jax.config_io import config_in_flags, from_json
from transformer_jax.data.shards import prepare_part
from transformer_jax.decoding.parts import parse_part
from transformer_jax.errors import UserError
from transformer_jax.remote_workdir import require_folder
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.prepare import check_inputs, claimed, has_tokenizer, prepare_tokenizer
from transformer_jax.training.resuming import differences_on_resume, fields_that_differ


@dataclass(frozen=True)
class Arguments:
    """Tokenise the training text in parts, for train.py with data.parts. Takes the flags of
    train.py.
    """

    workdir: str
    """Folder of the run."""
    config: str = ""
    """Config file, as in configs/, or a work directory's config.json; without one: the paper's base
    model.
    """
    tokenizer_only: bool = False
    """Make the work directory and its tokenizer, which all parts need."""
    part: str | None = None
    """i/n: tokenise part i of n, from 0/n to n-1/n; sets data.parts."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _prepare(sys.argv[1:] if argv is None else argv))


def _prepare(argv: list[str]) -> None:
    path, config = config_in_flags(argv)
    defaults = Arguments(tyro.MISSING, path, settings=config)
    a = tyro.cli(
        Arguments, args=argv, prog="python -m transformer_jax.data.prepare", default=defaults
    )
    if a.tokenizer_only == (a.part is not None):
        raise UserError(
            f"part is {a.part!r} and tokenizer_only {a.tokenizer_only}; expected one of the two."
        )
    if a.part is None:
        make_tokenizer(a.settings, require_folder(a.workdir))
    else:
        make_part(a.settings, require_folder(a.workdir), parse_part(a.part))


def make_tokenizer(config: Config, workdir: Path) -> None:
    """What ``train`` does first: a work directory for this config, and its tokenizer."""
    check_inputs(config)
    with claimed(workdir, config):
        prepare_tokenizer(workdir, config)


def make_part(config: Config, workdir: Path, part: tuple[int, int]) -> None:
    """Tokenise part i of n; changes nothing else in the work directory, where others may be at
    work.
    """
    number, count = part
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, parts=count))
    check_inputs(config)
    path = workdir / "config.json"
    if not path.is_file() or not has_tokenizer(workdir):
        raise UserError(
            f"{str(workdir)!r} has no tokenizer; expected one: run this with --tokenizer-only first."
        )
    if differences := differences_on_resume(from_json(path.read_text()), config):
        raise UserError(
            f"{str(workdir)!r} was made with another config; expected the same settings. "
            + fields_that_differ(differences)
        )
    prepare_part(workdir, config, Tokenizer.load(workdir), number)


if __name__ == "__main__":
    sys.exit(main())
