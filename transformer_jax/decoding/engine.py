"""Token ids in, token ids out: sentences of all lengths in few compiled searches, on one or several
devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.buckets import Bucket, Sentence, in_blocks, make_block, make_buckets
from transformer_jax.decoding.checks import vocabulary_sizes
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.continuous_batching import NOBODY, Block, Found, Rows, RowSearch
from transformer_jax.decoding.devices import row_shardings
from transformer_jax.decoding.ensemble import Ensemble, as_one, with_cast_matrices
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import Method, SearchResult, results
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID

logger = logging.getLogger(__name__)
T = TypeVar("T")

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
    """The search of one model, or of several whose probabilities are averaged.

    A sentence's own length decides in which shape it is encoded and in which of few buckets it is
    searched. Its result does not depend on the sentences around it.

    Attributes:
      buckets: one for sources of up to 128 tokens, one with a quarter of the rows for those of up
        to 512, and so on.
      longest_source: tokens, end symbol included.
      num_compiled: how many searches have been compiled so far.
      num_nan: sentences so far that have no result because the model's logits were NaN.
      slots_computed, slots_used: rows times steps of the searches so far, and those of them in
        which a sentence was in progress.
    """

    def __init__(
        self,
        models: Transformer | Sequence[Transformer],
        config: DecodingConfig,
        *,
        suppress: tuple[int, ...] = (),
        devices: Sequence[jax.Device] = (),
    ):
        """``suppress`` is what ``check_decoding`` gives for ``config``.

        Each of ``devices`` searches an equal share of the rows, for as long as that takes. Without
        them the search runs where the parameters are. In a run of several processes all must ask
        for the same search, and all get its result.

        Raises:
          UserError: a batch size that does not divide over the devices, a beam wider than the
            vocabulary, models with different vocabularies.
        """
        self.config = config
        self._shares = max(1, len(devices))
        model = as_one(models)
        self._source_size, self._target_size = vocabulary_sizes([model])
        if config.batch_size % self._shares:
            raise UserError(
                f"decoding.batch_size is {config.batch_size}; expected a multiple of "
                f"{self._shares}, the number of devices that share it."
            )
        self._everywhere, self._rows = row_shardings(devices)
        self._suppress = suppress
        self.method(num_hypotheses=1).check(self._target_size)
        self._position_limit = model.config.position_limit
        self.longest_source = min(config.max_source_length, self._position_limit)
        self.buckets = make_buckets(self.longest_source, config.batch_size, self._shares)
        self.num_compiled = self.num_nan = self.slots_computed = self.slots_used = 0
        self._num_dealt = 0
        self._graph, parameters = nnx.split(model, nnx.Param)
        self._encode = jax.jit(self._encode_block, static_argnames="bucket")
        self._seat = jax.jit(
            self._search_rows,
            static_argnames="bucket",
            donate_argnames="rows",
            compiler_options=_COMPILER_OPTIONS.get(jax.default_backend()),
        )
        self._results = jax.jit(partial(results, pad_id=PAD_ID))
        self._vacate = jax.jit(self._vacate_rows, donate_argnames="rows", out_shardings=self._rows)
        self.parameters = parameters
        # Kept between searches on a CPU, where new memory costs; elsewhere training may need it.
        self._kept: dict[tuple[Bucket, int], Rows] = {}

    @property
    def parameters(self) -> Any:
        """The model's, as ``nnx.to_pure_dict`` gives them (several models': an ``Ensemble``'s).

        Newer ones may be assigned, as such a dict or as ``nnx.State``, and go to the devices at
        once; nothing is compiled again.
        """
        return self._parameters

    @parameters.setter
    def parameters(self, parameters: Any) -> None:
        if isinstance(parameters, nnx.State):
            parameters = nnx.to_pure_dict(parameters)
        # Now, not in every search.
        self._parameters = jax.device_put(parameters, self._everywhere)
        if parameters:
            model = with_cast_matrices(nnx.merge(self._graph, self._parameters))
            self._cast_graph, weights = nnx.split(model, nnx.Param)
            self._weights = nnx.to_pure_dict(weights)
        else:
            self._weights = {}

    @property
    def num_devices(self) -> int:
        """How many share the rows."""
        return self._shares

    @property
    def models(self) -> list[Transformer]:
        """The models, with the parameters they have now."""
        model = nnx.merge(self._graph, self.parameters)
        return list(model.models) if isinstance(model, Ensemble) else [model]

    def search(
        self, sentences: Sequence[Sentence], *, num_hypotheses: int = 1
    ) -> list[list[Hypothesis]]:
        """The best hypotheses of each sentence, best first; none where the search finds none (with
        a warning where the model's logits were NaN).

        Raises:
          UserError: a source that is too long, token ids outside the vocabulary.
        """
        self._check(sentences)
        # The devices get all the work before the first result is waited for.
        running: list[tuple[Found, Any]] = []
        for bucket, blocks in in_blocks(self.buckets, sentences):
            # Gone if the search is interrupted.
            rows = self._kept.pop((bucket, num_hypotheses), None)
            rows = rows or self.new_rows(bucket, num_hypotheses)
            for indices in blocks:
                its = {index: sentences[index] for index in indices}
                block = self.encode(bucket, its, num_hypotheses=num_hypotheses)
                most = _ALL if indices is blocks[-1] else 0
                rows, left, slots = self.seat(bucket, rows, block, most=most, enough=_ALL)
                running.append((left, slots))
            found, rows = self._vacate(rows)
            running.append((found, np.zeros((1, 2), np.int32)))
            if jax.default_backend() == "cpu":
                self._kept[bucket, num_hypotheses] = rows
        found_of: list[list[Hypothesis]] = [[] for _ in sentences]
        with_nan = []
        for found, slots in map(_read, running):
            computed, used = slots.sum(axis=0).tolist()
            self.slots_computed += computed
            self.slots_used += used
            for row, index in enumerate(found.number_R.tolist()):
                if index != NOBODY:
                    found_of[index] = hypotheses(found.results, row)
                    if np.isnan(found.results.scores_BN[row, 0]):
                        with_nan.append(index)
        if with_nan:
            self.num_nan += len(with_nan)
            message = (
                "%d of %d sentences have no result, as the model's logits were NaN or infinite "
                "(sentence %d first). Its parameters are damaged, or training has diverged."
            )
            logger.warning(message, len(with_nan), len(sentences), min(with_nan))
        return found_of

    def _check(self, sentences: Sequence[Sentence]) -> None:
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

    def encode(
        self, bucket: Bucket, sentences: Mapping[int, Sentence], *, num_hypotheses: int = 1
    ) -> Block:
        """A block of numbered sentences of one encoded length, at most ``bucket.block_size`` for
        each device.
        """
        source_QS, block = self._block(bucket, sentences, num_hypotheses)
        return block._replace(cache=self._encode(self._weights, source_QS, bucket=bucket))

    def seat(
        self, bucket: Bucket, rows: Rows, block: Block, *, most: int, enough: int
    ) -> tuple[Rows, Found, jax.Array]:
        """``RowSearch.seat`` on the devices, which overwrites ``rows``."""
        whole = self._weights, np.int32(most), np.int32(enough)
        return self._seat(whole, rows, block, bucket=bucket)

    def results(self, rows: Rows) -> SearchResult:
        """What the sentences in the rows have finished."""
        return self._results(rows.state.finished)

    def new_rows(self, bucket: Bucket, num_hypotheses: int) -> Rows:
        """Idle rows on the devices."""
        make = partial(self._idle_rows, bucket, num_hypotheses)
        return jax.jit(make, out_shardings=self._rows)()

    def _block(
        self, bucket: Bucket, sentences: Mapping[int, Sentence], num_hypotheses: int
    ) -> tuple[np.ndarray, Block]:
        """Devices are dealt sentences in turn, from block to block."""
        dealt: list[dict[int, Sentence]] = [{} for _ in range(self._shares)]
        for number, sentence in sentences.items():
            dealt[self._num_dealt % self._shares][number] = sentence
            self._num_dealt += 1
        return make_block(bucket, dealt, self.longest_target, num_hypotheses)

    def lowered(
        self, bucket: Bucket, *, sharding: jax.sharding.Sharding | None = None
    ) -> jax.stages.Lowered:
        """The search of one of ``buckets``, to look at; for ``sharding``'s device, if given."""
        source_QS, block = self._block(bucket, {}, 1)
        cache = jax.eval_shape(partial(self._encode_block, bucket=bucket), self._weights, source_QS)
        rows = jax.eval_shape(partial(self._idle_rows, bucket, 1))
        whole = self._weights, np.int32(0), np.int32(0)
        given = whole, rows, block._replace(cache=cache)
        if sharding is not None:
            given = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), given
            )
        return self._seat.lower(*given, bucket=bucket)

    def longest_target(self, source_length: int) -> int:
        """Positions that any translation of a source of this length can need."""
        return min(source_length + self.config.max_extra_length, self._position_limit)

    def _encode_block(self, weights: Any, source_QS: jax.Array, *, bucket: Bucket) -> Any:
        def encode(weights: Any, source_QS: jax.Array) -> Any:
            return self._start_cache(weights, source_QS, bucket, max_length=0)

        return self._on_devices(encode)(weights, source_QS)

    def _search_rows(
        self, whole: tuple[Any, jax.Array, jax.Array], rows: Rows, block: Block, *, bucket: Bucket
    ) -> tuple[Rows, Found, jax.Array]:
        self.num_compiled += 1  # this runs when a shape is traced, which is once
        sizes = bucket.rows * self._shares, bucket.lengths[-1], self._shares
        logger.info(
            "Compiling the search for %d sentences of up to %d tokens on %d device(s).", *sizes
        )
        method = self.method(rows.state.finished.scores_BN.shape[1])
        longest = self.longest_target(bucket.lengths[-1])

        def seat(
            whole: tuple[Any, jax.Array, jax.Array], rows: Rows, block: Block
        ) -> tuple[Rows, Found, jax.Array]:
            weights, most, enough = whole
            step = nnx.merge(self._cast_graph, weights).decode_step
            search = RowSearch(method, step, longest, shortest=bucket.lengths[0])
            return search.seat(rows, block, most, enough)

        return self._on_devices(seat)(whole, rows, block)

    def _on_devices(self, function: Callable[..., T]) -> Callable[..., T]:
        """Each device calls it with the whole of its first argument and a share of the others."""
        if self._shares == 1:
            return function
        everywhere, rows = self._everywhere.spec, self._rows.spec

        def spread(whole: Any, *shared: Any) -> T:
            specs = everywhere, *(rows for _ in shared)
            return jax.shard_map(
                function, mesh=self._rows.mesh, in_specs=specs, out_specs=rows, check_vma=False
            )(whole, *shared)

        return spread

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

    def _idle_rows(self, bucket: Bucket, num_hypotheses: int) -> Rows:
        num_rows, longest = bucket.rows * self._shares, self.longest_target(bucket.lengths[-1])
        source_BS = jnp.zeros((num_rows, bucket.lengths[-1]), jnp.int32)
        start = partial(self._start_cache, bucket=bucket, max_length=longest)
        cache = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(start, self._weights, source_BS)
        )
        state = self.method(num_hypotheses).start(
            jnp.zeros(num_rows, jnp.int32),
            max_length=longest,
            prefix_BP=jnp.zeros((num_rows, longest), jnp.int32),
            seed_B=jnp.zeros(num_rows, jnp.uint32),
        )
        return Rows(jnp.full(num_rows, NOBODY, jnp.int32), state, cache.cleared())

    def _vacate_rows(self, rows: Rows) -> tuple[Found, Rows]:
        """What is left in rows that are done, and the rows without it."""
        found = Found(rows.number_B, self.results(rows))
        nobody_B = jnp.full_like(rows.number_B, NOBODY)
        return found, Rows(nobody_B, rows.state, rows.cache.cleared())

    def method(self, num_hypotheses: int) -> Method:
        """The search that ``config`` asks for."""
        config = self.config
        common: dict[str, Any] = {
            "bos_id": BOS_ID,
            "eos_id": EOS_ID,
            "pad_id": PAD_ID,
            "num_hypotheses": num_hypotheses,
            "constraints": Constraints(config.min_length, self._suppress, config.no_repeat_ngram),
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


def hypotheses(results: SearchResult, place: int) -> list[Hypothesis]:
    """The filled slots of one sentence."""
    slots = zip(*(x[place].tolist() for x in results), strict=True)
    return [
        Hypothesis(tokens[: length - 1], score, log_prob, token_log_probs[:length])
        for tokens, score, log_prob, length, token_log_probs in slots
        if length
    ]


def _read(found: Any) -> Any:
    """On the host, in every process all of it."""

    def read(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(read, found)
