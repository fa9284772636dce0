"""The benchmarks run; what they measure is not for a test to say."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

from benchmarks.train_job import Job
from benchmarks.train_torch import Model
from transformer_jax.config import ModelConfig
from transformer_jax.interop.pytorch import to_torch
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.loss import smoothed_cross_entropy

ROOT = Path(__file__).resolve().parents[1]


def benchmark(name: str, *flags: str) -> str:
    """What the program prints on stdout."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *flags],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def test_decoding_speed_of_every_engine_in_one_report(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    lengths, report = tmp_path / "lengths.tsv", tmp_path / "report.json"
    lengths.write_text("6\t5\n7\t6\n8\t9\n5\t5\n6\t7\n")  # one source shape: one compilation
    command = [
        "--model",
        "tiny",
        "--lengths",
        str(lengths),
        "--batch-sizes",
        "2",
        "--repeats",
        "1",
        "--output",
        str(report),
    ]
    command += ["--patience", "0", "--max-extra-length", "8"]
    printed = benchmark("decode_speed", *command)
    found = json.loads(report.read_text())
    [result] = found["results"]
    names = {"ours", "ctranslate2", "ctranslate2_int8", "huggingface"}
    assert result["skipped"] == {} and set(result["engines"]) == names
    for name, figures in result["engines"].items():
        assert figures["tokens_per_second"] > 0 and figures["peak_memory_gb"] > 0
        assert figures["precision"] == ("int8" if name.endswith("int8") else "float32")
        # batches of two get their mean length, halves to even
        assert figures["output_tokens"] == 8 + 8 + 6 + 6 + 5
        assert name in printed
    assert (
        result["engines"]["ours"]["compile_seconds"] > 0
        and result["engines"]["ours"]["shapes_compiled"] == 1
    )
    assert 0 <= result["engines"]["ours"]["wasted_slots"] < 1
    assert set(result["ours_over"]) == set(result["same_lines"]) == names - {"ours"}
    assert all(ratio["median_of_pairs"] > 0 for ratio in result["ours_over"].values())
    assert found["sentences"] == 5 and all(
        0 <= count <= 5 for count in result["same_lines"].values()
    )


def test_speed_as_it_grows_is_drawn(tmp_path: Path) -> None:
    train, plan, picture = (tmp_path / name for name in ("train.json", "plan.json", "scaling.png"))
    small = [
        "--devices",
        "1",
        "2",
        "--d-model",
        "16",
        "--length",
        "32",
        "--base",
        "16",
        "--layers",
        "1",
    ]
    printed = benchmark(
        "train_scale",
        *small,
        "--tokens",
        "256",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--output",
        str(train),
    )
    varied = json.loads(train.read_text())["varied"]
    assert {name: [row[name] for row in rows] for name, rows in varied.items()} == {
        "devices": [1, 2],
        "d_model": [16],
        "length": [32],
    }
    assert all(row["target_tokens_per_second"] > 0 for rows in varied.values() for row in rows)
    assert "| devices | parameters | target tokens/s |" in printed
    row = {"pairs": 1000, "plan_seconds": 0.1, "window_seconds": 0.2, "peak_mb": 3}
    plan.write_text(json.dumps({"results": [row]}))
    benchmark("train_scale", "--draw", str(picture), str(train), str(plan))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plans_as_they_grow() -> None:
    command = ["--pairs", "1000", "--window", "300", "--batches", "2"]
    printed = benchmark("plan_scale", *command)
    figures, table = printed.split("\n\n")
    results = json.loads(figures)["results"]
    assert [(result["pairs"], result["windows"]) for result in results] == [(1000, 4)]
    assert all(min(result["fill"]) > 0 and result["plan_seconds"] > 0 for result in results)
    assert len(table.splitlines()) == 3


def test_decoding_speed_of_contradictory_inputs_is_refused() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.decode_speed", "--model", "tiny", "--workdir", "."],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.returncode == 2 and "either --model or --workdir" in run.stderr


def test_training_speed_in_one_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        "--model",
        "tiny",
        "--pairs",
        "4",
        "--length",
        "6",
        "--lengths",
        "mixed",
        "--steps",
        "2",
        "--repeats",
        "1",
    ]
    command += ["--patience", "0", "--engines", "ours", "torch_eager", "--output", str(report)]
    printed = benchmark("train_speed", *command)
    found = json.loads(report.read_text())
    assert set(found["engines"]) == {"ours", "torch_eager"} and set(found["skipped"]) == {
        "torch_compile"
    }
    assert 4 <= found["real_target_tokens_a_step"] <= 24 and 0 < found["real_token_share"] <= 1
    for name, figures in found["engines"].items():
        assert (
            figures["target_tokens_per_second"] > 0
            and figures["mfu"] >= 0
            and figures["peak_memory_gb"] > 0
        )
        assert figures["precision"] == "float32" and 3 < figures["first_loss"] < 6
        assert name in printed
    biases = found["engines"]["torch_eager"]["attention_biases"]
    assert (
        biases
        and found["engines"]["torch_eager"]["parameters"]
        == found["engines"]["ours"]["parameters"] + biases
    )
    assert found["ours_over"]["torch_eager"]["of_medians"] > 0


def test_both_models_of_the_training_benchmark_compute_the_same_loss() -> None:
    shape: dict[str, Any] = {
        "vocab_size": 20,
        "d_model": 16,
        "d_ff": 24,
        "num_heads": 2,
        "num_layers": 2,
    }
    job = Job(
        **shape, device="cpu", dtype="float32", steps=1, threads=1, product_size=8, dropout=0.0
    )
    config = ModelConfig(**shape, norm_epsilon=job.norm_epsilon, dtype="float32")
    ours, theirs = Transformer(config, rngs=nnx.Rngs(0)), Model(job, 7)
    there = to_torch(ours)
    odd = theirs.transformer.load_state_dict(there.transformer.state_dict(), strict=False)
    assert not odd.unexpected_keys  # what is missing are biases, which are 0
    assert all(re.search(r"attn\..*bias$", name) for name in odd.missing_keys)
    theirs.embedding.weight = there.target_embedding.weight
    source = np.array([[4, 5, 6, 7, 2], [8, 2, 0, 0, 0], [9, 9, 2, 0, 0]], np.int32)
    target = np.array(
        [[7, 6, 2, 0, 0, 0, 0], [5, 8, 9, 10, 11, 12, 2], [4, 4, 4, 2, 0, 0, 0]], np.int32
    )
    sums = smoothed_cross_entropy(
        ours.hidden(source, target),
        ours.output_matrix_VD,
        target,
        label_smoothing=job.label_smoothing,
    )
    loss = theirs(torch.tensor(source).long(), torch.tensor(target).long()).item()
    np.testing.assert_allclose(loss, float(sums.loss / sums.tokens), rtol=1e-5)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem
)
def test_every_benchmark_is_importable(path: Path) -> None:
    importlib.import_module(f"benchmarks.{path.stem}")


def test_training_with_both_types_of_logits(tmp_path: Path) -> None:
    for side in ("en", "de"):
        (tmp_path / f"text.{side}").write_text("".join(f"word {i % 7} {side}\n" for i in range(64)))
    pairs = {"source": str(tmp_path / "text.en"), "target": str(tmp_path / "text.de")}
    settings = {
        "output": str(tmp_path / "runs"),
        "seeds": "3",
        **{
            f"data.{split}.{side}": path
            for split in ("train", "dev")
            for side, path in pairs.items()
        },
        "tokenizer.vocab-size": "36",
        "model.d-model": "16",
        "model.d-ff": "16",
        "model.num-heads": "2",
        "model.num-layers": "1",
        "data.max-source-length": "16",
        "data.max-target-length": "16",
        "batch.tokens": "160",
        "batch.buckets": "1",
        "training.steps": "2",
        "training.log-every": "1",
        "training.eval-every": "2",
        "training.bleu-every": "0",
    }
    printed = benchmark(
        "logits_types", *(word for name, value in settings.items() for word in (f"--{name}", value))
    )
    head, _, *rows = [line.strip("|").split("|") for line in printed.splitlines()]
    assert head == ["seed 3, float32", "seed 3, bfloat16"]
    figures = {name: (float(a), float(b)) for name, a, b in rows}
    exact, rounded = figures["step 2: dev nll"]
    assert exact != rounded and abs(exact - rounded) < 0.01
