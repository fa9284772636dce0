"""What kernels are read from a compiled function's text, and which part of the model they are."""

from __future__ import annotations

import pytest

from benchmarks.kernels import kernels, step_loops
from benchmarks.parts import Rates, by_part, markdown, seconds

# 3 turns of a loop, which takes a slice of %chunks, multiplies and puts a row into %rows; then the
# product of 2 x 8 tokens, split along the sum; and random bits
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


def test_kernels_of_loops_slices_and_products():
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
    assert [found[name].kind for name in ("product", "gradient", "random", "taken")] == [
        *("product", "weight gradient", "random", "move"),
    ]


def test_parts_and_their_times():
    rates = Rates(bytes=1e9, flops=1e9, integer_operations=1e6, launch=1e-6)
    table = by_part(kernels(PROGRAM), rates)
    assert {name: row["kernels"] for name, row in table.items()} == {
        "loss: products": 3,
        "loss: rest": 6,  # the slice has no name of its own; its user has
        "products: weight gradient": 1,
        "random bits": 1,
        "all": 11,
    }
    assert table["random bits"]["ms"] == pytest.approx(1e3 * (1e-6 + 200 / 1e6))
    product = next(kernel for kernel in kernels(PROGRAM) if kernel.name == "product")
    assert seconds(product, rates) == pytest.approx(1e-6 + 640e-9)  # longer than its bytes take
    assert "ms" not in by_part(kernels(PROGRAM), None)["all"]
    assert "| all | 11 |" in markdown(table)


def test_what_steps_read_of_their_caches():
    [(launched, read)] = step_loops(PROGRAM, {(3, 8, 4)})
    assert [kernel.name for kernel in launched] == ["taken", "product", "written"]
    assert read == 2 * 8 * 4
