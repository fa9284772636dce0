"""The batches of a whole corpus hold every pair once, within the budget, in few shapes."""

import numpy as np

from transformer_jax.data.corpus import Corpus
from transformer_jax.data.evaluation_batches import whole_corpus
from transformer_jax.special_ids import EOS_ID


def test_every_pair_once() -> None:
    rng = np.random.default_rng(0)
    sources = [[10 + i] * int(rng.integers(1, 60)) for i in range(200)]
    targets = [[300 + i] * int(rng.integers(1, 60)) for i in range(200)]
    found, shapes = [], set()
    for batch in whole_corpus(Corpus.from_lists(sources, targets), tokens=512, row_multiple=4):
        shapes.add(batch.source_BS.shape)
        assert batch.source_BS.shape == batch.target_BT.shape
        assert batch.source_BS.shape[0] % 4 == 0 and batch.source_BS.size <= 512
        for source, target in zip(batch.source_BS, batch.target_BT):
            if source.any():
                found.append((source[source != 0].tolist(), target[target != 0].tolist()))
            else:
                assert not target.any()
    wanted = [([*s, EOS_ID], [*t, EOS_ID]) for s, t in zip(sources, targets)]
    assert sorted(found) == sorted(wanted)
    assert len(shapes) <= 4


def test_a_sentence_longer_than_the_budget_still_comes() -> None:
    batches = list(whole_corpus(Corpus.from_lists([[5] * 99], [[6]]), tokens=64, row_multiple=8))
    assert [batch.source_BS.shape for batch in batches] == [(8, 100)]
