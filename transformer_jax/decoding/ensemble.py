"""Several models decoding as one: the mean of their probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from transformer_jax.decoding.search import StepFn
from transformer_jax.decoding.shortlisted_model import ShortlistedModel
from transformer_jax.model.cache import DecoderCache
from transformer_jax.model.transformer import Transformer

Caches = tuple[Any, ...]  # one a model: DecoderCache, or ShortlistedCache


def ensemble_step(models: Sequence[Transformer | ShortlistedModel]) -> StepFn:
    """A step over one cache a model: logits of one model as they are, log of the mean probability
    of several.
    """

    def step(tokens_BW: Array, caches: Caches) -> tuple[Array, Caches]:
        logits, new_caches = zip(
            *(
                model.decode_step(tokens_BW, cache)
                for model, cache in zip(models, caches, strict=True)
            )
        )
        if len(models) == 1:
            return logits[0], new_caches
        log_probs_MBWV = jnp.stack([jax.nn.log_softmax(x.astype(jnp.float32)) for x in logits])
        return jax.nn.logsumexp(log_probs_MBWV, axis=0) - jnp.log(
            jnp.float32(len(models))
        ), new_caches

    return step


def start_caches(
    models: Sequence[Transformer],
    source_BS: Array,
    mask_BS: Array,
    *,
    beam_size: int,
    max_length: int,
    source_room: int,
    keep_attention: bool,
) -> tuple[DecoderCache, ...]:
    """Every model's cache for these sentences."""
    return tuple(
        model.start_cache(
            model.encode(source_BS),
            mask_BS,
            beam_size=beam_size,
            max_length=max_length,
            source_room=source_room,
            keep_attention=keep_attention,
        )
        for model in models
    )


def reorder(caches: Caches, parents_BW: Array) -> Caches:
    """Beam w goes on from what was beam ``parents_BW[b, w]``, in every model."""
    return tuple(cache.reorder(parents_BW) for cache in caches)


def replace_rows(caches: Caches, rows_R: Array, fresh: Caches) -> Caches:
    """``DecoderCache.replace_rows`` in every model."""
    return tuple(cache.replace_rows(rows_R, new) for cache, new in zip(caches, fresh, strict=True))


def attention(caches: Caches) -> Array:
    """Where the last step looked, [B, W, S]: the mean over the models."""
    return jnp.stack(
        [cache.attention_BWS for cache in caches if cache.attention_BWS is not None]
    ).mean(axis=0)
