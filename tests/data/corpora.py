"""In-memory corpora in which each row identifies its pairs, for tests of batches."""

import numpy as np
import pytest

from transformer_jax.data.batching import Batch
from transformer_jax.data.corpus import Corpus, Sequences
from transformer_jax.settings.config import BatchConfig

EOS = 2
FIRST_ID = 10  # of regular tokens


def make_corpus(source_lengths: np.ndarray, target_lengths: np.ndarray) -> Corpus:
    """Lengths [N] include EOS. Both sides of pair i are the token i + 10, repeated, and EOS, so
    that a row identifies its pairs.
    """
    N, sides = len(source_lengths), []
    for lengths_N in (source_lengths, target_lengths):
        offsets = np.concatenate([[0], np.cumsum(lengths_N, dtype=np.int64)])
        tokens = np.repeat(np.arange(N, dtype=np.int32) + FIRST_ID, lengths_N)
        tokens[offsets[1:] - 1] = EOS
        sides.append(Sequences(tokens, offsets))
    return Corpus("test", (sides[0], sides[1]), N)


def random_lengths(seed: int, num_pairs: int, mean: float = 10.0) -> tuple[np.ndarray, np.ndarray]:
    """Log-normal lengths, correlated between the sides, as in real text."""
    random = np.random.default_rng(seed)
    source = random.lognormal(np.log(mean), 0.5, num_pairs)
    target = source * random.lognormal(0.05, 0.2, num_pairs)
    return np.clip(source, 2, 60).astype(np.int32), np.clip(target, 2, 60).astype(np.int32)


def random_corpus(seed: int, num_pairs: int, mean: float = 10.0) -> Corpus:
    return make_corpus(*random_lengths(seed, num_pairs, mean))


def small_config(layout: str, tokens: int = 512) -> BatchConfig:
    return BatchConfig(layout=layout, tokens=tokens, buckets=4, row_length=64, row_multiple=4)


def assert_same(a: Batch, b: Batch) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x, y)


def sequences_of(batch: Batch) -> list[tuple[int, int, int]]:
    """Sequences in a batch, as (number, source length, target length).

    Checks that each is complete and in the right place.
    """
    found = []
    for r in range(len(batch.source_BS)):
        sides = []
        segments = batch.source_segments_BS, batch.target_segments_BT
        for row, segment in zip((batch.source_BS[r], batch.target_BT[r]), segments, strict=True):
            real = row != 0
            assert real[: real.sum()].all(), "padding only at the end"
            if not real.any():
                assert segment is None or not segment[r].any()
                sides.append([])
                continue
            if segment is None:
                assert (row[real] == EOS).sum() == 1
            else:  # the segment id increases after each EOS, and is 0 at padding
                expected = np.where(real, np.cumsum(np.concatenate([[0], row[:-1] == EOS])) + 1, 0)
                np.testing.assert_array_equal(segment[r], expected)
            parts = np.split(row[real], np.flatnonzero(row[real] == EOS)[:-1] + 1)
            assert all(part[-1] == EOS and len(set(part[:-1])) == 1 for part in parts)
            sides.append([(int(part[0]) - FIRST_ID, len(part)) for part in parts])
        assert [j for j, _ in sides[0]] == [j for j, _ in sides[1]], (
            "source and target of a row are the same pairs"
        )
        found += [(j, s, t) for (j, s), (_, t) in zip(*sides)]
    return found


layouts = pytest.mark.parametrize("layout", ["bucketed", "packed"])
