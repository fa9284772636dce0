"""What each kernel that a compiled function launches on a GPU reads, writes and computes, as its
HLO tells.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from benchmarks.hlo import array_bytes, arrays

_OPERATION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)$")
# these launch nothing
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id"),
    *("fusion-done", "copy-done", "async-done", "after-all", "opt-barrier"),
}
_MOVING = {"transpose", "copy", "slice", "dynamic-slice", "concatenate"}
_INTEGER = {"add", "subtract", "multiply", "xor", "or", "and", "shift-left", "shift-right-logical"}


@dataclass(frozen=True)
class Operation:
    """A line of HLO."""

    name: str
    type: str
    kind: str
    operands: tuple[str, ...]
    attributes: str
    number: int  # of a parameter
    is_root: bool

    @property
    def bytes(self) -> int:
        """Of the result."""
        return array_bytes(self.type)

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Type and shape of the result's arrays."""
        return arrays(self.type)

    @property
    def elements(self) -> int:
        """Of the result's first array."""
        return prod(self.shapes[0][1])

    @property
    def source(self) -> str:
        """Where in the program it comes from: ``jit(train_step)/jvp(attention)/...``."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def called(self) -> str | None:
        """The computation that it runs."""
        found = re.search(r"(?:calls|body|to_apply)=%([\w.\-]+)", self.attributes)
        return found[1] if found else None

    def dimensions(self, name: str) -> list[int]:
        """A list such as ``lhs_contracting_dims={1}``, also of a call to cuBLAS."""
        found = re.search(rf'{name}\w*"?[=:][{{\[]([\d,"]*)', self.attributes)
        return [int(x) for x in found[1].replace('"', "").split(",") if x] if found else []


class Computation:
    """Named operations in their order."""

    def __init__(self, text: str):
        """The computation's text in HLO."""
        self.operations: dict[str, Operation] = {}
        self._shares: dict[str, float] = {}
        for line in text.splitlines()[1:]:
            if match := _OPERATION.match(line):
                root, name, type_, kind, operands, attributes = match.groups()
                names = tuple(re.findall(r"%([\w.\-]+)", operands))
                number = int(operands) if kind == "parameter" else 0
                self.operations[name] = Operation(
                    name, type_, kind, names, attributes, number=number, is_root=bool(root)
                )
        self.root = next((x for x in self.operations.values() if x.is_root), None)

    @cached_property
    def users(self) -> dict[str, list[Operation]]:
        """Who takes each operation's result."""
        users: dict[str, list[Operation]] = {name: [] for name in self.operations}
        for operation in self.operations.values():
            for name in set(operation.operands):
                users[name].append(operation)
        return users

    def results(self) -> list[Operation]:
        """The operations whose results leave the computation."""
        assert self.root is not None
        is_tuple = self.root.kind == "tuple"
        return [self.operations[x] for x in self.root.operands] if is_tuple else [self.root]

    def unviewed(self, operation: Operation) -> Operation:
        """The array that this is another view of."""
        while operation.kind == "bitcast":
            operation = self.operations[operation.operands[0]]
        return operation

    def read(self, name: str) -> float:
        """Bytes of an array that the results need."""
        return self.operations[name].bytes * self._share(name)

    def _share(self, name: str) -> float:
        """The share of an array's elements that the results need: slices and gathers need few."""
        if name in self._shares:
            return self._shares[name]
        operation, share = self.operations[name], 0.0
        if operation.is_root or not self.users[name]:
            share = 1.0
        for user in self.users[name]:
            of_user = self._share(user.name)
            whole = user.operands[0] == name
            if user.kind in {"slice", "dynamic-slice", "gather"} and whole:
                share += of_user * user.elements / operation.elements
            elif not (user.kind in {"dynamic-update-slice", "scatter"} and whole):  # in place
                share += of_user
        self._shares[name] = min(1.0, share)
        return self._shares[name]

    def written(self) -> float:
        """Bytes of the results; a slice put into an array counts alone, a scatter twice."""
        total = 0
        for result in map(self.unviewed, self.results()):
            if result.kind == "dynamic-update-slice":
                total += self.operations[result.operands[1]].bytes
            elif result.kind == "scatter":
                total += 2 * self.operations[result.operands[2]].bytes
            else:
                total += result.bytes
        return total


@dataclass(frozen=True)
class Kernel:
    """What one launch does, and how often it is launched."""

    name: str
    source: str  # where in the program it comes from
    kind: str  # product, weight gradient, random, move, custom (Pallas, cuDNN) or rest
    reads: dict[str, float]  # bytes of each operand, by the operation that makes it
    written: float  # bytes
    flops: float  # of matrix products
    integer_operations: float  # of unsigned integers: random bits
    launches: int

    @property
    def bytes(self) -> float:
        """Read and written."""
        return sum(self.reads.values()) + self.written


def computations(program: str) -> dict[str, Computation]:
    """Each computation by its name; the entry is ``ENTRY``."""
    texts = (text for text in re.split(r"\n(?=%|ENTRY)", program) if text[0] in "%E")
    return {text.split()[0].lstrip("%"): Computation(text) for text in texts}


def kernels(program: str, *, entry: str = "ENTRY") -> list[Kernel]:
    """What a compiled function, or one of its computations, launches; loops as often as they turn.

    A loop whose number of turns XLA does not know counts once.
    """
    every = computations(program)
    return list(_launched(every, every[entry], 1))


def step_loops(
    program: str, caches: Collection[tuple[int, ...]]
) -> list[tuple[list[Kernel], float]]:
    """The loops of a search that take steps, in their order: the kernels of one turn, and how many
    bytes they read of arrays that have the caches' shapes.
    """
    every = computations(program)
    bodies = {
        str(operation.called)
        for computation in every.values()
        for operation in computation.operations.values()
        if operation.kind == "while"
    }
    loops = []
    for name, computation in every.items():
        inside = computation.operations
        if name not in bodies or any(x.kind == "while" for x in inside.values()):
            continue
        launched = list(_launched(every, computation, 1))
        if any(kernel.flops for kernel in launched):
            is_cache = {
                name: computation.unviewed(operation).shapes[0][1] in caches
                for name, operation in inside.items()
            }
            read = sum(n for k in launched for x, n in k.reads.items() if is_cache[x])
            loops.append((launched, read))
    return loops


def _launched(
    every: dict[str, Computation], computation: Computation, times: int
) -> Iterator[Kernel]:
    for operation in computation.operations.values():
        if operation.kind in _FREE:
            continue
        if operation.kind in {"while", "call"}:
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.attributes)
            body = every[str(operation.called)]
            yield from _launched(every, body, times * int(turns[1] if turns else 1))
        else:
            yield _kernel(every, computation, operation, times)


def _kernel(
    every: dict[str, Computation], around: Computation, operation: Operation, times: int
) -> Kernel:
    inner = every.get(str(operation.called))
    if inner is not None and inner.root is not None and inner.root.kind == "fusion":
        inner = every[str(inner.root.called)]  # of an asynchronous fusion
    if inner is None or operation.kind not in {"fusion", "fusion-start"}:
        inner = Computation("")  # a single operation; its operands are parameters
        for name in set(operation.operands):
            given = around.operations[name]
            index = operation.operands.index(name)
            inner.operations[name] = Operation(
                name, given.type, "parameter", (), "", number=index, is_root=False
            )
        inner.operations[operation.name] = inner.root = operation
    inside = inner.operations.values()
    reads = dict.fromkeys(operation.operands, 0.0)
    for x in inside:
        if x.kind == "parameter":
            reads[operation.operands[x.number]] += inner.read(x.name)
    products = [x for x in inside if x.kind == "dot" or "__cublas" in x.attributes]
    sizes = [_product_sizes(inner, x) for x in products]
    return Kernel(
        name=operation.name,
        source=_source(around, operation, inner),
        kind=_kind(operation, inner, sizes),
        reads=reads,
        written=inner.written(),
        flops=sum(2.0 * prod(size) for size in sizes),
        integer_operations=sum(
            x.elements for x in inside if x.kind in _INTEGER and x.shapes[0][0] in {"u32", "u64"}
        ),
        launches=times,
    )


def _kind(operation: Operation, inner: Computation, products: list[tuple[int, int, int]]) -> str:
    kinds = {x.kind for x in inner.operations.values()}
    if products:
        # only a weight's gradient sums over the batch's tokens, the longest axis of all
        rows, columns, contracted = products[0]
        return "weight gradient" if contracted > max(rows, columns) else "product"
    if {"xor", "shift-right-logical"} <= kinds:
        return "random"
    if operation.kind == "custom-call":
        return "custom"
    moved = {x.kind for x in map(inner.unviewed, inner.results())}
    if "transpose" in operation.name or moved <= _MOVING:
        return "move"
    return "rest"


def _source(around: Computation, operation: Operation, inner: Computation) -> str:
    """What XLA made by itself has no name: its neighbours' then."""
    sources = [operation, *reversed(inner.operations.values())]
    sources += [around.operations[x] for x in operation.operands]
    sources += around.users[operation.name]
    return next((x.source for x in sources if x.source), "")


def _product_sizes(computation: Computation, product: Operation) -> tuple[int, int, int]:
    """Rows, columns and the sum's length of a matrix product. One that XLA has split along the sum
    has shares of it as a batch.
    """
    left = computation.operations[product.operands[0]].shapes[0][1]
    contracted = prod(left[axis] for axis in product.dimensions("lhs_contracting_dim"))
    batch = prod(left[axis] for axis in product.dimensions("lhs_batch_dim"))
    rows = prod(left) // (contracted * batch)
    columns = product.elements // (rows * batch)
    return rows, columns, contracted * batch
