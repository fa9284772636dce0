"""Compiling ahead for other devices: the report, and what is read from a compiled program's
text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from benchmarks import compile_for, hlo
from benchmarks.kernels import computations, kernels
from transformer_jax.config import ModelConfig
from transformer_jax.model.layers import FeedForward
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.loss import smoothed_cross_entropy


@pytest.mark.cpu("it compiles for the eight simulated devices")
def test_the_report_on_the_devices_that_are_here(monkeypatch, capsys):
    flags = {"d-model": 16, "d-ff": 32, "num-heads": 2, "num-layers": 1}
    model = [part for name, value in flags.items() for part in (f"--model.{name}", str(value))]
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "compile_for",
            "--device",
            "cpu",
            "--batch.tokens",
            "2560",
            "--length",
            "80",
            *model,
            "--tokenizer.vocab-size",
            "64",
        ],
    )
    assert compile_for.main() == 0
    report = json.loads(capsys.readouterr().out)
    step, search = report["train_step"], report["search"]
    assert (report["devices"], step["rows"], step["length"], step["mesh"]["data"]) == (8, 32, 80, 8)
    parameters = 64 * 16 + (4 + 8) * 16 * 16 + 2 * (2 * 16 * 32 + 32 + 16) + 5 * 2 * 16
    # with two moments of Adam's
    assert 0 <= step["memory_mb"]["arguments"] - 3 * 4 * parameters / 1e6 < 0.01
    # Every gradient is summed over the devices; that of the matrix for softmax and both embeddings
    # comes in three parts.
    assert (
        0
        <= step["collectives"]["all-reduce f32"]["mb"] - 4 * (parameters + 2 * 64 * 16) / 1e6
        < 0.002
    )
    # the tests' own XLA flags bring copies
    assert search["copied_caches"].keys() == {"a_step", "a_hand_over"}
    assert search["rows"] == 32


@pytest.mark.parametrize("device", ["h3000", "v9:2x2"])
def test_a_device_that_is_none(device, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compile_for", "--device", device])
    assert compile_for.main() == 2
    assert f"--device {device}" in capsys.readouterr().err


THUNKS = """\
000: kCommandBuffer [source       | next=022 (1)]
    001: kCustomKernel [source | sink] before grid: [1, 1, 1]
022: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    023: kCustomKernel [source | sink] more
  body:
    000: kCommandBuffer [source       | next=953 (1) ]
        024: kCustomKernel [source | sink] encode
    953: kWhile         [prev=000 (1) | next=1252 (1)]
condition:
        954: kCustomKernel [source | sink] go_on
      body:
        000: kCommandBuffer [source | sink]
            955: kCublasLtMatmul [source | sink] kCublasLtMatmul
            956: kCopy [source | sink] kCopy
        957: kCustomKernel [source | sink] after
    958: kCustomKernel [source | sink] collect
"""


@pytest.mark.parametrize("flags", ["--device v5e:2x2", "--device h200 --only search"])
def test_a_table_of_what_has_no_parts_is_refused(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compile_for", "--table", *flags.split()])
    assert compile_for.main() == 2
    assert "--table shows the parts of a training step on a GPU" in capsys.readouterr().err


def test_loops_that_the_host_controls():
    assert hlo.host_loops(THUNKS) == 2
    one_graph = "000: kCommandBuffer [source | sink]\n" + "".join(
        f"    {line}\n" for line in THUNKS.splitlines()[2:]
    )
    assert hlo.host_loops(one_graph) == 0


def test_collectives_count_what_devices_hand_over():
    program = """
ENTRY %main () -> f32[] {
  %a = (f32[200,300]{1,0}, bf16[8000]{0}) all-reduce(%x, %y), to_apply=%sum
  %b = f32[5000]{0} all-reduce-start(%z), to_apply=%sum
  %c = f32[1000]{0} all-gather(%z), dimensions={0}
}
"""
    assert hlo.collectives(program) == {
        "all-gather f32": {"count": 1, "mb": 0.004},
        "all-reduce bf16": {"count": 1, "mb": 0.016},
        "all-reduce f32": {"count": 2, "mb": 0.26},
    }


@pytest.fixture
def for_h200(h200: Any) -> Iterator[Callable[..., str]]:
    """``for_h200(function, *shapes)``: its text, compiled for a GPU that need not be here."""

    def compiled(function: Callable[..., Any], *shapes: Any) -> str:
        sharding = SingleDeviceSharding(h200)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )
        lowered = jax.jit(function).lower(*shapes)
        return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()

    with compile_for.running_on("gpu", [h200]):
        yield compiled


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_the_loss_reads_its_logits_twice_and_pads_nothing(for_h200):
    def gradient(hidden_BTD, matrix_VD, target_BT):
        def loss(*inputs):
            return smoothed_cross_entropy(*inputs, target_BT).loss

        return jax.grad(loss, argnums=(0, 1))(hidden_BTD, matrix_VD)

    text = for_h200(
        gradient,
        _array(784, 32, 512),
        _array(37_000, 512, dtype=jnp.float32),
        _array(784, 32, dtype=jnp.int32),
    )
    found = kernels(text)
    logits = next(kernel for kernel in found if kernel.kind == "product")
    others = [kernel for kernel in found if not kernel.flops]
    reading = [x for x in others if max(x.reads.values(), default=0) >= logits.written]
    # for the sums; for the gradient, written in their place
    assert [x.written > logits.written / 2 for x in reading] == [False, True]
    padded = [x for each in computations(text).values() for x in each.operations.values()]
    assert not [x for x in padded if x.kind == "pad" and x.bytes > 1e6]


def test_relu_is_computed_once(for_h200):
    config = ModelConfig(d_model=512, d_ff=2048, vocab_size=8, dtype="bfloat16")
    graph, parameters = nnx.split(nnx.eval_shape(lambda: FeedForward(config, rngs=nnx.Rngs(0))))

    def gradient(parameters, x_BLD, dy_BLD):
        y_BLD, vjp = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), parameters, x_BLD)
        return y_BLD, vjp(dy_BLD)

    x_BLD = _array(784, 32, 512)
    text = for_h200(gradient, parameters, x_BLD, x_BLD)
    operations = [x for each in computations(text).values() for x in each.operations.values()]
    maxima = [x for x in operations if x.kind == "maximum" and x.elements == 784 * 32 * 2048]
    assert len(maxima) == 1


def test_random_bits_of_a_step_are_drawn_once(for_h200):
    config = ModelConfig(
        d_model=64, d_ff=64, num_heads=2, num_layers=1, vocab_size=8, dtype="bfloat16"
    )
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

    def gradient(parameters, source_BS, target_BT, seed):
        def total(parameters):
            model = nnx.merge(graph, parameters)
            return model.hidden(source_BS, target_BT, dropout_key=jax.random.key(seed)).sum()

        return jax.grad(total)(parameters)

    tokens_BL = _array(16, 32, dtype=jnp.int32)
    text = for_h200(gradient, parameters, tokens_BL, tokens_BL, _array(dtype=jnp.int32))
    dropped = 7 * 16 * 32 * 64  # two embeddings, two sub-layers and three
    drawing = [x for x in kernels(text) if x.integer_operations > dropped / 100]
    assert len(drawing) == 1
    # 16 bits an element, and threefry, which makes 64 at a time, wastes none
    assert drawing[0].integer_operations < 40 * dropped
