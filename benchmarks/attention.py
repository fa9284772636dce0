"""Speed and rounding of attention, forward and backward, on this machine's accelerator.

    python -m benchmarks.attention --lengths 32 64 128 256 512

Each of ``--lengths`` is a number of tokens per row; ``--positions`` limits the number of rows. The
masks are the model's: padded rows, packed rows (four sentences per row), the decoder's causal
packed rows, and cross-attention between packed rows. The last eighth of each row is padding, so
some queries have no keys to attend to. Implementations:

- ``ours``: the attention that the model uses in bfloat16;
- ``plain``: ``jax.nn.dot_product_attention``, compiled by XLA, in bfloat16;
- ``cudnn`` (GPU): the same with cuDNN, where queries without keys attend to all keys;
- ``splash`` (TPU): JAX's splash attention with segment ids, for multiples of 128 tokens.

``out``, ``dq``, ``dk`` and ``dv`` are the largest errors, relative to the largest value of plain
attention in float32. Only real queries have a gradient. Errors far above ``plain`` errors mean
wrong results. ``ms`` is the time for one forward and backward pass.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.in_turn import Table, finish
from transformer_jax.model.attention import attention_mask, dot_product_attention
from transformer_jax.model.attention_kernel import short_attention, supports

Attention = Callable[..., jax.Array]
KINDS = ("padded", "packed", "causal", "cross")


def seeing(mask_B1TS: jax.Array) -> jax.Array:
    """Let queries without keys attend to all keys. Real queries keep their mask."""
    return mask_B1TS | ~mask_B1TS.any(-1, keepdims=True)


def ours(q_BTHK: Any, k_BSHK: Any, v_BSHK: Any, mask_B1TS: Any) -> jax.Array:
    """Run the fused kernel, or plain attention where the model does not use the kernel."""
    B, T, H, K = q_BTHK.shape
    dtype = q_BTHK.dtype
    x_BTD = jax.ShapeDtypeStruct((B, T, H * K), dtype)
    query, value = (
        SimpleNamespace(kernel=jax.ShapeDtypeStruct((H * K, H, each.shape[3]), dtype), dtype=dtype)
        for each in (q_BTHK, v_BSHK)
    )
    chosen = supports(x_BTD, query, value, mask_B1TS)
    return (short_attention if chosen else dot_product_attention)(q_BTHK, k_BSHK, v_BSHK, mask_B1TS)


def cudnn(q_BTHK: Any, k_BSHK: Any, v_BSHK: Any, mask_B1TS: Any) -> jax.Array:
    """Run cuDNN's attention, whose gradients are wrong for queries without keys."""
    return jax.nn.dot_product_attention(
        q_BTHK, k_BSHK, v_BSHK, mask=seeing(mask_B1TS), implementation="cudnn"
    )


def splash(
    queries_BT: jax.Array, keys_BS: jax.Array, *, causal: bool, interpret: bool = False
) -> Attention:
    """Make splash attention for these segment ids. Padding attends to padding."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    lengths = queries_BT.shape[1], keys_BS.shape[1]
    names = [f"block_{side}" for side in ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")]
    blocks = library.BlockSizes(**dict.fromkeys(names, min(512, *lengths)))
    mask = (library.CausalMask if causal else library.FullMask)(lengths)

    def attention(q_BTHK: Any, k_BSHK: Any, v_BSHK: Any, mask_B1TS: Any) -> jax.Array:
        masks = library.MultiHeadMask([mask] * q_BTHK.shape[2])
        kernel = library.make_splash_mha_single_device(
            masks, block_sizes=blocks, interpret=interpret
        )

        def of_row(q_HTK: Any, k_HSK: Any, v_HSK: Any, *ids: Any) -> jax.Array:
            return kernel(q_HTK, k_HSK, v_HSK, library.SegmentIds(*ids))

        scaled = q_BTHK * q_BTHK.shape[-1] ** -0.5
        arrays = [x.swapaxes(1, 2) for x in (scaled, k_BSHK, v_BSHK)]
        return jax.vmap(of_row)(*arrays, queries_BT, keys_BS).swapaxes(1, 2)

    return attention


def plain(q_BTHK: Any, k_BSHK: Any, v_BSHK: Any, mask_B1TS: Any) -> jax.Array:
    """Run JAX's attention without fused kernels."""
    return jax.nn.dot_product_attention(q_BTHK, k_BSHK, v_BSHK, mask=mask_B1TS)


def segments(kind: str, rows: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Make segment ids of queries and keys, int32 [B, T] and [B, S]."""
    sentences = 1 if kind == "padded" else 4
    real = length - length // 8
    segments_L = jnp.where(jnp.arange(length) < real, jnp.arange(length) * sentences // real + 1, 0)
    keys_L = segments_L
    if kind == "cross":  # sentences end elsewhere on the other side
        keys_L = jnp.where(segments_L > 0, jnp.roll(segments_L, 3).at[:3].set(1), 0)
    queries_BT, keys_BS = (jnp.broadcast_to(x, (rows, length)) for x in (segments_L, keys_L))
    return queries_BT, keys_BS


def gradients(attention: Attention, arrays: Any, mask_B1TS: Any, weight_BTHK: Any) -> Any:
    """Compute the output, and gradients of its product with ``weight_BTHK``, in float32."""
    out_BTHK, vjp = jax.vjp(lambda *x: attention(*x, mask_B1TS), *arrays)
    outputs = out_BTHK * (weight_BTHK != 0), *vjp(weight_BTHK.astype(out_BTHK.dtype))
    return [x.astype(jnp.float32) for x in outputs]


def measure(attention: Attention, arrays: Any, constants: Any, expected: Any, rounds: int) -> Any:
    """Measure errors and milliseconds of one implementation."""
    run = jax.jit(partial(gradients, attention))
    arrays = [x.astype(jnp.bfloat16) for x in arrays]
    outputs = jax.block_until_ready(run(arrays, *constants))
    begin = time.perf_counter()
    jax.block_until_ready([run(arrays, *constants) for _ in range(rounds)])
    seconds = (time.perf_counter() - begin) / rounds
    errors = [float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in zip(outputs, expected)]
    return dict(zip(("out", "dq", "dk", "dv"), errors, strict=True)) | {"ms": 1e3 * seconds}


def main() -> None:
    """Measure each length, mask and implementation."""
    flags = ArgumentParser(description=__doc__)
    add = flags.add_argument
    add("--lengths", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    add("--positions", type=int, default=25_088, help="tokens per side")
    add("--heads", type=int, default=8)
    add("--rounds", type=int, default=20)
    add("--output", type=Path, help="JSON file for results")
    arguments = flags.parse_args()
    table: Table = {}
    for length in arguments.lengths:
        rows = max(1, arguments.positions // length)
        shape = rows, length, arguments.heads, 64
        *arrays, weight_BTHK = (
            jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)
        )
        for kind in KINDS:
            queries_BT, keys_BS = segments(kind, rows, length)
            causal = kind == "causal"
            mask_B1TS = attention_mask(queries_BT, keys_BS, causal=causal)
            constants = mask_B1TS, weight_BTHK * (queries_BT > 0)[..., None, None]
            with jax.default_matmul_precision("highest"):
                expected = jax.jit(partial(gradients, plain))(arrays, *constants)
            compared: dict[str, Attention] = {"ours": ours, "plain": plain}
            if jax.default_backend() == "gpu":
                compared["cudnn"] = cudnn
            if jax.default_backend() == "tpu" and length % 128 == 0:
                compared["splash"] = splash(queries_BT, keys_BS, causal=causal)
            for name, attention in compared.items():
                row = measure(attention, arrays, constants, expected, arguments.rounds)
                table[f"{length} tokens, {kind}, {name}"] = row
    finish(table, None, arguments)


if __name__ == "__main__":
    main()
