"""Metrics: averages of several steps, TensorBoard files, full disks."""

import errno
import io
import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import entries
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from transformer_jax.runs.progress import Progress
from transformer_jax.settings.config import Config, TrainingConfig
from transformer_jax.storage import files as storage
from transformer_jax.training import metrics
from transformer_jax.training.loss import LossSums
from transformer_jax.training.metrics import Meter
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.step import StepMetrics


def events(workdir: Path) -> list[Any]:
    """Events in the only file. A record is a length, its checksum, an event and its checksum."""
    [file] = (workdir / "tensorboard").iterdir()
    assert ".out.tfevents." in file.name  # as TensorBoard expects
    data, found = file.read_bytes(), []
    while data:
        [length] = struct.unpack("<Q", data[:8])
        found.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def step_metrics(*sums: float, source_tokens: float = 30, bad: int = 0) -> StepMetrics:
    return StepMetrics(LossSums(*sums), *np.float32([source_tokens, 1, 0.1, bad, bad]))


def _means(entry: dict[str, Any]) -> dict[str, float]:
    """The means and speeds of an entry, without the values of its last step."""
    last = {"learning_rate", "gradient_norm", "bad_steps", "epoch", "peak_memory_bytes"}
    return {name: value for name, value in entry.items() if name not in last}


@pytest.mark.parametrize(("kind", "peak"), [("cpu", None), ("NVIDIA A100-SXM4-40GB", 312)])
def test_an_entry_has_the_averages_since_the_last_entry(
    kind: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skipped step takes time, but its loss does not count. Pauses do not count at all."""
    clock = iter([0, 2, 5, 100, 101, 102])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    meter = Meter(progress := Progress(), [SimpleNamespace(device_kind=kind)] * 2)
    meter.add(step_metrics(40, 20, 5, 20), 3e15)  # loss, nll, correct, target tokens; FLOPs
    meter.add(step_metrics(math.nan, math.nan, 0, 10, bad=1), 1e15)
    first = {"loss": 2, "nll": 1, "perplexity": math.e, "accuracy": 0.25, "tokens_per_second": 18}
    speed = {"tflops_per_device": 400.0} | ({"mfu": 400 / peak} if peak else {})  # in 5 s
    assert _means(meter.entry(epoch=0.5)) == pytest.approx(first | speed)
    meter.restart()  # after an evaluation
    meter.add(step_metrics(30, 10, 10, 10, source_tokens=20), 6e12)
    second = {"loss": 3, "nll": 1, "perplexity": math.e, "accuracy": 1, "tokens_per_second": 30}
    speed = {"tflops_per_device": 3.0} | ({"mfu": 3 / peak} if peak else {})
    assert _means(meter.entry(epoch=0.5)) == pytest.approx(second | speed)
    assert (progress.tokens, progress.train_seconds) == (120, 6)
    meter.add(step_metrics(math.nan, math.nan, 0, 10, bad=1), 0)
    last = meter.entry(epoch=0.5)
    assert math.isnan(last["loss"]) and last["epoch"] == 0.5 and last["bad_steps"] == 1


def test_tensorboard_curves(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Config(training=TrainingConfig(steps=9)), start_step=3)
    reporter.write("dev", 4, {"loss": 0.5, "bleu": 12, "note": "text", "nothing": float("nan")})
    version, start, entry = events(tmp_path)  # before close(), because training can take days
    reporter.close()
    assert version.file_version == "brain.Event:2"
    # makes TensorBoard drop what an earlier run wrote from here on
    assert (start.step, start.session_log.status) == (4, SessionLog.START)
    assert entry.step == 4 and {value.tag: value.simple_value for value in entry.summary.value} == {
        "dev/loss": 0.5,
        "dev/bleu": 12.0,
    }


@pytest.mark.parametrize(
    ("corrupt", "count"),
    [
        ([b'{"kind": \xff\n'], 1),
        ([b"null\n", b"[]\n", b'{"kind": 1, "step": 1}\n', b'{"step": "1"}\n'], 4),
        ([b"[" * 100_000 + b"\n"], 1),
        ([], 0),
    ],
)
def test_corrupt_lines_are_dropped_and_counted(
    corrupt: list[bytes], count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Except for the last line, which is truncated if the process is killed."""
    line = b'{"kind": "train", "step": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(line + b"".join(corrupt) + line + b'{"kind": "tr')
    Reporter(tmp_path, Config(training=TrainingConfig(steps=9)), start_step=3).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == 2 * line
    assert (f"Dropped {count} unreadable lines" in caplog.text) == (count > 0)


def test_a_full_disk_loses_entries_but_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    reporter = Reporter(tmp_path, Config(training=TrainingConfig(steps=200)), start_step=0)
    with monkeypatch.context() as patch:

        def full(self: EventsWriter) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(EventsWriter, "flush", full)
        for step in range(1, 100):  # more than the writer's queue can hold
            reporter.write("train", step, {"loss": 1.0})
    reporter.write("train", 100, {"loss": 2.0})
    reporter.close()
    assert capsys.readouterr().err.count("Metrics cannot be written") == 1
    assert (
        len(entries(tmp_path)) == 100 and events(tmp_path)[-1].summary.value[0].simple_value == 2.0
    )


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), BrokenPipeError(), None])
def test_messages_that_cannot_be_written_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None, terminal: bool
) -> None:
    """Without ``run_program`` too. stderr is None if it was closed when Python started."""

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise error or AssertionError

        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr("sys.stderr", error and Broken())
    reporter = Reporter(tmp_path, Config(training=TrainingConfig(steps=9)), start_step=0)
    reporter.say("hello")
    reporter.show(status="a status")
    reporter.write("train", 1, {"loss": 1.0})
    reporter.close()
    assert [entry["loss"] for entry in entries(tmp_path)] == [1.0]


def test_readers_see_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    with path.open() as reader:
        storage.write_atomically(path, "new")
        assert (reader.read(), path.read_text()) == ("old", "new")


def test_the_error_of_a_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*config\.json'"):
        storage.write_atomically(tmp_path / "config.json", "{}")
    assert not list(tmp_path.iterdir())
