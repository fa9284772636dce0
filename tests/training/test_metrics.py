"""What a run tells about itself, on a disk that is full."""

import errno
from pathlib import Path

import pytest
from runs import entries

from transformer_jax.training.reporting import Reporter


def test_a_full_disk_costs_entries_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(tmp_path, steps=200, start_step=0)
    reporter.write("train", 1, {"loss": 1.0, "nothing": float("nan")})
    with monkeypatch.context() as patch:

        class Full:
            def write(self, text: str) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(reporter, "_file", Full())
        for step in range(2, 100):
            reporter.write("train", step, {"loss": 1.0})
    reporter.write("train", 100, {"loss": 2.0})
    reporter.close()
    assert capsys.readouterr().err.count("metrics cannot be written") == 1
    first, last = entries(tmp_path)
    assert (first["loss"], first["nothing"], last["step"]) == (1.0, None, 100)
