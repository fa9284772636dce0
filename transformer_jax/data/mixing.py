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

    In a batch plan, it takes the place of a ``Corpus``. Its pairs are *slots*: a slot holds one of
    two pairs, depending on the epoch, and has room for both. For example, with parts of 4 and 2
    pairs (``abcd`` and ``ef``) and equal weights, each part has 4 slots. The slots of ``abcd`` hold
    ``abcd`` in every epoch, those of ``ef`` hold ``eeff``. With 3 slots, they hold ``eef`` in some
    epochs and ``eff`` in others.
    """

    def __init__(self, corpus: Corpus, config: PairsConfig) -> None:
        """Raise ``UserError`` if a weight is so small that epochs would be very long."""
        self._corpus = corpus
        self.read = corpus.read
        self.sides = corpus.sides
        num_pairs_C = np.array(corpus.sizes)  # C corpora, the parts
        num_slots_C = _slots_of_parts(num_pairs_C, config)
        self.num_pairs = int(num_slots_C.sum())
        self._num_pairs_C = num_pairs_C
        self._num_slots_C = num_slots_C
        part_N = np.arange(len(num_pairs_C)).repeat(num_pairs_C)
        # Pairs by part and, in a part, by length.
        self._order_N = np.lexsort((*corpus.lengths(), part_N))

    def lengths(self) -> np.ndarray:
        """Return the source and target lengths of slots, as int32 [2, N]."""
        # Epoch 0 has the first pair of every slot, and epoch 3 the second one.
        pairs_2N = [self.pairs_in_epoch(np.arange(self.num_pairs), epoch) for epoch in (0, 3)]
        return self._corpus.lengths()[:, pairs_2N].max(1)

    def pairs_in_epoch(self, slots: np.ndarray, epoch: int) -> np.ndarray:
        """Return the pairs in ``slots``: a systematic sample of each part, sorted by length.

        Slot i of a part with P pairs and S slots has pair (i P + shift) / S, rounded down. The
        shift is a multiple of P / 16, another one in each of 16 epochs.
        """
        ends_of_slots_C = self._num_slots_C.cumsum()
        ends_of_pairs_C = self._num_pairs_C.cumsum()
        part = np.searchsorted(ends_of_slots_C, slots, "right")
        num_pairs = self._num_pairs_C[part]
        num_slots = self._num_slots_C[part]
        from_end = slots - ends_of_slots_C[part]  # negative: positions count back from the end
        shift = epoch * 5 % 16 * num_pairs // 16
        return self._order_N[ends_of_pairs_C[part] + (from_end * num_pairs + shift) // num_slots]


def _slots_of_parts(num_pairs_C: np.ndarray, config: PairsConfig) -> np.ndarray:
    """Return the number of pairs of each part in an epoch: its weight's share, and enough for each
    pair of each part at least once.
    """
    weights_C = np.array(config.weights or num_pairs_C ** (1 / config.temperature))
    # Lengths of epochs, in units of the weights, that have each pair of this part once.
    epoch_lengths_C = num_pairs_C / weights_C
    num_slots_C = np.round(weights_C * epoch_lengths_C.max()).clip(num_pairs_C)
    max_slots = min(100 * num_pairs_C.sum(), 2**31 - 2)
    if num_slots_C.sum() > max_slots:
        rarest = config.source[epoch_lengths_C.argmax()]
        raise UserError(
            f"An epoch with these data.train.weights has {num_slots_C.sum():,.0f} pairs; expected "
            f"at most {max_slots:,}. Raise the weight of {rarest!r}."
        )
    return num_slots_C.astype(int)
