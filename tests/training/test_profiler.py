"""Profiles of training steps: which steps are in the trace, and that they never affect a run."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src.profiler import _profile_state
from runs import ONE, changed, entries, final_state, no_evaluation, tiny, traced

from transformer_jax.errors import UserError
from transformer_jax.settings.config import Config, TrainingConfig
from transformer_jax.training.loop import train

CONFIG = no_evaluation(tiny(steps=8, checkpoint_every=4, log_every=2))


def profiled(steps: str) -> Config:
    return changed(CONFIG, training={"profile": steps})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a profile."""
    workdir = tmp_path_factory.mktemp("plain") / "run"
    train(CONFIG, workdir, devices=ONE)
    assert not (workdir / "profile").exists()
    return workdir


def same_training(workdir: Path, plain: Path) -> None:
    """Assert that every loss and the final state equal those of the run without a profile."""
    states = [final_state(CONFIG, folder) for folder in (workdir, plain)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    losses = [[entry["loss"] for entry in entries(folder)] for folder in (workdir, plain)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.cpu("events of operations have these names on CPUs alone")
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("3:6", [3, 4, 5]),
        pytest.param("0:1", [0], marks=pytest.mark.exhaustive),
        pytest.param("7:8", [7], marks=pytest.mark.exhaustive),
        ("6:100", [6, 7]),
    ],
)
def test_the_trace_has_exactly_these_steps(
    steps: str, expected: list[int], plain: Path, tmp_path: Path
) -> None:
    train(profiled(steps), tmp_path / "run", devices=ONE)
    assert traced(tmp_path / "run") == (expected, len(expected))
    same_training(tmp_path / "run", plain)


@pytest.mark.cpu("events of operations have these names on CPUs alone")
def test_a_resumed_run_profiles_the_remaining_steps(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workdir = tmp_path / "run"
    train(changed(CONFIG, training={"steps": 4}), workdir, devices=ONE)
    assert "profile" not in caplog.text
    train(profiled("2:6"), workdir, devices=ONE)
    assert traced(workdir) == ([4, 5], 2)
    same_training(workdir, plain)
    train(profiled("2:900"), workdir, devices=ONE)
    assert "training.profile is '2:900', but the run resumes at step 8. Choose" in caplog.text
    train(profiled("2:6"), workdir, devices=ONE)  # the same command again
    message = "training.profile is '2:6', but the run resumes at step 8. Choose later steps."
    assert message in caplog.text


def test_errors_of_the_profiler_are_logged_and_change_nothing(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    busy, full = tmp_path / "busy", tmp_path / "full"
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # recording Python's calls takes most of the time
    with jax.profiler.trace(tmp_path / "other", profiler_options=options):
        # another trace of the same process
        train(profiled("3:6"), busy, devices=ONE)
    assert caplog.text.count("The profile could not be written: Profile has already been") == 1
    same_training(busy, plain)
    caplog.clear()
    full.mkdir()
    (full / "config.json").write_text((plain / "config.json").read_text())
    (full / "profile").write_text("not a folder")
    train(profiled("3:6"), full, devices=ONE)
    assert caplog.text.count("The profile could not be written: ") == 1
    _profile_state.reset()  # JAX keeps the trace that it could not write
    same_training(full, plain)


@pytest.mark.parametrize("steps", ["5", "5:", ":5", "a:b", "5:5", "6:5", "-1:5", "30:40", "1:2:3"])
def test_other_ranges_are_errors(steps: str) -> None:
    with pytest.raises(UserError) as raised:
        TrainingConfig(steps=30, profile=steps)
    assert str(raised.value) == (
        f"training.profile is {steps!r}; expected '' or START:STOP with START < STOP and START < "
        "training.steps = 30."
    )
