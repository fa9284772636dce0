"""Resuming a run: after interruptions, changed settings, corrected text or failed evaluations."""

import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from number_names import number_files
from runs import ONE, changed, dev_figures, entries, no_evaluation, tiny

from transformer_jax.errors import UserError
from transformer_jax.model import matmul
from transformer_jax.pretrained.loading import load_model
from transformer_jax.runs import checkpoints, workdir
from transformer_jax.runs.checkpoint_folder import complete_steps
from transformer_jax.runs.manifest import write_manifest
from transformer_jax.settings.config import Config, OptimizerConfig, PairsConfig
from transformer_jax.settings.config_files import load_config_file, to_json
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training import prepare
from transformer_jax.training.evaluator import Evaluator
from transformer_jax.training.loop import TrainingError, train
from transformer_jax.training.signals import Signals


def parameters(path: Path) -> Any:
    return nnx.to_pure_dict(nnx.state(load_model(path)[1], nnx.Param))


def means(workdir: Path, *steps: int) -> Any:
    """The mean of the parameters of these checkpoints."""
    each = [parameters(workdir / "checkpoints" / f"{step:08d}") for step in steps]
    return jax.tree.map(lambda *x: np.mean(x, axis=0), *each)


def interrupted_at(steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop runs after these steps, as SIGTERM would."""

    def stop_after(self: Signals, step: int) -> bool:
        self.received = "SIGTERM" if step in steps else None
        return step in steps

    monkeypatch.setattr(Signals, "stop_after", stop_after)


def test_interruptions_do_not_change_the_averaged_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = no_evaluation(tiny(steps=12, checkpoint_every=4, keep_checkpoints=2, average=2))
    train(config, tmp_path / "whole", devices=ONE)
    interrupted_at((5, 9, 11), monkeypatch)
    for step in (5, 9, 11):
        assert train(config, tmp_path / "run", devices=ONE)["steps"] == step
        assert step in complete_steps(tmp_path / "run" / "checkpoints")
    train(config, tmp_path / "run", devices=ONE)
    for run in ("whole", "run"):
        assert complete_steps(tmp_path / run / "checkpoints") == [8, 12]
    chex.assert_trees_all_equal(parameters(tmp_path / "run"), parameters(tmp_path / "whole"))


EVALUATED = changed(
    tiny(
        steps=6, eval_every=3, checkpoint_every=6, bleu_sentences=0, keep_checkpoints=1, average=1
    ),
    data={"test": PairsConfig()},
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Summary and work directory of an uninterrupted run of ``EVALUATED``."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    return train(EVALUATED, workdir, devices=ONE), workdir


def evaluated_on_resume(run: Path, uninterrupted: tuple[dict[str, Any], Path]) -> None:
    """Check that step 3 of a run was saved but not evaluated, and that resuming evaluates it."""
    assert entries(run, "dev") == [] and complete_steps(run / "checkpoints") == [3]
    ends_alike(run, uninterrupted)


def ends_alike(run: Path, uninterrupted: tuple[dict[str, Any], Path]) -> None:
    """Check that a resumed run has the same evaluations as an uninterrupted one."""
    resumed = train(EVALUATED, run, devices=ONE)
    whole, workdir = uninterrupted
    losses = [
        [(entry["step"], entry["dev_loss"]) for entry in entries(each, "dev")]
        for each in (workdir, run)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert (whole["best_step"], whole["best_dev_loss"]) == (
        resumed["best_step"],
        resumed["best_dev_loss"],
    )


def test_an_evaluation_skipped_for_a_signal_runs_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: tuple[dict[str, Any], Path]
) -> None:
    with monkeypatch.context() as patch:
        interrupted_at((3,), patch)
        train(EVALUATED, tmp_path / "run", devices=ONE)
    evaluated_on_resume(tmp_path / "run", uninterrupted)


def test_a_signal_during_an_evaluation_stops_after_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: tuple[dict[str, Any], Path]
) -> None:
    dev = Evaluator.dev

    def signaled(self: Evaluator, *given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return dev(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "dev", signaled)
        summary = train(EVALUATED, tmp_path / "run", devices=ONE)
    assert (summary["stopped_by"], summary["steps"]) == ("SIGTERM", 4)
    assert summary["steps"] < EVALUATED.training.steps and not summary["stopped_early"]
    ends_alike(tmp_path / "run", uninterrupted)


@pytest.mark.devices(2)
def test_changed_batches_need_a_flag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = no_evaluation(tiny(steps=4, checkpoint_every=2))
    train(config, tmp_path, devices=ONE)
    smaller = changed(config, batch={"tokens": 512}, training={"steps": 6})
    with pytest.raises(
        UserError, match=r"or --allow-changes. Fields that differ:\n  batch.tokens: 1024 .* 512 now"
    ):
        train(smaller, tmp_path, devices=ONE)
    with pytest.raises(
        UserError, match=r"the same settings\. Fields that differ:\n  batch.tokens.*\n  seed: 0"
    ):
        train(changed(smaller, seed=1), tmp_path, devices=ONE, allow_changes=True)
    wrong = changed(smaller, batch={"row_multiple": 3})
    with pytest.raises(UserError, match="row_multiple is 3; expected a multiple"):
        train(wrong, tmp_path, devices=jax.devices()[:2], allow_changes=True)
    # the errors did not change the work directory
    assert train(config, tmp_path, devices=ONE)["steps"] == 4
    assert train(smaller, tmp_path, devices=ONE, allow_changes=True)["steps"] == 6
    assert (
        "Resuming the run with different settings" in caplog.text
        and "batch.tokens: 1024" in caplog.text
    )
    before, after = entries(tmp_path)[3], entries(tmp_path)[4:]
    assert before["step"] == 4 and [entry["step"] for entry in after] == [5, 6]
    fewer = changed(smaller, training={"steps": 5})  # without the flag, and with nothing left to do
    assert train(fewer, tmp_path, devices=ONE)["steps"] == 6


def test_a_diverged_run_resumes_with_another_optimizer(tmp_path: Path) -> None:
    """With what the error advises, and with settings that add to the state or remove from it."""
    config = no_evaluation(tiny(steps=4, checkpoint_every=4, max_bad_steps=2))
    train(config, tmp_path, devices=ONE)
    optimizer = OptimizerConfig(warmup_steps=1, peak_learning_rate=1e38)
    hot = changed(config, training={"steps": 9}, optimizer=optimizer)
    with pytest.raises(TrainingError, match="--allow-changes"):
        train(hot, tmp_path, devices=ONE, allow_changes=True)
    cool = OptimizerConfig(
        warmup_steps=20, peak_learning_rate=0.001, clip_norm=1.0, weight_decay=0.01
    )
    cooler = changed(hot, optimizer=cool)
    assert train(cooler, tmp_path, devices=ONE, allow_changes=True)["steps"] == 9
    averaged = changed(cooler, optimizer={"ema_decay": 0.9})
    with pytest.raises(UserError, match="optimizer.ema_decay: 0.0 in the checkpoint, 0.9 now"):
        train(averaged, tmp_path, devices=ONE, allow_changes=True)
    plainer = changed(cooler, optimizer={"clip_norm": 0.0}, training={"steps": 10})
    assert train(plainer, tmp_path, devices=ONE, allow_changes=True)["steps"] == 10
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(parameters(tmp_path)))


def test_corrected_text_gets_a_new_tokenizer_until_the_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, letters in (("wrong", "abc"), ("right", "xyz")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(
            "".join(f"{a}{b} {c}\n" for a in letters for b in letters for c in letters)
        )
    pairs = PairsConfig("text", ("text",), ("text",))

    def config(name: str) -> Config:
        own = changed(
            no_evaluation(tiny(steps=1)), data={"root": str(tmp_path / name), "train": pairs}
        )
        return changed(own, tokenizer={"vocab_size": 12})

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            prepare, "_initial_state", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        train(config("wrong"), tmp_path / "run", devices=ONE)
    first = Tokenizer.load(tmp_path / "run")
    train(config("right"), tmp_path / "run", devices=ONE)
    second = Tokenizer.load(tmp_path / "run")
    assert first.source.encode(["xy"])[0].count(3) and not second.source.encode(["xy"])[0].count(3)
    # After the first checkpoint, the text must not change, even in the same file.
    (tmp_path / "right" / "text").write_text((tmp_path / "wrong" / "text").read_text())
    for name in ("wrong", "right"):
        with pytest.raises(UserError, match="The training text differs"):
            train(config(name), tmp_path / "run", devices=ONE)
    assert Tokenizer.load(tmp_path / "run").fingerprint == second.fingerprint


def test_a_failed_resume_does_not_change_the_config(tmp_path: Path) -> None:
    for name, letters in (("one", "abc"), ("other", "xyz")):
        (tmp_path / name).write_text(
            "".join(f"{a}{b} {c}\n" for a in letters for b in letters for c in letters)
        )
    config = changed(no_evaluation(tiny(steps=1)), tokenizer={"vocab_size": 12})
    config = changed(
        config, data={"root": str(tmp_path), "train": PairsConfig("text", ("one",), ("one",))}
    )
    train(config, tmp_path / "run", devices=ONE)
    before = (tmp_path / "run" / "config.json").read_text()
    wrong = changed(
        config, data={"train": PairsConfig("text", ("other",), ("other",))}, batch={"tokens": 512}
    )
    with pytest.raises(UserError, match="The training text differs"):
        train(wrong, tmp_path / "run", devices=ONE, allow_changes=True)
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_a_failed_evaluation_loses_no_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: tuple[dict[str, Any], Path]
) -> None:
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> None:
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 GiB"
            )

        patch.setattr(Evaluator, "dev", fail)
        with pytest.raises(
            TrainingError,
            match=r"Out of memory: evaluating step 3\. Set optimizer.accumulate_steps",
        ):
            train(EVALUATED, tmp_path, devices=ONE)
    evaluated_on_resume(tmp_path, uninterrupted)
    # step 3 was the best when step 6 was saved
    assert complete_steps(tmp_path / "checkpoints") == [3, 6]


def test_another_dev_set_resets_the_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(steps=4, eval_every=2, checkpoint_every=2, bleu_sentences=0)
    config = changed(config, data={"test": PairsConfig()})
    found = iter([3.0, 2.0, 6.0, 4.0, 4.0, 5.0])  # the resumed step is evaluated again
    monkeypatch.setattr(Evaluator, "dev", lambda *_, **__: (dev_figures(next(found)), ""))
    assert train(config, tmp_path, devices=ONE)["best_dev_loss"] == 2.0
    other = changed(config, data={"dev": number_files(7, "dev")}, training={"steps": 6})
    summary = train(other, tmp_path, devices=ONE)
    assert (summary["best_step"], summary["best_dev_loss"]) == (6, 4.0)
    summary = train(changed(other, training={"steps": 8}), tmp_path, devices=ONE)
    assert (summary["best_step"], summary["best_dev_loss"]) == (6, 4.0)


def test_a_resumed_run_can_change_how_many_checkpoints_are_averaged(tmp_path: Path) -> None:
    config = no_evaluation(tiny(steps=6, checkpoint_every=2, keep_checkpoints=3, average=1))
    train(config, tmp_path, devices=ONE)
    chex.assert_trees_all_equal(parameters(tmp_path), means(tmp_path, 6))
    train(changed(config, training={"average": 3}), tmp_path, devices=ONE)
    chex.assert_trees_all_close(parameters(tmp_path), means(tmp_path, 2, 4, 6), atol=1e-6)


def test_a_model_edited_in_the_work_directory_is_an_error(tmp_path: Path) -> None:
    """Even if the command uses the edited file."""
    config = no_evaluation(tiny(steps=1))
    train(config, tmp_path, devices=ONE)
    edited = changed(load_config_file(tmp_path / "config.json"), model={"d_ff": 64})
    (tmp_path / "config.json").write_text(to_json(edited))
    with pytest.raises(UserError, match=r"a different config(?s:.*)model.d_ff: 32 in .*, 64 now"):
        train(edited, tmp_path, devices=ONE)
    assert train(config, tmp_path, devices=ONE)["steps"] == 1  # repairs the file
    assert load_config_file(tmp_path / "config.json").model.d_ff == 32


def test_a_full_disk_ends_only_a_run_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = no_evaluation(tiny(steps=40, checkpoint_every=2))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_manifest", full)
        with pytest.raises(UserError, match="The first checkpoint could not be saved"):
            train(config, tmp_path, devices=ONE)
    assert len(entries(tmp_path)) <= 5
    config = changed(config, training={"steps": 6})

    def full_at_4(path: Path, *content: Any) -> None:
        if "00000004" in path.name:
            full()
        write_manifest(path, *content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_manifest", full_at_4)
        assert train(config, tmp_path, devices=ONE)["steps"] == 6
    assert "Checkpoint 4 could not be saved: [Errno 28] No space" in caplog.text
    assert complete_steps(tmp_path / "checkpoints") == [2, 6]


def test_a_folder_of_another_program_is_left_intact(tmp_path: Path) -> None:
    """Its name for settings and checkpoints may be the same."""
    folder = tmp_path / "checkpoints" / "1000"
    folder.mkdir(parents=True)
    files = {tmp_path / "config.json": '{"architectures": ["T5"]}', folder / "model.bin": "weights"}
    for path, text in files.items():
        path.write_text(text)
    with pytest.raises(UserError, match=r"config.json.*Unknown config field architectures"):
        train(tiny(), tmp_path, devices=ONE)
    assert {path: path.read_text() for path in files} == files


def test_a_link_to_itself_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        train(tiny(), tmp_path / "loop", devices=ONE)


def test_a_repointed_link_does_not_move_a_run(tmp_path: Path) -> None:
    """The next run may repoint ``runs/latest``."""
    config = no_evaluation(tiny(steps=2, checkpoint_every=1))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    link = tmp_path / "latest"
    link.symlink_to("one")
    with prepare.prepare(config, link, devices=ONE) as run:
        link.unlink()
        link.symlink_to("other")
        run.checkpoints.save(run.state.replace(step=jax.numpy.int32(1)), run.progress)
        run.checkpoints.wait()
    assert complete_steps(tmp_path / "one" / "checkpoints") == [1]
    assert not list((tmp_path / "other").iterdir())


def test_unsuitable_environments_are_errors_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="characters outside this locale's encoding.*PYTHONUTF8=1"):
        train(tiny(), tmp_path / "caf\udcc3\udca9", devices=ONE)
    with monkeypatch.context() as patch:
        patch.setattr(prepare.resource, "getrlimit", lambda _: (20, 20))
        with pytest.raises(UserError, match=r"open files is 20; expected .* \(ulimit -n 256\)"):
            train(tiny(), tmp_path / "run", devices=ONE)
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_AS: 1_500_000 * 1024}
    with monkeypatch.context() as patch:
        patch.setattr(prepare.resource, "getrlimit", lambda limit: (limits[limit], -1))
        message = r"address space \(KiB\) is 1500000; expected .* \(ulimit -v unlimited\)"
        with pytest.raises(UserError, match=message):
            train(tiny(), tmp_path / "run", devices=ONE)
    monkeypatch.setattr(workdir, "_CLAIM_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(
        workdir.Workdir, "claim", lambda self: setattr(self, "claim_id", "another's")
    )
    with pytest.raises(UserError, match=r"is not shared by all processes.* \.token"):
        train(tiny(), tmp_path / "run", devices=ONE)
    assert not list((tmp_path / "run").glob("[!.]*.model"))


@pytest.mark.cpu("auto is bfloat16 elsewhere")
def test_the_automatic_data_type_is_recorded_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run keeps the data type of the machine that it began on; its model depends on none."""
    config = changed(no_evaluation(tiny(steps=2)), model={"dtype": "auto"})

    def dtypes(steps: int, flags: set[str]) -> list[str]:
        monkeypatch.setattr(matmul, "cpu_flags", lambda: flags)
        with jax.default_matmul_precision(None):
            longer = changed(config, training={"steps": steps})
            summary = train(longer, tmp_path, devices=ONE)
        configs = [load_config_file(tmp_path), load_config_file(tmp_path / "model")]
        return [summary["dtype"], *(each.model.dtype for each in configs)]

    assert dtypes(2, {"avx512_bf16"}) == ["bfloat16", "bfloat16", "auto"]
    assert dtypes(4, set()) == ["bfloat16", "bfloat16", "bfloat16"]
    with pytest.raises(UserError, match="model.dtype: 'bfloat16' in the checkpoint, 'float32' now"):
        train(changed(config, model={"dtype": "float32"}), tmp_path, devices=ONE)
