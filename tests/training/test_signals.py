"""Ctrl-C and SIGTERM set a flag; their handlers raise no exceptions."""

import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental import multihost_utils
from number_names import number_files
from runs import ONE, changed, no_evaluation, tiny

from transformer_jax.training.evaluator import Evaluator
from transformer_jax.training.loop import train
from transformer_jax.training.signals import Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sets_a_flag_and_raises_no_exception(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        assert not signals.stop_after(1)
        signal.raise_signal(number)
        assert signals.received == number.name and signals.stop_after(1)
        # The next Ctrl-C kills the process without running Python code.
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)  # a signal to a process group can arrive twice
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert "stopping; saving ..." in capfd.readouterr().err


def test_one_ctrl_c_stops_all_processes_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's runtime handles SIGTERM and stops all processes after the same step."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "reached_preemption_sync_point", lambda step: step == 3 and received
    )
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert received == [signal.SIGTERM] and not signals.stop_after(2)
            assert signals.stop_after(3) and signals.received == "SIGTERM"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_ctrl_c_kills_the_program() -> None:
    program = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from transformer_jax.training.signals import Signals\n"
        "with Signals():\n    print('ready', flush=True)\n"
        # Short sleeps, because a signal to another thread does not interrupt this one.
        "    for _ in range(600): time.sleep(0.1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("stopping; saving ...")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT


def test_a_run_stopped_by_a_signal_leaves_the_test_set_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = no_evaluation(tiny(steps=1))
    test = number_files(3, "test")
    config = changed(config, data={"test": test})

    def told(self: Signals, step: int) -> bool:
        self.received = "SIGTERM"
        return True

    monkeypatch.setattr(Evaluator, "test", lambda self, checkpoints: ({"sentences": 3}, None))
    with monkeypatch.context() as patch:
        patch.setattr(Signals, "stop_after", told)
        summary = train(config, tmp_path, devices=ONE)
    assert summary["stopped_by"] == "SIGTERM" and "test" not in summary
    summary = train(config, tmp_path, devices=ONE)
    assert summary["stopped_by"] is None and summary["test"] == {"sentences": 3}
