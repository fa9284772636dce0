"""The benchmarks run; what they measure is not for a test to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_decoding_speed_of_every_engine_in_one_report(tmp_path: Path) -> None:
    lengths, report = tmp_path / "lengths.tsv", tmp_path / "report.json"
    lengths.write_text("6\t5\n7\t6\n8\t9\n5\t5\n6\t7\n")  # one source shape: one compilation
    command = ["--model", "tiny", "--lengths", str(lengths), "--batch-sizes", "2", "--repeats", "1", "--output", str(report)]
    command += ["--patience", "0", "--max-extra-length", "8"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.decode_speed", *command],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(report.read_text())
    [result] = found["results"]
    names = {"ours", "ctranslate2", "ctranslate2_int8", "huggingface"}
    assert result["skipped"] == {} and set(result["engines"]) == names
    for name, figures in result["engines"].items():
        assert figures["tokens_per_second"] > 0 and figures["peak_memory_gb"] > 0
        assert figures["precision"] == ("int8" if name.endswith("int8") else "float32")
        assert figures["output_tokens"] == 8 + 8 + 6 + 6 + 5  # batches of two get their mean length, halves to even
        assert name in run.stdout
    assert result["engines"]["ours"]["compile_seconds"] > 0 and result["engines"]["ours"]["shapes_compiled"] == 1
    assert 0 <= result["engines"]["ours"]["wasted_slots"] < 1
    assert set(result["ours_over"]) == set(result["same_lines"]) == names - {"ours"}
    assert all(ratio["median_of_pairs"] > 0 for ratio in result["ours_over"].values())
    assert found["sentences"] == 5 and all(0 <= count <= 5 for count in result["same_lines"].values())


def test_plans_as_they_grow() -> None:
    command = ["--pairs", "1000", "--window", "300", "--parts", "3", "--batches", "2"]
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan_scale", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    figures, table = run.stdout.split("\n\n")
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
