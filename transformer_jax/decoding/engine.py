"""Search over token ids, with a few compiled searches for sentences of all lengths."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from flax import nnx

from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.compiled_search import (
    CompiledSearch,
    ModelSearch,
    compile_search,
    finished_results,
)
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.continuous_batching import Admitted, Rows, select_rows
from transformer_jax.decoding.devices import put_on_device
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.length_buckets import Bucket, make_buckets, pad_batch
from transformer_jax.decoding.lexical_constraints import TABLE_SIZES
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.scheduler import (
    RunningBatch,
    Scheduler,
    SearchEngine,
    Task,
    run_until_idle,
)
from transformer_jax.decoding.search import Hypothesis, SearchMethod, SearchResult, Sentence
from transformer_jax.errors import UserError, short_repr
from transformer_jax.model.matmul import check_weights
from transformer_jax.model.transformer import Transformer, with_cast_weights
from transformer_jax.settings.config import (
    BeamSettings,
    ConstraintSettings,
    DecodingConfig,
    ModelConfig,
    SamplingSettings,
    SearchSettings,
)

logger = logging.getLogger(__name__)

# Search methods by their names in ``decoding.method``, with their settings.
SEARCH_METHODS: dict[str, tuple[type[SearchMethod], type[SearchSettings]]] = {
    "beam": (BeamSearch, BeamSettings),
    "sample": (Sampling, SamplingSettings),
}


class Engine:
    """Runs the search with one model or an ensemble on one device.

    A sentence's padded length and bucket depend only on its own length, and its result does not
    depend on other sentences. Hypotheses never depend on the number of rows. On accelerators and in
    float32, scores can differ by rounding errors with the number of rows.

    Attributes:
      buckets: the first takes sources of up to 128 tokens, the second up to 512 tokens with a
        quarter as many rows, and so on.
      min_rows: minimum number of rows of a search.
      max_source_length: maximum source length in tokens, EOS included.
      method: ``BeamSearch`` or ``Sampling``, from ``config``.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        config: DecodingConfig,
        *,
        suppressed_ids: tuple[int, ...] = (),
        unscored_prefix_length: int = 0,
        device: jax.Device | None = None,
    ):
        """Set up the search on ``device`` (default: the parameters' device). ``suppressed_ids``
        are the token ids of ``config.suppress``; ``unscored_prefix_length`` is that of
        ``BeamSearch``. Raises ``UserError`` if ``config.weights`` is int8 without AVX-512 VNNI.
        """
        check_weights(config.weights)
        self.config = config
        self.method = _search_method(config, suppressed_ids, model.config, unscored_prefix_length)
        positions = model.config.position_limit
        self.max_source_length = min(config.max_source_length, positions)
        self._max_target_length = partial(config.max_target_length, positions=positions)
        # XLA compiles a search with a single hypothesis to other operations, so the result would
        # depend on the number of rows.
        self.min_rows = 2 if jax.default_backend() == "cpu" and self.method.beam_size == 1 else 1
        self.buckets = make_buckets(self.max_source_length, config.batch_size, self.min_rows)
        self._device = device
        self._graph, self.parameters = nnx.split(model, nnx.Param)

    @property
    def parameters(self) -> Any:
        """Parameters of the model or ``Ensemble``, as a dict from ``nnx.to_pure_dict``.

        Assign such a dict or an ``nnx.State`` to update them; compiled functions are kept. Arrays
        on the device are not copied; do not donate them while they are in use here. An empty dict
        frees the memory until the next assignment.
        """
        return self._parameters

    @parameters.setter
    def parameters(self, parameters: Any) -> None:
        if isinstance(parameters, nnx.State):
            parameters = nnx.to_pure_dict(parameters)
        # Transfer once, not in every search.
        self._parameters = put_on_device(parameters, self._device)
        vars(self).pop("_cast", None)

    @cached_property
    def _cast(self) -> tuple[Any, Any]:
        """Graph and weights of the model that searches, with matrices in the type of the matmuls.
        They are made for the first search: there is none if CTranslate2 searches.
        """
        graph, weights = nnx.split(with_cast_weights(self.model, self.config.weights), nnx.Param)
        return graph, nnx.to_pure_dict(weights)

    @property
    def _weights(self) -> Any:
        return self._cast[1]

    @cached_property
    def _search(self) -> ModelSearch:
        return ModelSearch(self._cast[0], self.method)

    @cached_property
    def _compiled(self) -> CompiledSearch:
        return compile_search(self._search)

    def copy_to(self, device: jax.Device) -> Self:
        """Copy the engine to another device, with its current parameters. Engines on CPU devices
        share the memory of the parameters.
        """
        other = copy(self)
        other._device = device
        if self._parameters:
            graph, weights = self._cast
            other._parameters, weights = put_on_device((self._parameters, weights), device)
            other._cast = graph, weights
        return other

    @property
    def model(self) -> Transformer | Ensemble:
        """The model with its current parameters."""
        return nnx.merge(self._graph, self.parameters)

    def search(self, sentences: Sequence[Sentence]) -> list[list[Hypothesis]]:
        """Find up to ``num_hypotheses`` of each sentence, best first. A list is empty if the search
        finds no hypothesis (with a warning if the model's logits were NaN). Raises
        ``UserError`` if a source is too long.
        """
        return search_together([self], sentences)

    def bucket_of(self, sentence: Sentence) -> Bucket:
        """Find the bucket for a sentence's length and terms. Raises ``UserError`` if it is too
        long, or not a ``Sentence`` of token ids.
        """
        if not isinstance(sentence, Sentence):
            raise UserError(
                f"A sentence is {short_repr(sentence)}; expected a Sentence, such as "
                "Sentence(token_ids)."
            )
        for tokens in (sentence.tokens, sentence.prefix):
            if len(tokens) and np.asarray(tokens).dtype.kind not in "iu":
                raise UserError(
                    f"A sentence has the tokens {short_repr(tokens)}; expected token ids."
                )
        length = len(sentence.tokens)
        for bucket in self.buckets:
            if length < bucket.lengths[-1]:
                return bucket._replace(terms=np.shape(sentence.terms))
        raise UserError(
            f"A sentence has {length} source tokens; expected at most {self.max_source_length - 1} "
            "(decoding.max_source_length or, with learned positions, model.max_positions; minus 1 "
            "for EOS)."
        )

    def buckets_with_terms(self, max_terms: int) -> list[Bucket]:
        """Return the buckets for sentences with up to ``max_terms`` terms, or without terms."""
        shapes = [(), *(shape for shape in TABLE_SIZES if shape[0] <= max_terms)]
        return [bucket._replace(terms=shape) for shape in shapes for bucket in self.buckets]

    def new_batch(self, bucket: Bucket, *, is_resizable: bool = False) -> EngineBatch:
        """Prepare batch rows for sentences of a bucket; see ``EngineBatch``."""
        return EngineBatch(self, bucket, is_resizable=is_resizable)

    def encode(self, bucket: Bucket, sentences: Sequence[Sentence]) -> Rows:
        """Encode up to ``bucket.encode_batch_size`` sentences of one padded length."""
        # The number of rows makes no difference, so all share the compiled encoders.
        bucket = bucket._replace(num_rows=bucket.encode_batch_size)
        padded = pad_batch(bucket, sentences, self._max_target_length, self.method)
        return self._compiled.encode(self._weights, padded, bucket=bucket)

    def new_rows(self, bucket: Bucket) -> Rows:
        """Create idle batch rows on the device."""
        padded = pad_batch(bucket._replace(num_rows=1), [], self._max_target_length, self.method)
        return self._compiled.idle_rows(self._weights, padded, bucket=bucket)

    def admit_and_decode(
        self, rows: Rows, encoded: Rows, num_encoded: int, *, max_steps: int, stop_after: int
    ) -> tuple[Rows, Admitted]:
        """Run ``continuous_batching.admit_and_decode`` on the device; donates ``rows``."""
        counts = [np.int32(count) for count in (num_encoded, max_steps, stop_after)]
        return self._compiled.admit_and_decode(self._weights, rows, encoded, *counts)


class UnreadDecode(NamedTuple):
    """What a call of ``EngineBatch.decode`` leaves on the device, which may still compute it."""

    tasks: Sequence[Task]
    """Tasks that the call admitted."""
    admitted: Admitted
    """Their rows, and the results of the tasks that had these rows before."""
    finished: tuple[Any, SearchResult] | None
    """For each row, whether it is done, and its results; None: the call took no steps."""


class EngineBatch(RunningBatch):
    """Batch rows on an engine's device.

    In fewer rows, hypotheses are the same. On accelerators and in float32, scores can differ by
    rounding errors, because XLA sums in a different order.
    """

    def __init__(self, engine: Engine, bucket: Bucket, *, is_resizable: bool = False):
        """Prepare rows for sentences of ``bucket``. If ``is_resizable``, there are fewer rows than
        in the bucket while few sentences are in progress; call ``compile_next`` first.
        """
        self.bucket = bucket
        self._engine = engine
        row_counts = {bucket.num_rows}
        if is_resizable:
            # On a CPU a step's time is proportional to the number of rows; elsewhere it hardly
            # grows.
            factor = 2 if jax.default_backend() == "cpu" else 8
            row_counts |= {max(engine.min_rows, bucket.num_rows // factor**i) for i in range(8)}
        self._row_counts = sorted(row_counts)
        self._compiled_counts: list[int] = []
        self.num_rows = self._row_counts[0]
        self._rows: Rows | None = None  # created when needed
        # The task in each row.
        self._tasks: list[Task | None] = [None] * self.num_rows
        self._unread: list[UnreadDecode] = []
        self._empty_encoded: dict[Bucket, Rows] = {}

    @property
    def running(self) -> list[Task]:
        """The tasks in rows, as of the last ``read``."""
        return [task for task in self._tasks if task]

    @property
    def encode_batch_size(self) -> int:
        """Maximum number of sentences in a call of ``decode``."""
        return self._resized_bucket.encode_batch_size

    @property
    def _resized_bucket(self) -> Bucket:
        return self.bucket._replace(num_rows=self.num_rows)

    @property
    def is_ready(self) -> bool:
        """Whether at least one number of rows is compiled."""
        return bool(self._compiled_counts)

    def compile_next(self) -> bool:
        """Compile the functions for the next number of rows and each padded length, by calling
        them. Returns whether there are more.
        """
        engine = self._engine
        remaining = self._row_counts[len(self._compiled_counts) :]
        if not remaining:
            return False
        count = remaining[0]
        bucket = self.bucket._replace(num_rows=count)
        rows = engine.new_rows(bucket)
        self._empty_encoded[bucket] = engine.encode(bucket, [])
        for length in bucket.lengths:
            encoded = engine.encode(bucket, [Sentence([0] * (length - 1))])
            rows, _ = engine.admit_and_decode(rows, encoded, 1, max_steps=1, stop_after=1)
        finished_results(rows)
        for compiled_count in self._compiled_counts:
            moved_rows = select_rows(rows, np.zeros(compiled_count, np.int32))
            select_rows(moved_rows, np.zeros(count, np.int32))
        self._compiled_counts.append(count)  # from now on, another thread can decode with it
        return len(remaining) > 1

    def resize(self, count: int) -> None:
        """Move the running sentences to the smallest compiled number of rows that holds ``count``
        sentences, or to the largest.
        """
        counts = list(self._compiled_counts)  # another thread may add one
        num_rows = next((rows for rows in counts if rows >= count), counts[-1])
        if num_rows == self.num_rows:
            return
        from_R = np.full(num_rows, -1, np.int32)
        running = [row for row, task in enumerate(self._tasks) if task]
        from_R[: len(running)] = running
        if self._rows is not None:
            self._rows = select_rows(self._rows, from_R)
        self._tasks = [self._tasks[row] if row >= 0 else None for row in from_R]
        self.num_rows = num_rows

    def decode(self, admitted: Sequence[Task], *, max_steps: int, stop_after: int) -> None:
        """Assign rows to sentences of one padded length, and decode (see ``RunningBatch``)."""
        bucket = self._resized_bucket
        if self._rows is None:
            self._rows = self._engine.new_rows(bucket)
        if admitted or bucket not in self._empty_encoded:
            encoded = self._engine.encode(bucket, [task.sentence for task in admitted])
        else:
            encoded = self._empty_encoded[bucket]
        self._rows, rows_admitted = self._engine.admit_and_decode(
            self._rows, encoded, len(admitted), max_steps=max_steps, stop_after=stop_after
        )
        finished = finished_results(self._rows) if max_steps else None
        self._unread.append(UnreadDecode(admitted, rows_admitted, finished))

    def read(self) -> None:
        """Wait for the device. Finish tasks that are done, and free the rows of canceled ones."""
        for unread in self._unread:
            rows = np.asarray(unread.admitted.row_Q)[: len(unread.tasks)].tolist()
            self._read_admitted(unread.tasks, rows, unread.admitted.results)
            if unread.finished is not None:
                self._read_finished(*unread.finished)
        self._unread.clear()
        is_canceled_B = np.array([bool(task and task.future.cancelled()) for task in self._tasks])
        if is_canceled_B.any() and self._rows is not None:
            state = self._rows.state
            state = state._replace(done_B=state.done_B | is_canceled_B)
            self._rows = self._rows._replace(state=state)
            for row in np.flatnonzero(is_canceled_B):
                self._tasks[row] = None

    def release(self) -> None:
        """Free the memory of the rows."""
        self._rows = None

    def _read_admitted(self, tasks: Sequence[Task], rows: list[int], results: SearchResult) -> None:
        """Finish the tasks that were in ``rows``, in the order in which ``tasks`` took them."""
        results = jax.device_get(results)
        for index, (row, task) in enumerate(zip(rows, tasks, strict=True)):
            self._finish(row, results, index)
            self._tasks[row] = task

    def _read_finished(self, done_B: Any, results: SearchResult) -> None:
        """Finish the tasks in rows that are done."""
        done_rows = [row for row in np.flatnonzero(done_B).tolist() if self._tasks[row]]
        if done_rows:
            results = jax.device_get(results)
        for row in done_rows:
            self._finish(row, results, row)

    def _finish(self, row: int, results: SearchResult, index: int) -> None:
        """Finish the task in ``row``, if any. Its results are at index ``index``."""
        task = self._tasks[row]
        if task:
            self.num_invalid += int(np.isnan(results.scores_BN[index, 0]))
            task.finish(_hypotheses(results, index))
            self._tasks[row] = None


def _hypotheses(results: SearchResult, index: int) -> list[Hypothesis]:
    """Return the hypotheses of one sentence, best first."""
    slots = zip(*(x[index].tolist() for x in results), strict=True)
    return [
        Hypothesis(tokens[: length - 1], score, log_prob, token_log_probs[:length])
        for tokens, score, log_prob, length, token_log_probs in slots
        if length
    ]


def search_together(
    engines: Sequence[SearchEngine], sentences: Sequence[Sentence]
) -> list[list[Hypothesis]]:
    """Run ``Engine.search`` on several engines that differ only in their devices. Uses no more
    engines than needed to give every sentence a row.
    """
    bucket_of_sentence = [engines[0].bucket_of(sentence) for sentence in sentences]
    keys = [(np.shape(sentence.terms), -len(sentence.tokens)) for sentence in sentences]
    longest_first = sorted(range(len(sentences)), key=keys.__getitem__)
    buckets = [bucket_of_sentence[index] for index in longest_first]
    if buckets:
        engines = engines[: -(-len(sentences) // buckets[0].num_rows)]
    schedulers = [
        Scheduler([engine.new_batch(bucket) for bucket in dict.fromkeys(buckets)])
        for engine in engines
    ]
    futures: dict[int, Future[list[Hypothesis]]] = {}
    for rank, (index, bucket) in enumerate(zip(longest_first, buckets, strict=True)):
        scheduler = schedulers[rank % len(schedulers)]
        futures[index] = scheduler.queue.submit(sentences[index], bucket)
    run_until_idle(schedulers)
    num_invalid = sum(batch.num_invalid for x in schedulers for batch in x.batches)
    if num_invalid:
        logger.warning(
            "%d of %d sentences have no result because the model's logits were NaN or infinite. "
            "The parameters are corrupt, training diverged, or token ids are outside the "
            "vocabulary.",
            num_invalid,
            len(sentences),
        )
    return [futures[index].result() for index in range(len(sentences))]


def _search_method(
    config: DecodingConfig,
    suppressed_ids: tuple[int, ...],
    model: ModelConfig,
    unscored_prefix_length: int,
) -> SearchMethod:
    """Create the search method of ``config``, for a model's token ids."""
    constraint_settings = vars(config.part(ConstraintSettings))
    common_settings: dict[str, Any] = {
        "bos_id": model.decoder_start_id,
        "eos_id": model.eos_id,
        "pad_id": model.pad_id,
        "constraints": Constraints(suppressed_ids=suppressed_ids, **constraint_settings),
        "unscored_prefix_length": unscored_prefix_length,
    }
    method, settings = SEARCH_METHODS[config.method]
    return method(**common_settings, **vars(config.part(settings)))
