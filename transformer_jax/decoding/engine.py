"""Token ids in, token ids out: sentences of all lengths in few compiled searches, on one or several
devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.buckets import Bucket, Layout, Sentence, make_buckets
from transformer_jax.decoding.checks import vocabulary_sizes
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.continuous_batching import Found, Waiting, search_waiting
from transformer_jax.decoding.devices import row_shardings
from transformer_jax.decoding.models import DecodingModel, Source
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import Method, SearchResult
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer, with_cast_weights
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID

logger = logging.getLogger(__name__)

# For every function that holds a search's loop, by backend.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
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
      num_compiled: how many functions have been compiled so far.
      num_nan: sentences so far that have no result because the model's logits were NaN.
      slots_computed, slots_used: rows times steps of the searches so far, and those of them in
        which a sentence was in progress.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
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
        self._vocab_sizes = vocabulary_sizes(models)
        if config.batch_size % self._shares:
            raise UserError(
                f"decoding.batch_size is {config.batch_size}; expected a multiple of "
                f"{self._shares}, the number of devices that share it."
            )
        self._everywhere, self._rows = row_shardings(devices)
        self._graphs, states = zip(*(nnx.split(model, nnx.Param) for model in models))
        self.parameters = states
        self._suppress = suppress
        self.method(num_hypotheses=1).check(self._vocab_sizes[1])
        self._position_limit = min(model.config.position_limit for model in models)
        self.longest_source = min(config.max_source_length, self._position_limit)
        self.buckets = make_buckets(self.longest_source, config.batch_size // self._shares)
        self._layout = Layout(self.buckets, self._shares)
        self.num_compiled = self.num_nan = self.slots_computed = self.slots_used = 0
        self._search = jax.jit(
            self._search_bucket,
            static_argnames=("bucket", "num_hypotheses"),
            donate_argnames="memory",
            compiler_options=COMPILER_OPTIONS.get(jax.default_backend()),
        )
        # Kept between searches on a CPU, where new memory costs; elsewhere training may need it.
        self._memory: dict[Bucket, Any] = {}

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Each model's, as ``nnx.to_pure_dict`` gives them.

        Newer ones may be assigned, as such dicts or as ``nnx.State``, and go to the devices at
        once; nothing is compiled again.
        """
        return self._parameters

    @parameters.setter
    def parameters(self, parameters: Sequence[Any]) -> None:
        pure = tuple(
            nnx.to_pure_dict(each) if isinstance(each, nnx.State) else each for each in parameters
        )
        self._parameters = jax.device_put(pure, self._everywhere)  # now, not in every search

    @property
    def placement(self) -> Any:
        """The sharding of the parameters, if it was given devices."""
        return self._everywhere

    @property
    def num_devices(self) -> int:
        """How many share the rows."""
        return self._shares

    @property
    def models(self) -> list[Transformer]:
        """The models, with the parameters they have now."""
        return [
            nnx.merge(graph, parameters)
            for graph, parameters in zip(self._graphs, self.parameters, strict=True)
        ]

    def search(
        self, sentences: Sequence[Sentence], *, num_hypotheses: int = 1
    ) -> list[list[Hypothesis]]:
        """The best hypotheses of each sentence, best first; none where the search finds none (with
        a warning where the model's logits were NaN).

        Raises:
          UserError: a source that is too long, token ids outside the vocabulary.
        """
        for index, sentence in enumerate(sentences):
            if len(sentence.tokens) >= self.longest_source:
                raise UserError(
                    f"Sentence {index} has {len(sentence.tokens)} source tokens; expected at most "
                    f"{self.longest_source - 1}, one less than decoding.max_source_length (or "
                    "model.max_positions of learned ones), for the end symbol."
                )
            sides = sentence.tokens, sentence.prefix
            for side, tokens, size in zip(("source", "prefix"), sides, self._vocab_sizes):
                if len(tokens) and not 0 <= min(tokens) <= max(tokens) < size:
                    raise UserError(
                        f"Sentence {index} has {side} tokens from {min(tokens)} to {max(tokens)}; "
                        f"expected ids of the vocabulary, 0..{size - 1}."
                    )
        # The devices get all the work before the first result is waited for.
        running = []
        for bucket, places in self._layout.searches(sentences):
            its = {place: sentences[index] for index, place in places.items()}
            running.append((places, self._start(bucket, its, num_hypotheses)))
        if jax.default_backend() != "cpu":
            self._memory.clear()
        found: list[list[Hypothesis]] = [[] for _ in sentences]
        with_nan = []
        for places, on_device in running:
            results, slots_computed, slots_used = jax.tree.map(np.asarray, on_device)
            self.slots_computed += int(slots_computed.sum())
            self.slots_used += int(slots_used.sum())
            for index, place in places.items():
                found[index] = hypotheses(results, place)
                if np.isnan(results.scores_BN[place, 0]):
                    with_nan.append(index)
        if with_nan:
            self.num_nan += len(with_nan)
            message = (
                "%d of %d sentences have no result, as the model's logits were NaN or infinite "
                "(sentence %d first). Its parameters are damaged, or training has diverged."
            )
            logger.warning(message, len(with_nan), len(sentences), min(with_nan))
        return found

    def lowered(
        self,
        bucket: Bucket,
        *,
        num_hypotheses: int = 1,
        sharding: jax.sharding.Sharding | None = None,
        parameters: Any = None,
    ) -> jax.stages.Lowered:
        """The search of one of ``buckets``, not yet compiled: to look at, or to compile ahead; for
        ``sharding``'s devices, if given, and for parameters of these shapes if there are none yet.
        """
        waiting, counts = self._layout.waiting(bucket, {0: Sentence([EOS_ID])}, self.longest_target)
        parameters = self.parameters if parameters is None else parameters
        memory = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._rows),
            self.cache_shapes(bucket, parameters),
        )
        given = parameters, waiting, counts, memory
        if sharding is not None:
            given = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), given
            )
        return self._search.lower(*given, bucket=bucket, num_hypotheses=num_hypotheses)

    def ahead(
        self, sentences: Sequence[Sentence], *, num_hypotheses: int = 1
    ) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """What a search of such sentences (without prefixes) compiles: its functions by name, to be
        lowered later, even if the parameters are gone by then.
        """
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._everywhere),
            self.parameters,
        )
        return {
            self._name(bucket): partial(
                self.lowered, bucket, num_hypotheses=num_hypotheses, parameters=shapes
            )
            for bucket in dict.fromkeys(bucket for bucket, _ in self._layout.searches(sentences))
        }

    def cache_shapes(self, bucket: Bucket, parameters: Any = None) -> Any:
        """Shapes of the caches of one of ``buckets``, with the rows of all devices."""
        longest = bucket.lengths[-1]
        rows = bucket.rows * self._shares
        tokens_BS = jax.ShapeDtypeStruct((rows, longest), jnp.int32)
        source = Source(tokens_BS, jax.ShapeDtypeStruct((rows,), jnp.int32))

        def start(parameters: Any, source: Source) -> Any:
            models = [nnx.merge(graph, each) for graph, each in zip(self._graphs, parameters)]
            model = DecodingModel(models, (longest,), self.config.beam_size)
            return model.start_cache(source, max_length=self.longest_target(longest))

        return jax.eval_shape(start, self.parameters if parameters is None else parameters, source)

    def _name(self, bucket: Bucket) -> str:
        rows, longest = bucket.rows * self._shares, bucket.lengths[-1]
        return f"search for {rows} sentences of up to {longest} tokens"

    def longest_target(self, source_length: int) -> int:
        """Positions that any translation of a source of this length can need."""
        return min(source_length + self.config.max_extra_length, self._position_limit)

    def _start(self, bucket: Bucket, sentences: dict[int, Sentence], num_hypotheses: int) -> Found:
        """What the devices will find for the sentences at these places."""
        waiting, counts = self._layout.waiting(bucket, sentences, self.longest_target)
        # Gone if the search is interrupted.
        memory = self._memory.pop(bucket, None) or self.new_memory(bucket)
        found, self._memory[bucket] = self._search(
            self.parameters, waiting, counts, memory, bucket=bucket, num_hypotheses=num_hypotheses
        )
        return found

    def new_memory(self, bucket: Bucket) -> Any:
        """Caches of ``cache_shapes``, without sentences, on the devices."""
        zeros = partial(jax.tree.map, jnp.zeros_like, self.cache_shapes(bucket))
        return jax.jit(zeros, out_shardings=self._rows)()

    def _search_bucket(
        self,
        parameters: Any,
        waiting: Waiting,
        counts: jax.Array,
        memory: Any,
        *,
        bucket: Bucket,
        num_hypotheses: int,
    ) -> tuple[Found, Any]:
        """``memory`` is overwritten, and comes back for the next search of this bucket."""
        self.num_compiled += 1  # this runs when a shape is traced, which is once
        devices = "" if self._shares == 1 else f" on {self._shares} devices"
        logger.info("Compiling the %s%s.", self._name(bucket), devices)
        search = partial(self._search_share, bucket, self.method(num_hypotheses))
        if self._shares == 1:
            return search(parameters, waiting, counts, memory)
        everywhere, rows = self._everywhere.spec, self._rows.spec
        found, memory = jax.shard_map(
            search,
            mesh=self._rows.mesh,
            in_specs=(everywhere, rows, rows, rows),
            out_specs=rows,
            check_vma=False,
        )(parameters, waiting, counts, memory)
        return jax.lax.with_sharding_constraint(found, self._everywhere), memory

    def _search_share(
        self,
        bucket: Bucket,
        method: Method,
        parameters: Any,
        waiting: Waiting,
        counts_1M: jax.Array,
        memory: Any,
    ) -> tuple[Found, Any]:
        """What one device does."""
        transformers = [
            with_cast_weights(nnx.merge(graph, each))
            for graph, each in zip(self._graphs, parameters, strict=True)
        ]
        model = DecodingModel(transformers, bucket.lengths, self.config.beam_size)
        found, cache = search_waiting(
            method,
            model,
            waiting,
            counts_1M[0],
            memory.cleared(),
            max_length=self.longest_target(bucket.lengths[-1]),
        )
        slots = found.slots_computed[None], found.slots_used[None]
        return Found(found.results, *slots), cache

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
