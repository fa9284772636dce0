"""Token ids in, token ids out: sentences of all lengths in few compiled searches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.buckets import (
    Bucket,
    Sentence,
    bucket_of,
    in_blocks,
    make_block,
    make_buckets,
)
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.continuous_batching import NOBODY, Block, Found, Rows, RowSearch
from transformer_jax.decoding.ensemble import (
    Ensemble,
    as_one,
    vocabulary_sizes,
    with_cast_matrices,
)
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import Method, SearchResult, results
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID

logger = logging.getLogger(__name__)

_ALL = 2**30

# For the function that holds the search's loop, by backend.
_COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    # Without this, XLA copies caches that could be updated in place.
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True},
    # The whole search as one CUDA graph: all that XLA puts into graphs by itself, and loops. The
    # host would have to say after every step whether there is one more.
    "gpu": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
        "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    },
}


class Hypothesis(NamedTuple):
    """A translation."""

    tokens: list[int]
    """Target tokens without EOS."""
    score: float
    log_prob: float
    token_log_probs: list[float]
    """One more than ``tokens``: the end symbol's is the last."""


class Engine:
    """The search of one model, or of several whose probabilities are averaged, on one device.

    A sentence's own length decides in which shape it is encoded and in which of few buckets it is
    searched. Its result does not depend on the sentences around it.

    Attributes:
      buckets: one for sources of up to 128 tokens, one with a quarter of the rows for those of up
        to 512, and so on.
      longest_source: tokens, end symbol included.
      method: the search that ``config`` asks for.
      new_rows: a function of a bucket: idle rows on the device.
      results: a function of rows: the results of those whose sentences are done.
    """

    def __init__(
        self,
        models: Transformer | Ensemble | Sequence[Transformer],
        config: DecodingConfig,
        *,
        suppress: tuple[int, ...] = (),
        device: jax.Device | None = None,
    ):
        """``suppress`` is what ``check_decoding`` gives for ``config``. Without a ``device`` the
        search runs where the parameters are.

        Raises:
          UserError: a beam wider than the vocabulary, models with different vocabularies.
        """
        model = as_one(models)
        self.config, self.method = config, _method(config, suppress)
        self._source_size, self._target_size = vocabulary_sizes(model)
        self.method.check(self._target_size)
        self._position_limit = model.config.position_limit
        self.longest_source = min(config.max_source_length, self._position_limit)
        self.buckets = make_buckets(self.longest_source, config.batch_size)
        self._device = None if device is None else SingleDeviceSharding(device)
        self._graph, parameters = nnx.split(model, nnx.Param)
        self._encode = jax.jit(self._encode_block, static_argnames="bucket")
        self._seat = jax.jit(
            self._search_rows,
            static_argnames="bucket",
            donate_argnames="rows",
            compiler_options=_COMPILER_OPTIONS.get(jax.default_backend()),
        )
        self.new_rows = jax.jit(self._idle_rows, static_argnums=0, out_shardings=self._device)
        self.results = jax.jit(_results)
        self.parameters = parameters

    @property
    def parameters(self) -> Any:
        """The model's, as ``nnx.to_pure_dict`` gives them (several models': an ``Ensemble``'s).

        Newer ones may be assigned, as such a dict or as ``nnx.State``, and go to the device at
        once; nothing is compiled again.
        """
        return self._parameters

    @parameters.setter
    def parameters(self, parameters: Any) -> None:
        if isinstance(parameters, nnx.State):
            parameters = nnx.to_pure_dict(parameters)
        # Now, not in every search.
        self._parameters = jax.device_put(parameters, self._device)
        self._weights = {}
        if parameters:
            self._cast_graph, weights = nnx.split(with_cast_matrices(self.model), nnx.Param)
            self._weights = nnx.to_pure_dict(weights)

    @property
    def model(self) -> Transformer | Ensemble:
        """The model, with the parameters it has now."""
        return nnx.merge(self._graph, self.parameters)

    def search(self, sentences: Sequence[Sentence]) -> list[list[Hypothesis]]:
        """The hypotheses that each sentence wants, best first; none where the search finds none
        (with a warning where the model's logits were NaN).

        Raises:
          UserError: a source that is too long, token ids outside the vocabulary.
        """
        return search_together([self], sentences)

    def check(self, sentences: Sequence[Sentence]) -> None:
        """Raise ``UserError`` for what cannot be searched."""
        for index, sentence in enumerate(sentences):
            if len(sentence.tokens) >= self.longest_source:
                raise UserError(
                    f"Sentence {index} has {len(sentence.tokens)} source tokens; expected at most "
                    f"{self.longest_source - 1}, one less than decoding.max_source_length (or "
                    "model.max_positions of learned ones), for the end symbol."
                )
            for side, tokens, size in (
                ("source", sentence.tokens, self._source_size),
                ("prefix", sentence.prefix, self._target_size),
            ):
                if len(tokens) and not 0 <= min(tokens) <= max(tokens) < size:
                    raise UserError(
                        f"Sentence {index} has {side} tokens from {min(tokens)} to {max(tokens)}; "
                        f"expected ids of the vocabulary, 0..{size - 1}."
                    )

    def dispatch(self, sentences: Mapping[int, Sentence]) -> Iterator[Found]:
        """Start the search of numbered sentences, block by block. The device need not have finished
        what this yields; each sentence is in one of the results.
        """
        for bucket, blocks in in_blocks(self.buckets, sentences):
            rows = self.new_rows(bucket)
            for block in blocks:
                most = _ALL if block is blocks[-1] else 0
                encoded = self.encode(bucket, block)
                rows, left = self.seat(bucket, rows, encoded, most=most, enough=_ALL)
                yield left
            yield self.results(rows)

    def encode(self, bucket: Bucket, sentences: Mapping[int, Sentence]) -> Block:
        """A block of at most ``bucket.block_size`` numbered sentences of one encoded length."""
        source_QS, block = make_block(bucket, sentences, self.longest_target)
        return block._replace(cache=self._encode(self._weights, source_QS, bucket=bucket))

    def seat(
        self, bucket: Bucket, rows: Rows, block: Block, *, most: int, enough: int
    ) -> tuple[Rows, Found]:
        """``RowSearch.seat`` on the device, which overwrites ``rows``."""
        limits = np.int32(most), np.int32(enough)
        return self._seat(self._weights, rows, block, *limits, bucket=bucket)

    def lowered(
        self, bucket: Bucket, sharding: SingleDeviceSharding | None = None
    ) -> jax.stages.Lowered:
        """The search of one of ``buckets``, to look at; for ``sharding``'s device, if given."""
        rows, block = jax.eval_shape(lambda: (self.new_rows(bucket), self.encode(bucket, {})))
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            (self._weights, rows, block, np.int32(0), np.int32(0)),
        )
        return self._seat.lower(*given, bucket=bucket)

    def longest_target(self, source_length: int) -> int:
        """Positions that any translation of a source of this length can need."""
        return min(source_length + self.config.max_extra_length, self._position_limit)

    def _encode_block(self, weights: Any, source_QS: jax.Array, *, bucket: Bucket) -> Any:
        return self._start_cache(weights, source_QS, bucket, max_length=0)

    def _search_rows(
        self,
        weights: Any,
        rows: Rows,
        block: Block,
        most: jax.Array,
        enough: jax.Array,
        *,
        bucket: Bucket,
    ) -> tuple[Rows, Found]:
        shape = bucket.rows, bucket.lengths[-1]
        logger.info("Compiling the search for %d sentences of up to %d tokens.", *shape)
        step = nnx.merge(self._cast_graph, weights).decode_step
        longest = self.longest_target(bucket.lengths[-1])
        search = RowSearch(self.method, step, longest, shortest=bucket.lengths[0])
        rows, left, _ = search.seat(rows, block, most, enough)
        return rows, left

    def _start_cache(
        self, weights: Any, source_BS: jax.Array, bucket: Bucket, *, max_length: int
    ) -> Any:
        model: Any = nnx.merge(self._cast_graph, weights)
        return model.start_cache(
            model.encode(source_BS),
            source_BS != PAD_ID,
            beam_size=self.config.beam_size,
            max_length=max_length,
            source_capacity=bucket.lengths[-1],
        )

    def _idle_rows(self, bucket: Bucket) -> Rows:
        num_rows, longest = bucket.rows, self.longest_target(bucket.lengths[-1])
        source_BS = jnp.zeros((num_rows, bucket.lengths[-1]), jnp.int32)
        start = partial(self._start_cache, bucket=bucket, max_length=longest)
        shapes = jax.eval_shape(start, self._weights, source_BS)
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        state = self.method.start(
            jnp.zeros(num_rows, jnp.int32),
            max_length=longest,
            prefix_BP=jnp.zeros((num_rows, longest), jnp.int32),
            seed_B=jnp.zeros(num_rows, jnp.uint32),
        )
        return Rows(jnp.full(num_rows, NOBODY, jnp.int32), state, cache.cleared())


def search_together(
    engines: Sequence[Engine], sentences: Sequence[Sentence]
) -> list[list[Hypothesis]]:
    """The hypotheses of ``Engine.search``, by engines that are alike but for their devices. No more
    of them take part than it takes to give every sentence a row.
    """
    engines[0].check(sentences)
    order = sorted(range(len(sentences)), key=lambda index: -len(sentences[index].tokens))
    if order:
        bucket = bucket_of(engines[0].buckets, sentences[order[0]])
        engines = engines[: -(-len(order) // bucket.rows)]
    # The devices get all the work, in turn, before the first result is waited for.
    turns = zip_longest(
        *(
            engine.dispatch({index: sentences[index] for index in order[place :: len(engines)]})
            for place, engine in enumerate(engines)
        )
    )
    running = [found for found in chain.from_iterable(turns) if found is not None]
    found_of: list[list[Hypothesis]] = [[] for _ in sentences]
    num_nan = 0
    for number_R, found in map(jax.device_get, running):
        num_nan += np.isnan(found.scores_BN[number_R != NOBODY, 0]).sum()
        for row, index in enumerate(number_R.tolist()):
            if index != NOBODY:
                found_of[index] = hypotheses(found, row)[: sentences[index].wanted]
    if num_nan:
        message = (
            "%d of %d sentences have no result, as the model's logits were NaN or infinite. Its "
            "parameters are damaged, or training has diverged."
        )
        logger.warning(message, num_nan, len(sentences))
    return found_of


def _method(config: DecodingConfig, suppress: tuple[int, ...]) -> Method:
    common: dict[str, Any] = {
        "bos_id": BOS_ID,
        "eos_id": EOS_ID,
        "pad_id": PAD_ID,
        "constraints": Constraints(config.min_length, suppress, config.no_repeat_ngram),
        "length_penalty": config.length_penalty,
        "length_offset": config.length_offset,
    }
    if config.method == "beam":
        return BeamSearch(**common, beam_size=config.beam_size)
    return Sampling(
        **common,
        num_samples=config.beam_size,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
    )


def _results(rows: Rows) -> Found:
    number_B = jnp.where(rows.state.done_B, rows.number_B, NOBODY)
    return Found(number_B, results(rows.state.finished, PAD_ID))


def hypotheses(results: SearchResult, place: int) -> list[Hypothesis]:
    """The filled slots of one sentence."""
    slots = zip(*(x[place].tolist() for x in results), strict=True)
    return [
        Hypothesis(tokens[: length - 1], score, log_prob, token_log_probs[:length])
        for tokens, score, log_prob, length, token_log_probs in slots
        if length
    ]
