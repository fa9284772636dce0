"""Config files: loading, and conversion to and from JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any

from transformer_jax.errors import UserError, short_repr
from transformer_jax.settings.config import Config
from transformer_jax.storage.files import is_checkpoint, parse_object

_PACKAGE = Path(__file__).parents[1]
_RECIPES = folder if (folder := _PACKAGE / "configs").is_dir() else _PACKAGE.with_name("configs")
"""Folder of recipes: in the package if installed from a wheel, next to the package in a clone."""

_WITH_ARGUMENT = re.compile(r"([^/:.]+|.+?\.py):(.*)", re.DOTALL)
"""A recipe name or a Python file, a colon, and an argument, which can contain colons."""


_OLD_IDS = {"pad": 0, "bos": 1, "eos": 2, "unk": 3}
_OLD_TOKENIZER = {"sampling": "bpe_dropout", "sampled_epochs": "bpe_dropout_samples"}


def load_config_file(path: str | Path) -> Config:
    """Load a config from a recipe, a file, a work directory or a checkpoint.

    ``path`` is the name of a recipe (``multi30k``), a Python file with ``get_config()``, a
    config.json file, a work directory, or one of its checkpoints. Python files are executed, so
    load only files that you trust. JSON files are only parsed.

    Text after a colon is passed to ``get_config(argument)`` of the recipe or Python file:
    ``table3:C-N2``, ``mine/recipe.py:large``.

    Raises:
      UserError: the recipe or file does not exist, or has invalid settings.
      Exception: any other error of a Python file.
    """
    name = str(path)
    argument = None
    if not Path(name).exists() and (match := _WITH_ARGUMENT.fullmatch(name)):
        name, argument = match.groups()
    path = Path(name)
    if path.name == name and not path.suffix:
        path = recipe_path(name)
    if path.is_dir():
        path = (path.parents[1] if is_checkpoint(path) else path) / "config.json"
    if not path.is_file() or path.suffix not in (".py", ".json"):
        problem = "is not a .py or .json file" if path.exists() else "does not exist"
        raise UserError(
            f"Config file {str(path)!r} {problem}; expected a Python file with get_config(), a "
            "work directory's config.json, or the name of a recipe, such as demo."
        )
    if path.suffix == ".py":
        return _run_recipe(path, argument)
    try:
        return from_json(path.read_bytes())
    except UserError as error:
        raise UserError(f"Config file {str(path)!r}: {error}") from None


def recipe_path(name: str) -> Path:
    """Return the path of a recipe in ``configs``.

    Raises ``UserError`` if no recipe has this name.
    """
    path = _RECIPES / f"{name}.py"
    if not path.is_file():
        files = sorted(_RECIPES.glob("*.py"))
        recipes = [file.stem for file in files if "def get_config(" in file.read_text()]
        raise UserError(
            f"Config {name!r} is not a recipe; expected one of {', '.join(recipes)}, or the path "
            "of a Python file with get_config() or of a work directory's config.json."
        )
    return path


def _run_recipe(path: Path, argument: str | None) -> Config:
    names = runpy.run_path(str(path))
    if "get_config" not in names:
        raise UserError(
            f"{str(path)!r} has no get_config(); expected `def get_config() -> Config`."
        )
    arguments = [] if argument is None else [argument]
    try:
        inspect.signature(names["get_config"]).bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"get_config() in {str(path)!r} does not fit --config: {error}. An argument comes "
            "after the file or recipe and a colon, as in table3:C-N2."
        ) from None
    config = names["get_config"](*arguments)
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise UserError(
            f"get_config() in {str(path)!r} returned {kind}; expected a transformer_jax Config."
        )
    return config


def to_json(config: Config) -> str:
    """Serialize a config as indented JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str | bytes) -> Config:
    """Parse the output of ``to_json``.

    Raises ``UserError`` on unknown fields or invalid values.
    """
    return config_from_dict(parse_object(text, "The config"))


def config_from_dict(values: Any) -> Config:
    """Build a config from the output of ``dataclasses.asdict``, perhaps read from a JSON file.

    Raises ``UserError`` on unknown fields or invalid values.
    """
    try:
        return _build(Config, _with_new_names(values))
    except UserError as error:
        raise UserError(f"The config is not valid: {error}") from None


def _with_new_names(values: Any) -> Any:
    """Rename the fields that earlier versions of this package wrote."""
    if not isinstance(values, dict):
        return values
    values = {name: dict(x) if isinstance(x, dict) else x for name, x in values.items()}
    model = values.get("model")
    if isinstance(model, dict):
        if str(model.get("decoder_start")) in _OLD_IDS:
            model.setdefault("decoder_start_id", _OLD_IDS[model.pop("decoder_start")])
        if model.get("language_last") is False:
            del model["language_last"]
    tokenizer = values.get("tokenizer")
    if isinstance(tokenizer, dict):
        for old, new in _OLD_TOKENIZER.items():
            if old in tokenizer:
                tokenizer.setdefault(new, tokenizer.pop(old))
    return values


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a config, or a nested dict, to ``{"model.d_model": 512, ...}``."""
    values_by_name: dict[str, Any] = {}
    for name, value in (config if isinstance(config, dict) else vars(config)).items():
        if isinstance(value, dict) or dataclasses.is_dataclass(value):
            values_by_name |= flatten(value, f"{prefix}{name}.")
        else:
            values_by_name[f"{prefix}{name}"] = value
    return values_by_name


def _build(section: Any, values: dict[str, Any], prefix: str = "") -> Any:
    if not isinstance(values, dict):
        raise UserError(f"{prefix or 'It'} is {short_repr(values)}; expected an object.")
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    arguments = {}
    for name, value in values.items():
        if name == "architectures" and "EncoderModel" in str(value):
            raise UserError(
                f"It is an encoder alone, {short_repr(value)}; expected a model that also has a "
                "decoder. TextEncoder.from_pretrained loads encoders."
            )
        if name not in defaults:
            raise UserError(
                f"Unknown config field {prefix}{name}; expected one of {', '.join(defaults)}. If "
                "an earlier version of transformer_jax wrote the file, rename or remove the field; "
                "if it is from Hugging Face transformers, import the model: python -m "
                "transformer_jax.pretrained import."
            )
        if dataclasses.is_dataclass(default := defaults[name]):
            value = _build(type(default), value, f"{prefix}{name}.")
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return section(**arguments)
