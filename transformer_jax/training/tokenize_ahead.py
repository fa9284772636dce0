"""Tokenise the training text ahead of training, in shards that many processes or machines work on
at the same time:

    python -m transformer_jax.training.tokenize_ahead --config C --workdir W --tokenizer-only
    python -m transformer_jax.training.tokenize_ahead --config C --workdir W --shard 0/16 # to 15/16
    python train.py --config C --workdir W --data.shards 16

All of them need the same work directory (or ``data.cache`` and a copy of the work directory). A
shard is whole files; see ``data/corpus.py``.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from transformer_jax.cli import config_in_flags, parse_flags, parse_shard, run_program
from transformer_jax.config import Config
from transformer_jax.config_io import load_config_file
from transformer_jax.data.corpus import prepare_shard
from transformer_jax.errors import UserError
from transformer_jax.remote_workdir import require_folder
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training.prepare import check_inputs, has_tokenizer, prepare_tokenizer
from transformer_jax.training.resuming import differences_on_resume, fields_that_differ
from transformer_jax.training.workdir import claimed

COMMON = (
    "workdir",
    "config",
    "tokenizer_only",
    "shard",
    "settings.data.root",
    "settings.data.train.source",
    "settings.data.train.target",
    "settings.data.cache",
    "settings.data.workers",
)


@dataclass(frozen=True)
class Arguments:
    """Tokenise the training text in shards, for train.py with data.shards. Takes the flags of
    train.py.
    """

    workdir: str
    """Folder of the run."""
    config: str = ""
    """As for train.py: a recipe's name, a config file, or a work directory's config.json."""
    tokenizer_only: bool = False
    """Make the work directory and its tokenizer, which all shards need."""
    shard: str | None = None
    """i/n: tokenise shard i of n, from 0/n to n-1/n; sets data.shards."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it."""
    return run_program(lambda: _tokenize(sys.argv[1:] if argv is None else argv))


def _tokenize(argv: list[str]) -> None:
    a = parse_flags(Arguments, argv, defaults=config_in_flags(argv), common=COMMON)
    if a.tokenizer_only == (a.shard is not None):
        raise UserError(
            f"shard is {a.shard!r} and tokenizer_only {a.tokenizer_only}; expected one of the two."
        )
    workdir = require_folder(a.workdir)
    if a.shard is not None:
        _make_shard(a.settings, workdir, *parse_shard(a.shard))
        return
    check_inputs(a.settings)
    with claimed(workdir, a.settings):
        prepare_tokenizer(workdir, a.settings)


def _make_shard(config: Config, workdir: Path, shard: int, count: int) -> None:
    """Tokenise one shard; changes nothing else in the work directory, which others may use."""
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, shards=count))
    check_inputs(config)
    path = workdir / "config.json"
    if not path.is_file() or not has_tokenizer(workdir):
        raise UserError(
            f"{str(workdir)!r} has no tokenizer; expected one: run this with --tokenizer-only "
            "first."
        )
    if differences := differences_on_resume(load_config_file(path), config):
        raise UserError(
            f"{str(workdir)!r} was made with another config; expected the same settings. "
            + fields_that_differ(differences)
        )
    prepare_shard(workdir, config, Tokenizer.load(workdir), shard)


if __name__ == "__main__":
    sys.exit(main())
