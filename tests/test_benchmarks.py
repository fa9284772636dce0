"""Benchmarks: toy sizes, ratios, agreement of engines."""

import _ctypes
import ast
import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from random_models import lines_of_words, make_model, train_tokenizer, write_run
from runs import xla_flags

from benchmarks import all as all_parts
from benchmarks import attention, in_turn, parts
from benchmarks import decode as benchmarks_decode
from benchmarks.alignment_error import alignment_error
from benchmarks.all import Part, Program
from benchmarks.chart import COLORS, chart, comparisons
from benchmarks.in_turn import markdown, measure
from benchmarks.train import torch_loss
from transformer_jax.errors import UserError
from transformer_jax.export.pytorch import to_torch
from transformer_jax.model.attention import attention_mask
from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import Config, DataConfig, DecodingConfig, ModelConfig
from transformer_jax.training.loss import smoothed_cross_entropy
from transformer_jax.translation.program import decode

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
from transformer_jax.settings.config import Config, ModelConfig, TokenizerConfig
def get_config():
    model = ModelConfig(d_model=16, d_ff=32, num_heads=2, num_layers=1)
    return Config(model=model, tokenizer=TokenizerConfig(vocab_size=64))
"""


def benchmark(folder: Path, name: str, *flags: str) -> dict[str, dict[str, Any]]:
    """Run a benchmark and return its table."""
    (folder / "tiny.py").write_text(RECIPE)
    output = folder / "report.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--rounds", "1", "--output", str(output)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, *flags], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    table = json.loads(output.read_text())["table"]
    assert markdown(table) in done.stdout
    return table


class InTurn:
    """Stands in for the process of one engine, which would import all libraries again."""

    engine: Any = None

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "InTurn":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        in_turn._engine = self.engine
        done: Future[Any] = Future()
        done.set_result(function(*given))
        self.engine = in_turn._engine
        return done


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """As ``benchmark``, with its engines and decode.py in this process if that runs on CPUs."""
    if jax.default_backend() != "cpu":
        return partial(benchmark, tmp_path)
    run = subprocess.run

    def run_here(command: list[str], **settings: Any) -> Any:
        return decode(command[2:]) if command[1] == "decode.py" else run(command, **settings)

    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # benchmarks set both
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(in_turn, "ProcessPoolExecutor", InTurn)
    monkeypatch.setattr(in_turn, "_PAUSE", 0)
    monkeypatch.setattr(subprocess, "run", run_here)

    def benchmark_here(name: str, *flags: str) -> dict[str, dict[str, Any]]:
        (tmp_path / "tiny.py").write_text(RECIPE)
        output = tmp_path / "report.json"
        monkeypatch.setattr(sys, "argv", [name, "--rounds", "1", "--output", str(output), *flags])
        import_module(f"benchmarks.{name}").main()
        return json.loads(output.read_text())["table"]

    return benchmark_here


def test_alignment_error_rate() -> None:
    """Equation 3 of Och and Ney (2003), on cases that can be counted by hand."""
    gold = ["0-0 1-1 2?1", "0-0", ""]
    cases: list[tuple[list[str], tuple[float, float, float]]] = [
        (["0-0 1-1", "0-0", ""], (0, 1, 1)),
        (["a b ||| 0-0 1-1 2-1", "a ||| x ||| 0-0", " ||| "], (0, 1, 1)),  # possible is right
        (["0-0", "0-0", ""], (1 / 5, 1, 2 / 3)),  # 1 - (2 + 2) / (2 + 3)
        (["0-0 1-1", "0-0 1-0", "0-0"], (1 - 6 / 8, 3 / 5, 1)),
        (["2-1", "", ""], (1 - 1 / 4, 1, 0)),
        (["", "", ""], (1, 0, 0)),
    ]
    for found, expected in cases:
        assert alignment_error(found, gold) == pytest.approx(expected)
    with pytest.raises(UserError, match="There are 1 lines of links; expected 3, as in gold"):
        alignment_error(["0-0"], gold)


def test_the_hand_made_alignments_are_within_their_sentences() -> None:
    files = [ROOT / "benchmarks" / f"captions.{name}" for name in ("en", "de", "links")]
    lines = list(zip(*(file.read_text().splitlines() for file in files), strict=True))
    assert len(lines) == 20
    for en, de, links in lines:
        pairs = [tuple(map(int, re.split("[-?]", link))) for link in links.split()]
        assert len(set(pairs)) == len(pairs)
        assert {i for i, _ in pairs} == set(range(len(en.split())))
        assert {j for _, j in pairs} | {de.split().index(w) for w in de.split() if w == ","} == set(
            range(len(de.split()))
        )


def test_ratios_compare_runs_of_the_same_round() -> None:
    seconds = {"a": iter([9.0, 1.0, 2.0, 4.0]), "b": iter([9.0, 2.0, 2.0, 12.0])}
    runs = {name: lambda x=x: {"seconds": next(x), "gb": 0.5} for name, x in seconds.items()}
    table, rounds = measure(runs, 3, lambda answer: 6 / answer["seconds"], "lines/s")
    assert len(rounds) == 4  # the first warms up
    assert table["a"]["lines/s"] == 3 and table["b"]["lines/s"] == 3
    assert [table["b"][x] for x in ("ratio", "lowest", "highest", "gb")] == [2, 1, 3, 0.5]
    assert "| b | 3 | 2 | 1 | 3 | 12 | 0.5 |" in markdown(table)


def test_commands_here_and_in_another_checkout(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    command = "test -e slow && sleep 0.3 || true"
    table = benchmark(tmp_path, "in_turn", "--against", str(tmp_path), command)
    assert set(table) == {command, "against"} and table["against"]["ratio"] > 1


@pytest.mark.exhaustive
def test_training(tmp_path: Path) -> None:
    """Our engine of this checkout is among the toy sizes below."""
    small = ["--config", str(tmp_path / "tiny.py"), "--pairs", "4", "--length", "6", "--steps", "2"]
    engines = ["--engines", "torch_eager", "--against", str(ROOT)]
    table = benchmark(tmp_path, "train", *small, *engines)
    assert set(table) == {"torch_eager", "against"}
    for figures in table.values():
        assert figures["target tokens/s"] > 0 and figures["ms a step"] > 0 and figures["gb"] > 0
    assert table["against"]["compiling, s"] > 0


@pytest.mark.exhaustive
def test_parts_of_a_training_step(tmp_path: Path) -> None:
    """Every operation of the step is in the trace, and in a part of the model."""
    small = ["--config", str(tmp_path / "tiny.py"), "--pairs", "4", "--length", "6", "--steps", "2"]
    table = benchmark(tmp_path, "parts", *small)
    whole = table.pop("all")
    for column, total in whole.items():
        assert total == pytest.approx(sum(row[column] for row in table.values()))
    assert whole["%"] == pytest.approx(100)
    model = "attention: projections", "attention: dot products, softmax", "feed-forward"
    for name in model:
        assert table[name]["matmuls"] > 0 and table[name]["backward matmuls"] > 0
    assert table["loss"]["matmuls"] > 0 and table["loss"]["backward matmuls"] == 0
    for name in ("embedding", "norms", "dropout", "optimizer", "sums of gradients"):
        assert table[name]["ms"] > 0 and table[name]["matmuls"] == 0


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("jit(train_step)/jvp(attention)/BLD,DHK->BLHK/dot_general", "attention: projections"),
        (
            "jit(train_step)/transpose(jvp(attention))/dot_product_attention/mul",
            "attention: dot products, softmax",
        ),
        ("jit(train_step)/transpose(jvp(attention))/BLD,DHK->BLHK/add_any", "sums of gradients"),
        ("jit(train_step)/jvp(residual)/norm/rsqrt", "norms"),
        ("jit(train_step)/jvp(residual)/dropout/jit(_where)/select_n", "dropout"),
        ("jit(train_step)/jvp(residual)/add", "residual connections"),
        ("jit(train_step)/convert_element_type", "casts"),
        ("jit(train_step)/sqrt", "optimizer"),
        ("", "optimizer"),
    ],
)
def test_an_operation_belongs_to_the_scope_in_its_path(path: str, expected: str) -> None:
    assert parts.part(path) == expected


@pytest.mark.exhaustive
def test_decoding_agrees_with_other_engines(
    tmp_path: Path, here: Callable[..., dict[str, Any]]
) -> None:
    pytest.importorskip("ctranslate2")
    small = ["--config", str(tmp_path / "tiny.py"), "--sentences", "6", "--batch-sizes", "1"]
    small += ["--beam-size", "1"]  # with a beam, engines differ in how a forced length ends
    table = here("decode", *small)
    names = ("ours", "ctranslate2", "ctranslate2_int8", "huggingface")
    assert set(table) == {f"batch 1, {name}" for name in names}
    for figures in table.values():
        assert figures["tokens"] == table["batch 1, ours"]["tokens"]
    for name in ("ctranslate2", "huggingface"):
        assert table[f"batch 1, {name}"]["same"] == "6 of 6"


@pytest.mark.exhaustive
def test_serving_and_decoding_of_a_trained_model(
    tmp_path: Path, here: Callable[..., dict[str, Any]]
) -> None:
    for package in ("fastapi", "ctranslate2"):
        pytest.importorskip(package)
    tokenizer, workdir = train_tokenizer(lines_of_words(40)), tmp_path / "run"
    workdir.mkdir()
    model = make_model(tokenizer)
    config = Config(
        model=model.config,
        data=DataConfig(max_source_length=16, max_target_length=16),
        decoding=DecodingConfig(beam_size=2, max_extra_length=4, max_source_length=16),
    )
    write_run(workdir, config, tokenizer, {1: model}, best_step=1)
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{line}\n" for line in lines_of_words(6)))
    given = ["--workdir", str(workdir), "--input", str(lines)]
    few = ["--threads", "1", "--clients", "2", "--seconds", "0.3"]
    engines = ["--engines", "ours", "ctranslate2"]
    table = here("serving", *given, *few, *engines, "--", "--batch-size", "8")
    assert len(table) == 4
    for kind in ("mixed", "alike"):
        for name in ("ours", "ctranslate2"):
            figures = table[f"2 clients, {kind}, {name}"]
            assert figures["lines"] > 2 and 0 < figures["p50 ms"] <= figures["p95 ms"]
            assert not figures["differ"] and "errors" not in figures
        assert figures["setting"].startswith("1 x 1 threads, ")
        assert float(figures["ours / this"].split()[0]) > 0
    batch = ["--batch-sizes", "4", "--engines", "ours", "--patience", "1"]
    assert here("decode", *given, *batch)["batch 4, ours"]["same"] == "6 of 6"
    table = here("parts", *given, "--pairs", "4", "--threads", "1")
    assert table["logits"]["matmuls"] > 0 and table["best tokens of each beam"]["ms"] > 0
    assert {"writing the KV cache", "beams, constraints, results"} < set(table)


@pytest.mark.exhaustive
def test_corpus_and_plan(tmp_path: Path) -> None:
    [figures] = benchmark(tmp_path, "data", "--pairs", "3000", "--workers", "1").values()
    assert figures["pairs/s"] > 0 and figures["batch ms"] > 0 and 0 < figures["fill"] <= 1


def run_all(output: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, str]:
    """Run ``benchmarks.all``; return its exit status and results.md."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "argv", ["all", "--output", str(output), *flags])
    return all_parts.main(), (output / "results.md").read_text()


def test_finished_parts_are_skipped_and_failures_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = 'import sys; open(sys.argv[2], \'w\').write(\'{"table": {"x": {"y": 7}}}\')'
    (tmp_path / "write.py").write_text(write)
    slow = ["import subprocess, sys, time", "subprocess.Popen(['sleep', '60'])", "time.sleep(60)"]
    (tmp_path / "slow.py").write_text("\n".join(slow))
    programs = {
        name: Program(f"{tmp_path / name}.py --output {{output}}/{{name}}.json", "", "")
        for name in ("write", "no", "slow")
    }
    parts = {"good": Part(9, "write"), "bad": Part(9, "no"), "slow": Part(0.5, "slow")}
    parts |= {"long": Part(1000, "no"), "large": Part(9, "no", "", 99)}
    monkeypatch.setattr(all_parts, "PROGRAMS", programs)
    monkeypatch.setattr(all_parts, "PARTS", parts)
    output = tmp_path / "out"
    status, found = run_all(output, monkeypatch, "--parts", "good", "large")
    assert status == 0 and found.count("waits for a GPU or TPU") == 2
    status, found = run_all(output, monkeypatch, "--toy", "--minutes", "1")
    assert status == 1 and "| x | 7 |" in found and "waits for 99 devices" in found
    assert "failed with status 2, see bad.log" in found
    assert "failed with status 124, see slow.log" in found and "skipped: needs about 1000" in found
    (tmp_path / "write.py").unlink()  # the finished part does not need it
    assert run_all(output, monkeypatch, "--toy", "--parts", "good")[0] == 0


def test_the_default_time_is_enough_up_to_a_whole_recipe() -> None:
    """On one device, and with 30 s for finding it."""
    parts = [(name, part) for name, part in all_parts.PARTS.items() if part.devices == 1]
    names = [name for name, _ in parts]
    first = parts[: names.index("multi30k_cold") + 1]
    assert {"train_base", "train_big", "decode_128", "decode_512", "attention"} < {*dict(first)}
    assert sum(part.seconds for _, part in first) + 30 <= 60 * all_parts.MINUTES


def test_an_interrupted_recipe_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its seconds would be those of the rest, with a warm compilation cache."""
    program = """
import sys, pathlib
output = pathlib.Path(sys.argv[1])
assert not (output / "compiled").exists()
folder = output / "multi30k_cold"
folder.mkdir()
summary = '{"test": {"bleu": 41}, "train_seconds": 190, "tokens_per_second": 6}'
(folder / "summary.json").write_text(summary)
"""
    (tmp_path / "recipe.py").write_text(program)
    recipe = Program(f"{tmp_path / 'recipe.py'} {{output}}", "", "")
    monkeypatch.setattr(all_parts, "PROGRAMS", {"recipe": recipe})
    for name in ("multi30k_cold", "compiled"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").touch()
    status, found = run_all(tmp_path, monkeypatch, "--toy", "--parts", "multi30k_cold")
    assert status == 0 and "| multi30k_cold | 41 | 190 | 6 |" in found


def test_ctranslate2_computes_on_a_gpu_if_it_finds_cublas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Translator:
        def __init__(self, folder: str, **settings: Any) -> None:
            self.settings = settings

    package = ModuleType("ctranslate2")
    package.__dict__.update(Translator=Translator, get_cuda_device_count=lambda: 1)
    monkeypatch.setitem(sys.modules, "ctranslate2", package)
    (tmp_path / "source.json").write_text('{"source": [], "target": []}')
    job = {"folder": str(tmp_path), "threads": 8}
    library = tmp_path / "nvidia" / "cublas" / "lib" / "libcublas.so.12"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ImportError, match="run pip install nvidia-cublas-cu12"):
        benchmarks_decode.OTHERS["ctranslate2"](job, [])
    library.unlink()
    library.symlink_to(_ctypes.__file__)  # any shared library
    search: Any = benchmarks_decode.OTHERS["ctranslate2"](job, [])
    settings = inspect.getclosurevars(search).nonlocals["translator"].settings
    assert settings["device"] == "cuda" and settings["compute_type"] == "bfloat16"


@pytest.mark.exhaustive
@pytest.mark.cpu("two simulated devices")
def test_toy_sizes_of_the_accelerator_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {part.program for part in all_parts.PARTS.values()} == set(all_parts.PROGRAMS)
    (tmp_path / "tiny.py").write_text(RECIPE)  # compiles faster than the demo's model
    programs = {
        name: program._replace(toy=program.toy.replace("demo", str(tmp_path / "tiny.py")))
        for name, program in all_parts.PROGRAMS.items()
    }
    monkeypatch.setattr(all_parts, "PROGRAMS", programs)
    monkeypatch.setenv("XLA_FLAGS", xla_flags(2))
    chosen = ["attention", "train_base_2", "bart_32"]
    status, found = run_all(tmp_path, monkeypatch, "--toy", "--parts", *chosen)
    assert status == 0, found
    tables = {name: all_parts.figures(tmp_path, name) for name in chosen}
    assert len(tables["attention"]) == 8  # four masks, ours and plain
    for figures in tables["attention"].values():
        assert max(figures[name] for name in ("out", "dq", "dk", "dv")) < 0.01  # bfloat16
    figures = tables["train_base_2"]["ours"]
    assert figures["target tokens/s"] == 2 * figures["tokens/s per device"] > 0
    assert figures["compiling, s"] > 0
    assert tables["bart_32"]["batch 4, ours"]["tokens"] == 4 * 5  # of the fixed length


@pytest.mark.parametrize("kind", attention.KINDS)
def test_kernels_of_other_libraries_get_harmless_masks(kind: str) -> None:
    """cuDNN's queries without keys attend to all keys, and those of splash attention to padding.
    Outputs and gradients of real queries do not change.
    """
    queries_BT, keys_BS = attention.segments(kind, 1, 128)
    mask_B1TS = attention_mask(queries_BT, keys_BS, causal=kind == "causal")
    assert not mask_B1TS.any(-1).all() and attention.seeing(mask_B1TS).any(-1).all()
    *arrays, weight_BTHK = (
        jax.random.normal(key, (1, 128, 2, 64)) for key in jax.random.split(jax.random.key(0), 4)
    )
    weight_BTHK *= (queries_BT > 0)[..., None, None]

    def found(kernel: Any, mask_B1TS: Any) -> Any:
        return attention.gradients(kernel, arrays, mask_B1TS, weight_BTHK)

    splash = attention.splash(queries_BT, keys_BS, causal=kind == "causal", interpret=True)
    expected = found(attention.plain, mask_B1TS)
    for other in (found(attention.plain, attention.seeing(mask_B1TS)), found(splash, mask_B1TS)):
        for x, y in zip(expected, other, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-6)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem
)
def test_imported_names_exist(path: Path) -> None:
    """Also those that a function imports: `make test` does not run every benchmark."""
    statements = ast.walk(ast.parse(path.read_text()))
    imports = [x for x in statements if isinstance(x, ast.Import | ast.ImportFrom)]
    exec("\n".join(map(ast.unparse, imports)), {})


def test_chart_of_the_table_in_the_documentation(tmp_path: Path) -> None:
    rows = comparisons((ROOT / "docs/performance.md").read_text())
    assert len(rows) > 5 and any(row.ratio < 1 for row in rows)
    chart(rows, *COLORS["dark"]).savefig(tmp_path / "chart.svg")
    assert len(chart(rows, *COLORS["light"]).axes[0].patches) == len(rows)


def test_both_models_of_the_training_benchmark_compute_the_same_loss() -> None:
    config = ModelConfig(
        vocab_size=20, d_model=16, d_ff=24, num_heads=2, num_layers=2, dropout=0.0, dtype="float32"
    )
    ours = Transformer(config, rngs=nnx.Rngs(0))
    modules, loss = torch_loss(Config(model=config), 7)
    there = to_torch(ours)
    modules["transformer"].load_state_dict(there.transformer.state_dict())
    with torch.no_grad():
        modules["embedding"].weight.copy_(there.target_embedding.weight)
    source = np.array([[4, 5, 6, 7, 2], [8, 2, 0, 0, 0], [9, 9, 2, 0, 0]], np.int32)
    target = np.array(
        [[7, 6, 2, 0, 0, 0, 0], [5, 8, 9, 10, 11, 12, 2], [4, 4, 4, 2, 0, 0, 0]], np.int32
    )
    sums = smoothed_cross_entropy(
        ours.hidden(source, target), ours.output_matrix_VD, target, label_smoothing=0.1
    )
    theirs = loss(torch.tensor(source).long(), torch.tensor(target).long()).item()
    assert math.isclose(theirs, float(sums.loss / sums.tokens), rel_tol=1e-5)
