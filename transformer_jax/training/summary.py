"""The beginning and the end of a run's log: what it trains on, and its summary."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Callable
from typing import Any

import jax

from transformer_jax.devices.distributed import is_first
from transformer_jax.devices.machine import num_cores, peak_memory_bytes
from transformer_jax.evaluation import METRICS
from transformer_jax.runs.averaging import describe_steps
from transformer_jax.storage.files import write_atomically
from transformer_jax.training.evaluator import Evaluator
from transformer_jax.training.prepare import PreparedRun
from transformer_jax.training.reporting import Reporter

_PACKAGES = [
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "sentencepiece",
    "sacrebleu",
    "numpy",
]


def report_start(run: PreparedRun, reporter: Reporter) -> None:
    """Print and log the sizes of the data and the model, the devices and the versions."""
    count = sum(leaf.size for leaf in jax.tree.leaves(run.state.parameters))
    source_fill, target_fill = run.plan.fill
    axes = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    reporter.say(
        f"{run.corpora['train'].num_pairs:,} training pairs; vocabulary "
        f"{run.config.model.vocab_size:,}; {count:,} parameters\n"
        f"devices: {axes}; {run.plan.steps_per_epoch:,} steps per epoch\n"
        f"batches of {run.config.batch.tokens:,} tokens per side; "
        f"real tokens: {source_fill:.1%} source, {target_fill:.1%} target; "
        f"shapes to compile: {len(run.plan.shapes)}"
    )
    step = int(run.state.step)
    if step:
        reporter.say(f"resuming at step {step} of {run.config.training.steps}")
    values = {"source_fill": source_fill, "target_fill": target_fill, "parameters": count}
    reporter.write("start", step, values | {"environment": _environment()})


def write_summary(
    run: PreparedRun,
    evaluator: Evaluator,
    reporter: Reporter,
    show: Callable[[str], None],
    *,
    step: int,
    stopped_by: str | None,
) -> dict[str, Any]:
    """Write the model if training is finished, evaluate it on the test set, and write summary.json.

    Calls ``show`` with the current activity.
    """
    progress = run.progress
    stopped_early = step < run.config.training.steps and not stopped_by
    summary: dict[str, Any] = {
        "stopped_by": stopped_by,
        "stopped_early": stopped_early,
        "steps": step,
        "epochs": step / run.plan.steps_per_epoch,
        "bad_steps": int(run.state.bad_steps),
        **({"best_step": progress.best_step} if progress.best else {}),
        **{f"best_{name}": value for name, value in progress.best.items()},
        "train_seconds": progress.train_seconds,
        "tokens_per_second": progress.tokens / (progress.train_seconds or math.inf),
        "peak_memory_bytes": peak_memory_bytes(),
        "dtype": run.config.model.dtype,
        **_environment(),
    }
    if stopped_by:
        end = f"{stopped_by}: saved at step {step}. Run the same command again to resume."
    else:
        show("choosing the checkpoints to average")
        steps, parameters = evaluator.choose()
        summary["averaged_steps"] = steps
        model = describe_steps(steps)
        show("writing the model")
        run.workdir.write_model(parameters, steps)
        if "test" in run.pairs:
            show("evaluating on the test set")
            summary["test"], scores = evaluator.test(parameters)
            reporter.say(f"test, {model}: {scores}")
            for languages, values in summary["test"].get("languages", {}).items():
                scores_of_pair = ", ".join(
                    f"{metric.label} {values[name]:.2f}" for name, metric in METRICS.items()
                )
                reporter.say(f"{languages}: {scores_of_pair}")
        end = f"done at step {step}"
        if stopped_early:
            end = (
                f"stopped early at step {step} of {run.config.training.steps}, after "
                f"{progress.since_best} evaluations without improvement"
            )
        end = f"{end}: {model}; metrics in {run.workdir}/summary.json"
    if is_first():
        text = json.dumps(summary, indent=2) + "\n"
        write_atomically(run.workdir.path("summary.json"), text)
    reporter.say(end)
    return summary


def _environment() -> dict[str, Any]:
    """Return software versions and hardware."""
    return {
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu_cores": num_cores(),
        "devices": [str(device.device_kind) for device in jax.devices()],
        "processes": jax.process_count(),
    }
