"""Compile a recipe's training step and search for a GPU or TPU that this machine does not have.

    python -m benchmarks.compile_for --device v5e:2x4 --config configs/wmt14_base.py
    python -m benchmarks.compile_for --device h200 --config configs/wmt14_big.py --table

Requires ``pip install '.[tpu]'`` or ``'.[cuda]'``. Any field of the config can be set with a flag,
as in train.py; the vocabulary has ``tokenizer.vocab_size`` tokens. Prints one JSON object:

- ``memory_mb`` of one device: arguments, temporary buffers, and results that reuse an argument's
  memory (``in_place``). Arguments and temporary buffers together must fit.
- ``collectives``: number of collectives of each type in a step, and MB of their results on one
  device. The result of a reduce-scatter is a shard.
- ``parts`` of a training step: kernels of each part of the model. On a GPU, also GB read and
  written, TFLOP, and estimated milliseconds on an H200. On a TPU, also XLA's estimate of cycles,
  which excludes collectives. ``--table`` prints only these, in Markdown.
- ``copied_caches``: number of copies or gathers of a whole KV cache array in a search's loops,
  expected 0.

Kernels are assigned to parts by their name (``jax.named_scope``) and their operations. Kernels in a
loop count once per iteration, or once if XLA does not know the number of iterations. The estimate
adds a fixed launch time to the largest of the times for a kernel's bytes, matmuls and integer
operations. XLA cannot autotune for an absent GPU. Matmuls of a training step use cuBLASLt, with
biases, ReLU and sums as epilogues (``COMPILER_OPTIONS`` in training/step.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from benchmarks.hlo import (
    H200_RATES,
    by_cycles,
    by_part,
    collectives,
    computations,
    copied,
    in_loops,
    kernels,
)
from benchmarks.in_turn import Answer, markdown
from transformer_jax import Batch, Config, Engine, Transformer, UserError, batch_sharding, make_mesh
from transformer_jax.cli import config_in_flags, parse_flags, run_program
from transformer_jax.training.step import make_step_functions

_GPUS = {  # GB/s, GB, name
    "h100": (3352, 80, "NVIDIA H100 80GB HBM3"),
    "h200": (4800, 141, "NVIDIA H200"),
}
_TARGET = """
    gpu_device_info {{
      cuda_compute_capability {{ major: 9 minor: 0 }}
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
      fpus_per_core: 128 core_count: 132 clock_rate_ghz: 1.98 l2_cache_size: 52428800
      shared_memory_per_block: 49152 shared_memory_per_core: 233472
      shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
      registers_per_block_limit: 65536
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {0}000000000 device_memory_size: {1}000000000
      driver_version: "12.9.0" kernel_mode_driver_version: "12.9.0" runtime_version: "12.9.0"
      compile_time_toolkit_version: "12.9.0"
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }}
    runtime_version {{ major: 12 minor: 9 }} device_description_str: "{2}"
"""


@contextmanager
def running_on(platform: str, devices: list[Any]) -> Iterator[None]:
    """Make JAX report this platform and these devices."""
    with ExitStack() as stack:
        replacements = {"default_backend": lambda: platform, "device_count": lambda: len(devices)}
        stack.enter_context(mock.patch.multiple(jax, **replacements))
        if platform == "gpu":  # read by Pallas
            gpu = AbstractDevice(devices[0].device_kind, devices[0].core_count, platform)
            mesh = AbstractMesh((), (), abstract_device=gpu)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def gpus(name: str, count: int = 1) -> list[Any]:
    """Return compile-only GPUs of one machine. Raises ``NotImplementedError`` without JAX's CUDA
    package.
    """
    settings = {"target_config": _TARGET.format(*_GPUS[name]), "topology": f"1x1x{count}"}
    return list(topologies.get_topology_desc(platform="cuda", **settings).devices)


def find_devices(name: str) -> tuple[str, list[Any]]:
    """Return the platform and its compile-only devices."""
    kind, _, count = name.partition(":")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no metadata server
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    jax.config.update("jax_platforms", "cpu")
    if kind == "cpu":
        return "cpu", jax.devices()
    try:
        if kind in _GPUS:
            return "gpu", gpus(kind, int(count or 1))
        return "tpu", list(topologies.get_topology_desc(name, "tpu").devices)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"--device {name}: {str(error).splitlines()[0]} Expected one of {', '.join(_GPUS)}, "
            "cpu, or a TPU topology such as v5e:2x4. The device's JAX package must be installed: "
            "pip install '.[cuda]' or '.[tpu]'."
        ) from error


@dataclass(frozen=True)
class Arguments:
    """Compile the training step and the search for a device that this machine may not have."""

    device: str = tyro.MISSING
    """TPU topology such as v5e:2x4, or h100, h200 (h100:8 for eight of them), or cpu."""
    config: str = ""
    """Config file, as in configs/. Default: the paper's base model."""
    length: int = 32
    """Tokens per source and target sentence of the training batch, which has as many rows as fit
    into batch.tokens. Packed rows, the default on TPUs, have batch.row_length tokens instead."""
    table: bool = False
    """Compile only the training step, and print its parts as a Markdown table."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main() -> None:
    """Compile the training step and the search, and print the report."""
    arguments = parse_flags(Arguments, defaults=config_in_flags(sys.argv[1:]))
    config = arguments.settings
    size = arguments.settings.tokenizer.vocab_size
    sizes = {"vocab_size": size, "source_vocab_size": None if config.tokenizer.joint else size}
    config = replace(config, model=replace(config.model, **sizes))
    platform, devices = find_devices(arguments.device)
    config = config.with_layout(platform)
    report: Answer = {"device": devices[0].device_kind, "devices": len(devices)}
    with running_on(platform, devices):
        report["train_step"] = step = _train_step(config, devices, arguments.length)
        if not arguments.table:
            report["search"] = _search(config, devices[0])
    parts = step.get("parts") if arguments.table else None
    print(markdown(parts) if parts else json.dumps(report, indent=2))


def _train_step(config: Config, devices: list[Any], length: int) -> Answer:
    mesh = make_mesh(config.mesh, devices)
    batch = config.batch
    packed = batch.layout == "packed"
    length = batch.row_length if packed else length
    rows = batch.tokens // length // batch.row_multiple * batch.row_multiple
    side = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=batch_sharding(mesh))
    functions = make_step_functions(config, mesh)
    lowered = functions.train_step.lower(
        functions.abstract_state, Batch(*[side] * (4 if packed else 2))
    )
    text, figures = _compile(lowered)
    figures |= {"rows": rows, "mesh": dict(mesh.shape), "collectives": collectives(text)}
    if jax.default_backend() != "cpu":
        compiled_kernels = kernels(text)
        on_tpu = jax.default_backend() == "tpu"
        figures["parts"] = (
            by_cycles(compiled_kernels) if on_tpu else by_part(compiled_kernels, H200_RATES)
        )
    return figures


def _search(config: Config, device: Any) -> Answer:
    """Compile the search for one device; several devices search independently."""
    engine = Engine(Transformer(config.model, rngs=nnx.Rngs(0)), config.decoding)
    bucket = engine.buckets[0]
    text, figures = _compile(lowered_search(engine, SingleDeviceSharding(device)))
    every = computations(text)
    rows = jax.eval_shape(lambda: engine.new_rows(bucket))
    caches = {x.shape for x in jax.tree.leaves(rows.cache) if len(x.shape) == 4}
    copies = copied(every, in_loops(every), caches)
    return figures | {"rows": bucket.num_rows, "copied_caches": len(copies)}


def lowered_search(engine: Engine, sharding: Any = None) -> jax.stages.Lowered:
    """Lower the search of an engine's first bucket, for the device of ``sharding`` if given."""
    bucket = engine.buckets[0]
    with jax.disable_jit():  # a function with compiler options cannot be inside another
        rows, encoded = jax.eval_shape(lambda: (engine.new_rows(bucket), engine.encode(bucket, [])))
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (engine._weights, rows, encoded, *[np.int32(0)] * 3),
    )
    return engine._compiled.admit_and_decode.lower(*arguments)


def _compile(lowered: Any) -> tuple[str, Answer]:
    begin = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    names = {"arguments": "argument", "temporary": "temp", "in_place": "alias"}
    sizes = {name: getattr(memory, f"{x}_size_in_bytes") / 1e6 for name, x in names.items()}
    return compiled.as_text(), {"compile_seconds": seconds, "memory_mb": sizes}


if __name__ == "__main__":
    sys.exit(run_program(main))
