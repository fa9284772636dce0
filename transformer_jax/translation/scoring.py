"""Forced decoding: log-probabilities and soft alignments of given targets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from transformer_jax.decoding.devices import put_on_device
from transformer_jax.decoding.ensemble import Ensemble
from transformer_jax.decoding.length_buckets import padded_length
from transformer_jax.decoding.ranking import ranking_score
from transformer_jax.errors import UserError
from transformer_jax.model.gpu import single_device_mesh
from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import DecodingConfig
from transformer_jax.tokenization.rows import pad_rows, with_eos
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.alignment import align_texts
from transformer_jax.translation.loading import check_vocabulary
from transformer_jax.translation.requests import Request, Translation, batched, check_text

logger = logging.getLogger(__name__)

Tokens = Sequence[int]

_MAX_LOGITS = 2**22
_FULL_BATCH_LENGTH = 64
MIN_PADDED_LENGTH = 16
"""Smallest padded length of a pair (``length_buckets.padded_length``)."""
_MAX_LENGTH = 4096  # attention memory is quadratic in length


class Scorer:
    """Scores given targets with one model or an ensemble.

    An ensemble averages its models' probabilities. A batch has ``config.batch_size`` pairs of up to
    64 tokens, or fewer longer pairs. Each shape is compiled once per device.

    Attributes:
      max_length: maximum length of a sentence in tokens, EOS included; 4,096 or, if smaller, the
        number of learned positions.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        config: DecodingConfig | None = None,
        *,
        devices: Sequence[jax.Device] = (),
    ):
        """Distribute batches over ``devices`` in turn (default: the parameters' device).

        Raises:
          UserError: model and tokenizer have different vocabulary sizes.
        """
        check_vocabulary(model, tokenizer)
        self.tokenizer = tokenizer
        self.config = config or DecodingConfig()
        self.max_length = min(_MAX_LENGTH, model.config.position_limit)
        self._config = model.config
        models = model.models if isinstance(model, Ensemble) else [model]
        self._layers = min(each.config.decoder_layers for each in models)
        self._graph, parameters = nnx.split(model, nnx.Param)
        self._parameters = [put_on_device(parameters, device) for device in devices or [None]]
        self._log_probs_BT = jax.jit(self._score_batch)
        self._weights_BTS = jax.jit(self._align_batch, static_argnames="layer")

    def score(self, pairs: Iterable[tuple[str | Request, str]]) -> list[Translation]:
        """Score (source, target) pairs. Returns each target, in order, as a ``Translation`` with
        its log-probabilities, EOS included. A ``Request`` can have the languages of its pair.

        An empty line is scored as a single EOS. A pair with a sentence of more than ``max_length``
        tokens gets NaN scores and a warning.

        Raises:
            UserError: a source or target is not text, or a language is unknown.
        """
        requests = list[Request]()
        targets = list[str]()
        for line_number, (source, target) in enumerate(pairs, 1):
            requests.append(Request.of(source, line_number))
            check_text(requests[-1].text, f"Line {line_number}: source")
            check_text(target, f"Line {line_number}: target")
            targets.append(target)
        tokens = self.tokenizer.target.encode(targets)
        prefixes = [request.affixes(self.tokenizer).before_target for request in requests]
        encoded = [prefix + ids for prefix, ids in zip(prefixes, tokens)]
        scored = self.score_tokens(list(zip(self._sources(requests), encoded)))
        translations = list[Translation]()
        for text, prefix, ids, log_probs in zip(targets, prefixes, encoded, scored):
            log_probs = self._with_free_language(log_probs, len(prefix))
            log_prob = float(log_probs.sum(dtype=np.float64))
            length = len(log_probs)
            translations.append(
                Translation(
                    text,
                    ranking_score(log_prob, length, self.config),
                    log_prob,
                    length,
                    tuple(self.tokenizer.target.tokens(ids)),
                    tuple(map(float, log_probs)),
                    eos_token=self.tokenizer.target.eos_token,
                )
            )
        return translations

    def align(
        self, pairs: Sequence[tuple[str | Request, Translation]], *, layer: int | None = None
    ) -> list[Translation]:
        """Add an ``alignment`` to each translation, from a second pass with teacher forcing.

        A pair gets no alignment if its translation is empty or either side exceeds ``max_length``.
        Raises the same errors as ``align_tokens``.
        """
        requests = [
            Request.of(source, line_number) for line_number, (source, _) in enumerate(pairs, 1)
        ]
        sources = self._sources(requests)
        targets = [self.tokenizer.target.ids(translation.tokens) for _, translation in pairs]
        tokens = list(zip(sources, targets))
        aligned = []
        weights = self.align_tokens(tokens, layer=layer)
        for request, (_, translation), ids, weights_TS in zip(requests, pairs, tokens, weights):
            if weights_TS is not None and translation.tokens:
                texts = (request.text, translation.text)
                alignment = align_texts(self.tokenizer, texts, ids, weights_TS)
                translation = replace(translation, alignment=alignment)
            aligned.append(translation)
        return aligned

    def align_and_score(
        self, pairs: Sequence[tuple[str | Request, Translation]]
    ) -> list[Translation]:
        """Add an ``alignment`` to each translation, and ``token_log_probs`` to those that have
        none, because another engine found them.
        """
        aligned = self.align(pairs)
        missing = [i for i, translation in enumerate(aligned) if not translation.token_log_probs]
        requests = [Request.of(pairs[i][0], i + 1) for i in missing]
        targets = [self.tokenizer.target.ids(aligned[i].tokens) for i in missing]
        scored = self.score_tokens(list(zip(self._sources(requests), targets)))
        for i, log_probs in zip(missing, scored):
            scores = self._with_free_language(log_probs, len(log_probs))
            aligned[i] = replace(aligned[i], token_log_probs=tuple(map(float, scores)))
        return aligned

    def _with_free_language(self, log_probs: np.ndarray, prefix_length: int) -> np.ndarray:
        """Return the scores of a target that begins with a prefix of this length, with 0 for the
        language, which the search is forced to take.
        """
        count = min(prefix_length, self.tokenizer.unscored_prefix_length)
        return np.pad(log_probs[count:], (count, 0))

    def _sources(self, requests: Sequence[Request]) -> list[list[int]]:
        encoded = self.tokenizer.source.encode([each.text for each in requests])
        return [each.affixes(self.tokenizer).source(ids) for each, ids in zip(requests, encoded)]

    def score_tokens(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[np.ndarray]:
        """Return the natural log-probabilities of each target's tokens, then of EOS, in float32.
        They are NaN for a pair that is too long. ``pairs`` do not include EOS.
        """
        log_probs = self._in_batches(self._log_probs_BT, pairs)
        lengths = [len(target) + 1 for _, target in pairs]
        return [
            np.full(length, np.nan, np.float32) if log_probs_T is None else log_probs_T[:length]
            for log_probs_T, length in zip(log_probs, lengths)
        ]

    def align_tokens(
        self, pairs: Sequence[tuple[Tokens, Tokens]], *, layer: int | None = None
    ) -> list[np.ndarray | None]:
        """Return each pair's soft alignment as float32 [T, S], with EOS last on both sides. Row t
        is the attention of target token t over the source. A pair that is too long gets None.

        Weights are averaged over the heads of decoder layer ``layer`` (None: see
        ``model.alignment_layer``) and over the models. Each row sums to 1.

        Raises:
            UserError: ``layer`` is out of range.
        """
        if not -self._layers <= (layer or 0) < self._layers:
            raise UserError(
                f"The alignment layer is {layer}; expected {-self._layers} to {self._layers - 1}, "
                "one of the decoder's layers."
            )
        weights = self._in_batches(partial(self._weights_BTS, layer=layer), pairs)
        return [
            None if weights_TS is None else weights_TS[: len(target) + 1, : len(source) + 1]
            for weights_TS, (source, target) in zip(weights, pairs)
        ]

    def _in_batches(
        self, function: Callable[..., Array], pairs: Sequence[tuple[Tokens, Tokens]]
    ) -> list[np.ndarray | None]:
        """Call ``function(parameters, source_BL, target_BL)`` with batches of pairs of similar
        length. Returns the result rows in the order of ``pairs``. A pair that is too long gets
        None and a warning.
        """
        lengths = [1 + max(map(len, pair)) for pair in pairs]
        padded = {
            i: min(padded_length(length, MIN_PADDED_LENGTH), self.max_length)
            for i, length in enumerate(lengths)
            if length <= self.max_length
        }
        if len(padded) < len(pairs):
            message = "%d of %d pairs have more than %d source or target tokens, EOS included, and "
            message += "are skipped."
            logger.warning(message, len(pairs) - len(padded), len(pairs), self.max_length)
        eos_id = self._config.eos_id
        pad_id = self._config.pad_id
        running: list[tuple[list[int], Array]] = []
        # Dispatch the longest pairs first, and all batches before waiting for the first result.
        longest_first = sorted(padded, key=padded.__getitem__, reverse=True)
        for length, indices in groupby(longest_first, key=padded.__getitem__):
            full_length = max(length, _FULL_BATCH_LENGTH)
            num_pairs = self.config.batch_size * _FULL_BATCH_LENGTH // full_length
            batch_size = max(1, num_pairs // len(self._parameters))
            for batch in batched(indices, batch_size):
                sources = [with_eos(pairs[i][0], eos_id) for i in batch]
                targets = [[*pairs[i][1], eos_id] for i in batch]
                source_BL = pad_rows(sources, pad_id, length=length, num_rows=batch_size)
                target_BL = pad_rows(targets, pad_id, length=length, num_rows=batch_size)
                parameters = self._parameters[len(running) % len(self._parameters)]
                running.append((batch, function(parameters, source_BL, target_BL)))
        results: list[np.ndarray | None] = [None] * len(pairs)
        for batch, result in running:
            for i, row in zip(batch, np.asarray(result)):  # remaining rows are padding
                results[i] = row
        return results

    def _score_batch(self, parameters: Any, source_BS: Array, target_BT: Array) -> Array:
        logger.info(
            "Compiling the scoring function for %d pairs of up to %d tokens.", *source_BS.shape
        )
        model = nnx.merge(self._graph, parameters)
        with single_device_mesh():
            hidden = model.hidden(source_BS, target_BT)
        return _label_log_probs(model, hidden, target_BT)

    def _align_batch(
        self, parameters: Any, source_BS: Array, target_BT: Array, *, layer: int | None
    ) -> Array:
        logger.info(
            "Compiling the alignment function for %d pairs of up to %d tokens.", *source_BS.shape
        )
        model = nnx.merge(self._graph, parameters)
        return model.cross_attention(source_BS, target_BT, layer)


def _label_log_probs(model: Any, hidden: Any, target_BT: Array) -> Array:
    """Compute target log-probabilities, a few positions at a time. Returns float32 [B, T]."""

    def label_log_prob(position: tuple[Any, Array]) -> Array:
        hidden, target_B = position
        logits_BV = model.logits(jax.tree.map(lambda x_BD: x_BD[:, None], hidden))[:, 0]
        label_B = jnp.take_along_axis(logits_BV, target_B[:, None], axis=-1)[:, 0]
        return label_B - jax.nn.logsumexp(logits_BV, axis=-1)

    width = max(1, _MAX_LOGITS // (len(target_BT) * model.config.vocab_size))
    by_position = jax.tree.map(lambda x: x.swapaxes(0, 1), (hidden, target_BT))
    return jax.lax.map(label_log_prob, by_position, batch_size=min(width, len(target_BT.T))).T
