"""The watchdog speaks when something takes far longer than usual, and only then."""

import time
from collections.abc import Iterator

import pytest

from transformer_jax.training import watchdog as watchdog_module
from transformer_jax.training.watchdog import Watchdog


@pytest.fixture
def watchdog(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Watchdog]:
    caplog.set_level("WARNING", "transformer_jax")
    monkeypatch.setattr(watchdog_module, "_PATIENCE", 0.05)
    monkeypatch.setattr(watchdog_module, "_PATIENCE_AT_FIRST", 0.4)
    made = Watchdog()
    yield made
    made.close()


def _seen_three_times(watchdog: Watchdog, seconds: float = 0.0) -> None:
    for _ in range(3):
        watchdog.enter("step")
        time.sleep(seconds)
    watchdog.enter("step", "training step 7")


def test_a_late_phase_is_reported_again_when_its_time_has_doubled(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    _seen_three_times(watchdog)
    deadline = time.monotonic() + 20
    while len(caplog.records) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    said = caplog.records[0].getMessage()
    assert (
        "Process 0 of 1 has been busy with one thing for" in said
        and "training step 7 (usual: 0.0 s)" in said
    )
    first, second, third = (record.created for record in caplog.records[:3])
    assert third - second > 1.5 * (second - first)


def test_a_phase_of_usual_length_or_a_new_one_is_not_reported(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    _seen_three_times(watchdog, 0.03)
    time.sleep(0.1)  # more than the patience, not ten times as long as usual
    watchdog.enter("compilation")
    time.sleep(0.1)
    watchdog.enter("step")
    assert not caplog.records


def test_it_knows_what_is_going_on(watchdog: Watchdog) -> None:
    assert watchdog.phase == "before the first step"
    watchdog.enter("evaluation", "evaluation after step 5")
    assert watchdog.phase == "evaluation after step 5"
