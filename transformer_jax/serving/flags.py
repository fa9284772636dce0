"""Command-line flags of transformer-serve, parsed before JAX is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

import tyro

from transformer_jax import (
    Config,
    DecodingConfig,
    UserError,
    flag_values,
    load_config_file,
    parse_flags,
    shown,
)

_LANGUAGE = re.compile(r"[a-z]{2,3}(_[A-Za-z0-9]{2,8})*")


class Pair(NamedTuple):
    """A language pair."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"


class Served(NamedTuple):
    """A model to serve."""

    workdir: str
    pair: Pair
    search: DecodingConfig
    """The run's search settings, overridden by flags."""


@dataclass(frozen=True)
class Arguments:
    """Serve translations through a LibreTranslate-compatible HTTP API and a web UI."""

    workdir: tuple[str, ...] = ()
    """Work directories of training runs, or their URLs; one model per language pair."""
    languages: tuple[str, ...] = ()
    """Language pair of each model, such as en-de. Default: inferred from the suffixes of its
    training files."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    port: int = 8000
    """TCP port."""
    max_queue: int = 1024
    """Maximum number of sentences in progress. Requests beyond this limit get status 503; a single
    request with more sentences gets 413."""
    max_characters: int = 20_000
    """Maximum number of characters in a request; longer requests get status 413."""
    timeout: float = 60.0
    """Maximum number of seconds from the start of a request to its response; slower requests get
    status 503."""
    search: Annotated[DecodingConfig, tyro.conf.arg(name="")] = field(
        default_factory=DecodingConfig
    )


def checked_flags(argv: Sequence[str]) -> tuple[Arguments, list[Served]]:
    """Parse and check the flags. Returns the flags and the models to serve.

    Raises:
        UserError: a value is invalid, a run is missing, or two models have the same language pair.
    """
    arguments = parse_flags(Arguments, argv)
    arguments = replace(arguments, workdir=tuple(flag_values(argv, "workdir")))
    _check_values(arguments)
    from transformer_jax import local_workdir  # loads JAX, which --help does not need

    folders = [local_workdir(workdir) for workdir in arguments.workdir]
    configs = [load_config_file(folder) for folder in folders]
    pairs = _pairs(arguments, configs)
    served = []
    for folder, pair, config in zip(folders, pairs, configs, strict=True):
        search = parse_flags(Arguments, argv, defaults={"search": config.decoding}).search
        served.append(Served(str(folder), pair, search))
    return arguments, served


def _check_values(a: Arguments) -> None:
    if not a.workdir:
        raise UserError("--workdir is missing; expected a work directory written by train.py.")
    if not 0 < a.port < 65536:
        raise UserError(f"port is {a.port}; expected 1 to 65535.")
    for name in ("max_queue", "max_characters", "timeout"):
        value = getattr(a, name)
        if not 0 < value < math.inf:
            raise UserError(f"{name} is {value}; expected more than 0.")


def _pairs(a: Arguments, configs: Sequence[Config]) -> list[Pair]:
    """Return the language pair of each model. Raises ``UserError`` for duplicate pairs."""
    if a.languages and len(a.languages) != len(configs):
        raise UserError(
            f"languages has {len(a.languages)} pairs for {len(configs)} work directories; "
            "expected one pair per directory, in the same order."
        )
    pairs = list(map(_parse_pair, a.languages) if a.languages else map(_guessed_pair, configs))
    for index, pair in enumerate(pairs):
        if pair in pairs[:index]:
            first = a.workdir[pairs.index(pair)]
            raise UserError(
                f"{first!r} and {a.workdir[index]!r} both translate {pair}; expected one model "
                "per language pair. Set the pairs with --languages, such as en-de fr-de."
            )
    return pairs


def _parse_pair(text: str) -> Pair:
    source, _, target = text.partition("-")
    if not (_LANGUAGE.fullmatch(source) and _LANGUAGE.fullmatch(target)):
        raise UserError(
            f"languages has {shown(text)}; expected pairs of codes, such as en-de or en-pt_BR."
        )
    return Pair(source, target)


def _guessed_pair(config: Config) -> Pair:
    """Infer the language pair from field names or file suffixes of the training data."""
    train = config.data.train
    if train.kind == "numbers":
        return Pair("en", "de")
    if train.kind == "text":
        names = "".join(train.source[:1]), "".join(train.target[:1])
    else:
        names = train.source_field, train.target_field
    return Pair(*(_code_in(name) or side for name, side in zip(names, ("source", "target"))))


def _code_in(name: str) -> str:
    """Find the last language code in a name such as train-*.en.txt.gz."""
    parts = [x for x in re.split(r"[^A-Za-z_]", name) if x not in ("gz", "txt")]
    return next(filter(_LANGUAGE.fullmatch, reversed(parts)), "")
