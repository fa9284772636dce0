"""train.py: help, invalid flags and input, exit status."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from number_names import number_files

from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import flatten, load_config_file, to_json
from transformer_jax.training import __main__ as program

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    monkeypatch.syspath_prepend(str(ROOT))
    import train

    return train.main


@pytest.fixture
def help_on(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> Callable[[], str]:
    """Output of ``train.py --help``."""

    def print_help() -> str:
        with pytest.raises(SystemExit) as end:
            main(["--config", str(ROOT / "configs" / "multi30k.py"), "--help"])
        assert end.value.code == 0
        return capsys.readouterr().out

    return print_help


def flags_in_help(text: str) -> set[str]:
    return set(re.findall(r"^\W*--(\w[\w.-]*)", text, re.MULTILINE)) - {"help"}


def test_help_lists_every_section(help_on: Callable[[], str]) -> None:
    output = help_on()
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


def test_help_fits_the_terminal(
    help_on: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert max(map(len, help_on().splitlines())) <= width


FILES = number_files(100)
TRAIN = "--data.train.source long --data.train.target long"
NUMBERS = (
    f"--data.train.source {FILES.source[0]} --data.train.target {FILES.target[0]} "
    "--tokenizer.vocab-size 150"
)
TOO_LARGE = "99999999999999999999"

# Flags of train.py besides --workdir, and a regular expression for the message.
ERRORS_AT_ONCE = [
    ("", "No training data is given; set data.train.source"),
    ("--config none.py", "Config file 'none.py' does not exist"),
    ("--model.num-layrs 2", "--model.num-layers"),
    ("--model.d-model 33", "model.d_model is 33; expected an even number"),
    *(
        (f"{flag} {TOO_LARGE}", rf"is {TOO_LARGE}; expected a positive number below 2\^31")
        for flag in ("--training.steps", "--data.train.limit", "--num-processes")
    ),
    ("--data.train.source a --data.train.target b", "'a' is not a file"),
    ("--data.train.source long empty --data.train.target long empty", r"no pairs in \('empty',\)"),
    (f"{NUMBERS} --workdir /dev/null/w", "'/dev/null/w'"),
    (
        f"{NUMBERS} --mesh.fsdp 64",
        "-1 x 64 x 1; expected a product of [0-9]+, the number of devices",
    ),
    (f"{TRAIN} --training.freeze encoder.layer.*", r"freeze contains 'encoder.layer.\*', which"),
    (f"{TRAIN} --training.freeze *matrix *coder.*", "freeze is .*, which matches every parameter"),
    (f"{NUMBERS} --workdir .", "is not empty but has no config.json"),
    (f"{TRAIN} --training.bleu-tokenize ko-mecab", "BLEU tokenizer 'ko-mecab'"),
    (
        f"{NUMBERS} --data.dev.source none.en --data.dev.target none.de",
        "'none.en' is not a file",
    ),
    (
        f"{TRAIN} --data.dev.source short --data.dev.target long",
        "different numbers of lines .1 and 2",
    ),
    ("--data.train.source empty --data.train.target empty", "data.train has no pairs"),
    (
        "--data.train.kind tsv --data.train.source long",
        "long, line 1: field '2' is missing; expected Unicode text",
    ),
    (f"{TRAIN} --data.test.source empty --data.test.target empty", "data.test has no pairs"),
    (
        f"{TRAIN} --data.test.source long --data.test.target short",
        "different numbers of lines .2 and 1",
    ),
]
ERRORS_BEFORE_TRAINING = [
    (f"{NUMBERS} --batch.tokens 10", "batch.tokens is 10; expected at least [0-9]+, to fit batch"),
    (f"{NUMBERS} --tokenizer.source-language en", "source_language is 'en'; expected one of: none"),
    (f"{NUMBERS} --decoding.suppress no-such-token", "decoding.suppress contains 'no-such-token'"),
    (
        f"{NUMBERS} --training.start-from nowhere",
        "nowhere' is not a folder; expected a work directory",
    ),
]


@pytest.mark.parametrize(("flags", "message"), ERRORS_AT_ONCE + ERRORS_BEFORE_TRAINING)
def test_invalid_input_gives_one_line_and_status_2(
    main: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str,
    message: str,
) -> None:
    for name, text in {"short": "1\n", "long": "1\n2\n", "empty": ""}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    at_once = (flags, message) in ERRORS_AT_ONCE
    try:
        status = main(["--workdir", "run", *flags.split()])
        errors = capsys.readouterr().err
        first_or_last = errors.splitlines()[0 if at_once else -1]
        assert first_or_last.startswith("error: ") and "Traceback" not in errors
    except SystemExit as end:  # the flag parser's error, in a box
        status, errors = int(end.code or 0), capsys.readouterr().err.replace("│", " ")
    assert status == 2 and re.search(message, " ".join(errors.split()))
    if at_once:
        assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "error: model.max_positions is 8; expected at least 256, the larger of data.max"),
        (["--data.max-source-length=8", "--data.max-target-length=8"], "error: No training data"),
    ],
)
def test_flags_override_a_recipe_before_settings_are_compared(
    main: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: list[str],
    message: str,
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from transformer_jax import Config, ModelConfig\n\n\ndef get_config():\n"
        "    return Config(model=ModelConfig(positions='learned', max_positions=8))\n"
    )
    assert main(["--config", str(recipe), "--workdir", str(tmp_path / "run"), *flags]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("program", ["train.py", "decode.py"])
def test_a_missing_device_is_an_error_that_names_its_package(program: str, tmp_path: Path) -> None:
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
    for part in ("JAX_PLATFORMS is 'tpu'", "pip install 'jax[cuda13]' or 'jax[tpu]'"):
        assert part in done.stderr


def test_a_closed_pipe_during_help_is_not_an_error() -> None:
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


def test_sizes_and_languages_of_recipes() -> None:
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


@pytest.mark.parametrize("given", [None, "glibc.malloc.check=1"])
def test_the_program_restarts_once_with_huge_pages(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments stay, and settings of malloc that are given."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "utf8", "train.py", "--help"])
    monkeypatch.setattr(os, "execv", lambda path, argv: started.append([path, *argv]))
    with suppress(SystemExit):
        program.main()
    again = [sys.executable, sys.executable, "-X", "utf8", "train.py", "--help"]
    assert started == ([] if given else [again])
    assert os.environ["GLIBC_TUNABLES"] == (given or "glibc.malloc.hugetlb=1")
