"""Figures of a run: when it logs, evaluates and saves, and every number that it reports."""

import asyncio
import contextlib
import copy
import dataclasses
import errno
import faulthandler
import io
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from runs import ONE, changed, entries, tiny

from transformer_jax.errors import UserError
from transformer_jax.runs.checkpoints import Checkpoints
from transformer_jax.runs.manifest import Manifest
from transformer_jax.runs.workdir import Workdir
from transformer_jax.settings.changes import differences_on_resume
from transformer_jax.settings.config import Config, TrainingConfig
from transformer_jax.settings.config_files import flatten
from transformer_jax.storage import files as storage
from transformer_jax.training import __main__ as program
from transformer_jax.training import loop
from transformer_jax.training.compiling import CompileAhead
from transformer_jax.training.evaluator import Evaluator
from transformer_jax.training.loop import TrainingError, train
from transformer_jax.training.metrics import training_flops
from transformer_jax.training.prepare import prepare
from transformer_jax.training.reporting import Reporter
from transformer_jax.training.watchdog import Watchdog

WARMUP, PEAK = 4, 0.01
CONFIG = changed(
    tiny(steps=7, log_every=2, eval_every=3, checkpoint_every=4, bleu_sentences=3, average=1),
    optimizer={"warmup_steps": WARMUP, "peak_learning_rate": PEAK, "ema_decay": 0.5},
    data={"max_source_length": 20},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A finished run of ``CONFIG`` whose third step counted as skipped.

    ``saved``: steps at which it saved; ``evaluated``: parameters of each evaluation; ``logged``:
    the contents of metrics.jsonl before each evaluation.
    """
    workdir = tmp_path_factory.mktemp("figures") / "run"
    found = SimpleNamespace(workdir=workdir, saved=[], evaluated=[], logged=[])
    wait, dev, save = CompileAhead.wait, Evaluator.dev, Checkpoints.save

    def wait_for_step(self: CompileAhead, *given: Any) -> Any:
        step = wait(self, *given)

        def train_step(state: Any, batch: Any) -> Any:
            skipped = int(state.step) == 2
            state, metrics = step(state, batch)
            return state.replace(bad_steps=state.bad_steps + skipped), metrics

        return train_step

    def evaluate(self: Evaluator, parameters: Any) -> Any:
        found.evaluated.append(jax.tree.map(np.asarray, parameters))
        found.logged.append((workdir / "metrics.jsonl").read_text())
        return dev(self, parameters)

    def save_step(self: Checkpoints, state: Any, *given: Any) -> None:
        found.saved.append(int(state.step))
        save(self, state, *given)

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(CompileAhead, "wait", wait_for_step)
        patch.setattr(Evaluator, "dev", evaluate)
        patch.setattr(Checkpoints, "save", save_step)
        # Saving takes longer than a step.
        patch.setattr(Workdir, "push_files", lambda self: time.sleep(0.2))
        found.summary = train(CONFIG, workdir, devices=ONE)
    found.said = said.getvalue()
    with prepare(CONFIG, workdir, devices=ONE) as prepared:
        found.end, checkpoints = prepared, prepared.checkpoints
        abstract = prepared.functions.abstract_state
        found.kept = {
            step: checkpoints.restore(Manifest(checkpoints.path(step)), abstract)[1].tokens
            for step in checkpoints.steps()
        }
        yield found


def real_tokens(run: SimpleNamespace, steps: range) -> tuple[int, int]:
    """Source and target tokens of these steps, without padding."""
    batches = [run.end.plan.batch(step) for step in steps]
    return (
        sum(int((batch.source_BS > 0).sum()) for batch in batches),
        sum(int((batch.target_BT > 0).sum()) for batch in batches),
    )


def test_a_run_logs_evaluates_and_saves_at_its_intervals_and_at_the_end(
    run: SimpleNamespace,
) -> None:
    assert [entry["step"] for entry in entries(run.workdir)] == [2, 4, 6]
    assert [entry["step"] for entry in entries(run.workdir, "dev")] == [3, 6, 7]
    assert run.saved == [3, 4, 6, 7]
    # Each line is readable as soon as it is logged.
    steps = [[json.loads(line)["step"] for line in text.splitlines()] for text in run.logged]
    assert steps == [[0, 2], [0, 2, 3, 4, 6], [0, 2, 3, 4, 6, 6]]


def test_evaluations_use_the_moving_average_if_there_is_one(run: SimpleNamespace) -> None:
    last, state = run.evaluated[-1], run.end.state
    jax.tree.map(np.testing.assert_array_equal, last, jax.tree.map(np.asarray, state.ema))
    differ = jax.tree.map(lambda a, b: bool((a != np.asarray(b)).any()), last, state.parameters)
    assert any(jax.tree.leaves(differ))


def test_entries_have_the_epoch_the_learning_rate_and_skipped_steps(run: SimpleNamespace) -> None:
    per_epoch = run.end.plan.steps_per_epoch
    for entry in entries(run.workdir):
        step, skipped = entry["step"], int(entry["step"] >= 3)
        assert entry["epoch"] == pytest.approx(step / per_epoch)
        used = step - (entry["step"] > 3)  # the number of updates, which sets the learning rate
        rate = PEAK * min(used / WARMUP, math.sqrt(WARMUP / used))
        assert entry["learning_rate"] == pytest.approx(rate, rel=1e-5)
        assert entry["bad_steps"] in (skipped, 0 if step < 4 else 1)
        assert entry["gradient_norm"] > 0 and entry["peak_memory_bytes"]["host"] > 1e8
        assert abs(entry["time"] - time.time()) < 3600


def test_entries_count_flops_of_all_positions(run: SimpleNamespace) -> None:
    """Of both steps since the last entry, in the same seconds as their real tokens."""
    for entry in entries(run.workdir):
        steps = range(entry["step"] - 2, entry["step"])
        flops = sum(training_flops(run.end.config, *run.end.plan.shape(step)) for step in steps)
        seconds = sum(real_tokens(run, steps)) / entry["tokens_per_second"]
        assert entry["tflops_per_device"] == pytest.approx(flops / seconds / 1e12)
        assert "mfu" not in entry  # the peak of a CPU is unknown


def test_the_start_entry_has_the_size_of_the_model_and_of_padding(run: SimpleNamespace) -> None:
    [start] = entries(run.workdir, "start")
    leaves = jax.tree.leaves(run.end.state.parameters)
    count = sum(leaf.size for leaf in leaves)
    assert start["parameters"] == count and len(leaves) < count
    plan = run.end.plan
    epoch = range(plan.steps_per_epoch)
    shapes = [plan.shape(step) for step in epoch]
    positions = [sum(shape[0] * shape[side] for shape in shapes) for side in (1, 2)]
    fills = [n / total for n, total in zip(real_tokens(run, epoch), positions, strict=True)]
    assert abs(fills[0] - fills[1]) > 1e-3
    assert [start["source_fill"], start["target_fill"]] == pytest.approx(fills)
    pairs = run.end.corpora["train"].num_pairs
    for line in (
        f"{pairs:,} training pairs; vocabulary 150; {count:,} parameters",
        f"devices: data 1 x fsdp 1 x tensor 1; {len(epoch):,} steps per epoch",
        f"batches of 1,024 tokens per side; real tokens: {fills[0]:.1%} source, "
        f"{fills[1]:.1%} target; shapes to compile: 1",
    ):
        assert line in run.said.splitlines()


def test_the_summary_has_totals_of_the_run(run: SimpleNamespace) -> None:
    summary, progress, plan = run.summary, run.end.progress, run.end.plan
    assert json.loads((run.workdir / "summary.json").read_text()) == summary
    assert (summary["steps"], summary["bad_steps"]) == (7, 1)
    assert (summary["stopped_by"], summary["stopped_early"]) == (None, False)
    assert summary["epochs"] == pytest.approx(7 / plan.steps_per_epoch)
    assert progress.tokens == sum(real_tokens(run, range(7)))
    rate = summary["tokens_per_second"]
    assert rate == pytest.approx(progress.tokens / progress.train_seconds)
    assert summary["train_seconds"] == progress.train_seconds
    dev = {entry["step"]: entry for entry in entries(run.workdir, "dev")}
    best = min(dev.values(), key=lambda entry: entry["dev_loss"])
    assert summary["best_step"] == best["step"]
    for name in ("dev_loss", "dev_perplexity", "dev_accuracy", "dev_bleu"):
        assert summary[f"best_{name}"] == best[name]
    test = summary["test"]
    assert test["sentences"] == 10 and 0 <= test["exact_match"] <= 1
    assert "tok:char" in test["bleu_signature"] and "nc:6" in test["chrf_signature"]
    assert f"BLEU|{test['bleu_signature']} = {test['bleu']:.2f}" in run.said
    assert f"chrF2|{test['chrf_signature']} = {test['chrf']:.2f}" in run.said


def test_a_checkpoint_has_the_totals_of_its_own_step(run: SimpleNamespace) -> None:
    """Although training continues while it is written."""
    kept = run.kept
    assert 4 in kept and 7 in kept
    for step, tokens in kept.items():
        assert tokens == sum(real_tokens(run, range(step)))


def test_the_terminal_shows_what_the_files_have(run: SimpleNamespace) -> None:
    lines = run.said.splitlines()
    for entry in entries(run.workdir):
        assert (
            f"step {entry['step']}  loss {entry['loss']:.3f}  "
            f"{entry['tokens_per_second']:,.0f} tokens/s  "
            f"{entry['tflops_per_device']:.3g} TFLOP/s  epoch {entry['epoch']:.2f}  "
            f"lr {entry['learning_rate']:.2e}"
        ) in lines
    for entry in entries(run.workdir, "dev"):
        assert (
            f"step {entry['step']}: dev loss {entry['dev_loss']:.4f}, perplexity "
            f"{entry['dev_perplexity']:.3f}, accuracy {entry['dev_accuracy']:.2%}, "
            f"BLEU {entry['dev_bleu']:.2f}, chrF {entry['dev_chrf']:.2f}"
        ) in lines
        # from the loss without smoothing, which is the perplexity's
        assert entry["dev_perplexity"] == pytest.approx(math.exp(entry["dev_nll"]))
        assert entry["dev_nll"] < entry["dev_loss"] and 0 < entry["dev_accuracy"] < 1
    assert lines[-1].startswith("done at step 7: checkpoint ")
    assert lines[-1].endswith("summary.json")


def test_bleu_is_on_the_first_dev_sentences_and_the_whole_test_set(run: SimpleNamespace) -> None:
    assert {name: len(pairs) for name, pairs in run.end.pairs.items()} == {"dev": 3, "test": 10}
    files = CONFIG.data.dev.source[0], CONFIG.data.dev.target[0]
    lines = [Path(CONFIG.data.root, file).read_text().splitlines()[:3] for file in files]
    assert [pair[:2] for pair in run.end.pairs["dev"]] == list(zip(*lines, strict=True))
    assert run.end.corpora["dev"].num_pairs <= 20  # the loss is on all of them


# Settings that may change.

FREE = (
    *("model.vocab_size", "model.source_vocab_size", "model.pad_id", "model.eos_id"),
    *("mesh.", "decoding.", "training."),
    *("data.root", "data.workers", "data.dev.", "data.test."),
    *(
        "data.train.source",
        "data.train.target",
        "data.train.alignments",
    ),  # and their fields: the text is compared
)
WITH_FLAG = (
    *("batch.", "optimizer.", "training.label_smoothing", "training.r_drop", "training.simcut"),
    *("training.start_from", "model.dropout", "model.attention_dropout"),
    *("model.feed_forward_dropout", "model.remat", "model.dtype", "training.freeze"),
    *("data.train.weights", "data.train.temperature"),
    *("training.guided_alignment", "model.alignment_layer"),
)
NEVER = ("optimizer.ema_decay", "optimizer.name")


@pytest.mark.parametrize("name", flatten(Config()))
def test_every_setting_is_free_or_needs_a_flag_or_another_run(name: str) -> None:
    """As the help text of --allow-changes says."""
    old = Config()
    *sections, field = name.split(".")
    new = at = copy.copy(old)
    for section in sections:
        object.__setattr__(at, section, copy.copy(getattr(at, section)))
        at = getattr(at, section)
    object.__setattr__(at, field, "another value")
    found = differences_on_resume(old, new)
    assert [each.name for each in found] in ([], [name])
    if name.startswith(NEVER):
        expected = "never"
    elif name.startswith(WITH_FLAG):
        expected = "flag"
    else:
        expected = "free" if name.startswith(FREE) else "never"
    actual = ("flag" if found[0].changeable else "never") if found else "free"
    assert actual == expected


# Ends.


@pytest.mark.parametrize(
    ("stopped_by", "status"), [(None, 0), ("SIGINT", 130), ("SIGTERM", 143), (TrainingError, 1)]
)
def test_exit_statuses(
    stopped_by: Any,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: list[Any] = []

    def pretend(config: Config, workdir: str, *, allow_changes: bool) -> dict[str, Any]:
        given.append((config.training.steps, workdir, allow_changes))
        if stopped_by is TrainingError:
            raise TrainingError("The loss is bad.")
        return {"stopped_by": stopped_by}

    monkeypatch.setattr(loop, "train", pretend)
    flags = ["--workdir", str(tmp_path / "w"), "--training.steps", "9"]
    assert program.main(flags) == status
    assert program.main([*flags, "--allow-changes"]) == status
    assert given == [(9, flags[1], False), (9, flags[1], True)]
    assert capsys.readouterr().err.count("error: The loss is bad.") == 2 * (status == 1)


def test_writes_that_fail_together_print_no_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk, Orbax's event loop ends with many failed tasks."""

    async def write() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError(errno.ENOSPC, "No space left on device")

    async def save() -> None:
        tasks = [asyncio.create_task(write()) for _ in range(32)]
        await asyncio.sleep(0)
        raise OSError(errno.ENOSPC, f"No space left on device for {len(tasks)} arrays")

    def pretend(*_: Any, **__: Any) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            asyncio.run(save())
        return {"stopped_by": None}

    monkeypatch.setattr(loop, "train", pretend)
    try:
        assert program.main(["--workdir", str(tmp_path / "w")]) == 0
    finally:
        logging.getLogger("asyncio").setLevel(logging.NOTSET)
    assert "Traceback" not in capsys.readouterr().err


def test_tracebacks_are_written_after_half_an_hour_without_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda *given, **named: calls.append((given, named))
    )
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("off"))
    with Watchdog() as watch:
        watch.poll("step 3")
    assert calls == [((1800.0,), {"repeat": True, "file": 2})] * 2 + ["off"]


def test_out_of_memory_names_the_last_activity() -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    with pytest.raises(TrainingError, match="^Out of memory: step 3, 8 rows.*accumulate_steps"):  # noqa: SIM117
        with Watchdog() as watch:
            watch.poll("step 3, 8 rows")
            watch.poll()  # keeps the activity
            raise error


# Log files.


def test_entries_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    """Evaluations of that step too, because the resumed run repeats them."""
    given = [("start", 0), ("train", 2), ("dev", 2), ("train", 4), ("dev", 4), ("train", 5)]
    lines = [json.dumps({"kind": kind, "step": step}) + "\n" for kind, step in given]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"kind": "train", "st')
    Reporter(tmp_path, Config(training=TrainingConfig(steps=9)), start_step=4).close()
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(entry["kind"], entry["step"]) for entry in kept] == given[:4]


def test_an_entry_is_readable_at_once_and_has_the_time(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Config(training=TrainingConfig(steps=9)), start_step=0)
    before = time.time()
    reporter.write("train", 3, {"loss": math.inf, "names": ["a"], "nll": 0.5})
    [entry] = entries(tmp_path)
    assert before - 0.001 <= entry.pop("time") <= time.time() + 0.001
    assert entry == {"kind": "train", "step": 3, "loss": None, "names": ["a"], "nll": 0.5}
    reporter.close()


def test_only_the_first_process_writes_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformer_jax.training.reporting.is_first", lambda: False)
    reporter = Reporter(tmp_path, Config(training=TrainingConfig(steps=9)), start_step=0)
    reporter.write("train", 3, {"loss": 1.0})
    reporter.say("hello")
    reporter.close()
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().err


# Object stores.


@pytest.mark.parametrize("seconds", [595.0, 620.0])
def test_a_store_may_fail_for_ten_minutes(
    seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A local error is raised at once."""
    clock = [0.0]
    monkeypatch.setattr(storage.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(storage.time, "sleep", lambda pause: clock.__setitem__(0, clock[0] + pause))
    caplog.set_level(logging.WARNING)
    tries: list[float] = []

    def access() -> str:
        tries.append(clock[0])
        if clock[0] < seconds:
            raise OSError("the store is down")
        return "done"

    place: Any = SimpleNamespace()  # not a local path
    if seconds < 600:
        assert storage.retry(place, access) == "done"
        assert np.diff(tries).tolist() == [5.0] * (len(tries) - 1)  # a pause between tries
        assert "failed (the store is down); retrying" in caplog.text
    else:
        with pytest.raises(OSError, match="the store is down"):
            storage.retry(place, access)
        assert 600 <= clock[0] <= 610
    clock[0] = 0.0
    tries.clear()
    with pytest.raises(OSError, match="the store is down"):
        storage.retry(Path("local"), access)

    def mistake() -> None:
        raise UserError("a wrong name")

    with pytest.raises(UserError):
        storage.retry(place, mistake)
    assert clock[0] == 0


def test_defaults_are_the_documented_ones() -> None:
    """Numbers in docs/*.md and the paper's base model."""
    config = Config()
    model, optimizer, training = config.model, config.optimizer, config.training
    assert (model.d_model, model.d_ff, model.num_heads, model.num_layers) == (512, 2048, 8, 6)
    assert (model.dropout, training.label_smoothing, training.steps) == (0.1, 0.1, 100_000)
    assert (model.norm, model.tie_embeddings, model.norm_epsilon) == ("post", "all", 1e-6)
    assert (model.attention_dropout, model.feed_forward_dropout, model.max_positions) == (
        0,
        0,
        1024,
    )
    adam = optimizer.beta1, optimizer.beta2, optimizer.epsilon, optimizer.warmup_steps
    assert adam == (0.9, 0.98, 1e-9, 4000) and optimizer.accumulate_steps == 1
    off = optimizer.weight_decay, optimizer.clip_norm, optimizer.ema_decay, training.r_drop
    assert off == (0, 0, 0, 0) and (training.simcut, training.simcut_rate) == (0, 0.05)
    assert (training.log_every, training.eval_every, training.checkpoint_every) == (50, 1000, 1000)
    assert (training.keep_checkpoints, training.average) == (5, "auto")
    assert (training.bleu_sentences, training.bleu_tokenize) == (1000, "13a")
    assert (training.patience, training.max_bad_steps, training.select_by) == (0, 10, "loss")
    batch = config.batch
    assert (batch.tokens, batch.buckets, batch.row_length, batch.row_multiple) == (
        25_000,
        8,
        256,
        8,
    )
    assert (config.data.max_source_length, config.data.max_target_length) == (256, 256)
    tokenizer = config.tokenizer
    assert (tokenizer.vocab_size, tokenizer.algorithm, tokenizer.joint) == (37_000, "bpe", True)
    assert (tokenizer.bpe_dropout, tokenizer.bpe_dropout_samples) == (0, 8)
    assert tokenizer.max_training_sentences == 5_000_000
    search = dataclasses.asdict(config.decoding)
    assert (
        search.items()
        >= {
            **{"method": "beam", "beam_size": 4, "length_penalty": 0.6, "length_offset": 5.0},
            **{"max_extra_length": 50, "max_source_length": 256, "batch_size": 32, "min_length": 0},
            **{"no_repeat_ngram": 0, "suppress": (), "temperature": 1.0, "top_k": 0, "top_p": 1.0},
        }.items()
    )
