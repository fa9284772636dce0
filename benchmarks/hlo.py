"""Operations and kernels of a compiled program, parsed from XLA's text and assigned to parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from math import prod
from typing import NamedTuple

from benchmarks.in_turn import Table

# H200: 0.82 of the measured copy bandwidth (4.3 TB/s), 0.84 of the measured speed of an 8192 x 8192
# matmul (715 TFLOP/s); 132 multiprocessors x 64 lanes x 1.98 GHz
H200_RATES = {"bytes": 3.5e12, "flops": 600e12, "integer_operations": 16.7e12}
_LAUNCH = 1.5e-6  # minimum seconds per kernel

_OPERATION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)$", re.M)
_ARRAY = re.compile(r"\b((?:pred|bf|[fsu])(\d*))\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r" = (\S.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-done)?\("
)
_FREE = re.compile(  # no kernel launch
    "parameter|constant|tuple|get-tuple-element|bitcast|partition-id|after-all|opt-barrier|.*-done"
)
_MOVING = re.compile("transpose|copy|slice|dynamic-slice|concatenate")
_COPYING = re.compile("copy|gather|transpose|concatenate|pad|select")
_INTEGER = re.compile("add|subtract|multiply|xor|or|and|shift-left|shift-right-logical")


def arrays(text: str) -> list[tuple[str, tuple[int, ...], int]]:
    """Parse the type, shape and bytes of arrays in HLO text such as ``(f32[8,512], bf16[8])``."""
    arrays = []
    for dtype, bits, lengths in _ARRAY.findall(text):
        shape = tuple(int(n) for n in lengths.split(",") if n)
        arrays.append((dtype, shape, int(bits or 8) // 8 * prod(shape)))
    return arrays


class Operation(NamedTuple):
    """A line of HLO."""

    root: bool
    name: str
    type: str
    kind: str
    operands: tuple[str, ...]
    attributes: str
    number: int = 0  # index of a parameter, value of a constant

    @property
    def bytes(self) -> int:
        """Size of the result; for a library's matmul, without its workspace."""
        sizes = [size for _, _, size in arrays(self.type)]
        return sizes[0] if "__cublas" in self.attributes else sum(sizes)

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
        return self.kind in {"dot", "convolution"} or bool(
            re.search("__cublas|matmul", self.attributes)
        )

    def flops(self, left: Operation) -> float:
        """Count the FLOPs of a matmul with the left operand ``left``."""
        axes = re.search(r'lhs_contracting_dim\w*"?[=:][{\[]([\d,"]*)', self.attributes)
        contracted = [left.shape[int(x)] for x in re.findall(r"\d+", axes[1] if axes else "")]
        return 2.0 * prod(self.shape) * prod(contracted)


Computation = dict[str, Operation]
Program = dict[str, Computation]


def computations(program: str) -> Program:
    """Parse the operations of each computation, by name; the entry computation is ``ENTRY``."""
    every = {}
    for text in re.split(r"\n(?=%|ENTRY)", program):
        operations = {}
        for root, name, type_, kind, operands, attributes in _OPERATION.findall(text):
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            number = int(operands) if operands.isdigit() else 0
            operations[name] = Operation(bool(root), name, type_, kind, names, attributes, number)
        every[text.split()[0].lstrip("%")] = operations
    return every


def shares(inside: Computation) -> Callable[[str], float]:
    """Make a function that returns which fraction of an array is read. Slices and gathers read only
    a part.
    """

    @cache
    def share(name: str) -> float:
        users = [x for x in inside.values() if name in x.operands]
        total = float(inside[name].root or not users)
        for user in users:
            is_operand = user.operands[0] == name
            if is_operand and user.kind in {"slice", "dynamic-slice", "gather"}:
                total += share(user.name) * user.bytes / inside[name].bytes
            elif not (is_operand and user.kind in {"dynamic-update-slice", "scatter"}):  # in place
                total += share(user.name)
        return min(1.0, total)

    return share


class Kernel:
    """Work of one kernel launch, and the number of launches."""

    def __init__(self, every: Program, around: Computation, operation: Operation, launches: int):
        """``around`` is the computation that contains the operation."""
        self.name = operation.name
        self.launches = launches
        inner = {
            name: Operation(False, name, around[name].type, "parameter", (), "", number)
            for number, name in enumerate(operation.operands)
        } | {operation.name: operation._replace(root=True)}
        if operation.kind in {"fusion", "fusion-start"}:
            inner = every[operation.calls[0]]
        operations = list(inner.values())
        share = shares(inner)
        self.reads = dict.fromkeys(operation.operands, 0.0)  # bytes
        for x in operations:
            if x.kind == "parameter":
                self.reads[operation.operands[x.number]] += x.bytes * share(x.name)
        [root] = [x for x in operations if x.root]
        self.written = 0
        results = set()  # bytes; operations that write them
        for x in [inner[x] for x in root.operands] if root.kind == "tuple" else [root]:
            while x.kind == "bitcast":  # another view of an array
                x = inner[x.operands[0]]
            # an in-place update counts only its slice, a scatter twice its updates
            put = {"dynamic-update-slice": 1, "scatter": 2}.get(x.kind)
            self.written += put * inner[x.operands[put]].bytes if put else x.bytes
            results.add(x.kind)
        self.bytes = sum(self.reads.values()) + self.written
        unsigned = [x for x in operations if x.type.startswith(("u32", "u64"))]
        self.integer_operations = sum(prod(x.shape) for x in unsigned if _INTEGER.fullmatch(x.kind))
        # Operations that XLA adds have no name; take a neighbor's name.
        near = [operation, *reversed(operations), *(around[x] for x in operation.operands)]
        near += [x for x in around.values() if operation.name in x.operands]
        names = (re.search(r'op_name="([^"]+)"', x.attributes) for x in near)
        self.source = next((x[1] for x in names if x), "")
        estimate = re.search(r'estimated_cycles":"(\d+)', operation.attributes)
        self.cycles = int(estimate[1]) if estimate else 0  # on a TPU
        self.flops = 0.0
        self.kind = "rest"
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


def iterations(every: Program, operation: Operation) -> int:
    """Find the number of iterations of a loop, 1 if unknown. A TPU's loop compares its counter with
    a constant.
    """
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', operation.attributes):
        return int(known[1])
    condition = every[operation.calls[0]] if operation.kind == "while" else {}
    return max((x.number for x in condition.values() if x.kind == "constant"), default=1)


def is_free(operation: Operation) -> bool:
    """Return True if nothing runs for the operation, such as a constant or another view."""
    return _FREE.fullmatch(operation.kind) is not None


def kernels(program: str) -> list[Kernel]:
    """Find the kernels of a compiled function, with the number of iterations of their loops."""
    every = computations(program)

    def launched(around: Computation, times: int) -> Iterator[Kernel]:
        for operation in around.values():
            if operation.kind in {"while", "call"}:
                body = every[operation.calls[-1]]
                yield from launched(body, times * iterations(every, operation))
            elif not is_free(operation):
                yield Kernel(every, around, operation, times)

    return list(launched(every["ENTRY"], 1))


def part(kernel: Kernel) -> str:
    """Find the part of the training step that contains a kernel."""
    names = set(re.findall(r"\w+", kernel.source))
    kind = kernel.kind
    attention = "dot_product_attention" in names
    matmul = kind in ("matmul", "weight gradient")
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
        # also sums of gradients from the branches that begin there
        "norms and dropout": True,
    }
    return next(name for name, holds in rules.items() if holds)


def by_part(kernels: Iterable[Kernel], rates: Mapping[str, float]) -> Table:
    """Add up kernels, GB, TFLOP and milliseconds of each part and in total."""
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


def by_cycles(kernels: Iterable[Kernel]) -> Table:
    """Add up a TPU's kernels and XLA's estimate of cycles, in millions, by part and in total."""
    table: Table = {}
    for kernel in filter(lambda kernel: kernel.cycles, kernels):
        for name in part(kernel), "all":
            row = table.setdefault(name, {"kernels": 0, "million cycles": 0.0})
            row["kernels"] += kernel.launches
            row["million cycles"] += kernel.launches * kernel.cycles / 1e6
    return table


def in_loops(every: Program) -> set[str]:
    """Find the computations that run in the body of a loop, but not inside a fusion."""

    def entered(x: Operation) -> list[str]:
        [branches] = re.findall(r"branch_computations={(.*?)}", x.attributes) or [""]
        outside = x.kind in ("while", "conditional", "call")
        return [*x.calls, *re.findall(r"%([\w.\-]+)", branches)] if outside else []

    loops = [x for inside in every.values() for x in inside.values() if x.kind == "while"]
    inside = {name for x in loops for name in entered(x)}
    while new := {y for name in inside for x in every[name].values() for y in entered(x)} - inside:
        inside |= new
    return inside


def copied(
    every: Program, names: Iterable[str], shapes: Collection[tuple[int, ...]]
) -> list[Operation]:
    """Find operations that copy an array of one of these shapes without computing anything."""
    inside = [x for name in names for x in every[name].values() if _COPYING.fullmatch(x.kind)]
    return [x for x in inside if x.shape in shapes]


def collectives(program: str) -> Table:
    """Count collectives by kind and type, with MB of their results on one device.

    An asynchronous collective counts once, by its ``-done``, because in some versions of XLA the
    type of its ``-start`` also includes the operands.
    """
    table: Table = {}
    for result, kind in _COLLECTIVE.findall(program):
        sizes: Counter[str] = Counter()
        for dtype, _, size in arrays(result):
            sizes[f"{kind} {dtype}"] += size
        for name, size in sizes.items():
            row = table.setdefault(name, {"count": 0, "mb": 0.0})
            row["count"] += 1
            row["mb"] += size / 1e6
    return table
