"""Mix of corpora: epochs in which each corpus has a given share of the pairs.

An epoch has each pair of one corpus once. From the others, whose shares are larger for their size,
it has each pair about as often as the share asks for: for example, some pairs once and as many
twice. Other pairs follow in the next epochs, so on average, all pairs of a corpus occur equally
often. Epochs still have the same batch shapes, because pairs that replace each other are neighbors
in the corpus sorted by length.
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
        self._corpus, self.read, self.sides = corpus, corpus.read, corpus.sides
        sizes_C = np.array(corpus.sizes)
        weights_C = np.array(config.weights or sizes_C ** (1 / config.temperature))
        epochs_C = sizes_C / weights_C  # length of an epoch with each pair of this part once
        slots_C = np.round(weights_C * epochs_C.max()).clip(sizes_C)
        if slots_C.sum() > (most := min(100 * corpus.num_pairs, 2**31 - 2)):
            raise UserError(
                f"An epoch with these data.train.weights has {slots_C.sum():,.0f} pairs; expected "
                f"at most {most:,}. Raise the weight of {config.source[epochs_C.argmax()]!r}."
            )
        self.num_pairs, self._parts_2C = int(slots_C.sum()), np.array([sizes_C, slots_C], int)
        part_N = np.arange(len(sizes_C)).repeat(sizes_C)
        self._order_N = np.lexsort((*corpus.lengths(), part_N))

    def lengths(self) -> np.ndarray:
        """Return the source and target lengths of slots, as int32 [2, N]."""
        # Epoch 0 has the first pair of every slot, and epoch 3 the second one.
        pairs_2N = [self.drawn(np.arange(self.num_pairs), epoch) for epoch in (0, 3)]
        return self._corpus.lengths()[:, pairs_2N].max(1)

    def drawn(self, slots: np.ndarray, epoch: int) -> np.ndarray:
        """Return the pairs in ``slots``: a systematic sample of each part, sorted by length.

        Pairs are at even distances. The first distance is a multiple of 1/16, another one in each
        of 16 epochs.
        """
        ends_2C = self._parts_2C.cumsum(1)
        part = np.searchsorted(ends_2C[1], slots, "right")
        (size, count), (end, last) = self._parts_2C[:, part], ends_2C[:, part]
        # The first term is negative: it counts back from the end of the part.
        return self._order_N[end + ((slots - last) * size + epoch * 5 % 16 * size // 16) // count]
