"""Checkpoints: restoring, retention, averaging, corruption, full disks."""

import dataclasses
import errno
import json
import logging
import math
import shutil
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from runs import ONE, changed

from transformer_jax.devices.sharding import make_mesh
from transformer_jax.errors import UserError
from transformer_jax.evaluation import selection_score
from transformer_jax.pretrained.loading import load_model
from transformer_jax.runs import averaging, manifest
from transformer_jax.runs import checkpoints as checkpoint_module
from transformer_jax.runs.checkpoint_folder import complete_steps
from transformer_jax.runs.checkpoints import Checkpoints
from transformer_jax.runs.manifest import Manifest, delete_complete, write_manifest
from transformer_jax.runs.model_folder import save_model
from transformer_jax.runs.progress import Progress
from transformer_jax.runs.workdir import Workdir
from transformer_jax.settings.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.settings.config_files import to_json
from transformer_jax.storage.files import remote_path
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.step import StepFunctions, TrainState, make_step_functions


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(
        [("one two three", "eins zwei drei"), ("four five", "vier")] * 10,
        TokenizerConfig(vocab_size=40),
    )


@pytest.fixture(scope="module")
def config(tokenizer: Tokenizer) -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=tokenizer.target.vocab_size,
            d_model=8,
            d_ff=8,
            num_heads=2,
            num_layers=1,
        ),
        data=DataConfig(max_source_length=16, max_target_length=16),
        optimizer=OptimizerConfig(ema_decay=0.0),
        training=TrainingConfig(keep_checkpoints=2, average=2, checkpoint_every=1),
    )


@pytest.fixture(scope="module")
def run(config: Config) -> StepFunctions:
    return make_step_functions(config, make_mesh(config.mesh, ONE))


@pytest.fixture
def checkpoints(tmp_path: Path, config: Config, tokenizer: Tokenizer) -> Checkpoints:
    """The checkpoints of a new work directory, ``tmp_path``."""
    return _begin(tmp_path, config, tokenizer)


def _begin(folder: Path, config: Config, tokenizer: Tokenizer) -> Checkpoints:
    tokenizer.save(folder)
    (folder / "config.json").write_text(to_json(config))
    workdir = Workdir(folder)
    workdir.config = config
    workdir.tokenizer = tokenizer
    return workdir.checkpoints


@pytest.fixture(scope="module")
def folder_of_two(
    run: StepFunctions,
    config: Config,
    tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A work directory with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("two")
    _save(_begin(folder, config, tokenizer), run, 1, 2, best_step=1)
    return folder


@pytest.fixture
def two_saved(
    folder_of_two: Path, tmp_path: Path, config: Config, tokenizer: Tokenizer
) -> Checkpoints:
    """The checkpoints of steps 1 and 2 in ``tmp_path``. A copy takes a tenth of the time."""
    shutil.copytree(folder_of_two, tmp_path, dirs_exist_ok=True)
    return _begin(tmp_path, config, tokenizer)


def _state(run: StepFunctions, step: int) -> TrainState:
    """The initial state with shifted parameters. JAX would compile a sum for each shape."""
    state = jax.tree.map(np.asarray, run.init())
    shift = jax.tree.map(lambda x: x + np.float32(step), state.parameters)
    state = state.replace(step=np.int32(step), seed=np.uint32(step), parameters=shift, ema=None)
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, run.abstract_state))


def _save(checkpoints: Checkpoints, run: StepFunctions, *steps: int, **progress: object) -> None:
    for step in steps:
        checkpoints.save(_state(run, step), Progress(**progress))
    checkpoints.wait()


def _chosen(checkpoints: Checkpoints, step: int, training: TrainingConfig) -> list[int]:
    """The steps averaged at the end of a run without a dev set."""
    steps, early = checkpoints.steps()[::-1], bool(training.patience)
    chosen, _ = averaging.choose_average(
        checkpoints.folder, steps, step, training, stopped_early=early, dev_loss=None
    )
    return chosen


def test_restored_state_is_the_saved_one(checkpoints: Checkpoints, run: StepFunctions) -> None:
    assert checkpoints.newest() is None
    _save(checkpoints, run, 7, best_step=3)
    state, progress = checkpoints.restore(Manifest(checkpoints.path(7)), run.abstract_state)
    chex.assert_trees_all_equal(state, _state(run, 7))
    assert progress == Progress(best_step=3)


def test_retention_of_the_newest_and_best(checkpoints: Checkpoints, run: StepFunctions) -> None:
    _save(checkpoints, run, 1, 2, 3, 4, best_step=1)
    assert checkpoints.steps() == [1, 3, 4]
    _save(checkpoints, run, 5, best_step=5)
    assert checkpoints.steps() == [4, 5]


def test_retention_uses_the_interval_with_which_a_checkpoint_was_saved(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    """A run may resume with another ``training.checkpoint_every``."""
    training = {"keep_checkpoints": 5, "average": 3}
    steps = {10: [10, 20, 30, 40, 50, 60], 25: [75, 90]}  # 90 is the last step
    for interval, saved in steps.items():
        settings = changed(config, training=training | {"checkpoint_every": interval})
        checkpoints = _begin(tmp_path, settings, tokenizer)
        _save(checkpoints, run, *saved)
    assert checkpoints.steps() == [30, 40, 50, 60, 75, 90]
    assert _chosen(checkpoints, 0, settings.training) == [90, 75, 60]


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([3, 2, 1], 3),
        pytest.param([1, 2, 3], 1, marks=pytest.mark.exhaustive),
        ([math.nan, 2, 1], 3),
        pytest.param([2, math.nan, 3], 1, marks=pytest.mark.exhaustive),
        ([3, 1, math.nan], 2),
        pytest.param([math.nan] * 3, 1, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("average", ["auto", 3])
def test_the_number_of_averaged_checkpoints_with_the_lowest_dev_loss(
    average: Any,
    losses: list[float],
    best: int,
    two_saved: Checkpoints,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NaN is the worst. A fixed number is compared with the others."""
    caplog.set_level("INFO", logger="transformer_jax")
    folder, steps = two_saved.folder, [2, 1, 1]  # three, because two are kept
    training = TrainingConfig(keep_checkpoints=3, average=average, checkpoint_every=1)
    remaining = iter(losses)
    chosen, model = averaging.choose_average(
        folder, steps, None, training, stopped_early=False, dev_loss=lambda _: next(remaining)
    )
    assert len(chosen) == (best if average == "auto" else 3)
    *_, expected = averaging.load_averages(folder, chosen)
    chex.assert_trees_all_equal(model, expected)
    better = average == 3 and best < 3 and losses != [math.nan] * 3
    assert ("--training.average auto" in caplog.text) == better
    named = f"average of {best} checkpoints" if best > 1 else "checkpoint 2 "
    assert (named in caplog.text) == better


@pytest.mark.parametrize(("name", "select_by"), [("dev_loss", "loss"), ("dev_bleu", "bleu")])
def test_an_evaluation_that_is_not_a_number_is_never_the_best(name: str, select_by: str) -> None:
    progress = Progress()
    for step, value in enumerate([math.nan, 2.0, math.nan, 2.0, math.nan], start=1):
        progress.record_evaluation({name: value}, partial(selection_score, select_by), step=step)
    assert (progress.best_step, progress.since_best) == (2, 3)
    assert progress.early_stopping_triggered(3)


def test_retention_of_an_unscheduled_checkpoint_until_the_next_one(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    """Saved for a signal or an evaluation."""
    config = changed(config, training={"checkpoint_every": 4})
    checkpoints, kept = _begin(tmp_path, config, tokenizer), []
    for step in (4, 5, 7, 8):
        _save(checkpoints, run, step)
        kept.append(checkpoints.steps())
    assert kept == [[4], [4, 5], [4, 7], [4, 8]]


def test_retention_of_the_average_that_ends_at_the_best_step(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    dev = PairsConfig("text", ("dev.en",), ("dev.de",))
    config = changed(config, data={"dev": dev}, training={"patience": 9})
    checkpoints = _begin(tmp_path, config, tokenizer)
    for step in (1, 2, 3, 4, 5, 6):
        _save(checkpoints, run, step, best_step=min(step, 3))
    assert checkpoints.steps() == [2, 3, 5, 6]
    assert _chosen(checkpoints, 3, config.training) == [3, 2]
    _save(checkpoints, run, 7, best_step=7)  # the run has continued
    assert _chosen(checkpoints, 7, config.training) == [7, 6]


def test_only_decoding_settings_are_read_from_the_work_directory(
    tmp_path: Path, checkpoints: Checkpoints, run: StepFunctions, config: Config
) -> None:
    """The checkpoint determines all others."""
    _save(checkpoints, run, 1, best_step=9)
    now = changed(config, decoding={"beam_size": 7}, seed=3, model={"d_ff": 99})
    (tmp_path / "config.json").write_text(to_json(now))
    for path in (tmp_path, checkpoints.folder / "00000001"):
        assert load_model(path)[0] == changed(config, decoding=now.decoding)


def test_averaging_and_loading_checkpoints(
    tmp_path: Path, checkpoints: Checkpoints, run: StepFunctions
) -> None:
    _save(checkpoints, run, 10, 20, best_step=10)
    start = np.asarray(run.init().parameters["target_embedding"]["matrix"])

    def shift(path: Path = tmp_path) -> float:
        _, model, _ = load_model(path)
        return float(np.mean(model.target_embedding.matrix[...] - start))

    assert shift() == pytest.approx(20, rel=1e-5)
    *_, average = averaging.load_averages(checkpoints.folder, checkpoints.steps()[::-1])
    matrix = average["target_embedding"]["matrix"]
    assert float(np.mean(matrix - start)) == pytest.approx(15, rel=1e-5)
    assert shift(checkpoints.folder / "00000010") == pytest.approx(10, rel=1e-5)
    with pytest.raises(UserError, match="00000011' is not a folder; expected"):
        load_model(checkpoints.folder / "00000011")


def test_each_checkpoint_is_verified_once(
    checkpoints: Checkpoints, run: StepFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(checkpoints, run, 10, 20)
    verified, corruption = [], Manifest.corruption

    def counted(checkpoint: Manifest, **options: bool) -> str:
        verified.append(checkpoint.steps[0])
        return corruption(checkpoint, **options)

    monkeypatch.setattr(Manifest, "corruption", counted)
    list(averaging.load_averages(checkpoints.folder, checkpoints.steps()[::-1]))
    assert verified == [20, 10]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_loading_a_corrupt_checkpoint_fails_and_training_resumes_from_an_older_one(
    tmp_path: Path,
    two_saved: Checkpoints,
    run: StepFunctions,
    damage: str,
    caplog: pytest.LogCaptureFixture,
    config: Config,
) -> None:
    checkpoints = two_saved
    folder = checkpoints.folder / "00000002"
    files = (folder / "state" / "parameters").rglob("*")
    largest = max(files, key=lambda path: path.stat().st_size * path.is_file())
    if damage == "manifest":
        largest = folder / "manifest.json"
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        largest.unlink()
    else:
        largest.write_bytes(content[:-10] if damage == "cut" else content)
    for path in (tmp_path, folder):
        with pytest.raises(UserError, match=f"00000002 is corrupt: .*{largest.name}"):
            load_model(path)
    assert load_model(checkpoints.folder / "00000001")
    with caplog.at_level(logging.WARNING), Workdir(tmp_path).open(config) as step:
        state, _ = checkpoints.restore(Manifest(checkpoints.path(step)), run.abstract_state)
    assert int(state.step) == step == 1
    assert "00000002 is corrupt" in caplog.text
    assert checkpoints.steps() == [1]


def test_a_deleted_checkpoint_of_an_average_is_named(two_saved: Checkpoints) -> None:
    checkpoints = two_saved
    steps = checkpoints.steps()[::-1]
    shutil.rmtree(checkpoints.folder / f"{steps[1]:08d}")
    with pytest.raises(UserError, match=r"00000001 is corrupt: manifest.json is missing or has"):
        list(averaging.load_averages(checkpoints.folder, steps))


def test_training_does_not_restart_if_all_checkpoints_are_corrupt(
    tmp_path: Path, two_saved: Checkpoints, config: Config
) -> None:
    """An average names its corrupt checkpoint, and nothing is deleted."""
    checkpoints = two_saved
    for step in (1, 2):
        for file in (checkpoints.folder / f"{step:08d}" / "state").rglob("_METADATA"):
            file.write_text("{}")
        with pytest.raises(UserError, match=f"Checkpoint .*{step:08d} is corrupt: state/"):
            list(averaging.load_averages(checkpoints.folder, checkpoints.steps()[:step][::-1]))
    for _ in range(2):  # the second attempt fails, too
        with (
            pytest.raises(UserError, match="All 2 checkpoints .* are corrupt"),
            Workdir(tmp_path).open(config),
        ):
            pass
    assert len(list(checkpoints.folder.iterdir())) == 2


def test_an_error_while_restoring_does_not_mean_corruption(
    two_saved: Checkpoints, run: StepFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = two_saved

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(ocp, "load_checkpointables", out_of_memory)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        checkpoints.restore(Manifest(checkpoints.path(2)), run.abstract_state)
    assert checkpoints.steps() == [1, 2]


def test_an_interrupted_save_leaves_no_checkpoint(
    tmp_path: Path,
    two_saved: Checkpoints,
    config: Config,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints = two_saved
    (checkpoints.folder / "00000002" / "manifest.json").unlink()
    with Workdir(tmp_path).open(config) as step:
        assert step == 1
    [said] = [line for line in caplog.messages if "00000002" in line]
    assert "is incomplete or corrupt" in said
    assert [path.name for path in checkpoints.folder.iterdir()] == ["00000001"]


@pytest.mark.parametrize("where", ["local", "url"])
def test_a_deletion_that_is_interrupted_leaves_no_checkpoint(where, tmp_path, monkeypatch):
    """A checkpoint that lacks files must not look complete."""
    store = tmp_path if where == "local" else remote_path("memory://interrupted")
    path = store / "00000003"
    for name in ("state/parameters/x", "state/rest/y", "manifest.json"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")
    assert complete_steps(store) == [3]

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(manifest, "remove_folder", interrupted)
        delete_complete(path)
    assert complete_steps(store) == [] and (path / "state/rest/y").exists()
    delete_complete(path)
    assert not path.exists()


def test_a_step_is_saved_once(checkpoints: Checkpoints, run: StepFunctions) -> None:
    _save(checkpoints, run, 1, corpus="one")
    _save(checkpoints, run, 1, corpus="another")
    assert checkpoints.restore(Manifest(checkpoints.path(1)), run.abstract_state)[1].corpus == "one"
    assert checkpoints.has_complete(1)


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_if_the_first_save_fails_the_next_one_raises_an_error(
    checkpoints: Checkpoints,
    run: StepFunctions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(checkpoint_module, "write_manifest", _full)
    _save(checkpoints, run, 1)
    assert "Checkpoint 1 could not be saved: [Errno 28] No space" in caplog.text
    with pytest.raises(UserError, match=r"The first checkpoint .* No space.*from scratch"):
        _save(checkpoints, run, 2)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("The store is away; try again."), "The store is away; try again"),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_reason_of_a_failed_copy_or_deletion_is_a_sentence(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    checkpoint_module._warn_on_failure(fail)
    assert caplog.messages == [
        f"{reason}. Training continues and will retry at the next checkpoint."
    ]


def test_after_a_failed_save_the_next_one_succeeds(
    checkpoints: Checkpoints,
    run: StepFunctions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _save(checkpoints, run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_manifest", _full)
        _save(checkpoints, run, 2)
    assert "Checkpoint 2 could not be saved" in caplog.text
    assert not checkpoints.has_complete(2) and checkpoints.steps() == [1]
    _save(checkpoints, run, 2)
    assert checkpoints.steps() == [1, 2] and not checkpoints.failure
    _save(checkpoints, run, 3)
    assert [path.name for path in sorted(checkpoints.folder.iterdir())] == ["00000002", "00000003"]


def test_files_that_orbax_writes_after_a_failure_are_deleted(
    checkpoints: Checkpoints, run: StepFunctions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other threads still write when one has met a full disk."""
    late: list[threading.Timer] = []

    def save(path: str, *_: object) -> SimpleNamespace:
        def write() -> None:
            Path(path).mkdir(parents=True, exist_ok=True)
            (Path(path) / "late").write_text("of another thread")

        def result() -> None:
            write()
            late.append(threading.Timer(0.1, write))
            late[0].start()
            _full()

        return SimpleNamespace(result=result)

    _save(checkpoints, run, 1)
    monkeypatch.setattr(ocp, "save_checkpointables_async", save)
    _save(checkpoints, run, 2)
    late[0].join()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["00000001"]


@pytest.mark.parametrize(
    ("change", "field"),
    [({"coverage": 1.0}, "coverage"), ({"tokens": None}, "tokens")],
    ids=["unknown", "missing"],
)
def test_progress_of_another_version_is_an_error_that_names_the_field(
    change: dict[str, float | None],
    field: str,
    checkpoints: Checkpoints,
    run: StepFunctions,
    config: Config,
    tokenizer: Tokenizer,
) -> None:
    _save(checkpoints, run, 1)
    fields = dataclasses.asdict(Progress()) | change
    path = checkpoints.folder / "00000001"
    (path / "manifest.json").unlink()
    fields = {name: value for name, value in fields.items() if change.get(name, 0) is not None}
    write_manifest(path, config, tokenizer, {"progress": fields})
    with pytest.raises(UserError, match=rf"00000001/manifest.json: .* progress: {field}\. Resume"):
        checkpoints.restore(Manifest(checkpoints.path(1)), run.abstract_state)


def test_an_average_skips_irregular_checkpoints_before_its_last_one(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    """Such as step 25, which an interruption or an evaluation saved."""
    training = {"average": 3, "keep_checkpoints": 9, "checkpoint_every": 10}
    config = changed(config, training=training)
    checkpoints = _begin(tmp_path, config, tokenizer)
    for step in (10, 25, 30, 40):
        _save(checkpoints, run, step, best_step=min(step, 25))
    assert checkpoints.steps() == [10, 25, 30, 40]
    steps, folder = [40, 30, 25, 10], checkpoints.folder
    for chosen, most, expected in ((0, 3, [40, 30, 10]), (1, 2, [30, 10]), (2, 2, [25, 10])):
        training = dataclasses.replace(config.training, average=most)
        assert averaging._candidates(folder, steps, steps[chosen], training)[1][-1] == expected


def test_a_tokenizer_of_another_run_is_an_error(
    tmp_path: Path, checkpoints: Checkpoints, run: StepFunctions
) -> None:
    _save(checkpoints, run, 1)
    other = Tokenizer.train([("a b c", "x y z")] * 20, TokenizerConfig(vocab_size=12))
    other.save(tmp_path)
    with pytest.raises(UserError, match=r"tokenizer .* does not match checkpoint .*00000001"):
        load_model(tmp_path)


def test_folders_without_usable_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoint; expected a work directory"):
        load_model(tmp_path)
    folder = tmp_path / "checkpoints" / "00000005"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"config.json": [1, 2], "progress.json": [3, 4]}')
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"00000005.*earlier version.*load_model from commit ef0d56b"
    ):
        load_model(tmp_path)


def test_manifest_lists_every_file(checkpoints: Checkpoints, run: StepFunctions) -> None:
    _save(checkpoints, run, 1)
    folder = checkpoints.folder / "00000001"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(listed) == written - {"manifest.json"} and len(listed) > 2


def test_a_model_is_not_saved_over_a_run(
    tmp_path: Path, checkpoints: Checkpoints, run: StepFunctions
) -> None:
    _save(checkpoints, run, 1)
    for folder in (tmp_path, checkpoints.folder / "00000001"):
        with pytest.raises(FileExistsError):
            save_model(folder, *load_model(tmp_path))


def test_training_does_not_modify_an_imported_model(
    tmp_path: Path, checkpoints: Checkpoints, run: StepFunctions
) -> None:
    _save(checkpoints, run, 1)
    config, *model = load_model(tmp_path)
    save_model(tmp_path / "imported", config, *model)
    message = "is a finished or imported model, which training does not modify.*start-from"
    claim = Workdir(tmp_path / "imported").open(config)
    with pytest.raises(UserError, match=message), claim:
        pass
    assert load_model(tmp_path / "imported")[0] == config


def test_training_does_not_modify_a_model_that_an_earlier_version_imported(
    tmp_path: Path, checkpoints: Checkpoints, run: StepFunctions
) -> None:
    """Its parameters were a checkpoint of step 0."""
    _save(checkpoints, run, 1)
    config = load_model(tmp_path)[0]
    (checkpoints.folder / "00000001").rename(checkpoints.folder / "00000000")
    claim = Workdir(tmp_path).open(config)
    with pytest.raises(UserError, match="is a finished or imported model"), claim:
        pass


def test_intervals_are_read_once_and_a_single_candidate_needs_no_dev_loss(
    two_saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = two_saved
    read = []

    class Counted(Manifest):
        def __init__(self, folder: Path) -> None:
            read.append(folder.name)
            super().__init__(folder)

    monkeypatch.setattr(averaging, "Manifest", Counted)
    training = TrainingConfig(keep_checkpoints=2, average=1)
    steps = [2, 1]
    assert averaging.retained_steps(checkpoints.folder, steps, 1, training) == {1, 2}
    assert read == ["00000002", "00000001"]
    chosen, _ = averaging.choose_average(
        checkpoints.folder, steps, 2, training, stopped_early=True, dev_loss=lambda _: 1 / 0
    )
    assert chosen == [2]
