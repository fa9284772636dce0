"""The parts of a training step on a GPU, and the time that their kernels would take.

A kernel belongs to a part by its name in the program, which ``jax.named_scope`` in the model gives,
and by what it does. Its time is a plain estimate: a fixed time, plus the longest of what its bytes,
its matrix products and its integer operations take, at the same rates for every kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.kernels import Kernel

PARTS = (
    "loss: products",
    "loss: rest",
    "products: forward",
    "products: input gradient",
    "products: weight gradient",
    "attention: products",
    "attention: transposes",
    "attention: softmax",
    "attention: custom kernels",
    "feed-forward: bias and activation",
    "norms and dropout",
    "random bits",
    "embedding",
    "optimizer and casts",
)


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches."""

    bytes: float  # a second
    flops: float  # a second, in bfloat16 products
    integer_operations: float  # a second
    launch: float  # seconds that each kernel takes at least


# H200: 0.82 of what a plain copy (4.3 TB/s) and 0.84 of what a product of 8192 x 8192 (715 TFLOP/s)
# reached there; 132 multiprocessors x 64 lanes x 1.98 GHz.
RATES = {"h200": Rates(3.5e12, 600e12, 16.7e12, 1.5e-6)}


def part(kernel: Kernel) -> str:
    """Which of ``PARTS`` a kernel of a training step belongs to."""
    names = set(re.findall(r"\w+", kernel.source))
    is_product = kernel.kind in {"product", "weight gradient"}
    if "loss" in names:
        return "loss: products" if is_product else "loss: rest"
    if kernel.kind == "random":
        return "random bits"
    if "embedding" in names:
        return "embedding"
    if is_product and "dot_product_attention" in names:
        return "attention: products"
    if is_product and "transpose" not in names:
        return "products: forward"
    if is_product:
        is_weight = kernel.kind == "weight gradient"
        return f"products: {'weight' if is_weight else 'input'} gradient"
    if kernel.kind == "custom" and "dot_product_attention" in names:
        return "attention: custom kernels"
    if kernel.kind == "move" and "jvp" in names:
        return "attention: transposes"
    if "dot_product_attention" in names:
        return "attention: softmax"
    if "jvp" not in names or kernel.name.startswith("wrapped_convert"):  # a weight to bfloat16
        return "optimizer and casts"
    if "feed_forward" in names:
        return "feed-forward: bias and activation"
    return "norms and dropout"  # and what joins the gradients of the branches that begin there


def by_part(kernels: Iterable[Kernel], rates: Rates | None) -> dict[str, dict[str, float]]:
    """Kernels, GB, TFLOP and milliseconds of each part, and of all."""
    table = {name: {"kernels": 0, "gb": 0.0, "tflop": 0.0, "ms": 0.0} for name in (*PARTS, "all")}
    for kernel in kernels:
        of_one = {"kernels": 1, "gb": kernel.bytes / 1e9, "tflop": kernel.flops / 1e12}
        if rates is not None:
            of_one["ms"] = 1e3 * seconds(kernel, rates)
        for row in table[part(kernel)], table["all"]:
            for name, amount in of_one.items():
                row[name] += kernel.launches * amount
    if rates is None:
        for row in table.values():
            del row["ms"]
    return {
        name: {key: round(value, 3) for key, value in row.items()}
        for name, row in table.items()
        if row["kernels"]
    }


def seconds(kernel: Kernel, rates: Rates) -> float:
    """The time that one launch would take."""
    return rates.launch + max(
        kernel.bytes / rates.bytes,
        kernel.flops / rates.flops,
        kernel.integer_operations / rates.integer_operations,
    )


def markdown(table: dict[str, dict[str, float]]) -> str:
    """The table for a page of docs."""
    columns = list(table["all"])
    lines = [["part", *columns], ["---"] * (len(columns) + 1)]
    for name, row in table.items():
        lines.append([name, *(f"{row[key]:,.{0 if key == 'kernels' else 2}f}" for key in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
