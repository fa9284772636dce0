"""Forced decoding: the log-probabilities of given targets, and their soft alignments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.decoding.alignment import alignment
from transformer_jax.decoding.buckets import padded_length
from transformer_jax.decoding.devices import row_shardings
from transformer_jax.decoding.search import length_divisor
from transformer_jax.decoding.trained_models import TrainedModels, check_text, warn_first
from transformer_jax.decoding.translator import Translation
from transformer_jax.errors import UserError, shown
from transformer_jax.model.transformer import Transformer
from transformer_jax.special_ids import EOS_ID, PAD_ID

logger = logging.getLogger(__name__)

Tokens = Sequence[int]

_MAX_LOGITS = 2**22
_FULL_LENGTH = 64
_LONGEST = 4096  # attention takes memory as the square of the length


class Scorer(TrainedModels):
    """A model (or several with one vocabulary) that says how likely given targets are.

    Several score by the mean of their probabilities, as an ensemble translates. A batch has
    ``config.batch_size`` pairs of up to 64 tokens and fewer of longer ones. Each shape is compiled
    once.

    Attributes:
      longest: tokens that a sentence may have, EOS included: 4,096, or the number of learned
        positions.
      parameters: the models', a list of what ``nnx.to_pure_dict`` gives.
      num_compiled: how many functions have been compiled so far.
    """

    def _set_up(self, models: list[Transformer], devices: Sequence[jax.Device]) -> None:
        self.num_compiled = 0
        self._layers = min(model.config.decoder_layers for model in models)
        self.longest = min(_LONGEST, *(model.config.position_limit for model in models))
        self._shares = max(1, len(devices))
        everywhere, self._rows = row_shardings(devices)
        self._graphs, states = zip(*(nnx.split(model, nnx.Param) for model in models), strict=True)
        self.parameters = jax.device_put(list(map(nnx.to_pure_dict, states)), everywhere)
        self._log_probs_BT = jax.jit(self._score_batch)
        self._weights_BTS = jax.jit(self._align_batch, static_argnames="layer")

    def score(
        self, pairs: Iterable[tuple[str, str]], *, numbers: Sequence[int] = ()
    ) -> list[Translation]:
        """Each (source, target), in order, as a ``Translation``: the target with its
        log-probabilities, EOS included.

        Empty lines are scored too: as EOS alone. A pair with a sentence of more than ``longest``
        tokens gets NaN for its figures, with a warning. ``numbers`` are the lines' numbers in
        messages (default: from 1).

        Raises:
            UserError: what is no pair, a source or target that is no text.
        """
        pairs = list(pairs)
        numbers = numbers or range(1, len(pairs) + 1)
        for number, texts in zip(numbers, pairs, strict=True):
            if isinstance(texts, str) or len(texts) != 2:
                raise UserError(
                    f"Line {number} is {shown(texts)}; expected a pair of texts, (source, target)."
                )
            for side, text in zip(("source", "target"), texts, strict=True):
                check_text(text, f"Line {number}: {side}")
        sources = self.tokenizer.encode_source([source for source, _ in pairs])
        targets = self.tokenizer.encode_target([target for _, target in pairs])
        tokens = list(zip(sources, targets, strict=True))
        scored = iter(self.score_tokens(list(filter(self.fits, tokens))))
        translations = []
        for number, (_, text), pair in zip(numbers, pairs, tokens, strict=True):
            if self.fits(pair):
                log_probs = next(scored)
            else:
                self.num_failed += 1
                problem = self._too_long(pair)
                warn_first(self.num_failed, "Line %d is not scored: %s", number, problem)
                log_probs = np.full(len(pair[1]) + 1, np.nan)
            translations.append(self._translation(text, pair[1], log_probs))
        return translations

    def align(
        self, pairs: Sequence[tuple[str, Translation]], *, layer: int = -1
    ) -> list[Translation]:
        """Each source's translation with its ``alignment``, by attention in a second, forced pass.

        An empty translation gets none, nor does one that is, or whose source is, longer than
        ``longest``. Raises as ``align_tokens``.
        """
        sources = self.tokenizer.encode_source([source for source, _ in pairs])
        targets = [self.tokenizer.target_ids(translation.tokens) for _, translation in pairs]
        tokens = list(zip(sources, targets, strict=True))
        chosen = [i for i, pair in enumerate(tokens) if pair[1] and self.fits(pair)]
        weights = self.align_tokens([tokens[i] for i in chosen], layer=layer)
        aligned = [translation for _, translation in pairs]
        for i, weights_TS in zip(chosen, weights, strict=True):
            texts = pairs[i][0], aligned[i].text
            found = alignment(self.tokenizer, texts, tokens[i], weights_TS)
            aligned[i] = replace(aligned[i], alignment=found)
        return aligned

    def score_tokens(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[np.ndarray]:
        """Natural log-probability of each target's tokens and, last, of EOS; float32. Tokens are
        given without EOS.

        Raises:
            UserError: a pair that does not fit (``fits``).
        """
        rows = self._in_batches(partial(self._log_probs_BT, self.parameters), pairs)
        return [row[: len(target) + 1] for row, (_, target) in zip(rows, pairs, strict=True)]

    def align_tokens(
        self, pairs: Sequence[tuple[Tokens, Tokens]], *, layer: int = -1
    ) -> list[np.ndarray]:
        """Each pair's soft alignment, float32 [T, S], both with EOS last: row t is where token t of
        the target looked.

        Mean over the heads of decoder layer ``layer`` (and over the models); each row sums to 1.

        Raises:
            UserError: no such layer, or a pair that does not fit (``fits``).
        """
        self.check_layer(layer)
        run = partial(self._weights_BTS, self.parameters, layer=layer)
        return [
            weights[: len(target) + 1, : len(source) + 1]
            for weights, (source, target) in zip(self._in_batches(run, pairs), pairs, strict=True)
        ]

    def check_layer(self, layer: int) -> None:
        """``UserError`` unless the decoder has this layer; negative ones count from the last."""
        if not -self._layers <= layer < self._layers:
            raise UserError(
                f"The alignment layer is {layer}; expected {-self._layers} to {self._layers - 1}, "
                "one of the decoder's layers."
            )

    def _in_batches(
        self,
        run: Callable[[jax.Array, jax.Array], jax.Array],
        pairs: Sequence[tuple[Tokens, Tokens]],
    ) -> list[np.ndarray]:
        """The rows of ``run(source_BS, target_BT)``, called with pairs of similar length, in the
        order of ``pairs``.
        """
        for number, pair in enumerate(pairs, 1):
            if not self.fits(pair):
                raise UserError(f"Pair {number} is too long: {self._too_long(pair)}")
        lengths = [min(padded_length(1 + max(map(len, pair)), 16), self.longest) for pair in pairs]
        running = []
        # The device gets the longest first, and all batches before the first result is awaited.
        longest_first = sorted(range(len(pairs)), key=lambda i: -lengths[i])
        for length, same in groupby(longest_first, key=lambda i: lengths[i]):
            rows = min(self.config.batch_size, self.config.batch_size * _FULL_LENGTH // length)
            rows = max(1, rows // self._shares) * self._shares
            while batch := list(islice(same, rows)):
                sides_2BL = np.full((2, rows, length), PAD_ID, np.int32)
                for row, i in enumerate(batch):
                    for side_BL, tokens in zip(sides_2BL, pairs[i], strict=True):
                        side_BL[row, : len(tokens) + 1] = [*tokens, EOS_ID]
                running.append((batch, run(*jax.device_put(tuple(sides_2BL), self._rows))))
        rows_of: dict[int, np.ndarray] = {}
        for batch, result in running:
            rows_of |= zip(batch, np.asarray(result), strict=False)  # the other rows are padding
        return [rows_of[i] for i in range(len(pairs))]

    def _score_batch(
        self, parameters: list[Any], source_BS: jax.Array, target_BT: jax.Array
    ) -> jax.Array:
        self._count(source_BS, "scoring")
        each = [
            _label_log_probs(model, model.hidden(source_BS, target_BT), target_BT)
            for model in map(nnx.merge, self._graphs, parameters)
        ]
        if len(each) == 1:
            return each[0]
        return jax.nn.logsumexp(jnp.stack(each), axis=0) - np.log(len(each))

    def _align_batch(
        self, parameters: list[Any], source_BS: jax.Array, target_BT: jax.Array, *, layer: int
    ) -> jax.Array:
        self._count(source_BS, "alignment")
        each = [
            model.attention_weights(source_BS, target_BT).cross[layer].mean(axis=1)
            for model in map(nnx.merge, self._graphs, parameters)
        ]
        return jnp.stack(each).mean(axis=0)

    def _count(self, source_BS: jax.Array, what: str) -> None:
        self.num_compiled += 1  # runs once for each shape, when it is traced
        logger.info("Compiling the %s of %d pairs of up to %d tokens.", what, *source_BS.shape)

    def _translation(self, text: str, tokens: Tokens, log_probs: np.ndarray) -> Translation:
        log_prob, length = float(log_probs.sum(dtype=np.float64)), len(log_probs)
        divisor = length_divisor(length, self.config.length_penalty, self.config.length_offset)
        return Translation(
            text,
            log_prob / float(divisor),
            log_prob,
            length,
            tokens=tuple(self.tokenizer.target_tokens(tokens)),
            token_log_probs=tuple(map(float, log_probs)),
        )

    def fits(self, pair: tuple[Tokens, Tokens]) -> bool:
        """Whether source and target, given without EOS, have at most ``longest`` tokens with it."""
        return max(map(len, pair)) < self.longest

    def _too_long(self, pair: tuple[Tokens, Tokens]) -> str:
        lengths = " and ".join(str(len(tokens) + 1) for tokens in pair)
        learned = " = model.max_positions: this model's positions are learned and end there"
        return (
            f"{lengths} source and target tokens, EOS included; "
            f"expected at most {self.longest}{learned if self.longest < _LONGEST else ''}."
        )


def _label_log_probs(model: Transformer, hidden_BTD: jax.Array, target_BT: jax.Array) -> jax.Array:
    """log softmax(logits)[target], float32 [B, T]; logits exist for a few positions at a time."""

    def at_position(position: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden_BD, target_B = position
        logits_BV = model.logits(hidden_BD[:, None])[:, 0]
        label_B = jnp.take_along_axis(logits_BV, target_B[:, None], axis=-1)[:, 0]
        return label_B - jax.nn.logsumexp(logits_BV, axis=-1)

    width = max(1, _MAX_LOGITS // (len(target_BT) * model.config.vocab_size))
    by_position = hidden_BTD.swapaxes(0, 1), target_BT.T
    return jax.lax.map(at_position, by_position, batch_size=min(width, len(target_BT.T))).T
