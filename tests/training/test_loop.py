"""Whole runs on a tiny task: files, kills, signals, devices, errors, bad losses, early stopping."""

import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from number_names import number_files, number_names
from runs import (
    ONE,
    changed,
    command,
    dev_figures,
    entries,
    final_state,
    no_evaluation,
    saving,
    tiny,
    wait_for,
)

from transformer_jax.data.corpus import Corpus
from transformer_jax.data.sources import TextPair
from transformer_jax.errors import UserError
from transformer_jax.pretrained.loading import load_model
from transformer_jax.runs.checkpoint_folder import complete_steps
from transformer_jax.runs.checkpoints import Checkpoints
from transformer_jax.runs.workdir import Workdir
from transformer_jax.settings.config import (
    BatchConfig,
    Config,
    MeshConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
)
from transformer_jax.settings.config_files import from_json
from transformer_jax.training import evaluator as evaluator_module
from transformer_jax.training import metrics, watchdog
from transformer_jax.training.evaluator import Evaluator
from transformer_jax.training.loop import TrainingError, train
from transformer_jax.training.loss import LossSums
from transformer_jax.training.metrics import Meter
from transformer_jax.training.prepare import prepare
from transformer_jax.training.signals import Signals


def whole(**training: Any) -> Config:
    """Two batch shapes and dropout, both of which a resumed run must continue."""
    config = tiny(dropout=0.1, **training)
    return changed(config, batch={"buckets": 2})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of train.py on one device, next to its compilation cache."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    process = command(workdir, workdir.parent / "cache", whole())
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (workdir.parent / "stderr").write_text(errors)
    return workdir


def test_contents_of_a_work_directory(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 30
    assert summary["stopped_by"] is None
    assert 0 < summary["epochs"] < 5 and summary["epochs"] % 1
    assert set(summary["test"]) >= {"bleu", "bleu_signature", "chrf", "exact_match"}
    assert (
        summary["cpu_cores"]
        and summary["tokens_per_second"] > 0
        and summary["peak_memory_bytes"]["host"] > 1e7
    )
    assert summary["best_dev_loss"] == min(entry["dev_loss"] for entry in entries(finished, "dev"))
    assert (finished / "tokenizer.model").exists() and list((finished / "tensorboard").iterdir())
    train_entries = entries(finished)
    assert [entry["step"] for entry in train_entries] == list(range(1, 31))
    assert train_entries[-1]["loss"] < 0.9 * train_entries[0]["loss"]
    assert {"learning_rate", "gradient_norm", "tokens_per_second"} <= set(train_entries[0])
    assert train_entries[-1]["peak_memory_bytes"]["host"] > 1e7
    assert entries(finished, "start")[0]["environment"]["versions"] == summary["versions"]
    assert [entry["step"] for entry in entries(finished, "dev")] == [15, 30]
    assert complete_steps(finished / "checkpoints")[-3:] == [20, 25, 30]


def test_a_killed_and_stopped_run_resumes_bit_exactly(finished: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    cache = finished.parent / "cache"
    config = no_evaluation(whole())

    def newest() -> int:
        return max((entry["step"] for entry in entries(workdir)), default=0)

    process = command(workdir, cache, config)
    wait_for(lambda: newest() > 5 and saving(workdir), process, "a save after step 5")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed_at = newest()
    process = command(workdir, cache, config)
    wait_for(lambda: newest() > killed_at, process, "another step")
    process.terminate()
    process.terminate()  # a signal to a process group can arrive twice
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, errors
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["stopped_by"] == "SIGTERM" and summary["steps"] < 30
    assert complete_steps(workdir / "checkpoints")[-1] == summary["steps"]
    assert "Run the same command again" in errors
    with open("/dev/full", "w") as full:  # messages that cannot be written do not end training
        assert command(workdir, cache, config, stderr=full).wait(300) == 0
    chex.assert_trees_all_equal(final_state(config, workdir), final_state(whole(), finished))
    assert [entry["step"] for entry in entries(workdir)] == list(range(1, 31))
    assert [entry["loss"] for entry in entries(workdir)] == [
        entry["loss"] for entry in entries(finished)
    ]


def test_every_evaluation_shows_the_first_dev_pair(finished: Path) -> None:
    [(source, reference)] = number_names("dev", 1)
    printed = (finished.parent / "stderr").read_text()
    example = f"  source      {source}\n  reference   {reference}\n  translation "
    assert printed.count(example) == printed.count("dev loss") == 2


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(1, 2, 1), pytest.param(MeshConfig(2, 2, 2), marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_a_run_on_several_devices_equals_one_on_one_device(
    mesh: MeshConfig, tmp_path: Path
) -> None:
    """Trained, saved, resumed, evaluated and tested."""
    test = number_files(3, "test")  # each device compiles a search
    config = changed(tiny(bleu_sentences=3), data={"test": test})
    several = changed(config, mesh=mesh)
    devices = jax.devices()[: 8 if mesh.data == 2 else 2]
    train(changed(several, training={"steps": 20}), tmp_path / "several", devices=devices)
    summaries = (
        train(several, tmp_path / "several", devices=devices),
        train(config, tmp_path / "one", devices=ONE),
    )
    for kind, name in (("train", "loss"), ("dev", "dev_loss"), ("dev", "dev_bleu")):
        several, one = (
            {entry["step"]: entry[name] for entry in entries(tmp_path / folder, kind)}
            for folder in ("several", "one")
        )
        several = {step: several[step] for step in one}  # the first part also evaluated step 20
        np.testing.assert_allclose(list(several.values()), list(one.values()), rtol=1e-4)
    assert summaries[0]["test"]["bleu"] == summaries[1]["test"]["bleu"]


def test_an_entry_for_several_steps_is_their_mean(tmp_path: Path) -> None:
    for log_every in (1, 4):
        train(
            no_evaluation(tiny(steps=12, log_every=log_every, checkpoint_every=12)),
            tmp_path / str(log_every),
            devices=ONE,
        )
    single, several = entries(tmp_path / "1"), entries(tmp_path / "4")
    assert [entry["step"] for entry in several] == [4, 8, 12]
    for group, entry in zip((single[:4], single[4:8], single[8:]), several, strict=True):
        losses = [each["loss"] for each in group]
        assert min(losses) < entry["loss"] < max(losses)  # weighted by tokens
        np.testing.assert_allclose(entry["loss"], np.mean(losses), rtol=2e-2)


def test_the_best_checkpoint_by_bleu_is_kept(tmp_path: Path) -> None:
    config = tiny(
        steps=8, eval_every=2, checkpoint_every=2, keep_checkpoints=1, average=1, select_by="bleu"
    )
    bleus = iter([3.0, 9.0, 1.0, 5.0])
    clock = SimpleNamespace(passed=0.0)
    clock.perf_counter = lambda: time.perf_counter() + clock.passed

    def evaluation(self: Evaluator, parameters: Any) -> tuple[dict[str, float], str]:
        clock.passed += 10_000
        return dev_figures(1.0, dev_bleu=next(bleus)), ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "time", clock)
        patch.setattr(Evaluator, "dev", evaluation)
        patch.setattr(Evaluator, "test", lambda self, checkpoints: ({}, None))
        summary = train(config, tmp_path / "run", devices=ONE)
    assert (summary["best_dev_bleu"], summary["best_step"]) == (9.0, 4)
    assert complete_steps(tmp_path / "run" / "checkpoints") == [4, 8]
    # The hours of an evaluation do not count as those of the next step.
    rates = [entry["tokens_per_second"] for entry in entries(tmp_path / "run")]
    assert min(rates) > config.batch.tokens / 1000


def bare_evaluator(config: Config, **fields: Any) -> Evaluator:
    """An evaluator of a run that has only these fields."""
    evaluator = object.__new__(Evaluator)
    run: Any = SimpleNamespace(**fields)
    vars(evaluator).update(_run=run, _training_config=config.training)
    return evaluator


@pytest.mark.parametrize("processes", [1, 3])
def test_translations_are_scored_against_their_own_references(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process translates its share of the lines, here with a model that copies them."""
    sources = [f"{letter} follows the others" for letter in "abcdefg"]
    shares = [sources[number::processes] for number in range(processes)]
    translated = []

    def allgather(share: list[str]) -> list[list[str]]:
        translated.append(share)
        return shares

    evaluator = bare_evaluator(tiny(), pairs={"test": list(map(TextPair, sources, sources))})
    evaluator._translator = SimpleNamespace(translate=lambda lines: [line.text for line in lines])
    for name in ("_on_devices", "_replicated_copy"):
        monkeypatch.setattr(Evaluator, name, lambda self, parameters: parameters)
    monkeypatch.setattr(evaluator_module, "allgather", allgather)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    for number in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda number=number: number)
        figures, scores = evaluator.test([])
        assert figures["exact_match"] == scores.exact_match == 1 and figures["bleu"] > 99
    assert translated == shares


def test_dev_sentences_may_be_longer_than_a_microbatch_allows() -> None:
    config = changed(tiny(), batch={"tokens": 256}, optimizer={"accumulate_steps": 4})
    rows = config.batch.row_multiple
    for length, shape in ((3, (16, 4, 4)), (23, (rows, 24, 24))):  # with EOS
        corpus = Corpus.from_lists([[4] * length] * 16, [[4] * length] * 16)
        run: Any = SimpleNamespace(config=config, corpora={"dev": corpus}, pairs={})
        dev = Evaluator(run)._dev
        assert dev is not None and dev.shapes == (shape,)


def test_two_runs_cannot_share_a_work_directory(tmp_path: Path) -> None:
    """The second one fails, whatever its config, and does not change files of the first."""
    config = tiny()
    with Workdir(tmp_path).open(config):
        (tmp_path / "tokenizer.model").write_text("the first run's")
        with pytest.raises(UserError, match="Another run is using"):
            train(changed(config, seed=5), tmp_path, devices=ONE)
    assert (tmp_path / "tokenizer.model").read_text() == "the first run's"
    assert from_json((tmp_path / "config.json").read_text()) == config


def test_the_default_layout_depends_on_the_devices(finished: Path) -> None:
    assert tiny().batch.layout == "auto"
    assert from_json((finished / "config.json").read_text()).batch.layout == "bucketed"
    assert Config().with_layout("tpu").batch.layout == "packed"
    assert Config().with_layout("gpu").batch.layout == "bucketed"
    given = Config(batch=BatchConfig(layout="bucketed"))
    assert given.with_layout("tpu") == given


def test_a_relative_work_directory_trains_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(no_evaluation(tiny(steps=1)), "run", devices=ONE)
    assert load_model("run")[0].training.steps == 1


def test_a_run_that_failed_before_its_first_step_can_change_its_config(tmp_path: Path) -> None:
    config = no_evaluation(tiny(steps=1))
    too_large = changed(config, tokenizer=TokenizerConfig(vocab_size=50_000))
    with pytest.raises(UserError, match="50000 tokens .tokenizer.vocab_size."):
        train(too_large, tmp_path, devices=ONE)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "start", "step": 0}\n')
    assert train(config, tmp_path, devices=ONE)["steps"] == 1
    assert from_json((tmp_path / "config.json").read_text()).tokenizer.vocab_size == 150


def test_a_loss_that_stays_non_finite_ends_the_run(tmp_path: Path) -> None:
    config = no_evaluation(tiny(max_bad_steps=3))
    config = changed(config, optimizer=OptimizerConfig(warmup_steps=1, peak_learning_rate=1e38))
    with pytest.raises(TrainingError, match="not finite for 3 steps in a row"):
        train(config, tmp_path / "run", devices=ONE)
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()  # invalid in JSON
    assert [entry["loss"] is None for entry in entries(tmp_path / "run", "train")[-2:]] == [
        True,
        True,
    ]


def without_test_set(config: Config) -> Config:
    return changed(config, data={"test": PairsConfig()})


def test_training_stops_when_dev_loss_stops_improving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lower patience can also end a run that is already finished."""
    config = tiny(steps=100, eval_every=2, checkpoint_every=100, patience=2, bleu_sentences=0)
    optimizer = OptimizerConfig(warmup_steps=1, peak_learning_rate=1e-30)
    config = changed(without_test_set(config), optimizer=optimizer)
    more = changed(config, training={"steps": 6, "patience": 3})
    summary = train(more, tmp_path / "more", devices=ONE)
    assert (summary["steps"], summary["averaged_steps"]) == (6, [6])
    assert not summary["stopped_early"] and "\ndone at step 6: " in capsys.readouterr().err
    for run in ("run", "more", "run"):  # the last one is already finished
        summary = train(config, tmp_path / run, devices=ONE)
        assert (summary["steps"], summary["stopped_early"]) == (6, True)
        end = "stopped early at step 6 of 100, after 2 evaluations without improvement"
        assert f"\n{end}: checkpoint 2; metrics in" in capsys.readouterr().err
        assert summary["averaged_steps"] == [2]
        assert complete_steps(tmp_path / run / "checkpoints") == [2, 6]


@pytest.mark.parametrize(
    ("training", "with_dev", "losses", "averaged"),
    [
        # dev losses of steps 3 and 6, then of the averages ending at 6
        ({"average": "auto"}, True, [3, 2.5, 2.5, 2.2, 2.4, 2.3, 2.6], [6, 5]),
        pytest.param(
            {"average": 2}, True, [3, 2.5, 2.5, 2.2], [6, 5], marks=pytest.mark.exhaustive
        ),
        ({"average": "auto"}, False, [], [6]),
        # steps 3 and 6, averages ending at 6, averages ending at 3, the best step
        (
            {"average": "auto", "patience": 1, "steps": 99},
            True,
            [2.5, 3, 3, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.6],
            [3, 2],
        ),
        pytest.param(
            {"average": 2, "patience": 1, "steps": 99},
            True,
            [2.5, 3, 2.5, 2.4],
            [3, 2],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_end_of_a_run_chooses_checkpoints_to_average(
    training: dict[str, Any],
    with_dev: bool,
    losses: list[float],
    averaged: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the end, and if the run continues, the model is the newest checkpoint."""
    common = {"steps": 6, "eval_every": 3, "checkpoint_every": 1, "keep_checkpoints": 5}
    config = tiny(**(common | {"bleu_sentences": 0} | training))
    config = config if with_dev else no_evaluation(config)
    config = without_test_set(config)
    caplog.set_level("INFO")

    def names() -> list[int]:
        """The steps of the model that ``load_model`` logs."""
        caplog.clear()
        load_model(tmp_path)
        [found] = re.findall(
            r"(?:: |so )(?:average of \d+ checkpoints,|checkpoint) (.*)\.$", caplog.text, re.M
        )
        return [int(step) for step in reversed(found.split(" to "))]

    remaining = iter(losses)
    monkeypatch.setattr(
        Evaluator, "_loss", lambda *_: LossSums(*map(np.float32, (next(remaining), 1, 0, 1)))
    )
    with monkeypatch.context() as patch:
        patch.setattr(Signals, "stop_after", lambda self, step: self._handle(15, None) or True)
        assert "averaged_steps" not in train(config, tmp_path, devices=ONE)
    assert names() == [1] and "has not finished" in caplog.text
    assert not (tmp_path / "model").exists()
    caplog.clear()
    summary = train(config, tmp_path, devices=ONE)
    said = caplog.text
    assert next(remaining, None) is None and summary["averaged_steps"] == names() == averaged
    described = "average of 2 checkpoints, {1} to {0}" if len(averaged) > 1 else "checkpoint {}"
    assert described.format(*averaged) in capsys.readouterr().err
    assert with_dev or "data.dev is not set" in said
    longer = changed(config, training={"steps": 99, "eval_every": 99, "patience": 0})
    with monkeypatch.context() as patch:
        patch.setattr(Signals, "stop_after", lambda self, step: self._handle(15, None) or True)
        train(longer, tmp_path, devices=ONE)
    assert names() == [summary["steps"] + 1]


def test_a_failed_last_save_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "save", lambda self, state, progress, **_: None)
    with pytest.raises(UserError, match="could not be saved"):
        train(no_evaluation(tiny(steps=2)), tmp_path / "run", devices=ONE)


def test_training_on_packed_rows_with_bpe_dropout(tmp_path: Path) -> None:
    config = no_evaluation(tiny(steps=12))
    config = changed(
        config,
        tokenizer={"bpe_dropout": 0.1, "bpe_dropout_samples": 3},
        batch=BatchConfig(layout="packed", tokens=640, row_length=128, row_multiple=1),
    )
    train(config, tmp_path / "run", devices=ONE)
    found = entries(tmp_path / "run")
    assert found[-1]["loss"] < found[0]["loss"]
    assert entries(tmp_path / "run", "start")[0]["source_fill"] > 0.9
    config = changed(config, data={"dev": number_files(20, "dev")})
    with prepare(config, tmp_path / "run", devices=ONE) as run:
        pairs = {name: corpus.num_pairs for name, corpus in run.corpora.items()}
    assert pairs["train"] > 1400 and pairs["dev"] == 20  # only the training set is sampled


def test_a_stuck_step_writes_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Again and again, until the step ends. None come after the run."""
    errors = ""

    def has_two_tracebacks() -> bool:
        return errors.count("Timeout (0:00:00.4") >= 2 and errors.count("in stuck_add") >= 2

    def stuck_add(self: Meter, *given: Any) -> None:
        nonlocal errors
        end = time.monotonic() + 60
        while not has_two_tracebacks() and time.monotonic() < end:
            time.sleep(0.05)
            errors += capfd.readouterr().err
        add(self, *given)

    add = Meter.add
    monkeypatch.setattr(Meter, "add", stuck_add)
    monkeypatch.setattr(watchdog, "_STUCK_SECONDS", 0.4)
    train(no_evaluation(tiny(steps=2)), tmp_path, devices=ONE)
    assert has_two_tracebacks()
    capfd.readouterr()
    time.sleep(0.6)
    assert not capfd.readouterr().err
