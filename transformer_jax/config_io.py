"""Configs from files, from flags, and to and from JSON."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_jax.config import Config
from transformer_jax.errors import UserError


def load_config_file(path: str | Path) -> Config:
    """Run a config file's ``get_config()``, or read the config.json of a work directory."""
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"Config file {str(path)!r} does not exist; expected a Python file with get_config(), as in configs/."
        )
    if path.suffix == ".json":
        return from_json(path.read_text())
    spec = importlib.util.spec_from_file_location(f"_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(
            f"Config file {str(path)!r} is not a Python file; expected one with get_config(), as in configs/."
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(
            f"Config file {str(path)!r}, line {error.lineno}, is not valid Python: {error.msg}."
        ) from None
    if not hasattr(module, "get_config"):
        raise UserError(
            f"Config file {str(path)!r} has no get_config(); expected `def get_config() -> Config`."
        )
    try:
        config = module.get_config()
    except TypeError as error:  # most often a misspelt field
        said = str(error).partition(". Did you mean")[0]  # Python 3.13 has a hint of its own
        unknown = re.search(r"unexpected keyword argument '(\w+)'", said)
        near = difflib.get_close_matches(unknown[1], _FIELDS, n=1) if unknown else []
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"Config file {str(path)!r}: {said}.{hint}") from error
    if not isinstance(config, Config):
        raise UserError(
            f"get_config() of {str(path)!r} returned {type(config).__name__}; expected a transformer_jax Config."
        )
    return config


def config_in_flags(argv: Sequence[str]) -> tuple[str, Config]:
    """What ``--config`` names among a program's flags ('' without it), and the config whose values
    all others replace.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    path = parser.parse_known_args(argv)[0].config
    return path, load_config_file(path) if path else Config()


def to_json(config: Config) -> str:
    """The config as indented JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The config that ``to_json`` wrote. Unknown fields and values of a wrong type raise
    ``UserError``.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"The config is not JSON: {error}.") from None
    return _build(Config, values, "")


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """``{"model.d_model": 512, ...}``."""
    flat: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{f.name}.")
        else:
            flat[f"{prefix}{f.name}"] = value
    return flat


def _build(cls: Any, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise UserError(
            f"{prefix.rstrip('.') or 'config'} is {values!r}; expected an object with fields of {cls.__name__}."
        )
    fields = {f.name: f for f in dataclasses.fields(cls)}
    arguments = {}
    for name, value in values.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = (
                f"; did you mean {prefix}{near[0]}?"
                if near
                else f"; known fields: {', '.join(fields)}."
            )
            raise UserError(f"Unknown config field {prefix}{name}{hint}")
        section = fields[name].default_factory
        if dataclasses.is_dataclass(section):
            arguments[name] = _build(section, value, f"{prefix}{name}.")
        else:
            arguments[name] = tuple(value) if isinstance(value, list) else value
    return cls(**arguments)


_FIELDS = [name.rsplit(".", 1)[-1] for name in flatten(Config())]
