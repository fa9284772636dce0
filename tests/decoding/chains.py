"""Toy models for search tests. The next token depends on sentence, position and previous token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from transformer_jax.decoding.search import gather_beams

PAD, BOS, EOS = 0, 1, 2
IDS = {"pad_id": PAD, "bos_id": BOS, "eos_id": EOS}


def random_chains(seed: int, *, sentences: int, length: int, vocab: int) -> np.ndarray:
    """One chain per sentence: normalized log-probabilities, float32 [B, L, V, V]."""
    logits = np.random.default_rng(seed).normal(size=(sentences, length, vocab, vocab)) * 1.5
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


@struct.dataclass
class ToyCache:
    """Each beam's sentence and position."""

    sentence_BW: Array
    position_BW: Array

    def reorder(self, parents_BW: Array) -> ToyCache:
        """Make beam w continue beam ``parents_BW[b, w]``."""
        return gather_beams(self, parents_BW)

    def replace_rows(self, rows_R: Array, fresh: ToyCache) -> ToyCache:
        """Put the sentences of ``fresh`` into rows ``rows_R``."""
        return jax.tree.map(lambda old, new: old.at[rows_R].set(new, mode="drop"), self, fresh)


def start(sentence_B: Array, *, beam_size: int) -> ToyCache:
    """Create a cache in which row b holds sentence ``sentence_B[b]``."""
    shape_BW = sentence_B.shape[0], beam_size
    return ToyCache(
        jnp.broadcast_to(sentence_B[:, None], shape_BW).astype(jnp.int32),
        jnp.zeros(shape_BW, jnp.int32),
    )


def step(toys: np.ndarray | Array) -> Callable[[Array, Any], tuple[Array, Any]]:
    """Return the step function of ``random_chains``."""
    log_probs_BLVV = jnp.asarray(toys)

    def step(tokens_BW: Array, cache: ToyCache) -> tuple[Array, ToyCache]:
        position_BW = jnp.minimum(cache.position_BW, log_probs_BLVV.shape[1] - 1)
        at = cache.sentence_BW, position_BW, tokens_BW
        return log_probs_BLVV[at], dataclasses.replace(cache, position_BW=cache.position_BW + 1)

    return step


def hypotheses(result: Any) -> list[list[tuple[tuple[int, ...], float, float]]]:
    """(tokens, score, log-probability) of every hypothesis of every sentence. Checks what holds for
    every result: order, padding, EOS, and sums of token log-probabilities.
    """
    tokens_BNL, scores_BN, log_probs_BN, lengths_BN, token_log_probs_BNL = map(np.asarray, result)
    found = []
    for sentence in range(len(lengths_BN)):
        its = []
        for n, length in enumerate(lengths_BN[sentence]):
            tokens, each = tokens_BNL[sentence, n], token_log_probs_BNL[sentence, n]
            assert (tokens[length:] == PAD).all() and (each[length:] == 0).all()
            if length == 0:
                assert scores_BN[sentence, n] == log_probs_BN[sentence, n] == -np.inf
                continue
            assert tokens[length - 1] == EOS and not {EOS, PAD} & set(tokens[: length - 1].tolist())
            assert math.isclose(each.sum(), log_probs_BN[sentence, n], rel_tol=1e-5)
            its.append(
                (
                    tuple(tokens[:length].tolist()),
                    float(scores_BN[sentence, n]),
                    float(log_probs_BN[sentence, n]),
                )
            )
        scores = [score for _, score, _ in its]
        assert scores == sorted(scores, reverse=True)
        found.append(its)
    return found


def assert_same(found: list[tuple[tuple[int, ...], float, float]], expected: list[Any]) -> None:
    """Assert that a sentence's ``hypotheses`` equal the reference search's."""
    assert [tokens for tokens, _, _ in found] == [each.tokens for each in expected]
    scores = [(score, log_prob) for _, score, log_prob in found]
    expected_scores = [(each.score, each.log_prob) for each in expected]
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5)
