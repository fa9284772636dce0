"""Toy models for the tests of every search: the next token depends on the sentence, the position
and the token before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from transformer_jax.decoding.search import gather_beams

PAD, BOS, EOS = 0, 1, 2
IDS = {"pad_id": PAD, "bos_id": BOS, "eos_id": EOS}


class Chains(NamedTuple):
    """One chain a sentence, and where each of its steps looks."""

    log_probs_BLVV: np.ndarray
    attention_BLVS: np.ndarray


def random_chains(seed: int, *, sentences: int, length: int, vocab: int, source: int = 3) -> Chains:
    """Normalised log-probabilities; attention rows sum to 1, and two more source positions are
    padding.
    """
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(sentences, length, vocab, vocab)) * 1.5
    attention = generator.dirichlet(np.ones(source), size=(sentences, length, vocab))
    padded = np.pad(attention, ((0, 0), (0, 0), (0, 0), (0, 2)))
    return Chains(
        (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32),
        padded.astype(np.float32),
    )


@struct.dataclass
class ToyCache:
    """Which sentence a beam belongs to, how far it is, and where its last step looked."""

    sentence_BW: Array
    position_BW: Array
    attention_BWS: Array

    def reorder(self, parents_BW: Array) -> ToyCache:
        """Beam w continues what was beam ``parents_BW[b, w]``."""
        return gather_beams(self, parents_BW)

    def replace_rows(self, rows_R: Array, fresh: ToyCache) -> ToyCache:
        """Rows ``rows_R`` hold the sentences of ``fresh``."""
        return jax.tree.map(lambda old, new: old.at[rows_R].set(new, mode="drop"), self, fresh)


def start(chains: Chains, sentence_B: Array, *, beam_size: int) -> ToyCache:
    """A cache in which row b holds sentence ``sentence_B[b]`` of ``chains``."""
    shape_BW = sentence_B.shape[0], beam_size
    return ToyCache(
        jnp.broadcast_to(sentence_B[:, None], shape_BW).astype(jnp.int32),
        jnp.zeros(shape_BW, jnp.int32),
        jnp.zeros((*shape_BW, chains.attention_BLVS.shape[-1])),
    )


def step(chains: Chains) -> Callable[[Array, Any], tuple[Array, Any]]:
    """The step function of the chains over such a cache."""
    log_probs_BLVV, attention_BLVS = map(jnp.asarray, chains)

    def step(tokens_BW: Array, cache: ToyCache) -> tuple[Array, ToyCache]:
        position_BW = jnp.minimum(cache.position_BW, log_probs_BLVV.shape[1] - 1)
        at = cache.sentence_BW, position_BW, tokens_BW
        cache = dataclasses.replace(
            cache, position_BW=cache.position_BW + 1, attention_BWS=attention_BLVS[at]
        )
        return log_probs_BLVV[at], cache

    return step


def attention(cache: ToyCache) -> Array:
    """Where the last step looked."""
    return cache.attention_BWS


def hypotheses(result: Any) -> list[list[tuple[tuple[int, ...], float, float]]]:
    """(tokens, score, log-probability) of every hypothesis of every sentence, with what each result
    must satisfy checked.
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
            np.testing.assert_allclose(each.sum(), log_probs_BN[sentence, n], rtol=1e-5)
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
