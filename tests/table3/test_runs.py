"""Table 3 as a program: which runs there are, how they are done, what the table says of them."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from runs import tiny

from transformer_jax.config import Config, PairsConfig
from transformer_jax.config_io import flatten, load_config_file, recipe_path, to_json
from transformer_jax.errors import UserError
from transformer_jax.table3.__main__ import main
from transformer_jax.table3.figures import as_markdown, collect, write_table
from transformer_jax.table3.runs import (
    Run,
    chosen_rows,
    environments,
    load_table,
    prepare,
    train_all,
)

ROOT = Path(__file__).resolve().parents[2]
TABLE = load_table(recipe_path("table3"))
ROWS = list(TABLE.rows)

# What stands for train.py: leaves what a run leaves, for the wrong dropout fails.
TRAINER = """
import json, signal, sys, time
from pathlib import Path
config, workdir = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
wait, steps = float(sys.argv[3]), config["training"]["steps"]
workdir.mkdir(parents=True, exist_ok=True)
if config["model"]["dropout"] == 0:
    sys.exit("error: dropout | is needed")
def end(stopped):
    done = {"steps": 1 if stopped else steps, "stopped_by": stopped}
    (workdir / "summary.json").write_text(json.dumps(done))
    sys.exit(143 if stopped else 0)
signal.signal(signal.SIGTERM, lambda *_: end("SIGTERM"))
with (workdir / "metrics.jsonl").open("a") as file:
    heads, seed = config["model"]["num_heads"], config["seed"]
    figures = {"dev_perplexity": 5 + seed + heads / 8, "dev_bleu": 20 + seed + heads}
    for entry in (
        {"kind": "start", "step": 0, "parameters": 1_230_000},
        {"kind": "train", "step": 7},
        {"kind": "dev", "step": steps, **figures},
    ):
        print(json.dumps(entry), file=file, flush=True)
    print('{"kind": "tr', file=file)
print("ready", flush=True)
time.sleep(wait)
end(None)
"""


def fake(wait: float = 0.0):
    """Starts the trainer above in place of train.py."""

    def start(run: Run, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        config = run.folder.with_suffix(".json")
        config.parent.mkdir(exist_ok=True)
        config.write_text(to_json(run.config))
        with run.log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-c", TRAINER, str(config), str(run.folder), str(wait)],
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                process_group=0,
            )

    return start


@pytest.fixture
def base() -> Config:
    config = tiny(steps=30)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_heads=8))


def test_rows_are_named_by_how_they_begin() -> None:
    assert chosen_rows("E,A,base", ROWS) == ["base", "A-h1", "A-h4", "A-h16", "A-h32", "E"]
    assert chosen_rows("C-N", ROWS) == ["C-N2", "C-N4", "C-N8"]
    assert chosen_rows("A-h1", ROWS) == ["A-h1"]  # not A-h16
    assert chosen_rows("base,A,B,C,D,E,big", ROWS) == ROWS and len(ROWS) == 20
    for unknown in ("F", "A,,B", "base, A"):
        with pytest.raises(
            UserError, match=r"rows has .*; expected names, .* of base, A-h1, .*big"
        ):
            chosen_rows(unknown, ROWS)


def test_runs_of_one_seed_come_together_and_finished_ones_are_left_out(
    base: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    base = dataclasses.replace(
        base, training=dataclasses.replace(base.training, label_smoothing=0.0)
    )
    names = ["base", "A-h4", "D-ls0.0"]
    runs = prepare(base, TABLE, names, workdir=tmp_path, seeds=2)
    assert [str(run) for run in runs] == [
        *("base, seed 1", "A-h4, seed 1", "base, seed 2", "A-h4, seed 2")
    ]
    assert "D-ls0.0 is left out: with this base it is the same as base." in caplog.text
    assert runs[1].config.model.num_heads == 4 and runs[2].config.seed == 2
    assert {run.config.data.cache for run in runs} == {str(tmp_path / "corpus")}
    assert train_all(runs[:3], [{}], start=fake()) == 0
    left = prepare(base, TABLE, names, workdir=tmp_path, seeds=2)
    assert left == runs[3:]
    longer = dataclasses.replace(base, training=dataclasses.replace(base.training, steps=60))
    assert len(prepare(longer, TABLE, names, workdir=tmp_path, seeds=2)) == 4


def test_a_run_with_early_stopping_is_finished_once_it_has_ended(
    base: Config, tmp_path: Path
) -> None:
    patient = dataclasses.replace(base.training, patience=3)
    [run] = prepare(
        dataclasses.replace(base, training=patient), TABLE, ["base"], workdir=tmp_path, seeds=1
    )
    run.folder.mkdir(parents=True)
    for stopped_by, early, finished in (
        ("SIGTERM", True, False),
        (None, False, False),  # all steps of an earlier, lower training.steps
        (None, True, True),
    ):
        (run.folder / "summary.json").write_text(
            json.dumps({"steps": 20, "stopped_by": stopped_by, "stopped_early": early})
        )
        assert run.is_finished is finished


def test_another_base_is_refused(base: Config, tmp_path: Path) -> None:
    prepare(base, TABLE, ["base"], workdir=tmp_path, seeds=1)
    other = dataclasses.replace(base, model=dataclasses.replace(base.model, d_ff=64))
    with pytest.raises(UserError, match=r"another base; .*\n  model.d_ff: 32 in base.json, 64 now"):
        prepare(other, TABLE, ["base"], workdir=tmp_path, seeds=1)
    without = dataclasses.replace(base, data=dataclasses.replace(base.data, dev=PairsConfig()))
    with pytest.raises(UserError, match="data.dev is missing"):
        prepare(without, TABLE, ["base"], workdir=tmp_path / "new", seeds=1)


def test_a_run_that_fails_stops_no_other_and_the_table_says_so(
    base: Config, tmp_path: Path
) -> None:
    names = ["base", "A-h4", "A-h16", "D-drop0.0"]
    runs = prepare(base, TABLE, names, workdir=tmp_path, seeds=2)
    done: list[int] = []
    when_done = lambda: done.append(len(collect(tmp_path, TABLE)))  # noqa: E731
    assert train_all(runs, [{}, {}, {}], start=fake(), when_done=when_done) == 2
    assert len(done) == 8 and done[-1] == 4
    write_table(tmp_path, TABLE)
    [header, _, first, *rows, _, perplexity, bleu] = (
        (tmp_path / "table3.md").read_text().rstrip().split("\n")
    )
    assert header.startswith("| row | here | million parameters: paper | ours | perplexity: paper")
    assert first == ("| base |  | 65 | 1.23 | 4.92 | 7.50 ± 0.71 | 25.8 | 29.5 ± 0.7 | 2 of 2 |")
    assert rows[0].startswith("| A-h4 | num_heads 4 | 65 | 1.23 | 5.00 |")
    error = "failed, exit status 1: error: dropout / is needed"
    assert rows[2] == (
        "| D-drop0.0 | dropout 0.0 | 65 | – | 5.77 | – | 24.6 | – "
        f"| 0 of 2; seed 1 {error}; seed 2 {error} |"
    )
    assert perplexity.endswith("perplexity over 3 rows: -1.00 (1: the same order).")
    assert bleu == "Rank correlation with the paper's bleu over 3 rows: +0.87 (1: the same order)."
    assert (tmp_path / "table3.png").read_bytes()[:4] == b"\x89PNG"
    # what failed is tried again
    assert [str(run) for run in prepare(base, TABLE, names, workdir=tmp_path, seeds=2)] == [
        *("D-drop0.0, seed 1", "D-drop0.0, seed 2")
    ]


def test_each_process_has_a_device_of_its_own(base: Config, tmp_path: Path) -> None:
    runs, at_work = prepare(base, TABLE, ["base", "A-h1", "A-h4"], workdir=tmp_path, seeds=1), []

    class Process:
        returncode = 0

        def __init__(self, run: Run, device: str):
            run.folder.parent.mkdir(exist_ok=True)
            self.device, self.polls = device, 0
            assert device not in at_work
            at_work.append(device)

        def poll(self) -> int | None:
            self.polls += 1
            if self.polls < 2:
                assert len(at_work) <= 2
                return None
            at_work.remove(self.device)
            return 0

    devices = [{"DEVICE": "0"}, {"DEVICE": "1"}]
    train_all(runs, devices, start=lambda run, env: Process(run, env["DEVICE"]))  # type: ignore
    assert not at_work and all(run.log.exists() for run in runs)


def test_ctrl_c_lets_the_runs_save_and_the_same_command_goes_on(
    base: Config, tmp_path: Path
) -> None:
    runs = prepare(base, TABLE, ["base", "A-h1", "A-h4"], workdir=tmp_path, seeds=1)

    def interrupt() -> None:
        while not all(run.log.exists() and b"ready" in run.log.read_bytes() for run in runs[:2]):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=interrupt).start()
        train_all(runs, [{}, {}], start=fake(60))
    assert not runs[2].log.exists()
    text = write_table(tmp_path, TABLE)
    assert text.count("0 of 1; seed 1 at step 30 of 30") == 2 and "failed" not in text
    left = prepare(base, TABLE, ["base", "A-h1", "A-h4"], workdir=tmp_path, seeds=1)
    assert left == runs and train_all(left, [{}], start=fake()) == 0


def test_a_table_without_base_or_bleu_is_still_a_table(base: Config, tmp_path: Path) -> None:
    [run] = prepare(base, TABLE, ["A-h1"], workdir=tmp_path, seeds=1)
    train_all([run], [{}], start=fake())
    lines = (run.folder / "metrics.jsonl").read_text()
    (run.folder / "metrics.jsonl").write_text(re.sub(r', "dev_bleu": \d+', "", lines))
    found = collect(tmp_path, TABLE)
    text = as_markdown(found, TABLE, flatten(load_config_file(tmp_path / "base.json")))
    assert "| 5.29 | 6.12 | 24.9 | – | 1 of 1 |" in text and "correlation" not in text
    write_table(tmp_path, TABLE)
    assert not (tmp_path / "table3.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows", "base,F"], "rows has 'F'; expected names, or how they begin, of base, A-h1"),
        (["--seeds", "0"], "seeds is 0; expected 1 or more"),
        (["--seed", "3"], "no --seed with it"),
        (["--workdir", "s3://x/y"], "workdir is 's3://x/y'; expected a folder of this machine"),
        (["--collect-only"], "holds no base.json; expected the --workdir of a table"),
        (["--table", "none.py"], "table is 'none.py', which is no file"),
        (["--table", "configs/demo.py"], "'configs/demo.py' lacks ROWS; expected ROWS and"),
        (["--rows", "A-h32"], "row A-h32: model.d_model is 16; expected"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "base.py").write_text(
        "from transformer_jax.config_io import from_json\n\n\n"
        f"def get_config():\n    return from_json({json.dumps(dataclasses.asdict(tiny()))!r})\n"
    )
    common = ["--config", str(tmp_path / "base.py"), "--workdir", str(tmp_path / "table")]
    common += ["--model.num-heads", "8"]
    assert main([*common, *flags]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize(
    ("found", "visible", "devices"),
    [
        ("cpu 8", "", [{}]),
        ("tpu 4", "", [{}]),  # one process has them all
        ("gpu 2", "", [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        ("gpu 2", "3,5", [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]),
    ],
)
def test_each_gpu_serves_one_process(
    monkeypatch: pytest.MonkeyPatch, found: str, visible: str, devices: list[dict[str, str]]
) -> None:
    def answer(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        compile(command[2], "asked", "exec")
        return subprocess.CompletedProcess(command, 0, f"{found}\n", "")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(subprocess, "run", answer)
    assert environments() == devices


def test_a_device_that_is_not_there_is_an_error_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(UserError, match="^JAX_PLATFORMS is 'tpu', but JAX finds no such device"):
        environments()


def test_what_jax_says_of_its_devices_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback ...\nRuntimeError: no driver\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match="^RuntimeError: no driver$"):
        environments()


def test_the_program_trains_a_row_and_prints_the_table(tmp_path: Path) -> None:
    """Once for real: one step, and again with nothing left to do."""
    config = tiny(steps=1, eval_every=1, checkpoint_every=1, average=1, bleu_every=0)
    data = dataclasses.replace(config.data, test=PairsConfig())
    (tmp_path / "base.json").write_text(to_json(dataclasses.replace(config, data=data)))
    command = [sys.executable, "-m", "transformer_jax.table3", "--rows", "base"]
    command += ["--config", str(tmp_path / "base.json"), "--workdir", str(tmp_path / "table")]
    xla_flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    for _ in range(2):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": xla_flags},
        )
        assert done.returncode == 0, done.stderr
        assert re.search(
            r"^\| base \|  \| 65 \| 0.01 \| 4.92 \| [\d.]+ \| 25.8 \| – \| 1 of 1 \|$",
            done.stdout,
            re.MULTILINE,
        )
    assert done.stderr == ""
    assert (tmp_path / "table" / "base" / "seed-1.log").read_text().endswith("exit status 0\n")
