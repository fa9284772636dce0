"""The compiled functions of a search: encoding, decoding, and creating idle rows."""

from __future__ import annotations

import logging
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.decoding.continuous_batching import Admitted, Rows, admit_and_decode
from transformer_jax.decoding.length_buckets import Bucket, PaddedBatch
from transformer_jax.decoding.search import SearchMethod, SearchResult, results
from transformer_jax.model.gpu import single_device_mesh

logger = logging.getLogger(__name__)

# Compiler options for the search loop, and on a CPU for the encoder, by backend.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {
        # Without this, XLA copies caches that could be updated in place.
        "xla_cpu_copy_insertion_use_region_analysis": True,
        # Use YNNPACK, a library of CPU kernels, for matmuls only. By default, XLA uses it for sums
        # over large arrays, too: a row of a large batch is then summed in another order.
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT,"
        "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    },
    # Run the whole search as one CUDA graph: XLA's default commands plus conditionals and loops.
    # Otherwise the host decides after every step whether to continue.
    "gpu": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
        "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    },
}


class ModelSearch(NamedTuple):
    """A model without its weights and a search method: the static inputs of compiled functions."""

    graph: nnx.GraphDef[Any]
    method: SearchMethod

    def admit_and_decode(
        self,
        weights: Any,
        rows: Rows,
        encoded: Rows,
        num_encoded: jax.Array,
        max_steps: jax.Array,
        stop_after: jax.Array,
    ) -> tuple[Rows, Admitted]:
        """Run ``continuous_batching.admit_and_decode`` with the model."""
        step = nnx.merge(self.graph, weights).decode_step
        rows, admitted, _ = admit_and_decode(
            self.method, step, rows, encoded, num_encoded, max_steps, stop_after
        )
        return rows, admitted

    def encode(
        self, weights: Any, padded: PaddedBatch, bucket: Bucket, max_length: int = 0
    ) -> Rows:
        """Encode sentences and start their search. ``max_length`` is the number of target positions
        in the KV cache.
        """
        model: Any = nnx.merge(self.graph, weights)
        with single_device_mesh():
            memory_BSD = model.encode(padded.source_BS)
        cache = model.start_cache(
            memory_BSD,
            padded.source_BS != self.method.pad_id,
            beam_size=self.method.beam_size,
            max_length=max_length,
            source_capacity=bucket.lengths[-1],
        )
        return Rows(self.method.start(**padded.start_arguments), cache)

    def idle_rows(self, weights: Any, padded: PaddedBatch, bucket: Bucket) -> Rows:
        """Create idle rows with the shapes of ``padded``, which has one row."""
        max_length = padded.start_arguments["prefix_BP"].shape[1]
        encode = partial(self.encode, bucket=bucket, max_length=max_length)
        zeros = jax.tree.map(
            lambda x: jnp.zeros((bucket.num_rows, *x.shape[1:]), x.dtype),
            jax.eval_shape(encode, weights, padded),
        )
        size = sum(x.nbytes for x in jax.tree.leaves(zeros.cache)) / 1e9
        logger.info(
            "Compiling the search for %d sentences of up to %d tokens (KV cache: %.1f GB).",
            bucket.num_rows,
            bucket.lengths[-1],
            size,
        )
        idle = zeros.state._replace(done_B=~zeros.state.done_B)
        return Rows(idle, zeros.cache.empty_like())


class CompiledSearch(NamedTuple):
    """Jitted functions of weights and arrays; the bucket is static."""

    encode: Any
    admit_and_decode: Any
    idle_rows: Any


@lru_cache(maxsize=32)
def compile_search(search: ModelSearch) -> CompiledSearch:
    """Jit the functions that all engines with the same search share, whatever their device."""
    backend = jax.default_backend()
    options = COMPILER_OPTIONS.get(backend)
    encoder_options = options if backend == "cpu" else None
    return CompiledSearch(
        jax.jit(search.encode, static_argnames="bucket", compiler_options=encoder_options),
        jax.jit(search.admit_and_decode, donate_argnames="rows", compiler_options=options),
        # The weights, although unused, determine the device.
        jax.jit(search.idle_rows, static_argnames="bucket", keep_unused=True),
    )


@jax.jit
def finished_results(rows: Rows) -> tuple[jax.Array, SearchResult]:
    """Return which rows are done, and the results of all rows."""
    # The tokens after a result's length are never read, so any padding will do.
    return rows.state.done_B, results(rows.state.finished, pad_id=0)
