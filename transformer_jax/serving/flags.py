"""The flags of transformer-serve, and what they say of the models: none of this loads JAX."""

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
    """What a model translates from and into."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"


class Served(NamedTuple):
    """A model to serve."""

    workdir: str
    pair: Pair
    search: DecodingConfig
    """The run's, with what the flags say in place of it; always beam search."""


@dataclass(frozen=True)
class Arguments:
    """Translate for other programs, as LibreTranslate does, and on a page for people."""

    workdir: tuple[str, ...] = ()
    """Work directories of training runs, or their URLs: a model for each pair of languages."""
    languages: tuple[str, ...] = ()
    """For each model what it translates, such as en-de. Default: the endings of its training
    files."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all of this machine's."""
    port: int = 8000
    """TCP port."""
    max_queue: int = 1024
    """Sentences in progress, of all requests together. More are refused (503; 413 in one
    request)."""
    max_characters: int = 20_000
    """Characters in a request. More are refused (413)."""
    timeout: float = 60.0
    """Seconds that a request may take to arrive and be answered; then it gets 503."""
    average: int | None = None
    """Take the mean of this many checkpoints, up to the chosen one. Default: what the end of
    training chose; of a single checkpoint's folder, itself."""
    compilation_cache: str = "auto"
    """Folder where compiled functions are kept between runs; off, or auto: as in decode.py."""
    search: Annotated[DecodingConfig, tyro.conf.arg(name="")] = field(
        default_factory=DecodingConfig
    )


def checked_flags(argv: Sequence[str]) -> tuple[Arguments, list[Served]]:
    """The flags, and the models that they ask for.

    Raises:
        UserError: values that cannot work, runs that do not exist, two models of one pair.
    """
    arguments = parse_flags(Arguments, argv)
    arguments = replace(arguments, workdir=tuple(flag_values(argv, "workdir")))
    _check_values(arguments)
    from transformer_jax import local_workdir  # loads JAX, which --help does without

    folders = [local_workdir(workdir) for workdir in arguments.workdir]
    configs = [load_config_file(folder) for folder in folders]
    pairs = _pairs(arguments, configs)
    precisions = {config.model.matmul_precision for config in configs}
    if len(precisions) > 1:
        raise UserError(
            f"model.matmul_precision is {' and '.join(sorted(precisions))} in these runs; expected "
            "one for all models of a process. Serve them from several."
        )
    served = []
    for folder, pair, config in zip(folders, pairs, configs, strict=True):
        search = parse_flags(Arguments, argv, defaults={"search": config.decoding}).search
        served.append(Served(str(folder), pair, replace(search, method="beam")))
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
    """The pair of each model, all different."""
    if a.languages and len(a.languages) != len(configs):
        raise UserError(
            f"languages has {len(a.languages)} pairs for {len(configs)} work directories; "
            "expected one for each, in their order."
        )
    pairs = list(map(_parse_pair, a.languages) if a.languages else map(_guessed_pair, configs))
    for index, pair in enumerate(pairs):
        if pair in pairs[:index]:
            first = a.workdir[pairs.index(pair)]
            raise UserError(
                f"{first!r} and {a.workdir[index]!r} both translate {pair}; expected a model for "
                "each pair. --languages says what they translate, such as en-de fr-de."
            )
    return pairs


def _parse_pair(text: str) -> Pair:
    source, _, target = text.partition("-")
    if not (_LANGUAGE.fullmatch(source) and _LANGUAGE.fullmatch(target)):
        raise UserError(
            f"languages has {shown(text)}; expected two codes such as en-de, or en-pt_BR."
        )
    return Pair(source, target)


def _guessed_pair(config: Config) -> Pair:
    """By the names of its training data's fields, or by how its files' names end."""
    train = config.data.train
    if train.kind == "numbers":
        return Pair("en", "de")
    if train.kind == "text":
        names = "".join(train.source[:1]), "".join(train.target[:1])
    else:
        names = train.source_field, train.target_field
    return Pair(*(_code_in(name) or side for name, side in zip(names, ("source", "target"))))


def _code_in(name: str) -> str:
    """The last language code in a name such as train-*.en.txt.gz."""
    parts = [x for x in re.split(r"[^A-Za-z_]", name) if x not in ("gz", "txt")]
    return next(filter(_LANGUAGE.fullmatch, reversed(parts)), "")
