"""Token ids in, token ids out: sentences of all lengths through few compiled programs, on one or
several devices.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding import ensemble
from transformer_jax.decoding.beam_search import BeamSearch
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.continuous_batching import Queue, QueueResult, search_queue
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import NOT_FORCED, padded_length
from transformer_jax.decoding.shortlist import Shortlist
from transformer_jax.decoding.shortlisted_model import ShortlistedModel
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer, with_cast_weights
from transformer_jax.sharding import row_shardings
from transformer_jax.special_ids import BOS_ID, EOS_ID, PAD_ID
from transformer_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# a queue holds so many batches; its end, where no sentence waits any more, is what costs
_BATCHES = 32
_PREFIX_STEP = 8  # prefixes are padded to a multiple of this: few shapes


class Sentence(NamedTuple):
    """What to search."""

    tokens: Sequence[int]
    """Source tokens without EOS, fewer than ``Engine.longest_source``."""
    prefix: Sequence[int] = ()
    """Target tokens that the translation must begin with."""
    seed: int = 0
    """Tells the samples of sentences apart."""


class Hypothesis(NamedTuple):
    """What was found."""

    tokens: list[int]
    """Target tokens without EOS."""
    score: float
    log_prob: float
    token_log_probs: list[float]
    """One more than ``tokens``: the end symbol's is the last."""


class _Inputs(NamedTuple):
    source_QS: Any
    shape_Q: Any  # which of a program's lengths to encode in; the same in all of a block
    own_QK: Any  # tokens that a shortlist adds, or None


class Program(NamedTuple):
    """What is compiled once: a search of sentences of similar lengths."""

    lengths: tuple[int, ...]
    """Source lengths, end symbol included, that sentences are encoded in; the search has room for
    the last one.
    """
    rows: int
    """Sentences that each device has under way."""

    @property
    def block_size(self) -> int:
        """Sentences that a device encodes at a time, all in one shape: few, as seldom just as many
        of a length wait.
        """
        return max(1, self.rows // 4)

    @property
    def num_blocks(self) -> int:
        """In a device's queue."""
        return _BATCHES * self.rows // self.block_size


class Engine:
    """The search of one model, or of several whose probabilities are averaged.

    A sentence's own length says in which shape it is encoded and by which of few programs it is
    searched. What it gets does not depend on the sentences around it.

    Attributes:
      programs: one for sources of up to 128 tokens, one with a quarter of the rows for those of up
        to 512, and so on.
      longest_source: tokens, end symbol included.
      num_compiled: how many programs have been compiled so far.
      slots_computed, slots_used: rows times steps of the searches so far, and those of them in
        which a sentence was under way.
    """

    def __init__(
        self,
        models: Sequence[Transformer],
        config: DecodingConfig,
        *,
        suppress: tuple[int, ...] = (),
        shortlist: Shortlist | None = None,
        devices: Sequence[jax.Device] = (),
    ):
        """``suppress`` holds the ids of ``config.suppress``, ``shortlist`` what the file
        ``config.shortlist`` says.

        Each of ``devices`` searches an equal share of the rows, for as long as that takes. Without
        them the search runs where the parameters are. In a run of several processes all must ask
        for the same search, and all get its result.

        Raises:
          UserError: a batch size that does not divide over the devices, a beam wider than the
            vocabulary, models with other vocabularies than the first one's.
        """
        self.config = config
        self._shares = max(1, len(devices))
        sizes = [
            (model.config.source_vocab_size or model.config.vocab_size, model.config.vocab_size)
            for model in models
        ]
        if len(set(sizes)) > 1:
            raise UserError(
                f"The models have {sizes} source and target tokens; expected models of one vocabulary."
            )
        self._everywhere, self._rows = row_shardings(devices)
        self._graphs, states = zip(*(nnx.split(model, nnx.Param) for model in models))
        self.parameters = states
        self._suppress, self._shortlist = suppress, shortlist
        self._shared_C = None if shortlist is None else shortlist.shared(suppress)
        if config.batch_size % self._shares:
            raise UserError(
                f"decoding.batch_size is {config.batch_size}; expected a multiple of {self._shares}, the devices that share it."
            )
        _check_beam(config, models[0].config.vocab_size, self._shared_C)
        # Learned positions end somewhere.
        self._max_positions = [
            model.config.max_positions for model in models if model.config.positions == "learned"
        ]
        self.longest_source = min([config.max_source_length, *self._max_positions])
        self.programs = _programs(self.longest_source, config.batch_size // self._shares)
        self.num_compiled = self.slots_computed = self.slots_used = 0
        # Without this, XLA's CPU compiler copies caches that could be updated in place.
        options = (
            {"xla_cpu_copy_insertion_use_region_analysis": True}
            if jax.default_backend() == "cpu"
            else None
        )
        self._search = jax.jit(
            self._search_queue,
            static_argnames=("program", "num_hypotheses"),
            donate_argnames="caches",
            compiler_options=options,
        )
        # Kept from search to search on a CPU, where new memory costs; elsewhere training may need
        # it back.
        self._caches: dict[Program, ensemble.Caches] = {}

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
    def models(self) -> list[Transformer]:
        """The models, with the parameters they have now."""
        return [
            nnx.merge(graph, parameters)
            for graph, parameters in zip(self._graphs, self.parameters, strict=True)
        ]

    def search(
        self, sentences: Sequence[Sentence], *, num_hypotheses: int = 1
    ) -> list[list[Hypothesis]]:
        """The best hypotheses of each sentence, best first; none where the search finds none.

        Raises:
          UserError: a source that is too long.
        """
        for index, sentence in enumerate(sentences):
            if len(sentence.tokens) >= self.longest_source:
                raise UserError(
                    f"Sentence {index} has {len(sentence.tokens)} source tokens; expected at most {self.longest_source - 1}, "
                    "one less than decoding.max_source_length (or model.max_positions of learned ones), for the end symbol."
                )
        of_length: dict[int, list[int]] = defaultdict(list)
        for index in sorted(range(len(sentences)), key=lambda index: -len(sentences[index].tokens)):
            of_length[self._encoded_length(sentences[index])].append(index)
        # The device gets everything before the first result is waited for.
        running = []
        for program in self.programs:
            size = program.block_size * self._shares
            blocks = [
                of_length[length][first : first + size]
                for length in reversed(program.lengths)
                for first in range(0, len(of_length[length]), size)
            ]
            for first in range(0, len(blocks), program.num_blocks):
                places = self._places(program, blocks[first : first + program.num_blocks])
                queue, counts, tokens_QX = self._queue(
                    program, {place: sentences[index] for index, place in places.items()}
                )
                # gone if the search is interrupted
                caches = self._caches.pop(program, None) or self._new_caches(program)
                result, self._caches[program] = self._search(
                    self.parameters,
                    queue,
                    counts,
                    caches,
                    program=program,
                    num_hypotheses=num_hypotheses,
                )
                running.append((places, tokens_QX, result))
        if jax.default_backend() != "cpu":
            self._caches.clear()
        found: list[list[Hypothesis]] = [[] for _ in sentences]
        for places, tokens_QX, result in running:
            fetched: Any = jax.tree.map(np.asarray, result)
            if tokens_QX is not None:  # from places in shortlists to tokens
                tokens_QNL = np.take_along_axis(
                    tokens_QX[:, None], fetched.found.tokens_BNL, axis=2
                )
                fetched = fetched._replace(found=fetched.found._replace(tokens_BNL=tokens_QNL))
            self.slots_computed += int(fetched.slots_computed.sum())
            self.slots_used += int(fetched.slots_used.sum())
            for index, place in places.items():
                found[index] = _hypotheses(*(x[place] for x in fetched.found))
        return found

    def lowered(
        self,
        program: Program,
        *,
        num_hypotheses: int = 1,
        sharding: jax.sharding.Sharding | None = None,
    ) -> jax.stages.Lowered:
        """One of ``programs``, not yet compiled: to look at, or to compile ahead; for
        ``sharding``'s devices, if given.
        """
        queue, counts, _ = self._queue(program, {0: Sentence([EOS_ID])})
        given = self.parameters, queue, counts, self.cache_shapes(program)
        if sharding is not None:
            given = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), given
            )
        return self._search.lower(*given, program=program, num_hypotheses=num_hypotheses)

    def cache_shapes(self, program: Program) -> ensemble.Caches:
        """Of the caches of one of ``programs``: all rows of all devices."""
        source_BS = jax.ShapeDtypeStruct(
            (program.rows * self._shares, program.lengths[0]), jnp.int32
        )
        max_length = self._longest(program.lengths[-1])
        return jax.eval_shape(
            lambda source_BS: self._start_caches(program, self.models, source_BS, max_length),
            source_BS,
        )

    def _encoded_length(self, sentence: Sentence) -> int:
        lengths = (length for program in self.programs for length in program.lengths)
        return next(length for length in lengths if len(sentence.tokens) < length)

    def _longest(self, source_length: int) -> int:
        """Positions that any translation of a source of this shape can need."""
        return min([source_length + self.config.max_extra_length, *self._max_positions])

    def _places(self, program: Program, blocks: list[list[int]]) -> dict[int, int]:
        """Where in the queue the sentences of each block stand: dealt out to the devices in turn,
        from block to block.
        """
        places: dict[int, int] = {}
        for block, indices in enumerate(blocks):
            for i, index in enumerate(indices):
                device = len(places) % self._shares
                places[index] = (
                    device * program.num_blocks + block
                ) * program.block_size + i // self._shares
        return places

    def _queue(
        self, program: Program, sentences: dict[int, Sentence]
    ) -> tuple[Queue, np.ndarray, np.ndarray | None]:
        """The sentences at their places as arrays, how many each device has in each block, and
        their shortlists, if any.
        """
        blocks = self._shares * program.num_blocks
        size, room = blocks * program.block_size, program.lengths[-1]
        # At least 1: an array without elements crashes jaxlib 0.11.2 where several devices search.
        longest_prefix = max([1, *(len(sentence.prefix) for sentence in sentences.values())])
        source_QS = np.full((size, room), PAD_ID, np.int32)
        limit_Q, seed_Q = np.zeros(size, np.int32), np.zeros(size, np.uint32)
        prefix_QP = np.full(
            (size, -(-longest_prefix // _PREFIX_STEP) * _PREFIX_STEP), NOT_FORCED, np.int32
        )
        shape_Q, counts = np.zeros(size, np.int32), np.zeros(blocks, np.int32)
        for place, sentence in sentences.items():
            tokens, prefix = sentence.tokens, sentence.prefix
            source_QS[place, : len(tokens) + 1] = [*tokens, EOS_ID]
            limit_Q[place] = min(
                len(tokens) + 1 + self.config.max_extra_length, self._longest(room)
            )
            prefix_QP[place, : len(prefix)] = prefix
            seed_Q[place] = sentence.seed
            shape_Q[place] = program.lengths.index(self._encoded_length(sentence))
            counts[place // program.block_size] += 1
        tokens_QX = own_QK = None
        if self._shortlist is not None and self._shared_C is not None:
            tokens_QX = self._shortlist.of_sentences(source_QS, self._shared_C, prefix_BP=prefix_QP)
            own_QK = tokens_QX[:, len(self._shared_C) :]
            places_QP = (tokens_QX[:, None] == prefix_QP[:, :, None]).argmax(axis=-1)
            prefix_QP = np.where(prefix_QP < 0, NOT_FORCED, places_QP)
        # they go to the devices with the call
        arrays: Any = _Inputs(source_QS, shape_Q, own_QK), limit_Q, prefix_QP, seed_Q
        return Queue(*arrays), counts.reshape(self._shares, program.num_blocks), tokens_QX

    def _start_caches(
        self, program: Program, models: Sequence[Transformer], source_BS: jax.Array, max_length: int
    ) -> Any:
        return ensemble.start_caches(
            models,
            source_BS,
            source_BS != PAD_ID,
            beam_size=self.config.beam_size,
            max_length=max_length,
            source_room=program.lengths[-1],
            keep_attention=self.config.coverage_penalty > 0,
        )

    def _new_caches(self, program: Program) -> ensemble.Caches:
        shapes = self.cache_shapes(program)
        return jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
            out_shardings=self._rows,
        )()

    def _search_queue(
        self,
        parameters: Any,
        queue: Queue,
        counts: jax.Array,
        caches: ensemble.Caches,
        *,
        program: Program,
        num_hypotheses: int,
    ) -> tuple[QueueResult, ensemble.Caches]:
        """``caches`` are overwritten, and come back for the next queue of this program."""
        self.num_compiled += 1  # this runs when a shape is traced, which is once
        inputs: _Inputs = queue.inputs
        own = (
            ""
            if inputs.own_QK is None
            else f" and {inputs.own_QK.shape[1]} target tokens of their own"
        )
        sizes = program.rows * self._shares, program.lengths[-1]
        devices = "" if self._shares == 1 else f" on {self._shares} devices"
        logger.info(
            "Compiling the search for %d sentences of up to %d tokens%s%s.", *sizes, own, devices
        )
        search = partial(self._search_share, program, num_hypotheses=num_hypotheses)
        if self._shares == 1:
            return search(parameters, queue, counts, caches)
        everywhere, rows = self._everywhere.spec, self._rows.spec
        search_shares = jax.shard_map(
            search,
            mesh=self._rows.mesh,
            in_specs=(everywhere, rows, rows, rows),
            out_specs=rows,
            check_vma=False,
        )
        result, caches = search_shares(parameters, queue, counts, caches)
        return jax.lax.with_sharding_constraint(result, self._everywhere), caches

    def _search_share(
        self,
        program: Program,
        parameters: Any,
        queue: Queue,
        counts_1M: jax.Array,
        caches: ensemble.Caches,
        *,
        num_hypotheses: int,
    ) -> tuple[QueueResult, ensemble.Caches]:
        models = [
            with_cast_weights(nnx.merge(graph, each))
            for graph, each in zip(self._graphs, parameters, strict=True)
        ]
        source_room = program.lengths[-1]
        shortlisted = (
            []
            if self._shared_C is None
            else [ShortlistedModel(model, self._shared_C) for model in models]
        )

        def with_own(caches: ensemble.Caches, own_BK: jax.Array | None) -> ensemble.Caches:
            if own_BK is None:
                return caches
            return tuple(
                model.with_own(cache, own_BK)
                for model, cache in zip(shortlisted, caches, strict=True)
            )

        def start_cache(inputs: _Inputs) -> ensemble.Caches:
            """Encodes the block in its own shape, which all its sentences have, to the caches that
            all shapes share.
            """

            def start_at(length: int, source_BS: jax.Array) -> ensemble.Caches:
                return self._start_caches(program, models, source_BS[:, :length], 0)

            branches = [partial(start_at, length) for length in program.lengths]
            return with_own(
                jax.lax.switch(inputs.shape_Q[0], branches, inputs.source_QS), inputs.own_QK
            )

        # Rows begin without tokens of their own (-1), where sentences have such.
        nobodys_BK = jax.tree.map(
            lambda own_QK: jnp.full((program.rows, own_QK.shape[1]), -1, jnp.int32),
            queue.inputs.own_QK,
        )
        result, caches = search_queue(
            self._method(num_hypotheses),
            ensemble.ensemble_step(shortlisted or models),
            start_cache,
            ensemble.replace_rows,
            queue,
            counts_1M[0],
            with_own(tuple(cache.cleared() for cache in caches), nobodys_BK),
            batch_size=program.rows,
            max_length=self._longest(source_room),
            reorder=ensemble.reorder,
            attention=ensemble.attention if self.config.coverage_penalty > 0 else None,
            source_length=source_room,
        )
        if shortlisted:
            caches = tuple(cache.decoder for cache in caches)
        return result._replace(
            slots_computed=result.slots_computed[None], slots_used=result.slots_used[None]
        ), caches

    def _method(self, num_hypotheses: int) -> BeamSearch | Sampling:
        config = self.config
        suppress = self._suppress
        if self._shared_C is not None:  # all searches number tokens by their places
            suppress = tuple(self._shared_C.tolist().index(token) for token in suppress)
        constraints = Constraints(
            config.min_length, suppress, config.no_repeat_ngram, config.repetition_penalty
        )
        if config.method == "sample":
            return Sampling(
                BOS_ID,
                EOS_ID,
                PAD_ID,
                num_samples=config.beam_size,
                num_hypotheses=num_hypotheses,
                temperature=config.temperature,
                top_k=config.top_k,
                top_p=config.top_p,
                seed=config.seed,
                length_penalty=config.length_penalty,
                length_offset=config.length_offset,
                constraints=constraints,
            )
        return BeamSearch(
            BOS_ID,
            EOS_ID,
            PAD_ID,
            beam_size=config.beam_size,
            num_hypotheses=num_hypotheses,
            length_penalty=config.length_penalty,
            length_offset=config.length_offset,
            coverage_penalty=config.coverage_penalty,
            constraints=constraints,
        )


def check_decoding(
    config: DecodingConfig, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], Shortlist | None]:
    """The ids of ``config.suppress`` and the shortlist in the file ``config.shortlist``, as
    ``Engine`` takes them; no model is needed.

    Raises:
      UserError: a token to suppress that the target vocabulary lacks, or EOS; a shortlist that is
        missing, damaged or made for another tokenizer; a beam wider than the vocabulary.
    """
    suppress = tuple(tokenizer.require_target_ids(config.suppress, "decoding.suppress"))
    if EOS_ID in suppress:
        [end] = tokenizer.target_tokens([EOS_ID])
        raise UserError(
            f"decoding.suppress has {end!r}, without which no translation ends before its longest "
            "length; expected other tokens (decoding.min_length asks for longer translations)."
        )
    shortlist = Shortlist.load(config.shortlist, tokenizer) if config.shortlist else None
    shared_C = None if shortlist is None else shortlist.shared(suppress)
    _check_beam(config, tokenizer.target_vocab_size, shared_C)
    return suppress, shortlist


def _check_beam(config: DecodingConfig, vocab_size: int, shared_C: np.ndarray | None) -> None:
    num_tokens = vocab_size if shared_C is None else len(shared_C)
    if config.method == "beam" and config.beam_size > num_tokens:
        which = "of the vocabulary" if shared_C is None else "that every sentence may use"
        raise UserError(
            f"decoding.beam_size is {config.beam_size}; expected at most {num_tokens}, "
            f"the tokens {which}."
        )


def _hypotheses(
    tokens_NL: np.ndarray,
    scores_N: np.ndarray,
    log_probs_N: np.ndarray,
    lengths_N: np.ndarray,
    token_log_probs_NL: np.ndarray,
) -> list[Hypothesis]:
    return [
        Hypothesis(tokens[: length - 1], score, log_prob, token_log_probs[:length])
        for tokens, score, log_prob, length, token_log_probs in zip(
            *(
                x.tolist()
                for x in (tokens_NL, scores_N, log_probs_N, lengths_N, token_log_probs_NL)
            ),
            strict=True,
        )
        if length
    ]


def _programs(longest: int, batch_size: int) -> tuple[Program, ...]:
    """A program for the lengths 16, 24, 32, ..., 128, one for those up to 512, one up to 2,048,
    ..., to the longest.
    """
    lengths = sorted({min(padded_length(length, 16), longest) for length in range(1, longest + 1)})
    groups = groupby(lengths, key=lambda length: (((length - 1) // 128).bit_length() + 1) // 2)
    return tuple(Program(tuple(group), max(1, batch_size // 4**power)) for power, group in groups)
