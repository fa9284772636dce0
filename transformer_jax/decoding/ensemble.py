"""Ensembles of models.

Shape suffixes (B, W, ...): ``model/attention.py`` and ``search.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from transformer_jax.errors import UserError
from transformer_jax.model.kv_cache import DecoderCache, empty_cache
from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import ModelConfig


class Ensemble(nnx.Module):
    """Averages the probabilities of several models. Has the same methods as ``Transformer``."""

    def __init__(self, models: Sequence[Transformer]):
        """Raise ``UserError`` if ``models`` is empty, or if their vocabulary sizes or first decoder
        inputs differ.
        """
        sizes = list(map(vocabulary_sizes, models))
        if len(set(sizes)) != 1:
            raise UserError(
                f"The models' (source, target) vocabulary sizes are {sizes}; expected one or more "
                "models with the same sizes."
            )
        for name in ("decoder_start_id", "pad_id", "eos_id"):
            ids = [getattr(model.config, name) for model in models]
            if len(set(ids)) > 1:
                raise UserError(
                    f"The models' model.{name} are {ids}; expected the same value, because all "
                    "models of an ensemble get the same token ids."
                )
        self.models = nnx.List(models)

    @property
    def config(self) -> ModelConfig:
        """Config of the model with the fewest positions."""
        return min((model.config for model in self.models), key=lambda x: x.position_limit)

    def hidden(self, source_BS: Array, target_BT: Array) -> tuple[Array, ...]:
        """Return each model's decoder output, as input for ``logits``."""
        return tuple(model.hidden(source_BS, target_BT) for model in self.models)

    def logits(self, hidden: tuple[Array, ...]) -> Array:
        """Return logits of the mean probabilities, float32 [B, T, V]."""
        pairs = zip(self.models, hidden, strict=True)
        return _logits_of_mean([model.logits(hidden_BTD) for model, hidden_BTD in pairs])

    def cross_attention(self, source_BS: Array, target_BT: Array, layer: int | None) -> Array:
        """Return the mean of ``Transformer.cross_attention`` over the models."""
        weights = [model.cross_attention(source_BS, target_BT, layer) for model in self.models]
        return jnp.stack(weights).mean(axis=0)

    def encode(self, source_BS: Array) -> tuple[Array, ...]:
        """Return each model's encoder output ``memory_BSD``."""
        return tuple(model.encode(source_BS) for model in self.models)

    def start_cache(
        self, memories: tuple[Array, ...], source_mask_BS: Array, **sizes: int
    ) -> DecoderCache:
        """Create a cache with the layers of all models. See ``Transformer.start_cache``."""
        cross_keys_values: list[Any] = []
        for model, memory_BSD in zip(self.models, memories, strict=True):
            cross_keys_values += model.cross_keys_values(memory_BSD)
        return empty_cache(cross_keys_values, source_mask_BS, **sizes)

    def decode_step(self, tokens_BW: Array, cache: DecoderCache) -> tuple[Array, DecoderCache]:
        """Return logits of the mean probabilities, float32 [B, W, V], and the new cache."""
        layers = cache.layers()
        remaining_layers = iter(layers)
        logits = [
            model.next_logits(
                tokens_BW, list(islice(remaining_layers, model.config.decoder_layers))
            )
            for model in self.models
        ]
        return _logits_of_mean(logits), cache.append(layers)


def vocabulary_sizes(model: Transformer | Ensemble) -> tuple[int, int]:
    """Return the source and target vocabulary sizes."""
    config = model.config
    return config.source_vocab_size or config.vocab_size, config.vocab_size


def _logits_of_mean(logits: Sequence[Array]) -> Array:
    """Compute logits whose softmax is the mean of the models' probabilities."""
    log_probs = jnp.stack([jax.nn.log_softmax(x) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0)
