"""Code shared by the command-line programs: flags, help, logging, signals, exit status."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin
from weakref import WeakSet

from transformer_jax.errors import LossyStream, UserError, one_line, short_repr
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import load_config_file

T = TypeVar("T")

ABANDONED_WORK = WeakSet[Future[Any]]()
"""Work in threads that cannot be canceled, such as compilation, and that nobody waits for."""

_ANY_REMEDY = (
    "check the path, its permissions, free disk space, limits (ulimit -a), and the network"
)
_REMEDIES = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path, of which a part is a file",
    errno.EISDIR: "choose a file instead of a folder",
    errno.EEXIST: "choose another path, or remove what is there",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EROFS: "choose a place that can be written",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space, or ask for a larger quota",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def run_program(work: Callable[[], int | None]) -> int:
    """Run a program's main function and return its exit status. The program must then exit.

    The status is the return value of ``work`` (0 for None), 2 on invalid input (``UserError`` or
    ``OSError``, printed as one line), 130 on Ctrl-C, and 141 if the reader of stdout is gone, for
    example with ``| head``. Log messages at INFO and above go to stderr; messages that cannot be
    written, for example because the disk is full, are dropped.
    """
    _open_standard_streams()
    # This handler writes to the current ``sys.stderr``, which a progress bar can replace.
    handler: Any = logging.lastResort
    handler.setLevel(logging.NOTSET)
    logging.basicConfig(handlers=[handler], format="%(message)s", force=True)
    # Orbax logs through absl. Training has its own messages for failed saves and object stores.
    for library in ("absl", "gcsfs"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    logging.getLogger("transformer_jax").setLevel(logging.INFO)
    try:
        try:
            status = work() or 0
        except SystemExit:  # of --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except OSError as error:
        poll = select.poll()
        poll.register(1, 0)
        if isinstance(error, BrokenPipeError) and poll.poll(0):  # stdout's other end is closed
            status = 141
        else:
            file = "" if error.filename is None else f"{short_repr(error.filename)}: "
            remedy = _REMEDIES.get(error.errno or 0, _ANY_REMEDY)
            print(f"error: {file}{error.strerror or one_line(error)}; {remedy}.", file=sys.stderr)
            status = 2
    except KeyboardInterrupt:
        status = 130
    try:
        sys.stdout.flush()
    except OSError:  # at exit, Python would flush again, fail again and exit with status 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if any(map(Future.running, ABANDONED_WORK)):
        # Compilation can take minutes.
        sys.stderr.flush()
        os._exit(status)
    return status


def _open_standard_streams() -> None:
    """Open closed standard streams on /dev/null, and make stderr a ``LossyStream``. Results cannot
    be written to a closed stdout: its descriptor is for reading only, so writing is an error.

    Otherwise the next file to be opened would get the descriptor of stdout or stderr and receive
    what is printed, and ``print(..., file=None)`` would write messages to stdout.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # /dev/null gets ``descriptor``, the lowest free descriptor
            access = os.O_RDONLY if name == "stdout" else os.O_RDWR
            os.set_inheritable(os.open(os.devnull, access), True)
            setattr(sys, name, os.fdopen(descriptor, "w" if name == "stdout" else "r+"))
    sys.stderr = LossyStream(sys.stderr)  # type: ignore[assignment]


def parse_flags(
    arguments: type[T],
    argv: Sequence[str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """Parse a program's flags into an instance of ``arguments``.

    Exits the program on ``--help`` or invalid flags.

    Args:
      arguments: a dataclass, possibly nested. Field docstrings become the help text. A union of
        dataclasses defines one subcommand for each dataclass.
      argv: the flags; None: ``sys.argv[1:]``.
      defaults: field values that override the defaults declared in ``arguments``. Required fields
        then need the default ``tyro.MISSING``.
    """
    import tyro  # imported here because library code also imports this module

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_number_rule)
    spec = sys.modules["__main__"].__spec__
    prog = f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
    if not defaults:
        return tyro.cli(arguments, prog=prog, args=argv, registry=registry)
    default = arguments(**defaults)
    return tyro.cli(arguments, prog=prog, args=argv, default=default, registry=registry)


def _number_rule(info: Any) -> Any:
    """Parse a number, or None or another word instead of it. tyro's own message for such flags
    shows Python's types.
    """
    from tyro.constructors import PrimitiveConstructorSpec

    members = get_args(info.type) if get_origin(info.type) in (Union, UnionType) else (info.type,)
    words: dict[str, Any] = {}
    number_type: Any = None
    for member in members:
        plain = get_args(member)[0] if get_origin(member) is Annotated else member
        if plain is type(None):
            words["None"] = None
        elif get_origin(plain) is Literal:
            words |= {str(value): value for value in get_args(plain)}
        elif plain in (int, float) and number_type is None:
            number_type = plain
        else:
            return None
    if number_type is None:
        return None
    kind = "a whole number" if number_type is int else "a number"
    expected = " or ".join([*words, kind])

    def parse(texts: list[str]) -> Any:
        if texts[0] in words:
            return words[texts[0]]
        try:
            return number_type(texts[0])
        except ValueError:
            raise ValueError(f"{short_repr(texts[0])}; expected {expected}") from None

    choices = [f"{{{','.join(words)}}}"] if words else []
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join([*choices, number_type.__name__.upper()]),
        instance_from_str=parse,
        is_instance=lambda x: x in words.values() or type(x) in (number_type, int),
        str_from_instance=lambda x: [str(x)],
    )


def config_in_flags(argv: Sequence[str] | None) -> dict[str, Any]:
    """Return defaults for the ``config`` and ``settings`` fields of a program's arguments.

    ``config`` is the value of ``--config``, and ``settings`` is the config loaded from it. Without
    ``--config``, they are "" and ``Config()``.
    """
    name = "".join(flag_values(argv, "config")[-1:])
    return {"config": name, "settings": load_config_file(name) if name else Config()}


def flag_values(argv: Sequence[str] | None, name: str) -> list[str]:
    """Return all values of the ``--name`` flag, which can be repeated, in ``argv`` (None:
    ``sys.argv[1:]``).

    Other flags are parsed later, because their defaults can depend on these values.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", nargs="*", action="extend", default=[])
    return vars(parser.parse_known_args(argv)[0])[name]
