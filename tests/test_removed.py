"""Names that 0.1 removed are answered with what replaced them."""

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from transformer_jax import removed
from transformer_jax.cli import parse_flags
from transformer_jax.config import Config
from transformer_jax.config_io import flatten, from_json, load_config_file, to_json
from transformer_jax.errors import UserError

SETTING = "training.compilation_cache"
FLAGS = [*removed.FLAGS, *(name.replace("_", "-") for name in removed.SETTINGS)]


@dataclass(frozen=True)
class Flags:
    """No flags that anybody removed."""

    kept: int = 1
    """Stays."""


def with_setting(name: str, value: object) -> str:
    values = json.loads(to_json(Config()))
    section, _, field = name.rpartition(".")
    values[section][field] = value
    return json.dumps(values)


@pytest.mark.parametrize("name", removed.SETTINGS)
def test_a_removed_setting_at_its_default_loads_and_at_another_value_is_named(name: str) -> None:
    default, advice = removed.SETTINGS[name]
    assert name not in flatten(Config())
    assert from_json(with_setting(name, default)) == Config()
    with pytest.raises(UserError, match="was removed") as error:
        from_json(with_setting(name, "another value"))
    assert str(error.value) == f"{name} is 'another value', but was removed: {advice}"


def test_a_config_file_that_sets_it_is_told(tmp_path: Path) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(
        "from transformer_jax.config import Config, TrainingConfig\n"
        "def get_config():\n    return Config(training=TrainingConfig(compilation_cache='auto'))\n"
    )
    with pytest.raises(UserError, match=f"recipe.py', line 3: {SETTING} was removed: use"):
        load_config_file(file)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_removed_flag_names_what_replaced_it(flag: str) -> None:
    with pytest.raises(UserError, match=f"--{flag} was removed: .*[.]$"):
        parse_flags(Flags, [f"--{flag}=1"])
    assert parse_flags(Flags, ["--kept", "2"]) == Flags(2)


@pytest.mark.parametrize("module", removed.MODULES)
def test_a_removed_module_names_what_replaced_it(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"{module} was removed: .*[.]$"):
        importlib.import_module(f"transformer_jax.{module}")


def test_a_removed_program_ends_with_one_line() -> None:
    for module in list(removed.MODULES)[:1]:
        program = [sys.executable, "-m", f"transformer_jax.{module}"]
        done = subprocess.run(program, capture_output=True, text=True)
        assert done.returncode == 1
        assert removed.MODULES[module] in done.stderr
        assert len(done.stderr.splitlines()) == 1
