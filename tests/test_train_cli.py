"""train.py as its user meets it: help, wrong flags, wrong input, exit statuses."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from transformer_jax.config import Config, ModelConfig
from transformer_jax.config_io import flatten, load_config_file, to_json
from transformer_jax.training.__main__ import COMMON, Arguments

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    monkeypatch.syspath_prepend(str(ROOT))
    import train

    return train.main


@pytest.fixture
def help_on(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What train.py prints for ``--help`` and these words."""

    def print_help(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["--config", str(ROOT / "configs" / "multi30k.py"), "--help", *words])
        assert end.value.code == 0
        return capsys.readouterr().out

    return print_help


def flags_in_help(text: str) -> set[str]:
    return set(re.findall(r"^\W*--(\w[\w.-]*)", text, re.MULTILINE)) - {"help"}


def test_help_all_lists_every_section(help_on: Callable[..., str]) -> None:
    output = help_on("all")
    for flag in (
        "--workdir",
        "--model.d-ff INT",
        "--data.train.kind",
        "--optimizer.warmup-steps",
        "--mesh.fsdp",
        "--seed",
    ):
        assert flag in output
    assert "(default: 256)" in output  # the recipe's d_ff
    named = {name.replace("_", "-") for name in flatten(Config())}
    assert named | {"workdir", "config", "distributed"} <= flags_in_help(output)


def test_plain_help_lists_the_common_flags(help_on: Callable[..., str]) -> None:
    output = help_on()
    assert output == help_on("--workdir", "w")
    assert "--help all" in output and output.count("\n") < 130
    flags = flags_in_help(output)
    assert {"workdir", "config", "data.train.source", "training.steps", "model.d-model"} <= flags
    assert "model.remat" not in flags
    assert set(COMMON) <= set(flatten(Arguments("w")))


def test_help_on_a_section_lists_its_flags_alone(help_on: Callable[..., str]) -> None:
    model = {f"model.{name.replace('_', '-')}" for name in flatten(ModelConfig())}
    assert flags_in_help(help_on("model")) == model
    assert {"data.root", "data.dev.limit"} <= flags_in_help(help_on("data"))
    assert {"num-processes", "process-id"} <= flags_in_help(help_on("processes"))


def test_help_on_an_unknown_section_names_the_known(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help", "modle"]) == 2
    assert "--help is 'modle'; expected all or one of" in capsys.readouterr().err


def test_help_has_the_width_of_the_terminal(
    help_on: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert max(map(len, help_on().splitlines())) <= width
    # sentences are not broken where the source breaks them
    assert "Or a URL" in " ".join(help_on().replace("│", " ").split())


def test_unknown_flag_names_the_nearest(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--workdir", "w", "--model.num-layrs", "2"])
    assert end.value.code == 2
    assert "--model.num-layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workdir", "w"], "There is nothing to train on; expected data.train.source"),
        (["--workdir", "w", "--config", "none.py"], "Config file 'none.py' does not exist"),
        (
            ["--workdir", "w", "--data.train.source", "a", "--data.train.target", "b"],
            "File 'a' does not exist",
        ),
        (
            ["--workdir", "w", "--batch.tokens", "100"],
            "batch.tokens is 100; expected at least 2048",
        ),
        (["--workdir", "/dev/null/w", "--data.train.kind", "numbers"], "'/dev/null/w'"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    main: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    assert main(flags) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and message in errors and "Traceback" not in errors


def test_wrong_value_in_a_flag_is_explained(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--workdir", "w", "--model.d-model", "33"])
    errors = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "model.d_model is 33; expected an even number" in errors


@pytest.mark.parametrize("flag", ["--training.steps", "--data.train.limit", "--num-processes"])
def test_a_number_that_is_too_large_is_explained(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    try:
        status = main(["--workdir", "w", flag, "99999999999999999999"])
    except SystemExit as end:  # tyro's way to report a bad value of a flag
        status = int(end.code or 0)
    assert status == 2
    errors = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "is 99999999999999999999; expected a positive number below 2^31" in errors


@pytest.mark.parametrize("program", ["train.py", "decode.py"])
def test_a_device_that_is_not_there_is_named_with_what_to_install(
    program: str, tmp_path: Path
) -> None:
    flags = {"train.py": ["--config", "configs/demo.py", "--workdir", str(tmp_path / "run")]}
    (tmp_path / "config.json").write_text(to_json(Config()))
    done = subprocess.run(
        [sys.executable, program, *flags.get(program, ["--workdir", str(tmp_path)])],
        capture_output=True,
        text=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"JAX_PLATFORMS": "tpu"},
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    for part in ("JAX_PLATFORMS is 'tpu'", "Installed plugins:", "pip install 'jax[tpu]'"):
        assert part in done.stderr


def test_nobody_reading_the_help_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()


def test_recipes_differ_where_their_names_say() -> None:
    base, big = (
        load_config_file(ROOT / "configs" / f"wmt14_{size}.py") for size in ("base", "big")
    )
    assert (big.model.d_model, big.model.d_ff, big.model.num_heads, big.model.dropout) == (
        1024,
        4096,
        16,
        0.3,
    )
    assert (base.training.steps, big.training.steps) == (100_000, 300_000)
    french = load_config_file(ROOT / "configs" / "wmt14_en_fr_big.py")
    assert (french.model.dropout, french.tokenizer.vocab_size) == (0.1, 32_000)
