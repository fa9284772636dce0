"""Mix of corpora: epochs in which each corpus has a given fraction of the pairs.

An epoch contains each pair of one corpus exactly once. It oversamples every other corpus by a
factor of at least 1, which follows from the weights. A factor of 1.5 means that half of the pairs
occur twice in an epoch, and the rest once. Which pairs occur twice changes from epoch to epoch, so
all pairs of a corpus occur equally often in the long run. All epochs have the same batch shapes,
because pairs that replace each other are neighbors in the corpus sorted by length.
"""

from __future__ import annotations

import numpy as np

from transformer_jax.data.corpus import Corpus
from transformer_jax.errors import UserError
from transformer_jax.settings.config import PairsConfig


class Mix:
    """A corpus of several parts, with the number of pairs that each part has in an epoch.

    In a batch plan, it takes the place of a ``Corpus``. Its pairs are slots: a slot holds one of
    two pairs, depending on the epoch, and has room for both.
    """

    def __init__(self, corpus: Corpus, config: PairsConfig) -> None:
        """Raise ``UserError`` if a weight is so small that epochs would be very long."""
        self._corpus = corpus
        self.read = corpus.read
        self.sides = corpus.sides
        sizes_C = np.array(corpus.sizes)
        weights_C = np.array(config.weights or sizes_C ** (1 / config.temperature))
        epochs_C = sizes_C / weights_C  # length of an epoch with each pair of this part once
        slots_C = np.round(weights_C * epochs_C.max()).clip(sizes_C)
        max_pairs = min(100 * corpus.num_pairs, 2**31 - 2)
        if slots_C.sum() > max_pairs:
            raise UserError(
                f"An epoch with these data.train.weights has {slots_C.sum():,.0f} pairs; expected "
                f"at most {max_pairs:,}. Raise the weight of {config.source[epochs_C.argmax()]!r}."
            )
        self.num_pairs = int(slots_C.sum())
        self._parts_2C = np.array([sizes_C, slots_C], int)
        part_N = np.arange(len(sizes_C)).repeat(sizes_C)
        self._order_N = np.lexsort((*corpus.lengths(), part_N))

    def lengths(self) -> np.ndarray:
        """Return the source and target lengths of slots, as int32 [2, N]."""
        # Epoch 0 has the first pair of every slot, and epoch 3 the second one.
        pairs_2N = [self.pairs_in_epoch(np.arange(self.num_pairs), epoch) for epoch in (0, 3)]
        return self._corpus.lengths()[:, pairs_2N].max(1)

    def pairs_in_epoch(self, slots: np.ndarray, epoch: int) -> np.ndarray:
        """Return the pairs in ``slots``: a systematic sample of each part, sorted by length.

        Pairs are at even distances. The first distance is a multiple of 1/16, another one in each
        of 16 epochs.
        """
        ends_2C = self._parts_2C.cumsum(1)
        part = np.searchsorted(ends_2C[1], slots, "right")
        num_pairs, num_slots = self._parts_2C[:, part]
        end_of_pairs, end_of_slots = ends_2C[:, part]
        from_end = slots - end_of_slots  # negative: positions count back from the end of the part
        shift = epoch * 5 % 16 * num_pairs // 16
        return self._order_N[end_of_pairs + (from_end * num_pairs + shift) // num_slots]
