"""Search over token ids, with a few compiled searches for sentences of all lengths."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields
from functools import lru_cache, partial
from itertools import chain, groupby, islice, zip_longest
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.continuous_batching import (
    EMPTY,
    Found,
    Rows,
    admit_and_decode,
    resized,
)
from transformer_jax.decoding.devices import on_device
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.length_buckets import Bucket, Padded, make_block, make_buckets
from transformer_jax.decoding.lexical_constraints import SIZES
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import Hypothesis, Method, Sentence, results
from transformer_jax.errors import UserError
from transformer_jax.model.gpu import on_one_device
from transformer_jax.model.matmul import check_int8
from transformer_jax.model.transformer import Transformer, with_cast_weights
from transformer_jax.settings.config import DecodingConfig, ModelConfig

logger = logging.getLogger(__name__)

_ALL = 2**30

# Compiler options for the search loop, and on a CPU for the encoder, by backend.
_COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
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


class _Search(NamedTuple):
    """Static inputs to an engine's compiled functions."""

    graph: nnx.GraphDef[Any]
    method: Method

    def admit_and_decode(
        self, weights: Any, rows: Rows, block: Rows, max_steps: jax.Array, stop_after: jax.Array
    ) -> tuple[Rows, Found]:
        """Run ``continuous_batching.admit_and_decode`` with the model."""
        step = nnx.merge(self.graph, weights).decode_step
        rows, evicted, _ = admit_and_decode(self.method, step, rows, block, max_steps, stop_after)
        return rows, evicted

    def encode(self, weights: Any, padded: Padded, bucket: Bucket, max_length: int = 0) -> Rows:
        """Encode sentences and start their search. ``max_length`` is the number of target positions
        in the KV cache.
        """
        model: Any = nnx.merge(self.graph, weights)
        with on_one_device():
            memory_BSD = model.encode(padded.source_BS)
        cache = model.start_cache(
            memory_BSD,
            padded.source_BS != self.method.pad_id,
            beam_size=self.method.beam_size,
            max_length=max_length,
            source_capacity=bucket.lengths[-1],
        )
        return Rows(padded.number_B, self.method.start(**padded.start), cache)

    def idle_rows(self, weights: Any, padded: Padded, bucket: Bucket) -> Rows:
        """Create idle rows with the shapes of ``padded``, which has one row."""
        longest = padded.start["prefix_BP"].shape[1]
        encode = partial(self.encode, bucket=bucket, max_length=longest)
        zeros = jax.tree.map(
            lambda x: jnp.zeros((bucket.rows, *x.shape[1:]), x.dtype),
            jax.eval_shape(encode, weights, padded),
        )
        size = sum(x.nbytes for x in jax.tree.leaves(zeros.cache)) / 1e9
        said = "Compiling the search for %d sentences of up to %d tokens (KV cache: %.1f GB)."
        logger.info(said, bucket.rows, bucket.lengths[-1], size)
        idle = zeros.state._replace(done_B=~zeros.state.done_B)
        return Rows(zeros.number_B + EMPTY, idle, zeros.cache.empty_like())


class _Compiled(NamedTuple):
    """Jitted functions of weights and arrays; the bucket is static."""

    encode: Any
    admit_and_decode: Any
    idle_rows: Any


@lru_cache(maxsize=32)
def _compiled(search: _Search) -> _Compiled:
    """Jit the functions that all engines with the same search share, whatever their device."""
    backend = jax.default_backend()
    options = _COMPILER_OPTIONS.get(backend)
    of_encoder = options if backend == "cpu" else None
    return _Compiled(
        jax.jit(search.encode, static_argnames="bucket", compiler_options=of_encoder),
        jax.jit(search.admit_and_decode, donate_argnames="rows", compiler_options=options),
        # The weights, although unused, determine the device.
        jax.jit(search.idle_rows, static_argnames="bucket", keep_unused=True),
    )


class Engine:
    """Runs the search with one model or an ensemble on one device.

    A sentence's padded length and bucket depend only on its own length. Its result does not depend
    on other sentences, nor, on a CPU in mixed precision or int8, on the number of rows.

    Attributes:
      buckets: the first takes sources of up to 128 tokens, the second up to 512 tokens with a
        quarter as many rows, and so on.
      fewest_rows: minimum number of rows of a search.
      longest_source: maximum source length in tokens, EOS included.
      method: ``BeamSearch`` or ``Sampling``, from ``config``.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        config: DecodingConfig,
        *,
        suppress: tuple[int, ...] = (),
        free_prefix: int = 0,
        device: jax.Device | None = None,
    ):
        """Set up the search on ``device`` (default: the parameters' device). ``suppress`` holds the
        token ids of ``config.suppress``; ``free_prefix`` is that of ``BeamSearch``. Raises
        ``UserError`` if ``config.weights`` is int8 without AVX-512 VNNI.
        """
        if config.weights == "int8":
            check_int8()
        self.config = config
        self.method = _method(config, suppress, model.config, free_prefix)
        positions = model.config.position_limit
        self.longest_source = min(config.max_source_length, positions)
        self._longest_target = partial(config.longest_target, positions=positions)
        # XLA compiles a search with a single hypothesis to other operations.
        self.fewest_rows = 2 if jax.default_backend() == "cpu" and self.method.beam_size == 1 else 1
        self.buckets = make_buckets(self.longest_source, config.batch_size, self.fewest_rows)
        self._device = device
        self._graph, self.parameters = nnx.split(model, nnx.Param)

    @property
    def parameters(self) -> Any:
        """Parameters of the model or ``Ensemble``, as a dict from ``nnx.to_pure_dict``.

        Assign such a dict or an ``nnx.State`` to update them, without recompilation. Arrays on the
        device are not copied; do not donate them while they are in use here. An empty dict frees
        the memory until the next assignment.
        """
        return self._parameters

    @parameters.setter
    def parameters(self, parameters: Any) -> None:
        if isinstance(parameters, nnx.State):
            parameters = nnx.to_pure_dict(parameters)
        # Transfer once, not in every search.
        self._parameters = on_device(parameters, self._device)
        self._weights = {}
        if parameters:
            graph, weights = nnx.split(
                with_cast_weights(self.model, self.config.weights), nnx.Param
            )
            self._weights = nnx.to_pure_dict(weights)
            self._search = _Search(graph, self.method)
            self._compiled = _compiled(self._search)

    def on(self, device: jax.Device) -> Self:
        """Copy the engine to another device, with its current parameters. Engines on CPU devices
        share the memory of the parameters.
        """
        other = copy(self)
        other._device = device
        if device.platform == "cpu":
            other._parameters, other._weights = on_device((self._parameters, self._weights), device)
        else:
            other.parameters = self.parameters
        return other

    @property
    def model(self) -> Transformer | Ensemble:
        """The model with its current parameters."""
        return nnx.merge(self._graph, self.parameters)

    def search(self, sentences: Sequence[Sentence]) -> list[list[Hypothesis]]:
        """Find up to ``wanted`` hypotheses for each sentence, best first. A list is empty if the
        search finds no hypothesis (with a warning if the model's logits were NaN). Raises
        ``UserError`` if a source is too long.
        """
        return search_together([self], sentences)

    def dispatch(self, sentences: Mapping[int, Sentence]) -> Iterator[Found]:
        """Start the search for numbered sentences, given by shape of their terms, longest first.
        Sentences of a block have the same padded length. Yields results that the device may still
        be computing. Each sentence appears in exactly one result.
        """
        by_bucket = groupby(sentences, key=lambda n: self.bucket_of(sentences[n]))
        for bucket, numbers in by_bucket:
            blocks = list[dict[int, Sentence]]()
            for _, same in groupby(numbers, key=lambda n: bucket.length_of(sentences[n])):
                while block := {n: sentences[n] for n in islice(same, bucket.block_size)}:
                    blocks.append(block)
            rows = self.new_rows(bucket)
            for block in blocks:
                max_steps = _ALL if block is blocks[-1] else 0
                encoded = self.encode(bucket, block)
                rows, evicted = self.admit_and_decode(
                    rows, encoded, max_steps=max_steps, stop_after=_ALL
                )
                yield evicted
            yield self.results(rows)

    def bucket_of(self, sentence: Sentence) -> Bucket:
        """Find the bucket for a sentence's length and terms. Raises ``UserError`` if it is too
        long.
        """
        length = len(sentence.tokens)
        for bucket in self.buckets:
            if length < bucket.lengths[-1]:
                return bucket._replace(terms=np.shape(sentence.terms))
        raise UserError(
            f"A sentence has {length} source tokens; expected at most {self.longest_source - 1} "
            "(decoding.max_source_length or, with learned positions, model.max_positions; minus 1 "
            "for EOS)."
        )

    def buckets_with_terms(self, most: int) -> list[Bucket]:
        """Return the buckets for sentences with up to ``most`` terms, or those without terms."""
        sizes = [(), *(size for size in SIZES if size[0] <= most)]
        return [bucket._replace(terms=size) for size in sizes for bucket in self.buckets]

    def encode(self, bucket: Bucket, sentences: Mapping[int, Sentence]) -> Rows:
        """Encode up to ``bucket.block_size`` numbered sentences of one padded length."""
        # The number of rows makes no difference, so all share the compiled encoders.
        bucket = bucket._replace(rows=bucket.block_size)
        padded = make_block(bucket, sentences, self._longest_target, self.method)
        return self._compiled.encode(self._weights, padded, bucket=bucket)

    def admit_and_decode(
        self, rows: Rows, block: Rows, *, max_steps: int, stop_after: int
    ) -> tuple[Rows, Found]:
        """Run ``continuous_batching.admit_and_decode`` on the device; donates ``rows``."""
        limits = np.int32(max_steps), np.int32(stop_after)
        return self._compiled.admit_and_decode(self._weights, rows, block, *limits)

    resized = staticmethod(resized)

    @staticmethod
    @jax.jit
    def results(rows: Rows) -> Found:
        """Return the results of the rows whose sentences are done."""
        number_B = jnp.where(rows.state.done_B, rows.number_B, EMPTY)
        return Found(number_B, results(rows.state.finished, pad_id=0))

    def new_rows(self, bucket: Bucket) -> Rows:
        """Create idle batch rows on the device."""
        padded = make_block(bucket._replace(rows=1), {}, self._longest_target, self.method)
        return self._compiled.idle_rows(self._weights, padded, bucket=bucket)

    def freed(self, rows: Rows, numbers: Sequence[int]) -> Rows:
        """Free the rows of the sentences with these numbers, without results."""
        is_freed_B: Any = np.isin(rows.number_B, numbers)
        return rows._replace(state=rows.state._replace(done_B=rows.state.done_B | is_freed_B))

    def unnumbered(self, rows: Rows) -> Rows:
        """Take the numbers off the rows whose sentences are done."""
        return rows._replace(number_B=jnp.where(rows.state.done_B, EMPTY, rows.number_B))

    @staticmethod
    def hypotheses(found: Found, numbers: Container[int]) -> dict[int, list[Hypothesis]]:
        """Return the hypotheses of the sentences in ``found`` that are among ``numbers``, best
        first. Waits for the device.
        """
        places = enumerate(np.asarray(found.number_R).tolist())
        place_of = {number: place for place, number in places if number in numbers}
        results = jax.device_get(found.results) if place_of else found.results
        hypotheses = dict[int, list[Hypothesis]]()
        for number, place in place_of.items():
            slots = zip(*(x[place].tolist() for x in results))
            hypotheses[number] = [
                Hypothesis(tokens[: length - 1], score, log_prob, token_log_probs[:length])
                for tokens, score, log_prob, length, token_log_probs in slots
                if length
            ]
        return hypotheses


def search_together(
    engines: Sequence[Engine], sentences: Sequence[Sentence]
) -> list[list[Hypothesis]]:
    """Run ``Engine.search`` on several engines that differ only in their devices. Uses no more
    engines than needed to give every sentence a row.
    """
    keys = [(np.shape(sentence.terms), -len(sentence.tokens)) for sentence in sentences]
    order = sorted(range(len(sentences)), key=keys.__getitem__)
    if order:
        bucket = engines[0].bucket_of(sentences[order[0]])
        engines = engines[: -(-len(order) // bucket.rows)]
    # Dispatch all work to the devices in turn before waiting for the first result.
    turns = zip_longest(
        *(
            engine.dispatch({index: sentences[index] for index in order[place :: len(engines)]})
            for place, engine in enumerate(engines)
        )
    )
    running = [found for found in chain.from_iterable(turns) if found is not None]
    found_of: dict[int, list[Hypothesis]] = {}
    num_nan = 0
    for found in map(jax.device_get, running):
        num_nan += np.isnan(found.results.scores_BN[found.number_R != EMPTY, 0]).sum()
        found_of |= Engine.hypotheses(found, range(len(sentences)))
    if num_nan:
        message = (
            "%d of %d sentences have no result because the model's logits were NaN or infinite. "
            "The parameters are corrupt, training diverged, or token ids are outside the "
            "vocabulary."
        )
        logger.warning(message, num_nan, len(sentences))
    return [found_of[index][: sentence.wanted] for index, sentence in enumerate(sentences)]


def _method(
    config: DecodingConfig, suppress: tuple[int, ...], model: ModelConfig, free_prefix: int
) -> Method:
    method: type[Method] = BeamSearch if config.method == "beam" else Sampling
    shared = vars(config).keys() & {field.name for field in fields(method)}
    return method(
        bos_id=model.decoder_start_id,
        eos_id=model.eos_id,
        pad_id=model.pad_id,
        constraints=Constraints(config.min_length, suppress, config.no_repeat_ngram),
        free_prefix=free_prefix,
        **{name: getattr(config, name) for name in shared},
    )
