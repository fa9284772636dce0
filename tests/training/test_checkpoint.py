"""Checkpoints: exact, kept as configured, checked when read, usable alone, unharmed by a full
disk.
"""

import dataclasses
import errno
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from transformer_jax import checkpoint
from transformer_jax.checkpoint import load_model
from transformer_jax.config import (
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.config_io import to_json
from transformer_jax.errors import UserError
from transformer_jax.sharding import make_mesh
from transformer_jax.tokenizer import Tokenizer
from transformer_jax.training import saver as checkpoint_module
from transformer_jax.training.progress import Progress
from transformer_jax.training.saver import Checkpoints
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
            vocab_size=tokenizer.target_vocab_size, d_model=8, d_ff=8, num_heads=2, num_layers=1
        ),
        data=DataConfig(max_source_length=16, max_target_length=16),
        optimizer=OptimizerConfig(ema_decay=0.0),
        training=TrainingConfig(checkpoint_every=1, keep_checkpoints=2, average=2),
    )


@pytest.fixture(scope="module")
def run(config: Config) -> StepFunctions:
    return make_step_functions(config, make_mesh(config.mesh))


def _state(run: StepFunctions, step: int) -> TrainState:
    state = run.init()
    shift = jax.tree.map(lambda x: x + step, state.parameters)
    return state.replace(step=jax.numpy.int32(step), parameters=shift, ema=None)


def _save(checkpoints: Checkpoints, run: StepFunctions, *steps: int, **progress: object) -> None:
    for step in steps:
        checkpoints.save(_state(run, step), Progress(**progress))
    checkpoints.wait()


def test_restored_state_is_the_saved_one(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    assert checkpoints.restore_latest(run.abstract_state) is None
    _save(checkpoints, run, 7, best_step=3)
    state, progress = checkpoints.restore_latest(run.abstract_state)
    chex.assert_trees_all_equal(state, _state(run, 7))
    assert progress == Progress(best_step=3)


def test_newest_and_best_are_kept(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    _save(checkpoints, run, 1, 2, 3, 4, best_step=1)
    assert checkpoints.steps() == [1, 3, 4]
    _save(checkpoints, run, 5, best_step=5)
    assert checkpoints.steps() == [4, 5]


def test_a_checkpoint_is_usable_from_its_folder_alone(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    _save(Checkpoints(tmp_path / "run", config, tokenizer), run, 3)
    shutil.move(tmp_path / "run" / "checkpoints" / "00000003", tmp_path / "elsewhere")
    loaded_config, model, loaded_tokenizer = load_model(tmp_path / "elsewhere")
    assert (loaded_config, loaded_tokenizer.fingerprint) == (config, tokenizer.fingerprint)
    expected = _state(run, 3).parameters
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected)


def test_how_to_decode_is_what_the_work_directory_says_now(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    _save(Checkpoints(tmp_path, config, tokenizer), run, 1, best_step=9)
    now = dataclasses.replace(config, decoding=DecodingConfig(beam_size=7), seed=3)
    (tmp_path / "config.json").write_text(to_json(now))
    assert load_model(tmp_path)[0] == dataclasses.replace(config, decoding=now.decoding)
    with pytest.raises(
        UserError, match="There is no best checkpoint: that of step 9 could not be saved"
    ):
        load_model(tmp_path, checkpoint="best")


def test_averaging_and_choice(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    _save(Checkpoints(tmp_path, config, tokenizer), run, 10, 20, best_step=10)
    start = np.asarray(run.init().parameters["target_embedding"]["matrix"])

    def shift(**options: object) -> float:
        return float(
            np.mean(load_model(tmp_path, **options)[1].target_embedding.matrix[...] - start)
        )

    assert shift(average=1) == pytest.approx(20, rel=1e-5)
    assert shift() == pytest.approx(15, rel=1e-5)  # the config's training.average
    assert shift(average=2) == pytest.approx(15, rel=1e-5)
    assert shift(checkpoint="best") == pytest.approx(10, rel=1e-5)
    assert shift(checkpoint=10) == pytest.approx(10, rel=1e-5)
    with pytest.raises(UserError, match="average is 0; expected at least 1"):
        load_model(tmp_path, average=0)
    with pytest.raises(UserError, match="average is 3; expected at most 2"):
        load_model(tmp_path, average=3)
    with pytest.raises(
        UserError, match="checkpoint is 11; expected last, best, or one of the steps 10, 20"
    ):
        load_model(tmp_path, checkpoint=11)


def test_a_run_that_patience_ended_gives_the_mean_up_to_its_best(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    training = dataclasses.replace(config.training, patience=3, average=2, keep_checkpoints=2)
    data = dataclasses.replace(config.data, dev=PairsConfig("numbers", split="dev"))
    config = dataclasses.replace(config, training=training, data=data)
    start = np.asarray(run.init().parameters["target_embedding"]["matrix"])
    checkpoints = Checkpoints(tmp_path, config, tokenizer)

    def save(step: int, **progress: object) -> None:
        checkpoints.save(_state(run, step), Progress(**progress))
        checkpoints.wait()

    def shift(**options: object) -> float:
        return round(
            float(np.mean(load_model(tmp_path, **options)[1].target_embedding.matrix[...] - start)),
            3,
        )

    for step in (10, 20, 30, 40):
        save(step, best_step=min(step, 30), since_best=max(0, step // 10 - 3))
    assert shift() == 35
    save(50, best_step=30, since_best=2)
    assert checkpoints.steps() == [20, 30, 40, 50]
    save(60, best_step=30, since_best=3)
    assert checkpoints.steps() == [20, 30, 50, 60]
    summary = {"steps": 60, "averaged_steps": [30, 20], "best_step": 30}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert (shift(), shift(average=1), shift(checkpoint="best"), shift(checkpoint="last")) == (
        25,
        30,
        30,
        55,
    )
    save(70, best_step=70, since_best=0)  # it went on, with more patience
    assert shift() == 65


def test_no_checkpoint_is_read_twice_to_know_whether_it_is_whole(
    tmp_path: Path,
    run: StepFunctions,
    config: Config,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _save(Checkpoints(tmp_path, config, tokenizer), run, 10, 20)
    verified, damage = [], checkpoint.damage

    def counted(path: Path) -> str:
        verified.append(int(path.name))
        return damage(path)

    monkeypatch.setattr(checkpoint, "damage", counted)
    load_model(tmp_path)
    assert verified == [20, 10]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_last_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path,
    run: StepFunctions,
    config: Config,
    tokenizer: Tokenizer,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    _save(checkpoints, run, 1, 2, best_step=1)
    # of an earlier time
    (tmp_path / "checkpoints" / "00000002.damaged" / "state").mkdir(parents=True)
    largest = max(
        (tmp_path / "checkpoints" / "00000002" / "state").rglob("*"),
        key=lambda p: p.stat().st_size * p.is_file(),
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        largest.unlink()
    else:
        largest.write_bytes(content if damage == "flip" else content[:-10])
    for chosen in (2, None, "best"):
        with pytest.raises(UserError, match=f"00000002 is corrupt: state/.*{largest.name}"):
            load_model(tmp_path, checkpoint=chosen)
    assert load_model(tmp_path, checkpoint=1)[0] == config
    with caplog.at_level(logging.WARNING):
        state, _ = checkpoints.restore_latest(run.abstract_state)
    assert int(state.step) == 1
    assert "damaged" in caplog.text
    assert checkpoints.steps() == [1]


def test_when_all_are_damaged_nothing_is_deleted_or_begun_anew(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    _save(checkpoints, run, 1, 2)
    for path in (tmp_path / "checkpoints").glob("*/config.json"):
        path.write_text("{}")
    for _ in range(2):  # a second start does not begin anew either
        with pytest.raises(UserError, match="All 2 checkpoints .* are damaged"):
            Checkpoints(tmp_path, config, tokenizer).restore_latest(run.abstract_state)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_an_error_while_restoring_is_not_taken_for_damage(
    tmp_path: Path,
    run: StepFunctions,
    config: Config,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    _save(checkpoints, run, 1, 2)

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(checkpoint_module, "_restore_state", out_of_memory)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        checkpoints.restore_latest(run.abstract_state)
    assert checkpoints.steps() == [1, 2]


def test_a_save_that_was_cut_off_is_no_checkpoint(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    _save(Checkpoints(tmp_path, config, tokenizer), run, 1, 2)
    folder = tmp_path / "checkpoints"
    (folder / "00000002" / "manifest.json").unlink()  # being deleted
    shutil.copytree(folder / "00000002", folder / "00000003.saving")
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    assert int(checkpoints.restore_latest(run.abstract_state)[0].step) == 1
    assert [path.name for path in folder.iterdir()] == ["00000001"]


def test_a_save_that_was_cut_off_before_it_had_its_name_counts(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    """Also where an older checkpoint of its step was half deleted to make room for it."""
    _save(Checkpoints(tmp_path, config, tokenizer), run, 1, 2)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "00000002", folder / "00000002.saving")
    (folder / "00000002" / "manifest.json").unlink()
    assert (
        int(Checkpoints(tmp_path, config, tokenizer).restore_latest(run.abstract_state)[0].step)
        == 2
    )
    assert sorted(path.name for path in folder.iterdir()) == ["00000001", "00000002"]
    shutil.copytree(folder / "00000002", folder / "00000002.replaced")
    (folder / "00000002").rename(folder / "00000002.saving")
    assert Checkpoints(tmp_path, config, tokenizer).steps() == [1, 2]
    assert sorted(path.name for path in folder.iterdir()) == ["00000001", "00000002"]


def test_a_step_that_is_saved_again_is_there_until_the_new_one_is_whole(
    tmp_path: Path,
    run: StepFunctions,
    config: Config,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    _save(checkpoints, run, 1)

    def stopped(path: Path) -> None:
        assert checkpoints.steps() == [1]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "write_manifest", stopped)
    _save(checkpoints, run, 1)
    monkeypatch.undo()
    assert int(checkpoints.restore_latest(run.abstract_state)[0].step) == 1
    _save(checkpoints, run, 1, corpus="another")
    assert checkpoints.restore_latest(run.abstract_state)[1].corpus == "another"


def test_full_disk_is_reported_and_older_checkpoints_stay(
    tmp_path: Path,
    run: StepFunctions,
    config: Config,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    _save(checkpoints, run, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "write_manifest", full)
    _save(checkpoints, run, 2)
    assert "No space left on device" in caplog.text
    assert checkpoints.last_saved == -1
    monkeypatch.undo()
    assert [int(checkpoints.restore_latest(run.abstract_state)[0].step), *checkpoints.steps()] == [
        1,
        1,
    ]


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_without_a_first_checkpoint_there_is_nothing_to_go_on_with(
    tmp_path: Path,
    run: StepFunctions,
    config: Config,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    monkeypatch.setattr(checkpoint_module, "write_manifest", _full)
    _save(checkpoints, run, 1)
    assert "Checkpoint 1 could not be saved: [Errno 28] No space" in caplog.text
    assert "There is no checkpoint." in caplog.text
    for again in (checkpoints.check, lambda: _save(checkpoints, run, 2)):
        with pytest.raises(UserError, match=r"The first checkpoint .* No space.*at the beginning"):
            again()


def test_after_a_failed_save_the_next_one_succeeds(
    tmp_path: Path,
    run: StepFunctions,
    config: Config,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even if the failed one's folder cannot be deleted, as it is still written to."""
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    _save(checkpoints, run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_manifest", _full)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        _save(checkpoints, run, 2)
        assert "Checkpoint 2 could not be saved" in caplog.text
        assert "The newest is of step 1." in caplog.text
        patch.setattr(checkpoint_module, "write_manifest", checkpoint.write_manifest)
        _save(checkpoints, run, 2)
    checkpoints.check()
    assert checkpoints.steps() == [1, 2] and not checkpoints.failure
    _save(checkpoints, run, 3)
    assert [path.name for path in sorted(checkpoints.folder.iterdir())] == ["00000002", "00000003"]


def test_a_mean_leaves_out_irregular_checkpoints_below_the_chosen_one(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    """Of an interruption at step 25, or of a best value between two that were due."""
    training = dataclasses.replace(
        config.training, checkpoint_every=10, average=3, keep_checkpoints=9
    )
    config = dataclasses.replace(config, training=training)
    checkpoints = Checkpoints(tmp_path, config, tokenizer)
    for step in (10, 25, 30, 40):
        progress = Progress(best_step=min(step, 25))  # which keeps step 25
        checkpoints.save(_state(run, step), progress)
    checkpoints.wait()
    assert checkpoints.steps() == [10, 25, 30, 40]

    def chosen(**options: Any) -> list[int]:
        return [int(path.name) for path in checkpoint.choose_checkpoints(tmp_path, **options)]

    assert chosen() == [40, 30, 10]
    assert chosen(average=2, checkpoint=30) == [30, 10]
    assert chosen(average=2, checkpoint="best") == [25, 10]  # the chosen one itself may be one
    with pytest.raises(UserError, match="average is 4; expected at most 3"):
        chosen(average=4)


def test_a_corrupt_checkpoint_is_refused(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    """Also if it is only one of several whose mean is taken."""
    _save(Checkpoints(tmp_path, config, tokenizer), run, 1, 2, best_step=1)
    assert load_model(tmp_path)[0] == config
    for step, options in ((1, {}), (2, {}), (2, {"checkpoint": "best"}), (1, {"checkpoint": 1})):
        corrupt = tmp_path / "checkpoints" / f"{step:08d}" / "config.json"
        content = corrupt.read_text()
        corrupt.write_text(content + " ")
        with pytest.raises(UserError, match=f"Checkpoint .*{step:08d} is corrupt: config.json"):
            load_model(tmp_path, **options)
        corrupt.write_text(content)
    manifest = tmp_path / "checkpoints" / "00000002" / "manifest.json"
    manifest.write_text("[")
    with pytest.raises(UserError, match=r"00000002 is corrupt: manifest.json cannot be read"):
        load_model(tmp_path)


def test_a_model_edited_in_the_work_directory_has_no_effect_and_says_so(
    tmp_path: Path,
    run: StepFunctions,
    config: Config,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _save(Checkpoints(tmp_path, config, tokenizer), run, 1)
    (tmp_path / "config.json").write_text(to_json(config))
    assert load_model(tmp_path)[0] == config and not caplog.records
    edited = dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=99))
    (tmp_path / "config.json").write_text(to_json(edited))
    assert load_model(tmp_path)[0] == config
    assert "model.d_ff is 99 in" in caplog.text and "was trained with 8" in caplog.text


def test_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint; expected a work directory"):
        load_model(tmp_path)


def test_manifest_lists_every_file(
    tmp_path: Path, run: StepFunctions, config: Config, tokenizer: Tokenizer
) -> None:
    _save(Checkpoints(tmp_path, config, tokenizer), run, 1)
    folder = tmp_path / "checkpoints" / "00000001"
    listed = json.loads((folder / "manifest.json").read_text())
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert (
        set(listed)
        == written - {"manifest.json"}
        > {"config.json", "tokenizer.model", "progress.json"}
    )
