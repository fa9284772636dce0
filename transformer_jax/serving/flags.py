"""Command-line flags of transformer-serve, parsed before JAX is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_network
from itertools import permutations
from typing import Annotated, Literal, NamedTuple

import tyro

from transformer_jax import DecodingConfig, UserError, flag_values, load_config_file, parse_flags
from transformer_jax.errors import short_repr
from transformer_jax.serving.limits import Limits
from transformer_jax.settings.config import EngineName
from transformer_jax.translation.requests import check_patterns

# In zh-Hans-en, the capital shows that Hans is not a language.
_LANGUAGE = r"([a-z]{2,8}(?:_[A-Za-z0-9]{2,8}|-[A-Z0-9][A-Za-z0-9]{1,7})*)"
_PAIR = re.compile(f"{_LANGUAGE}-{_LANGUAGE}")


class Pair(NamedTuple):
    """A language pair."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"


def normalize_code(language: str) -> str:
    """Return the form in which language codes are compared, such as pt-br for pt-BR and pt_BR."""
    return language.lower().replace("_", "-")


class ServedModel(NamedTuple):
    """A model to serve."""

    workdir: str
    pairs: Sequence[Pair]
    search: DecodingConfig
    """The run's search settings, overridden by flags."""


@dataclass(frozen=True)
class Arguments:
    """Serve translations through a LibreTranslate-compatible HTTP API and a web UI."""

    workdir: tuple[str, ...] = ()
    """Work directories of training runs, or their URLs; one model per language pair."""
    languages: tuple[str, ...] = ("source-target",)
    """Language pair of each model, such as en-de or en-pt-BR; all for all pairs of a many-to-many
    model."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces."""
    port: int = 8000
    """TCP port."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header of accepted requests, or * for any. Default: on a loopback address,
    localhost and that address, so that no other site can use its own name for this server;
    otherwise any."""
    engine: EngineName = "auto"
    """Program that searches. jax: our exact search. ctranslate2: faster for small models on a CPU,
    with another stopping rule (docs/serving.md). auto: ctranslate2 if it can do what is asked."""
    limits: Annotated[Limits, tyro.conf.arg(name="")] = Limits()
    protect: tuple[str, ...] = ()
    """HTML and XML: regular expressions of more text that passes unchanged (docs/markup.md)."""
    max_terms: Literal[0, 1, 4, 16, 64] = 0
    """Maximum number of glossary terms in a sentence. More take longer to compile at startup."""
    access_log: bool = False
    """Log each request: time, client, path and status, but no text."""
    log_level: Literal["info", "warning"] = "info"
    """Least severe messages to log. The access log is independent of it."""
    trusted_proxies: tuple[str, ...] = ()
    """IP addresses or networks, such as 10.0.0.0/8, of reverse proxies whose X-Forwarded-For header
    gives the client in the access log."""
    search: Annotated[DecodingConfig, tyro.conf.arg(name="")] = DecodingConfig()


def checked_flags(argv: Sequence[str] | None) -> tuple[Arguments, list[ServedModel]]:
    """Parse and check the flags. Returns the flags and the models to serve.

    Raises:
        UserError: a value is invalid, a run is missing, or two models have the same language pair.
    """
    arguments = parse_flags(Arguments, argv)
    arguments = replace(arguments, workdir=tuple(flag_values(argv, "workdir")))
    if not arguments.workdir:
        raise UserError("--workdir is missing; expected a work directory written by train.py.")
    if not 0 < arguments.port < 65536:
        raise UserError(f"--port is {arguments.port}; expected 1 to 65535.")
    check_patterns(arguments.protect, "--protect")
    _check_networks(arguments.trusted_proxies)
    pairs = _pairs(arguments)
    from transformer_jax import local_workdir  # loads JAX, which --help does not need

    served = []
    for workdir, pairs_of_model in zip(arguments.workdir, pairs):
        folder = local_workdir(workdir)
        defaults = {"search": load_config_file(folder).decoding}
        search = parse_flags(Arguments, argv, defaults=defaults).search
        served.append(ServedModel(str(folder), pairs_of_model, search))
    return arguments, served


def _check_networks(proxies: Sequence[str]) -> None:
    for proxy in proxies:
        try:
            ip_network(proxy)
        except ValueError as error:
            raise UserError(
                f"--trusted-proxies has {short_repr(proxy)} ({error}); expected IP addresses or "
                "networks, such as 127.0.0.1 or 10.0.0.0/8."
            ) from None


def _all_pairs(workdir: str) -> list[Pair]:
    from transformer_jax import Tokenizer, local_workdir

    codes = [*Tokenizer.load(local_workdir(workdir)).languages.tokens]
    if not codes:
        raise UserError(
            f"--languages is 'all' for {workdir!r}, which is not a many-to-many model; expected a "
            "pair, such as en-de."
        )
    return [Pair(*pair) for pair in permutations(codes, 2)]


def _pairs(a: Arguments) -> list[list[Pair]]:
    """Return the language pairs of each model. Raises ``UserError`` for duplicates."""
    if len(a.languages) != len(a.workdir):
        raise UserError(
            f"--languages has {len(a.languages)} pair(s) for {len(a.workdir)} work directories; "
            "expected one pair per directory, in the same order, such as --languages en-de fr-de."
        )
    pairs = list[list[Pair]]()
    number_of = dict[tuple[str, ...], int]()
    for number, (text, workdir) in enumerate(zip(a.languages, a.workdir)):
        codes = _PAIR.fullmatch(text)
        if not codes and text != "all":
            raise UserError(
                f"--languages has {short_repr(text)}; expected pairs of codes, such as en-de or "
                "en-pt-BR."
            )
        pairs.append([Pair(*codes.groups())] if codes else _all_pairs(workdir))
        for pair in pairs[number]:
            first = number_of.setdefault(tuple(map(normalize_code, pair)), number)
            if first != number:
                raise UserError(
                    f"{a.workdir[first]!r} and {workdir!r} both translate {pair}; expected one "
                    "model per language pair."
                )
    return pairs
