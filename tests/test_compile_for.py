"""Ahead-of-time compilation for other devices: the report, and parsing of compiled programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from benchmarks import compile_for
from benchmarks.hlo import (
    by_cycles,
    by_part,
    collectives,
    computations,
    copied,
    in_loops,
    kernels,
)
from benchmarks.in_turn import markdown
from transformer_jax.data.batching import Batch
from transformer_jax.devices.sharding import make_mesh
from transformer_jax.errors import UserError
from transformer_jax.model.layers import EncoderLayer
from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import Config, MeshConfig, ModelConfig
from transformer_jax.training.loss import smoothed_cross_entropy
from transformer_jax.training.step import COMPILER_OPTIONS, make_step_functions


@pytest.mark.cpu("it compiles for the eight simulated devices")
def test_the_report_for_local_devices(monkeypatch, capsys):
    sizes = "--model.d-model 16 --model.d-ff 32 --model.num-heads 2 --model.num-layers 1"
    sizes += " --decoding.max-source-length 16 --decoding.max-extra-length 8"
    flags = f"--device cpu --batch.tokens 2560 --length 80 --tokenizer.vocab-size 64 {sizes}"
    monkeypatch.setattr(sys, "argv", ["compile_for", *flags.split()])
    compile_for.main()
    report = json.loads(capsys.readouterr().out)
    step, search = report["train_step"], report["search"]
    assert (report["devices"], step["rows"], step["mesh"]["data"]) == (8, 32, 8)
    parameters = 64 * 16 + (4 + 8) * 16 * 16 + 2 * (2 * 16 * 32 + 32 + 16) + 5 * 2 * 16
    # Adam has two moments.
    assert 0 <= step["memory_mb"]["arguments"] - 3 * 4 * parameters / 1e6 < 0.01
    # Devices sum every gradient. The matrix of the softmax and both embeddings has three gradients.
    summed = step["collectives"]["all-reduce f32"]["mb"]
    assert 0 <= summed - 4 * (parameters + 2 * 64 * 16) / 1e6 < 0.002
    # The XLA flags of the tests cause copies.
    assert search["rows"] == 32 and search["copied_caches"] >= 0


@pytest.mark.parametrize("device", ["h3000", "v9:2x2"])
def test_unknown_devices(device):
    with pytest.raises(UserError, match=f"--device {device}: "):
        compile_for.find_devices(device)


def test_computations_in_loops_are_found_through_branches() -> None:
    program = """
%fused (p: f32[4]) -> f32[4] {
  ROOT %c = f32[4]{0} copy(%p)
}

%first (p: f32[4]) -> f32[4] {
  ROOT %c = f32[4]{0} copy(%p)
}

%body (p: f32[4]) -> f32[4] {
  %f = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %d = f32[4]{0} conditional(%i, %f), branch_computations={%first, %second}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %o = f32[4]{0} copy(%p)
  ROOT %w = f32[4]{0} while(%o), condition=%goes_on, body=%body
}

%second (p: f32[4]) -> f32[4] {
  ROOT %n = f32[4]{0} negate(%p)
}

%goes_on (p: f32[4]) -> pred[] {
  ROOT %t = pred[] constant(1)
}
"""
    every = computations(program.strip())
    found = in_loops(every)
    assert found == {"body", "goes_on", "first", "second"}
    assert len(copied(every, found, {(4,)})) == 1


def test_collectives_count_transferred_bytes():
    program = """
ENTRY %main () -> f32[] {
  %a = (f32[200,300]{1,0}, bf16[8000]{0}) all-reduce(%x, %y), to_apply=%sum
  %b = f32[5000]{0} all-reduce-start(%z), to_apply=%sum
  %b.done = f32[5000]{0} all-reduce-done(%b)
  %c = f32[1000]{0} all-gather(%z), dimensions={0}
  %d = ((f32[4000]{0}), f32[500]{0}) reduce-scatter-start(%z), to_apply=%sum
  %d.done = f32[500]{0} reduce-scatter-done(%d)
}
"""
    assert collectives(program) == {
        "all-gather f32": {"count": 1, "mb": 0.004},
        "all-reduce bf16": {"count": 1, "mb": 0.016},
        "all-reduce f32": {"count": 2, "mb": 0.26},
        "reduce-scatter f32": {"count": 1, "mb": 0.002},
    }


@pytest.fixture
def for_h200(h200: Any) -> Iterator[Callable[..., str]]:
    """``for_h200(function, *shapes)`` returns the program compiled for an absent GPU."""

    def compiled(function: Callable[..., Any], *shapes: Any) -> str:
        sharding = SingleDeviceSharding(h200)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )
        lowered = jax.jit(function).lower(*shapes)
        return lowered.compile(
            compiler_options={"xla_gpu_autotune_level": 0} | COMPILER_OPTIONS["gpu"]
        ).as_text()

    with compile_for.running_on("gpu", [h200]):
        yield compiled


def _step_of_eight(model: ModelConfig, mesh: MeshConfig) -> str:
    """A training step of 128 pairs of 16 + 16 tokens, compiled for eight GPUs."""
    devices = compile_for.gpus("h200", 8)
    with compile_for.running_on("gpu", devices):
        run = make_step_functions(Config(model=model, mesh=mesh), make_mesh(mesh, devices))
        side = jax.ShapeDtypeStruct((128, 16), jnp.int32)
        lowered = run.train_step.lower(run.abstract_state, Batch(side, side))
        options = {"xla_gpu_autotune_level": 0}
        return lowered.compile(compiler_options=options).as_text()


# An absent device cannot load a program from the compilation cache.
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(
    "mesh", [MeshConfig(data=8), MeshConfig(fsdp=8), MeshConfig(fsdp=4, tensor=2)], ids=str
)
def test_eight_gpus_exchange_parameters_and_gradients_once(h200, mesh):
    """``fsdp`` uses bfloat16 and shards gradients; a tied matrix is summed in float32."""
    model = ModelConfig(
        d_model=64, d_ff=128, num_heads=2, num_layers=1, vocab_size=512, dtype="bfloat16"
    )
    found = collectives(_step_of_eight(model, mesh))
    matrix, kernels = 512 * 64, (4 + 8) * 64 * 64 + 2 * 2 * 64 * 128
    summed = sum(found.get(f"all-reduce {dtype}", {"mb": 0.0})["mb"] for dtype in ("f32", "bf16"))
    few = 0.01  # MB: norms, biases and sums
    if mesh.fsdp == 1:
        assert summed == pytest.approx((4 * matrix + 2 * kernels) / 1e6, abs=few)
        assert found["all-reduce f32"]["mb"] == pytest.approx(4 * matrix / 1e6, abs=few)
        return
    # along ``tensor``: in bfloat16, the results of five sublayers and the gradients of their six
    # inputs and of the decoder output; in float32, two embeddings and the loss's three numbers
    positions = 128 * 16 // mesh.fsdp if mesh.tensor > 1 else 0
    activations = positions * (2 * (5 + 6 + 1) * 64 + 4 * (2 * 64 + 3))
    assert summed == pytest.approx(activations / 1e6, abs=few)
    del found["all-reduce f32"], found["all-reduce bf16"], found["all-reduce s32"]
    matrix, kernels = matrix // mesh.tensor, kernels // mesh.tensor
    assert {name: figures["mb"] for name, figures in found.items()} == {
        "all-gather bf16": pytest.approx(2 * (matrix + kernels) / 1e6, abs=0.001),  # biases of F
        "reduce-scatter bf16": pytest.approx(2 * kernels / mesh.fsdp / 1e6),
        "reduce-scatter f32": pytest.approx(4 * matrix / mesh.fsdp / 1e6),
    }


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.usefixtures("h200")
def test_eight_gpus_sum_gradients_during_the_backward_pass():
    """XLA sums the layers' 56 MB of gradients in two parts, both during other matmuls."""
    model = ModelConfig(
        d_model=1024, d_ff=4096, num_layers=1, num_heads=8, vocab_size=512, dtype="bfloat16"
    )
    step = list(computations(_step_of_eight(model, MeshConfig(data=8)))["ENTRY"].values())
    place = {x.name: i for i, x in enumerate(step)}
    large = [x for x in step if x.kind == "all-reduce-done" and x.bytes > 20e6]
    first, second = sorted((place[x.operands[0]], place[x.name]) for x in large)
    assert sum(x.bytes for x in large) > 0.9 * 2 * (12 * 1024**2 + 4 * 1024 * 4096)
    assert second[0] < first[1]  # both at once
    assert all(sum(x.is_matmul for x in step[slice(*span)]) >= 4 for span in (first, second))


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_the_loss_reads_logits_twice_without_padding(for_h200):
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
    logits = next(kernel for kernel in found if kernel.kind == "matmul")
    others = [kernel for kernel in found if not kernel.flops]
    reading = [x for x in others if max(x.reads.values(), default=0) >= logits.written]
    # once for the sums, and once for the gradient, which replaces them
    assert [x.written > logits.written / 2 for x in reading] == [False, True]
    padded = [x for each in computations(text).values() for x in each.values()]
    assert not [x for x in padded if x.kind == "pad" and x.bytes > 1e6]


def test_matmuls_add_biases_and_gradients_and_apply_relu(for_h200):
    config = ModelConfig(d_model=512, d_ff=2048, vocab_size=8, dtype="bfloat16", dropout=0.1)
    graph, parameters = nnx.split(nnx.eval_shape(lambda: EncoderLayer(config, rngs=nnx.Rngs(0))))

    def gradient(parameters, x_BLD, dy_BLD, mask_B1LL):
        def run(parameters, x_BLD):
            return nnx.merge(graph, parameters)(x_BLD, mask_B1LL, dropout_key=jax.random.key(0))

        y_BLD, vjp = jax.vjp(run, parameters, x_BLD)
        return y_BLD, vjp(dy_BLD)

    x_BLD = _array(784, 32, 512)
    text = for_h200(gradient, parameters, x_BLD, x_BLD, _array(784, 1, 32, 32, dtype=bool))
    assert text.count('"epilogue":"BIAS_RELU"') == text.count('"epilogue":"BIAS"') == 1
    # Matmuls add the gradients of the inputs of both residual connections.
    sums = [x for x in kernels(text) if x.kind == "matmul" and len(x.reads) == 3]
    assert len(sums) == 2 + 2
    operations = [x for each in computations(text).values() for x in each.values()]
    assert not [x for x in operations if x.kind == "maximum" and prod(x.shape) == 784 * 32 * 2048]


@pytest.mark.parametrize(("width", "masks"), [(64, 7), (128, 2)])
def test_random_bits_are_drawn_only_in_the_forward_pass(for_h200, width, masks):
    """There are two embeddings and five sublayers; kernels draw the masks of 128-wide sublayers."""
    config = ModelConfig(
        d_model=width, d_ff=64, num_heads=2, num_layers=1, vocab_size=8, dtype="bfloat16"
    )
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

    def gradient(parameters, source_BS, target_BT, seed):
        def total(parameters):
            model = nnx.merge(graph, parameters)
            return model.hidden(source_BS, target_BT, dropout_key=jax.random.key(seed)).sum()

        return jax.grad(total)(parameters)

    tokens_BL = _array(16, 32, dtype=jnp.int32)
    text = for_h200(gradient, parameters, tokens_BL, tokens_BL, _array(dtype=jnp.int32))
    dropped = masks * 16 * 32 * width
    # An element needs 16 bits. Threefry makes 64 at a time, and XLA computes each half separately.
    drawn = sum(x.integer_operations for x in kernels(text)) / dropped
    assert 20 < drawn < 60


# A loop of 3 iterations, each of which slices %chunks, multiplies, and updates a row of %rows; then
# a matmul over 2 x 8 tokens, split along the contraction; and random bits
PROGRAM = """\
HloModule jit_step

%take (chunks: bf16[3,8,4]) -> bf16[8,4] {
  %chunks = bf16[3,8,4]{2,1,0} parameter(0)
  %start = s32[] constant(0)
  %slice = bf16[1,8,4]{2,1,0} dynamic-slice(%chunks, %start, %start, %start), dynamic_slice_sizes={1,8,4}
  ROOT %flat = bf16[8,4]{1,0} bitcast(%slice)
}

%logits (left: bf16[8,4], right: bf16[10,4]) -> f32[8,10] {
  %left = bf16[8,4]{1,0} parameter(0)
  %right = bf16[10,4]{1,0} parameter(1)
  ROOT %dot = f32[8,10]{1,0} dot(%left, %right), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%put (rows: f32[3,8,10], row: f32[8,10]) -> f32[3,8,10] {
  %rows = f32[3,8,10]{2,1,0} parameter(0)
  %row = f32[8,10]{1,0} parameter(1)
  %one = f32[1,8,10]{2,1,0} bitcast(%row)
  %first = s32[] constant(0)
  ROOT %put.1 = f32[3,8,10]{2,1,0} dynamic-update-slice(%rows, %one, %first, %first, %first)
}

%split (left.1: bf16[2,8,4], right.1: bf16[2,8,6]) -> f32[2,4,6] {
  %left.1 = bf16[2,8,4]{2,1,0} parameter(0)
  %right.1 = bf16[2,8,6]{2,1,0} parameter(1)
  ROOT %dot.1 = f32[2,4,6]{2,1,0} dot(%left.1, %right.1), lhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

%bits (count: u32[100]) -> u32[100] {
  %count = u32[100]{0} parameter(0)
  %shift = u32[100]{0} shift-right-logical(%count, %count)
  ROOT %mix = u32[100]{0} xor(%shift, %count)
}

%body (state: (bf16[3,8,4], bf16[10,4], f32[3,8,10])) -> (bf16[3,8,4], bf16[10,4], f32[3,8,10]) {
  %state = (bf16[3,8,4]{2,1,0}, bf16[10,4]{1,0}, f32[3,8,10]{2,1,0}) parameter(0)
  %all = bf16[3,8,4]{2,1,0} get-tuple-element(%state), index=0
  %weights = bf16[10,4]{1,0} get-tuple-element(%state), index=1
  %sums = f32[3,8,10]{2,1,0} get-tuple-element(%state), index=2
  %taken = bf16[8,4]{1,0} fusion(%all), kind=kLoop, calls=%take
  %product = f32[8,10]{1,0} fusion(%taken, %weights), kind=kCustom, calls=%logits, metadata={op_name="jit(step)/jvp(loss)/while/dot_general"}
  %written = f32[3,8,10]{2,1,0} fusion(%sums, %product), kind=kLoop, calls=%put, metadata={op_name="jit(step)/jvp(loss)/while/add"}
  ROOT %next = (bf16[3,8,4]{2,1,0}, bf16[10,4]{1,0}, f32[3,8,10]{2,1,0}) tuple(%all, %weights, %written)
}

ENTRY %main (x: (bf16[3,8,4], bf16[10,4], f32[3,8,10]), y: bf16[2,8,4], z: bf16[2,8,6], n: u32[100]) -> f32[2,4,6] {
  %x = (bf16[3,8,4]{2,1,0}, bf16[10,4]{1,0}, f32[3,8,10]{2,1,0}) parameter(0)
  %y = bf16[2,8,4]{2,1,0} parameter(1)
  %z = bf16[2,8,6]{2,1,0} parameter(2)
  %n = u32[100]{0} parameter(3)
  %while = (bf16[3,8,4]{2,1,0}, bf16[10,4]{1,0}, /*index=2*/f32[3,8,10]{2,1,0}) while(%x), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %random = u32[100]{0} fusion(%n), kind=kLoop, calls=%bits, metadata={op_name="jit(step)/jvp(residual)/dropout/xor"}
  ROOT %gradient = f32[2,4,6]{2,1,0} fusion(%y, %z), kind=kCustom, calls=%split, metadata={op_name="jit(step)/transpose(jvp(feed_forward))/BLF,FD->BLD/transpose"}
}
"""  # noqa: E501


def test_kernels_of_loops_slices_and_matmuls():
    found = {kernel.name: kernel for kernel in kernels(PROGRAM)}
    assert {name: kernel.launches for name, kernel in found.items()} == {
        "taken": 3,
        "product": 3,
        "written": 3,
        "random": 1,
        "gradient": 1,
    }
    assert found["taken"].bytes == 2 * 2 * 8 * 4  # one slice, not all three
    assert found["written"].bytes == 2 * 4 * 8 * 10  # in place
    assert found["product"].bytes == 2 * (8 * 4 + 10 * 4) + 4 * 8 * 10
    assert found["product"].flops == 2 * 8 * 10 * 4
    assert found["gradient"].flops == 2 * 4 * 6 * 16
    assert found["random"].integer_operations == 200
    kinds = [found[name].kind for name in ("product", "gradient", "random", "taken")]
    assert kinds == ["matmul", "weight gradient", "random", "move"]


def test_cycles_of_parts_on_a_tpu():
    """A loop's number of iterations is the constant that its counter is compared with."""
    condition = """\
%more (state: (bf16[3,8,4], bf16[10,4], f32[3,8,10])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  ROOT %less = pred[] compare(%counter, %three), direction=LT
}

"""
    program = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    program = program.replace("%body (state", condition + "%body (state")
    for call, cycles in {"logits": 2_000_000, "split": 500_000}.items():
        cost = f'calls=%{call}, backend_config={{"estimated_cycles":"{cycles}"}}'
        program = program.replace(f"calls=%{call}", cost)
    table = by_cycles(kernels(program))
    assert table["loss: matmuls"] == {"kernels": 3, "million cycles": 6.0}
    assert table["matmuls: weight gradient"] == {"kernels": 1, "million cycles": 0.5}
    assert table["all"] == {"kernels": 4, "million cycles": 6.5}


def test_parts_and_their_times():
    table = by_part(kernels(PROGRAM), {"bytes": 1e9, "flops": 1e9, "integer_operations": 1e6})
    assert {name: row["kernels"] for name, row in table.items()} == {
        "loss: matmuls": 3,
        "loss: rest": 6,  # the slice has the name of its user
        "matmuls: weight gradient": 1,
        "random bits": 1,
        "all": 11,
    }
    assert table["random bits"]["ms"] == pytest.approx(1e3 * (1.5e-6 + 200 / 1e6))
    # The matmul is limited by FLOPs, not bytes.
    assert table["loss: matmuls"]["ms"] == pytest.approx(3e3 * (1.5e-6 + 640e-9))
    assert "| all | 11 |" in markdown(table)
