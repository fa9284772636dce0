"""Compile a recipe's training step and search for a GPU or TPU that this machine does not have.

    python -m benchmarks.compile_for --device v5e:2x4 --config configs/wmt14_base.py
    python -m benchmarks.compile_for --device h200 --config configs/wmt14_big.py --table

It needs ``pip install '.[tpu]'`` or ``'.[cuda]'``. Any field of the config may be given as a flag,
as with train.py; the vocabulary has ``tokenizer.vocab_size`` tokens. Prints one JSON object:

- ``memory_mb`` of one device: arguments, temporary buffers, and results that reuse an argument's
  memory (``in_place``). Arguments and temporary buffers together must fit.
- ``collectives``: number of collectives of each type in a step, and MB that one device receives.
- ``parts`` of a training step on a GPU: kernels, GB read and written, TFLOP and estimated
  milliseconds on an H200 for each part of the model. ``--table`` prints only these, in Markdown.
- ``copied_caches``: number of copies or gathers of a whole KV cache array in a search, expected 0.

Kernels are assigned to parts by their name (``jax.named_scope``) and their operations. Kernels in a
loop count once per iteration, or once if XLA does not know the number of iterations. The estimate
adds a fixed launch time to the largest of the times for a kernel's bytes, matmuls and integer
operations. XLA cannot autotune for an absent GPU, so all matmuls use Triton, never cuBLAS.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Annotated, Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from benchmarks.in_turn import Answer, Table, markdown
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
# H200: 0.82 of the measured copy bandwidth (4.3 TB/s), 0.84 of the measured speed of an 8192 x 8192
# matmul (715 TFLOP/s); 132 multiprocessors x 64 lanes x 1.98 GHz
H200_RATES = {"bytes": 3.5e12, "flops": 600e12, "integer_operations": 16.7e12}
_LAUNCH = 1.5e-6  # minimum seconds per kernel

_OPERATION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)$", re.M)
_ARRAY = re.compile(r"\b((?:pred|bf|[fsu])(\d*))\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r" = (\S.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_FREE = re.compile(  # no kernel launch
    "parameter|constant|tuple|get-tuple-element|bitcast|partition-id|after-all|opt-barrier|.*-done"
)
_MOVING = re.compile("transpose|copy|slice|dynamic-slice|concatenate")
_COPYING = re.compile("copy|gather|transpose|concatenate|pad|select")
_INTEGER = re.compile("add|subtract|multiply|xor|or|and|shift-left|shift-right-logical")


def arrays(text: str) -> list[tuple[str, tuple[int, ...], int]]:
    """Type, shape and bytes of the arrays in HLO text such as ``(f32[8,512], bf16[8])``."""
    found = []
    for dtype, bits, lengths in _ARRAY.findall(text):
        shape = tuple(int(n) for n in lengths.split(",") if n)
        found.append((dtype, shape, int(bits or 8) // 8 * prod(shape)))
    return found


class Operation(NamedTuple):
    """A line of HLO."""

    root: bool
    name: str
    type: str
    kind: str
    operands: tuple[str, ...]
    attributes: str
    number: int = 0  # index of a parameter

    @property
    def bytes(self) -> int:
        """Size of the result."""
        return sum(size for _, _, size in arrays(self.type))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result's first array."""
        return arrays(self.type)[0][1]

    @property
    def calls(self) -> list[str]:
        """Computations that the operation calls."""
        return re.findall(r"(?:calls|body|condition|to_apply)=%([\w.\-]+)", self.attributes)

    @property
    def is_matmul(self) -> bool:
        """True for matmuls, including library calls."""
        return self.kind == "dot" or bool(re.search("__cublas|matmul", self.attributes))

    def flops(self, left: Operation) -> float:
        """FLOPs of a matmul with the left operand ``left``."""
        axes = re.search(r'lhs_contracting_dim\w*"?[=:][{\[]([\d,"]*)', self.attributes)
        contracted = [left.shape[int(x)] for x in re.findall(r"\d+", axes[1] if axes else "")]
        return 2.0 * prod(self.shape) * prod(contracted)


Computation = dict[str, Operation]
Program = dict[str, Computation]


def computations(program: str) -> Program:
    """Operations of each computation by name; the entry computation is ``ENTRY``."""
    every = {}
    for text in re.split(r"\n(?=%|ENTRY)", program):
        found = {}
        for root, name, type_, kind, operands, attributes in _OPERATION.findall(text):
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            number = int(operands) if kind == "parameter" else 0
            found[name] = Operation(bool(root), name, type_, kind, names, attributes, number)
        every[text.split()[0].lstrip("%")] = found
    return every


def shares(inside: Computation) -> Callable[[str], float]:
    """Make a function for the fraction of an array that is read: slices and gathers read a part."""

    @cache
    def share(name: str) -> float:
        users = [x for x in inside.values() if name in x.operands]
        total = float(inside[name].root or not users)
        for user in users:
            whole = user.operands[0] == name
            if whole and user.kind in {"slice", "dynamic-slice", "gather"}:
                total += share(user.name) * user.bytes / inside[name].bytes
            elif not (whole and user.kind in {"dynamic-update-slice", "scatter"}):  # in place
                total += share(user.name)
        return min(1.0, total)

    return share


class Kernel:
    """Work of one kernel launch, and the number of launches."""

    def __init__(self, every: Program, around: Computation, operation: Operation, launches: int):
        """``around`` is the computation that contains the operation."""
        self.name, self.launches = operation.name, launches
        inner = {
            name: Operation(False, name, around[name].type, "parameter", (), "", number)
            for number, name in enumerate(operation.operands)
        } | {operation.name: operation._replace(root=True)}
        if operation.kind in {"fusion", "fusion-start"}:
            inner = every[operation.calls[0]]
        operations, share = list(inner.values()), shares(inner)
        self.reads = dict.fromkeys(operation.operands, 0.0)  # bytes
        for x in operations:
            if x.kind == "parameter":
                self.reads[operation.operands[x.number]] += x.bytes * share(x.name)
        [root] = [x for x in operations if x.root]
        self.written, results = 0, set()  # bytes; operations that write them
        for x in [inner[x] for x in root.operands] if root.kind == "tuple" else [root]:
            while x.kind == "bitcast":  # another view of an array
                x = inner[x.operands[0]]
            # an update in place counts only its slice, a scatter twice that
            put = {"dynamic-update-slice": 1, "scatter": 2}.get(x.kind)
            self.written += put * inner[x.operands[put]].bytes if put else x.bytes
            results.add(x.kind)
        self.bytes = sum(self.reads.values()) + self.written
        unsigned = [x for x in operations if x.type.startswith(("u32", "u64"))]
        self.integer_operations = sum(prod(x.shape) for x in unsigned if _INTEGER.fullmatch(x.kind))
        # Operations that XLA adds have no name; take a neighbor's name.
        near = [operation, *reversed(operations), *(around[x] for x in operation.operands)]
        near += [x for x in around.values() if operation.name in x.operands]
        found = (re.search(r'op_name="([^"]+)"', x.attributes) for x in near)
        self.source = next((x[1] for x in found if x), "")
        self.flops, self.kind = 0.0, "rest"
        if {"xor", "shift-right-logical"} <= {x.kind for x in operations}:
            self.kind = "random"
        elif operation.kind == "custom-call":
            self.kind = "custom"
        elif "transpose" in operation.name or all(map(_MOVING.fullmatch, results)):
            self.kind = "move"
        for x in operations:
            if x.is_matmul:
                self.flops += x.flops(inner[x.operands[0]])
                # only a weight gradient is smaller than both operands
                small = prod(x.shape) < min(prod(inner[y].shape) for y in x.operands[:2])
                self.kind = "weight gradient" if small else "matmul"


def kernels(program: str) -> list[Kernel]:
    """Kernels of a compiled function, with the number of iterations of their loops."""
    every = computations(program)

    def launched(around: Computation, times: int) -> Iterator[Kernel]:
        for operation in around.values():
            if operation.kind in {"while", "call"}:
                turns = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.attributes)
                body = every[operation.calls[-1]]
                yield from launched(body, times * int(turns[1] if turns else 1))
            elif not _FREE.fullmatch(operation.kind):
                yield Kernel(every, around, operation, times)

    return list(launched(every["ENTRY"], 1))


def part(kernel: Kernel) -> str:
    """Part of the training step that contains a kernel."""
    names, kind = set(re.findall(r"\w+", kernel.source)), kernel.kind
    attention, matmul = "dot_product_attention" in names, kind in ("matmul", "weight gradient")
    rules = {
        "loss: matmuls": "loss" in names and matmul,
        "loss: rest": "loss" in names,
        "random bits": kind == "random",
        "embedding": "embedding" in names,
        "attention: matmuls": attention and matmul,
        "matmuls: forward": matmul and "transpose" not in names,
        "matmuls: weight gradient": kind == "weight gradient",
        "matmuls: input gradient": matmul,
        "attention: custom kernels": attention and kind == "custom",
        "attention: transposes": kind == "move" and "jvp" in names,
        "attention: softmax": attention,
        # conversion of weights to bfloat16
        "optimizer and casts": "jvp" not in names or kernel.name.startswith("wrapped_convert"),
        "feed-forward: bias and activation": "feed_forward" in names,
        # also sums of the gradients of branches that begin there
        "norms and dropout": True,
    }
    return next(name for name, holds in rules.items() if holds)


def by_part(kernels: Iterable[Kernel], rates: Mapping[str, float]) -> Table:
    """Kernels, GB, TFLOP and milliseconds of each part and in total."""
    table: Table = {}
    for kernel in kernels:
        work = max(getattr(kernel, name) / rate for name, rate in rates.items())
        figures = {"kernels": 1, "gb": kernel.bytes / 1e9, "tflop": kernel.flops / 1e12}
        figures["ms"] = 1e3 * (_LAUNCH + work)
        for name in part(kernel), "all":
            row = table.setdefault(name, dict.fromkeys(figures, 0))
            for column, amount in figures.items():
                row[column] += kernel.launches * amount
    return table


def copied(
    every: Program, names: Iterable[str], shapes: Collection[tuple[int, ...]]
) -> list[Operation]:
    """Operations that copy an array of one of these shapes without computing anything."""
    inside = [x for name in names for x in every[name].values() if _COPYING.fullmatch(x.kind)]
    return [x for x in inside if x.shape in shapes]


def collectives(program: str) -> Table:
    """Number of collectives by kind and type, and MB that one device receives."""
    found: Table = {}
    for result, kind in _COLLECTIVE.findall(program):
        sizes: Counter[str] = Counter()
        for dtype, _, size in arrays(result):
            sizes[f"{kind} {dtype}"] += size
        for name, size in sizes.items():
            row = found.setdefault(name, {"count": 0, "mb": 0.0})
            row["count"] += 1
            row["mb"] += size / 1e6
    return found


@contextmanager
def running_on(platform: str, devices: list[Any]) -> Iterator[None]:
    """Make JAX report this platform and these devices."""
    with ExitStack() as stack:
        told = {"default_backend": lambda: platform, "device_count": lambda: len(devices)}
        stack.enter_context(mock.patch.multiple(jax, **told))
        if platform == "gpu":  # read by Pallas
            gpu = AbstractDevice(devices[0].device_kind, devices[0].core_count, platform)
            mesh = AbstractMesh((), (), abstract_device=gpu)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def gpus(name: str, count: int = 1) -> list[Any]:
    """Compile-only GPUs of one machine; ``NotImplementedError`` without JAX's CUDA package."""
    settings = {"target_config": _TARGET.format(*_GPUS[name]), "topology": f"1x1x{count}"}
    return list(topologies.get_topology_desc(platform="cuda", **settings).devices)


def find_devices(name: str) -> tuple[str, list[Any]]:
    """Platform and compile-only devices."""
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
    """Compile the training step and the search for a device that may be absent."""

    device: str
    """TPU topology such as v5e:2x4, or h100, h200 (h100:8 for eight of them), or cpu."""
    config: str = ""
    """Config file, as in configs/. Default: the paper's base model."""
    length: int = 32
    """Tokens per source and target sentence of the training batch, with rows up to batch.tokens."""
    table: bool = False
    """Compile only the training step, and print its parts as a Markdown table."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def main() -> None:
    """Compile the training step and the search, and print the report."""
    arguments = parse_flags(Arguments, defaults=config_in_flags(sys.argv[1:]))
    config, size = arguments.settings, arguments.settings.tokenizer.vocab_size
    sizes = {"vocab_size": size, "source_vocab_size": None if config.tokenizer.joint else size}
    config = replace(config, model=replace(config.model, **sizes))
    platform, devices = find_devices(arguments.device)
    report: Answer = {"device": devices[0].device_kind, "devices": len(devices)}
    with running_on(platform, devices):
        report["train_step"] = step = _train_step(config, devices, arguments.length)
        if not arguments.table:
            report["search"] = _search(config, devices[0])
    parts = step.get("parts") if arguments.table else None
    print(markdown(parts) if parts else json.dumps(report, indent=2))


def _train_step(config: Config, devices: list[Any], length: int) -> Answer:
    mesh, batch = make_mesh(config.mesh, devices), config.batch
    rows = batch.tokens // length // batch.row_multiple * batch.row_multiple
    side = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=batch_sharding(mesh))
    functions = make_step_functions(config, mesh)
    lowered = functions.train_step.lower(functions.abstract_state, Batch(side, side))
    text, figures = _compile(lowered)
    figures |= {"rows": rows, "mesh": dict(mesh.shape), "collectives": collectives(text)}
    if devices[0].platform == "gpu":
        figures["parts"] = by_part(kernels(text), H200_RATES)
    return figures


def _search(config: Config, device: Any) -> Answer:
    """Compile the search for one device; several devices search independently."""
    engine = Engine([Transformer(config.model, rngs=nnx.Rngs(0))], config.decoding)
    bucket = engine.buckets[0]
    text, figures = _compile(engine.lowered(bucket, SingleDeviceSharding(device)))
    every, rows = computations(text), jax.eval_shape(lambda: engine.new_rows(bucket))
    caches = {x.shape for x in jax.tree.leaves(rows.cache) if len(x.shape) == 4}
    copies = copied(every, [name for name in every if "fused" not in name], caches)
    return figures | {"rows": bucket.rows, "copied_caches": len(copies)}


def _compile(lowered: Any) -> tuple[str, Answer]:
    begin = time.perf_counter()
    compiled = lowered.compile()
    seconds, memory = time.perf_counter() - begin, compiled.memory_analysis()
    names = {"arguments": "argument", "temporary": "temp", "in_place": "alias"}
    sizes = {name: getattr(memory, f"{x}_size_in_bytes") / 1e6 for name, x in names.items()}
    return compiled.as_text(), {"compile_seconds": seconds, "memory_mb": sizes}


if __name__ == "__main__":
    sys.exit(run_program(main))
