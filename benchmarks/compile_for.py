"""Compile a recipe's training step and search for a GPU or TPU that this machine does not have.

    pip install '.[tpu]'
    python -m benchmarks.compile_for --device v5e:2x4 --config configs/wmt14_base.py
    pip install '.[cuda]'
    python -m benchmarks.compile_for --device h200 --config configs/wmt14_big.py

``--device`` is a TPU topology (v5e:2x2, v6e:4x4, v5p:2x2x1, ...), h100, h200 or a100 (with :N for N
of them in one machine), or cpu, for this machine's own. Any field of the config may be given as a
flag, as with train.py; the vocabulary has the size that ``tokenizer.vocab_size`` asks for. Prints
one JSON object:

- ``memory_mb``, of one device: what a compiled function is given (``arguments``), what it allocates
  in between (``temporary``), and which of its results reuse an argument's memory (``in_place``).
  The first two together must fit.
- ``flops``, of one device, as XLA counts them; a loop counts once. None if XLA does not say.
- ``collectives``: how many, and how many MB of each type, one device sends in a step.
- ``copied_caches``: how often a step of the search copies or gathers a whole block of keys or
  values, which it should not, and the same for the loops around the steps, which encode sentences
  and put them into rows.
- ``parts``, of a training step on a GPU: kernels, GB read and written and TFLOP of each part of the
  model, and for an H200 an estimate of the milliseconds (``benchmarks/parts.py``). ``--table``
  prints this alone, in Markdown.
- ``steps``, of a search on a GPU: for each loop that takes steps the kernels of a step, the GB that
  it reads and writes, and how many of those are keys and values read from the caches.
  ``host_loops``: loops whose condition the host evaluates; none, as the engine asks XLA for one
  CUDA graph.

Compiling uses one core here: half a minute to three. For a GPU nothing is tuned, because tuning
runs kernels: all matrix products are Triton's, where on the machine itself XLA takes cuBLAS for
those that it does better. No figure here was measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from benchmarks import hlo
from benchmarks.kernels import kernels, step_loops
from benchmarks.parts import RATES, by_part, markdown
from transformer_jax.cli import config_in_flags, parse_flags, run_program
from transformer_jax.config import Config
from transformer_jax.data.batching import Batch
from transformer_jax.decoding.engine import Engine
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.sharding import batch_sharding, check_rows, make_mesh
from transformer_jax.training.step import make_step_functions

# compute capability, multiprocessors, shared bytes of each and of a block, GB/s, GB, GHz, L2 bytes,
# name
_GPUS = {
    "a100": ((8, 0), 108, 167_936, 166_912, 2039, 80, 1.41, 41_943_040, "NVIDIA A100-SXM4-80GB"),
    "h100": ((9, 0), 132, 233_472, 232_448, 3352, 80, 1.98, 52_428_800, "NVIDIA H100 80GB HBM3"),
    "h200": ((9, 0), 132, 233_472, 232_448, 4800, 141, 1.98, 52_428_800, "NVIDIA H200"),
}
# assumed of driver and toolkit; CUDA graphs hold matrix products and loops from 12.3 on
_CUDA = (12, 9)


@dataclass(frozen=True)
class Arguments:
    """Compile the training step and the search for a device that need not be here."""

    device: str
    """TPU topology such as v5e:2x4, or h100, h200, a100 (h100:8 for eight of them), or cpu."""
    config: str = ""
    """Config file, as in configs/; without one: the paper's base model."""
    length: int = 32
    """Tokens of a sentence on either side, in the training batch; the rows follow from
    batch.tokens.
    """
    only: Literal["train_step", "search"] | None = None
    """Compile one of the two."""
    table: bool = False
    """Print the training step's parts as a Markdown table instead."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main() -> int:
    """Compile the training step and the search, and print what they need."""
    return run_program(_main)


def _main() -> int:
    arguments = parse_flags(Arguments, defaults=config_in_flags(sys.argv[1:]))
    on_gpu = arguments.device.partition(":")[0] in _GPUS
    if arguments.table and not (on_gpu and arguments.only != "search"):
        raise UserError(
            f"--table shows the parts of a training step on a GPU; expected --device "
            f"{' or '.join(_GPUS)}, not {arguments.device}, and no --only search."
        )
    # the tokenizer says how many, as in training
    config, size = arguments.settings, arguments.settings.tokenizer.vocab_size
    sizes = {"vocab_size": size, "source_vocab_size": None if config.tokenizer.joint else size}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        platform, devices = _devices(arguments.device, Path(folder))
        with running_on(platform, devices):
            report: dict[str, Any] = {"device": devices[0].device_kind, "devices": len(devices)}
            if arguments.only != "search":
                report["train_step"] = _train_step(config, devices, arguments)
            if arguments.only != "train_step":
                report["search"] = _search(config, platform, devices[0], Path(folder))
    if arguments.table:
        print(markdown(report["train_step"]["parts"]))
    else:
        print(json.dumps(report, indent=2))
    return 0


@contextmanager
def running_on(platform: str, devices: list[Any]) -> Iterator[None]:
    """The code finds these devices where it asks what it runs on."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(jax, "default_backend", return_value=platform))
        stack.enter_context(mock.patch.object(jax, "device_count", return_value=len(devices)))
        if platform == "gpu":  # where Pallas looks
            gpu = AbstractDevice(devices[0].device_kind, devices[0].core_count, platform)
            mesh = AbstractMesh((), (), abstract_device=gpu)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def _devices(name: str, folder: Path) -> tuple[str, list[Any]]:
    """The platform, and devices to compile for but not to run on."""
    kind, _, count = name.partition(":")
    if kind in _GPUS:
        flags = "--xla_gpu_autotune_level=0"
        dumps = f"--xla_dump_to={folder} --xla_dump_hlo_module_re=.*search_bucket.*"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags} {dumps}"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # nobody to ask
    jax.config.update("jax_platforms", "cpu")
    if kind == "cpu":
        return "cpu", jax.devices()
    try:
        if kind in _GPUS:
            return "gpu", gpus(kind, int(count or 1))
        return "tpu", list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"--device {name}: {str(error).splitlines()[0]} Expected one of {', '.join(_GPUS)}, "
            "cpu, or a TPU topology like "
            "v5e:2x4, with JAX's package for it installed: pip install '.[cuda]' or '.[tpu]'."
        ) from error


def gpus(name: str, count: int = 1) -> list[Any]:
    """So many of a kind in one machine, to compile for.

    Raises:
      NotImplementedError: JAX's package for CUDA is not installed.
    """
    shape = f"1x1x{count}"  # partitions, machines, GPUs of each
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_target(name), topology=shape
    )
    return list(topology.devices)


def _target(name: str) -> str:
    """A GPU as XLA's GpuTargetConfigProto, in text."""
    (major, minor), cores, shared, shared_block, bandwidth, memory, clock, l2_cache, description = (
        _GPUS[name]
    )
    driver, toolkit = f'"{_CUDA[0]}.{_CUDA[1]}.0"', f"{{ major: {_CUDA[0]} minor: {_CUDA[1]} }}"
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          fpus_per_core: {128 if major > 8 else 64} core_count: {cores}
          clock_rate_ghz: {clock} l2_cache_size: {l2_cache}
          shared_memory_per_block: 49152 shared_memory_per_core: {shared}
          shared_memory_per_block_optin: {shared_block}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {bandwidth}000000000 device_memory_size: {memory}000000000
          driver_version: {driver} kernel_mode_driver_version: {driver}
          runtime_version: {driver} compile_time_toolkit_version: {driver}
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {toolkit}
        device_description_str: "{description}"
    """


def _train_step(config: Config, devices: list[Any], arguments: Arguments) -> dict[str, Any]:
    gpu, length = arguments.device.partition(":")[0], arguments.length
    mesh = make_mesh(config.mesh, devices)
    multiple = config.batch.row_multiple
    check_rows(mesh, multiple, config.optimizer.accumulate_steps)
    rows = max(multiple, config.batch.tokens // length // multiple * multiple)
    side = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=batch_sharding(mesh))
    functions = make_step_functions(config, mesh)
    lowered = functions.train_step.lower(functions.abstract_state, Batch(side, side))  # type: ignore[attr-defined]
    compiled, figures = _compile(lowered)
    if gpu in _GPUS:
        figures["parts"] = by_part(kernels(compiled.as_text()), RATES.get(gpu))
    return {
        "rows": rows,
        "length": length,
        "mesh": dict(mesh.shape),
        **figures,
        "collectives": hlo.collectives(compiled.as_text()),
    }


def _search(config: Config, platform: str, device: Any, folder: Path) -> dict[str, Any]:
    """On one device: searches on several are as many of these."""
    engine = Engine([Transformer(config.model, rngs=nnx.Rngs(0))], config.decoding)
    bucket = engine.buckets[0]
    compiled, figures = _compile(engine.lowered(bucket, sharding=SingleDeviceSharding(device)))
    text, hypotheses = compiled.as_text(), bucket.rows * config.decoding.beam_size
    step = hlo.innermost_loop(text, hypotheses=hypotheses, vocab_size=config.model.vocab_size)
    blocks = {x.shape for x in jax.tree.leaves(engine.cache_shapes(bucket)) if len(x.shape) == 4}
    # what is fused is written nowhere
    loops = {name for name in hlo.computations(text) if "fused" not in name}
    copied = {
        "a_step": len(hlo.moved(text, loops & step, blocks)),
        "a_hand_over": len(hlo.moved(text, loops - step, blocks)),
    }
    figures |= {
        "rows": bucket.rows,
        "longest_source": bucket.lengths[-1],
        "copied_caches": copied,
    }
    if platform == "gpu":
        thunks = next(folder.glob("*search_bucket*thunk_sequence_after_thunk_passes.txt"))
        figures["host_loops"] = hlo.host_loops(thunks.read_text())
        figures["steps"] = [
            {
                "kernels": sum(kernel.launches for kernel in launched),
                "gb": round(sum(kernel.launches * kernel.bytes for kernel in launched) / 1e9, 3),
                "cache_gb": round(read / 1e9, 3),
            }
            for launched, read in step_loops(text, blocks)
        ]
    return figures


def _compile(lowered: Any) -> tuple[Any, dict[str, Any]]:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return compiled, {
        "compile_seconds": round(seconds, 1),
        "compile_cpu_seconds": round(cpu_seconds, 1),
        "memory_mb": {
            "arguments": round(memory.argument_size_in_bytes / 1e6, 2),
            "temporary": round(memory.temp_size_in_bytes / 1e6, 2),
            "in_place": round(memory.alias_size_in_bytes / 1e6, 2),
        },
        "flops": costs.get("flops"),
    }


if __name__ == "__main__":
    sys.exit(main())
