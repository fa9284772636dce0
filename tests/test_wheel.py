"""The built wheel, installed without a clone."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from random_models import make_model, train_tokenizer
from servers import CONFIG, LINES, running, write_served_run

from transformer_jax.translation.translator import Translator

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, built from the source archive by `python -m build`."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("transformer_jax", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    # the environment has the build requirements, so nothing is downloaded
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"], folder)
    [wheel] = (folder / "dist").glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", "there"]
    run([*pip, str(wheel)], folder)
    return folder / "there"


def run(command: list[str], folder: Path, *, status: int = 0, **environment: str) -> str:
    """The output of a program run in ``folder``, which must exit with this status."""
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert result.returncode == status, result.stdout
    return result.stdout


def test_the_wheel_has_every_file_and_recipe(installed: Path) -> None:
    package = ROOT / "transformer_jax"
    recipes = {path.relative_to(ROOT) for path in (ROOT / "configs").glob("*.py")}
    assert sources(installed / "transformer_jax") == sources(package) | recipes


def sources(folder: Path) -> set[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder) for path in files}


def test_programs_run_without_the_clone(installed: Path, tmp_path: Path) -> None:
    def program(name: str, *flags: str, status: int = 0) -> str:
        command = [sys.executable, str(installed / "bin" / name), *flags]
        return run(command, tmp_path, status=status, PYTHONPATH=str(installed))

    assert "--input" in program("transformer-decode", "--help")
    flags = ["--config", "table3:C-N2,multi30k_cpu", "--help", "tokenizer"]
    text = program("transformer-train", *flags)
    assert "(default: 8000)" in text  # from a recipe that reads two others
    text = program("transformer-train", "--config", "multi30k", "--workdir", "w", status=2)
    assert "data.root = 'data/multi30k'" in text  # missing; everything else exists
    code = "import transformer_jax; print(transformer_jax.Config, transformer_jax.__file__)"
    text = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(installed))
    assert text.split()[1:] == [
        "'transformer_jax.settings.config.Config'>",
        str(installed / "transformer_jax" / "__init__.py"),
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work directory with a small random model."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = train_tokenizer(LINES)
    write_served_run(folder, Translator(make_model(tokenizer), tokenizer, CONFIG))
    return folder


def test_the_service_names_its_extra(installed: Path, trained: Path, tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split("[>=]", each)[0] for each in project["optional-dependencies"]["serve"]]
    modules = {name.replace("-", "_") for name in names}
    # not installed, as far as Python knows
    blocked = f"import sys; sys.modules.update(dict.fromkeys({modules}))"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    command = [sys.executable, str(installed / "bin" / "transformer-serve")]
    flags = ["--workdir", str(trained)]
    path = f"{tmp_path}{os.pathsep}{installed}"
    said = run([*command, *flags], tmp_path, status=2, PYTHONPATH=path)
    assert "is not installed." in said and "for a wheel: 'transformer-jax[serve]'" in said
    assert "--max-queue" in run([*command, "--help"], tmp_path, PYTHONPATH=path)


@pytest.mark.exhaustive
def test_the_service_runs_without_the_clone(installed: Path, trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, installed / "bin" / "transformer-serve", "--workdir", trained]
    command += ["--languages", "en-de"]
    command += ["--batch-size", "1", "--beam-size", "1", "--max-source-length", "16"]
    with running(command, tmp_path, PYTHONPATH=str(installed)) as (process, port):
        url = f"http://127.0.0.1:{port}"
        page = ROOT / "transformer_jax" / "serving" / "page"
        for path in page.iterdir():
            name = "" if path.name == "index.html" else path.name
            assert urlopen(f"{url}/{name}").read() == path.read_bytes()
        query = urlencode({"q": "one two three", "target": "de"}).encode()
        answer = json.load(urlopen(f"{url}/translate", query))
        assert answer["translatedText"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
