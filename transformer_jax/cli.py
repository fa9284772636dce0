"""What the command-line programs have in common: where they log, and how what ends them becomes an
exit status.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from transformer_jax.errors import UserError


def run_program(work: Callable[[], int | None]) -> int:
    """Do the work of a program; returns its exit status.

    That is what ``work`` returns (None: 0), 2 on wrong input (``UserError`` or ``OSError``, told in
    one line), 130 on Ctrl-C and 141 when nobody reads stdout any more, as in ``| head``. What it
    logs at INFO and above goes to stderr.
    """
    try:
        logging.basicConfig(stream=sys.stderr, format="%(message)s", force=True)
        # Orbax's; what goes wrong in a save is reported here
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        logging.getLogger("transformer_jax").setLevel(logging.INFO)
        return work() or 0
    except BrokenPipeError:
        # What is still buffered would fail once more when the interpreter shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def check_output(name: str) -> None:
    """``UserError`` unless a file of this name, which ``--output`` gives, can be made."""
    path = Path(name).absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"output is {name!r}; expected the name of a file in a folder that exists.")


def parse_shard(shard: str) -> tuple[int, int]:
    """``0/4`` as (0, 4): the first of four shards."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not int(match[1]) < int(match[2]):
        raise UserError(
            f"shard is {shard!r}; expected i/n with i from 0 to n - 1, such as 0/4, 1/4, 2/4, 3/4."
        )
    return int(match[1]), int(match[2])
