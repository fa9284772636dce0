"""The program that trains Table 3 of the paper (section 6.2).

    python -m transformer_jax.table3 --config configs/wmt14_base.py --rows base,A,C-N --seeds 3 \\
        --workdir runs/table3

Each row and seed is a run of train.py in a process of its own. WORKDIR gets:

    base.json               the config that the rows differ from
    ROW/seed-1, ...         work directories, and beside each its config (seed-1.json) and what
                            train.py printed (seed-1.log)
    table3.md, table3.png   table and picture of what is there so far
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from transformer_jax.cli import config_in_flags, flags_given, parse_flags, run_program
from transformer_jax.config import Config
from transformer_jax.config_io import recipe_path
from transformer_jax.errors import UserError
from transformer_jax.storage import is_url, local_path
from transformer_jax.table3.figures import write_table
from transformer_jax.table3.runs import chosen_rows, environments, load_table, prepare, train_all

COMMON = ("workdir", "config", "rows", "seeds", "collect_only", "table")


@dataclass(frozen=True)
class Arguments:
    """Train rows of Table 3 of the paper, and put their figures beside the paper's. The same
    command run again resumes, and tries again what failed.

    Flags for the settings of train.py (`--help all`) change the base.
    """

    workdir: str
    """Folder of the table, made if it does not exist."""
    config: str = ""
    """Config file of the base. '': the paper's base model."""
    rows: str = "base,A,B,C,D,E"
    """Names of rows, or how they begin: A is A-h1, A-h4, A-h16 and A-h32."""
    seeds: int = 1
    """Train each row with seeds 1, 2, ... up to this: all rows with seed 1 first."""
    collect_only: bool = False
    """Train nothing; print the table of what is there."""
    table: str = ""
    """Python file with the rows. '': configs/table3.py."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status, as ``run_program`` has it; 1 if a run failed."""
    return run_program(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    arguments = parse_flags(Arguments, argv, defaults=config_in_flags(argv), common=COMMON)
    workdir = local_path(arguments.workdir)
    table = load_table(Path(arguments.table or recipe_path("table3")))
    if arguments.collect_only:
        print(write_table(workdir, table))
        return 0
    if is_url(arguments.workdir):
        raise UserError(f"workdir is {arguments.workdir!r}; expected a folder of this machine.")
    if arguments.seeds < 1 or "seed" in flags_given(argv):
        raise UserError(f"seeds is {arguments.seeds}; expected 1 or more, and no --seed with it.")
    names = chosen_rows(arguments.rows, table.rows)
    runs = prepare(arguments.settings, table, names, workdir=workdir, seeds=arguments.seeds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = train_all(runs, environments(), when_done=lambda: write_table(workdir, table))
    finally:
        print(write_table(workdir, table))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
