"""What a compiled function does, read from its HLO: cache copies, collectives, kernels."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from math import prod

_BYTES = {
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "s64": 8,
    "u64": 8,
    "u16": 2,
    "s8": 1,
    "u8": 1,
    "pred": 1,
}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Type and shape of all arrays named in this text, such as ``(f32[8,512], bf16[8])``."""
    return [
        (dtype, tuple(int(length) for length in shape.split(",") if length))
        for dtype, shape in _SHAPE.findall(text)
    ]


def array_bytes(text: str) -> int:
    """The size of all these arrays."""
    return sum(_BYTES.get(dtype, 0) * prod(shape) for dtype, shape in arrays(text))


def computations(program: str) -> dict[str, str]:
    """The text of each computation but the entry, by its name (``%...``)."""
    return {
        text.split()[0]: text
        for text in re.split(r"\n(?=%|ENTRY)", program)
        if text.startswith("%")
    }


def innermost_loop(program: str, *, hypotheses: int, vocab_size: int) -> set[str]:
    """Names of the computations that make a search's logits, float32 [hypotheses, V], and of all
    that they call.
    """
    texts = computations(program)
    calls = {
        name: {called for called in re.findall(r"%[\w.\-]+", text) if called in texts}
        for name, text in texts.items()
    }
    logits = re.compile(rf"f32\[(?:{hypotheses}|\d+,\d+),{vocab_size}\]")
    makes_logits = [
        name
        for name, text in texts.items()
        if logits.search(text) and re.search("dot|convolution|matmul", text)
    ]
    # not the loops around it
    steps = {name for name in makes_logits if " while(" not in texts[name]}
    while called := set().union(*(calls[name] for name in steps)) - steps:
        steps |= called
    return steps


def moved(
    program: str, names: Collection[str], shapes: Collection[tuple[int, ...]]
) -> list[tuple[str, str]]:
    """Operations of these computations that write an array of one of these shapes anew, though they
    compute nothing.
    """
    texts = computations(program)
    moves = re.compile(
        r"= [a-z]+\d*\[([\d,]+)\]\S* (copy|gather|transpose|concatenate|pad|select)\("
    )
    found = [(op, shape) for name in names for shape, op in moves.findall(texts[name])]
    return [(op, shape) for op, shape in found if tuple(map(int, shape.split(","))) in shapes]


def collectives(program: str) -> dict[str, dict[str, float]]:
    """By kind and type: how many there are, and the MB of what one device gets of them."""
    found: dict[str, list[int]] = defaultdict(list)
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    pattern = rf" = (\S.*?) ({names})(?:-start)?\("
    for result, kind in re.findall(pattern, program):
        sizes: dict[str, int] = defaultdict(int)
        for dtype, shape in arrays(result):
            sizes[dtype] += _BYTES.get(dtype, 0) * prod(shape)
        for dtype, size in sizes.items():
            found[f"{kind} {dtype}"].append(size)
    return {
        name: {"count": len(sizes), "mb": round(sum(sizes) / 1e6, 3)}
        for name, sizes in sorted(found.items())
    }


def host_loops(thunks: str) -> int:
    """How many loops are no part of a CUDA graph, by XLA's dump of what it launches on a GPU
    (``thunk_sequence_after_thunk_passes``).
    """
    count, graph = 0, None
    for indent, kind in re.findall(r"^( *)\d+: (k\w+)", thunks, re.M):
        if graph is not None and len(indent) <= graph:
            graph = None
        if kind == "kCommandBuffer" and graph is None:
            graph = len(indent)
        count += kind == "kWhile" and graph is None
    return count
