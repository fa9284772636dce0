"""Behavior common to all programs: exit status, messages, signals, flags and help."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from transformer_jax.cli import config_in_flags, flag_values, parse_flags, run_program
from transformer_jax.errors import UserError
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import to_json
from transformer_jax.training.__main__ import Arguments as TrainArguments

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "transformer_jax"
MAINS = [f"{file.parent.name}.__main__" for file in sorted(PACKAGE.glob("*/__main__.py"))]


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("x is 1; expected 2."), "error: x is 1; expected 2.\n"),
        (FileNotFoundError(2, "No such file or directory", "a/b"), "error: 'a/b': No such file"),
        (FileExistsError(17, "File exists", "a" * 500), "aaa': File exists; choose another path"),
        (
            OSError(28, "No space left on device"),
            "error: No space left on device; free disk space.\n",
        ),
        (
            PermissionError(13, "Permission denied", "a"),
            "Permission denied; check its permissions.",
        ),
        (OSError("Not a gzipped file"), "error: Not a gzipped file; check"),
        (OSError("not\na gzipped file"), "error: not a gzipped file; check"),
        (TimeoutError(), "error: TimeoutError; check"),  # of asyncio, without a message
        (BrokenPipeError(32, "Broken pipe"), "error: Broken pipe; check"),  # of a socket
    ],
)
def test_user_errors_are_one_short_line(
    error: Exception, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(lambda: fail(error)) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1 and len(text) < 300 and "Errno" not in text


def test_exit_statuses() -> None:
    assert run_program(lambda: None) == 0
    assert run_program(lambda: 7) == 7
    assert run_program(lambda: fail(KeyboardInterrupt())) == 130
    with pytest.raises(ZeroDivisionError):  # bugs keep their traceback
        run_program(lambda: fail(ZeroDivisionError()))


@pytest.mark.parametrize(
    "program",
    [
        "train.py --workdir w --config w",
        "decode.py --workdir w",
        "-m transformer_jax.serving --workdir w --port 0",
        "-m transformer_jax.report --workdir w --output w/r",
        pytest.param(
            "-m transformer_jax.report.heat_maps --workdir w --text x --output w/r",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "-m transformer_jax.pretrained import --input w --workdir w",
            marks=pytest.mark.exhaustive,
        ),
        "-m transformer_jax.parsing score --gold w --parses w",
    ],
)
def test_closed_standard_streams_do_not_receive_messages_or_files(
    program: str, tmp_path: Path
) -> None:
    """The streams are opened first, so no message goes to stdout and no file becomes stdout."""
    (tmp_path / "w").write_text("")
    script = program if program.startswith("-m") else f"{ROOT}/{program}"
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, *script.split()],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("kind", ["full", "gone"])
def test_only_a_failing_stdout_ends_a_program(stream: str, kind: str) -> None:
    code = f"""
import logging, sys
from transformer_jax.cli import run_program

def main():
    logging.getLogger("transformer_jax.x").warning("a message")
    print("text", file=sys.{stream})
    return 7

sys.exit(run_program(main))
"""
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") if kind == "full" else open(write, "w") as broken:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: broken}
        done = subprocess.run([sys.executable, "-c", code], text=True, cwd=ROOT, **streams)
    if stream == "stderr":
        assert done.returncode == 7
    elif kind == "gone":
        assert (done.returncode, done.stderr) == (141, "a message\n")
    else:
        assert done.returncode == 2 and "error: No space left on device" in done.stderr


OUTPUTS = [  # of every program, some shorter than the buffer and some longer
    "parsing.__main__ score --gold tree --parses tree",
    "parsing.__main__ restore --words words --sequences sequences",
    "parsing.__main__ restore --words many --sequences many",
    *(f"{name} --help" for name in (*MAINS, "report.heat_maps")),
]


@pytest.mark.parametrize(("kind", "status"), [("full", 2), ("gone", 141), ("open", 0)])
def test_every_program_ends_with_an_error_if_its_output_is_lost(
    kind: str, status: int, tmp_path: Path
) -> None:
    """Also if the output was still buffered. The programs run in one process, to save time."""
    code = """
import importlib, json, os, sys

found, stdout = {}, os.dup(1)
for line in json.loads(sys.argv[1]):
    module, *flags = line.split()
    os.dup2(stdout, 1)
    sys.stdout = open(1, "w", closefd=False)
    try:
        found[line] = importlib.import_module(f"transformer_jax.{module}").main(flags)
    except SystemExit as end:
        found[line] = end.code
    sys.stdout.flush()  # as at exit, where an error would change the status to 120
print(json.dumps(found), file=sys.stderr)
"""
    (tmp_path / "tree").write_text("(S (NN dog))\n")
    (tmp_path / "words").write_text("dog\n")
    (tmp_path / "sequences").write_text("(S XX )S\n")
    (tmp_path / "many").write_text("XX\n" * 9999)
    read, write = os.pipe()
    os.close(read)
    broken = open(write, "w")  # noqa: SIM115
    with broken, open("/dev/full" if kind == "full" else os.devnull, "w") as other:
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(OUTPUTS)],
            stdout=broken if kind == "gone" else other,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    *messages, last = done.stderr.splitlines()
    assert json.loads(last) == dict.fromkeys(OUTPUTS, status), done.stderr
    errors = [message for message in messages if message.startswith("error: ")]
    assert len(errors) == (len(OUTPUTS) if kind == "full" else 0)
    assert all("No space left on device; free disk space" in error for error in errors)


@dataclass(frozen=True)
class Inner:
    """Settings of the search."""

    width: int = 4
    """Hypotheses."""
    depth: int = 2
    """How deep."""


@dataclass(frozen=True)
class Outer:
    """Search."""

    name: str = tyro.MISSING
    """Who searches."""
    flat: Annotated[Inner, tyro.conf.arg(name="")] = field(default_factory=Inner)
    nested: Inner = field(default_factory=Inner)


def test_defaults_can_be_replaced() -> None:
    parsed = parse_flags(Outer, ["--name", "n", "--nested.depth", "7"], defaults={"flat": Inner(9)})
    assert parsed == Outer("n", Inner(9), Inner(depth=7))
    assert parse_flags(Outer, [], defaults={"name": "m"}) == Outer("m")
    with pytest.raises(SystemExit) as end:
        parse_flags(Outer, [])
    assert end.value.code == 2


def test_help_lists_every_flag_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_flags(Outer, ["--help"], defaults={"flat": Inner(9)})
    assert end.value.code == 0
    text = capsys.readouterr().out
    flags = {"--help", "--name", "--width", "--depth", "--nested.width", "--nested.depth"}
    assert set(re.findall(r"--\w[\w.-]*", text)) == flags
    assert "How deep." in text and "(default: 9)" in text


def test_flags_can_be_inspected_before_parsing() -> None:
    argv = ["--a_b=1", "--workdir", "x", "y", "--c.d-e", "5", "-h"]
    assert flag_values(argv, "workdir") == ["x", "y"]
    assert flag_values(argv, "config") == []
    assert flag_values(["--config=a.py"], "config") == ["a.py"]
    assert flag_values(["--workdir", "x", "y", "--seed", "1", "--workdir=z"], "workdir") == [*"xyz"]
    assert dataclasses.is_dataclass(parse_flags(Outer, ["--name=n"]))


def test_of_a_repeated_config_the_last_counts(tmp_path: Path) -> None:
    """As of any other flag that has one value."""
    files = [str(tmp_path / f"{seed}.json") for seed in range(3)]
    for seed, file in enumerate(files):
        Path(file).write_text(to_json(Config(seed=seed)))
    flags = ["--workdir=w", f"--config={files[1]}", "--config", files[0], "--config", files[2]]
    found = config_in_flags(flags)
    assert (found["config"], found["settings"].seed) == (files[2], 2)
    assert parse_flags(TrainArguments, flags, defaults=found).config == files[2]


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--model.d-model", "a whole number"),
        ("--optimizer.peak-learning-rate", "None or a number"),
        ("--mesh.data", "-1 or a whole number"),
    ],
)
def test_messages_of_flags_show_no_types(
    flag: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_flags(Config, [flag, "x"])
    message = " ".join(re.sub("[│─╭╮╰╯]", " ", capsys.readouterr().err).split())
    assert f"Error parsing {flag}: 'x'; expected {expected}" in message
    assert "typing" not in message and "class" not in message
