"""The batch plan: purity, every pair in turn, full batches of few shapes, the right tokens in the
right places.
"""

import gzip
import hashlib
from collections import Counter, defaultdict

import numpy as np
import pytest
import sentencepiece
from corpora import (
    assert_same,
    layouts,
    make_corpus,
    random_corpus,
    random_lengths,
    sequences_of,
    small_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import BatchConfig
from transformer_jax.data import batching
from transformer_jax.data.batching import Batch, BatchPlan, permutation, whole_corpus
from transformer_jax.data.bucketing import choose_shapes
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.packing import pack
from transformer_jax.errors import UserError
from transformer_jax.special_ids import EOS_ID


@layouts
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_batch_is_a_pure_function_of_the_step(layout, data):
    corpus = random_corpus(
        data.draw(st.integers(0, 99)), data.draw(st.integers(1, 300)), data.draw(st.integers(1, 3))
    )
    seed = data.draw(st.integers(-5, 2**40))
    plan = BatchPlan(corpus, small_config(layout), seed=seed)
    in_order = [plan.batch(step) for step in range(40)]
    for step in data.draw(st.lists(st.integers(0, 39), min_size=5, max_size=5)):
        assert_same(plan.batch(step), in_order[step])
    step = data.draw(st.integers(0, 39))
    alone = BatchPlan(corpus, small_config(layout), seed=seed)
    assert_same(alone.batch(step), in_order[step])


@layouts
def test_batches_are_those_of_earlier_versions(layout):
    """Runs under way depend on it."""
    plan = BatchPlan(random_corpus(5, 2000, 2), small_config(layout), seed=5)
    digest = hashlib.sha256(repr(plan.shapes).encode())
    for step in (*range(60), 5000, 10**6):
        digest.update(repr((plan.shape(step), plan.epoch(step))).encode())
        for array in plan.batch(step):
            if array is not None:
                digest.update(array.tobytes())
    assert (
        digest.hexdigest()[:16]
        == {"bucketed": "9638c41424af204a", "packed": "1e6069b7b6c13183"}[layout]
    )


@layouts
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_slice_of_rows_is_those_rows_of_the_batch(layout, data):
    plan = BatchPlan(random_corpus(0, 150, 2), small_config(layout), seed=3)
    step = data.draw(st.integers(0, 100))
    rows = data.draw(st.slices(plan.shape(step)[0]))
    whole = plan.batch(step)
    assert_same(plan.batch(step, rows), Batch(*(None if x is None else x[rows] for x in whole)))


@layouts
@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 99),
    num_pairs=st.integers(1, 300),
    num_samples=st.integers(1, 3),
    cycles=st.integers(1, 4),
)
def test_every_pair_comes_in_turn(layout, seed, num_pairs, num_samples, cycles):
    """A bucket's stream brings each of its sequences once an epoch, and no epoch runs ahead or
    behind by a batch.
    """
    corpus = random_corpus(seed, num_pairs, num_samples)
    plan = BatchPlan(corpus, small_config(layout), seed=seed)
    times: dict[tuple[int, int, int], Counter] = defaultdict(Counter)
    step = 0
    while plan.epoch(step) < cycles * num_samples:
        times[plan.shape(step)].update(j for j, _, _ in sequences_of(plan.batch(step)))
        step += 1
    for (B, S, T), count in times.items():
        if layout == "bucketed":  # all that a bucket is to bring, known from the lengths
            order = sorted(plan.shapes, key=lambda shape: (shape[1] + shape[2], shape[1:]))
            sizes = zip(corpus.lengths()[0].ravel(), corpus.lengths()[1].ravel())
            bucket = [
                next(shape for shape in order if s <= shape[1] and t <= shape[2]) for s, t in sizes
            ]
            members = {j for j, shape in enumerate(bucket) if shape == (B, S, T)}
            assert set(count) <= members
            due = cycles * len(members)
            assert due - B < count.total() <= due
            assert max(count.values()) - min(count[j] for j in members) <= 1
        else:
            assert max(count.values()) - min(count[j] for j in range(num_samples * num_pairs)) <= 1


@pytest.mark.parametrize("num_samples", [1, 3])
@layouts
def test_batches_are_full_within_budget_and_of_listed_shapes(layout, num_samples):
    corpus = random_corpus(1, 500, num_samples)
    config = small_config(layout)
    plan = BatchPlan(corpus, config, seed=0)
    assert len(plan.shapes) <= (config.buckets if layout == "bucketed" else 1)
    s, t = corpus.lengths()[0].ravel(), corpus.lengths()[1].ravel()
    for step in range(100):
        batch, (B, S, T) = plan.batch(step), plan.shape(step)
        assert (B, S, T) in plan.shapes
        assert (
            B % config.row_multiple == 0
            and 0 < B * S <= config.tokens
            and 0 < B * T <= config.tokens
        )
        assert batch.source_BS.shape == (B, S) and batch.target_BT.shape == (B, T)
        assert (
            (batch.source_segments_BS is not None)
            == (batch.target_segments_BT is not None)
            == (layout == "packed")
        )
        assert all(x is None or x.dtype == np.int32 for x in batch)
        found = sequences_of(batch)
        assert len(found) >= B and all(s[j] == ls and t[j] == lt for j, ls, lt in found), (
            "whole sequences"
        )


@layouts
def test_each_epoch_uses_its_own_segmentation(layout):
    num_pairs = 400
    plan = BatchPlan(random_corpus(2, num_pairs, 3), small_config(layout), seed=0)
    for step in range(int(7 * plan.steps_per_epoch)):
        epoch = int(plan.epoch(step))
        versions = {j // num_pairs for j, _, _ in sequences_of(plan.batch(step))}
        # A batch at the start of an epoch may finish the epochs before.
        assert versions <= {(epoch - late) % 3 for late in range(2)}


@layouts
def test_epochs_count_steps(layout):
    plan = BatchPlan(random_corpus(0, 700), small_config(layout), seed=0)
    epochs = np.array([plan.epoch(step) for step in range(1000)])
    assert epochs[0] == 0 and (np.diff(epochs) > 0).all()
    assert abs(1000 / epochs[-1] - plan.steps_per_epoch) < 0.02 * plan.steps_per_epoch
    far = 10**9
    assert plan.epoch(far) == pytest.approx(far / plan.steps_per_epoch, rel=1e-6)
    assert plan.batch(far).source_BS.shape == plan.shape(far)[:2]
    with pytest.raises(IndexError, match="-1"):
        plan.batch(-1)


@layouts
def test_order_depends_on_seed_and_epoch(layout):
    corpus = random_corpus(0, 600)
    plan, other = (BatchPlan(corpus, small_config(layout), seed=seed) for seed in (0, 1))
    per_epoch = int(plan.steps_per_epoch)
    first, second = (
        [sequences_of(plan.batch(e * per_epoch + i)) for i in range(5)] for e in (0, 3)
    )
    assert first != second
    assert first != [sequences_of(other.batch(i)) for i in range(5)]
    # Shapes are mixed, not sorted, within an epoch.
    sizes = [plan.shape(step)[1] for step in range(per_epoch)]
    assert layout == "packed" or (sizes != sorted(sizes) and len(set(sizes)) == len(plan.shapes))


def test_each_epoch_is_shuffled_anew():
    """Here batches divide epochs evenly: 8 of one shape and 8 of another, in another order, of
    other pairs, each epoch.
    """
    lengths = np.array([[10] * 128 + [20] * 64])
    plan = BatchPlan(
        make_corpus(lengths, lengths), BatchConfig(tokens=160, buckets=2, row_multiple=8), seed=0
    )
    assert plan.shapes == ((16, 10, 10), (8, 20, 20)) and plan.steps_per_epoch == 16
    epochs = [range(start, start + 16) for start in range(0, 64, 16)]
    orders = {tuple(plan.shape(step) for step in epoch) for epoch in epochs}
    partitions = {
        frozenset(frozenset(sequences_of(plan.batch(step))) for step in epoch) for epoch in epochs
    }
    assert len(orders) == len(partitions) == 4
    for epoch in epochs:
        assert sorted(j for step in epoch for j, _, _ in sequences_of(plan.batch(step))) == list(
            range(192)
        )


@pytest.mark.parametrize("num_pairs", [1, 2, 7])
@layouts
def test_a_corpus_smaller_than_a_batch_repeats_its_pairs(layout, num_pairs):
    plan = BatchPlan(random_corpus(0, num_pairs), BatchConfig(layout=layout, tokens=4096), seed=0)
    assert plan.steps_per_epoch < 1
    count = Counter(j for step in range(20) for j, _, _ in sequences_of(plan.batch(step)))
    assert set(count) == set(range(num_pairs)) and plan.epoch(5) > 5


def test_first_uses_are_in_the_order_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = BatchPlan(random_corpus(0, 150, 2), small_config("bucketed"), seed=3)
    shapes = [plan.shape(step) for step in range(5, 40)]
    assert len(set(shapes)) == len(plan.shapes) > 1
    assert plan.first_uses(5, 40) == list(dict.fromkeys(shapes))
    assert plan.first_uses(5, 6) == shapes[:1] and plan.first_uses(7, 7) == []
    monkeypatch.setattr(batching, "_STEPS_LOOKED_AT", 1)
    others = [shape for shape in plan.shapes if shape != shapes[0]]
    assert plan.first_uses(5, 40) == [shapes[0], *others]  # the others follow


def test_buckets_fill_a_batch_an_epoch_where_the_corpus_allows_it():
    lengths = random_lengths(0, 3000)
    plan = BatchPlan(make_corpus(*lengths), BatchConfig(tokens=4096), seed=0)
    count = Counter(plan.shape(step) for step in range(round(50 * plan.steps_per_epoch)))
    assert len(plan.shapes) > 4 and all(count[shape] > 25 for shape in plan.shapes)


@layouts
def test_fill_is_the_share_of_real_tokens(layout):
    plan = BatchPlan(random_corpus(5, 400, 2), small_config(layout), seed=0)
    real, padded = np.zeros(2), np.zeros(2)
    for step in range(round(40 * plan.steps_per_epoch)):
        batch = plan.batch(step)
        real += (batch.source_BS != 0).sum(), (batch.target_BT != 0).sum()
        padded += batch.source_BS.size, batch.target_BT.size
    np.testing.assert_allclose(real / padded, plan.fill, rtol=0.01)


@layouts
def test_little_padding(layout):
    plan = BatchPlan(random_corpus(0, 100_000), BatchConfig(layout=layout), seed=0)
    assert min(plan.fill) >= (0.85 if layout == "bucketed" else 0.95), plan.fill


@pytest.mark.parametrize(
    "name, vocab_size",
    [("multi30k/tok/train.lc.norm.tok.{}.gz", 10_000), ("tatoeba_de_en/train.{}.gz", 8_000)],
)
def test_little_padding_of_real_text(shared_data, name, vocab_size, tmp_path):
    sides = []
    for language in ("en", "de"):
        with gzip.open(
            shared_data / name.format(language), "rt", encoding="utf-8", newline="\n"
        ) as lines:
            sides.append([line.rstrip("\n") for line in lines])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sides[0][:20_000] + sides[1][:20_000]),
        model_prefix=str(tmp_path / "bpe"),
        model_type="bpe",
        vocab_size=vocab_size,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "bpe.model"))
    lengths = [
        np.array([[len(ids) + 1 for ids in processor.encode(side, num_threads=2)]])
        for side in sides
    ]
    corpus = make_corpus(*lengths)
    for tokens in (4096, 25_000):
        bucketed = BatchPlan(corpus, BatchConfig(tokens=tokens), seed=0)
        assert len(bucketed.shapes) <= 12 and min(bucketed.fill) >= 0.85, bucketed.fill
    packed = BatchPlan(corpus, BatchConfig(layout="packed"), seed=0)
    assert min(packed.fill) >= 0.95, packed.fill


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60),
    st.integers(1, 8),
)
def test_shapes_are_few_and_hold_all_pairs(pairs, buckets):
    config = BatchConfig(tokens=200, buckets=buckets, row_multiple=1)
    s, t = np.array(pairs).T
    histogram = np.zeros((41, 41), np.int64)
    np.add.at(histogram, (s, t), 1)
    shapes = choose_shapes(histogram, config)
    assert 1 <= len(shapes) <= buckets
    assert all(any(a <= S and b <= T for S, T in shapes) for a, b in pairs)
    assert max(S for S, _ in shapes) == s.max() and max(T for _, T in shapes) == t.max()
    assert choose_shapes(3 * histogram, config, epochs=3) == shapes


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), max_size=200), st.integers(0, 5))
def test_packed_rows_hold_what_they_can(pairs, seed):
    s, t = np.array(pairs, np.int32).reshape(-1, 2).T
    row = pack(s, t, 20, 30, np.random.default_rng(seed).permutation(len(s)))
    assert row.shape == s.shape
    if len(row):
        assert (np.bincount(row) > 0).all()
        assert np.bincount(row, s).max() <= 20 and np.bincount(row, t).max() <= 30


def test_packing_refuses_a_pair_longer_than_a_row():
    fits, longer = np.array([20, 1]), np.array([21, 1])
    assert pack(fits, fits, 20, 20, np.arange(2)).max() + 1 == 2
    for source, target in ((longer, fits), (fits, longer)):
        with pytest.raises(AssertionError, match="a pair longer than a row"):
            pack(source, target, 20, 20, np.arange(2))


def test_packing_full_length_pairs_needs_a_row_each():
    s = np.array([64] * 10 + [1] * 5)
    assert pack(s, s, 64, 64, np.arange(15)).max() + 1 == 11


def test_sides_of_packed_rows_are_in_the_proportion_of_the_text():
    s = np.full((1, 4000), 8)
    plan = BatchPlan(make_corpus(s, 2 * s), BatchConfig(layout="packed", row_length=256), seed=0)
    assert plan.shapes == ((96, 128, 256),) and min(plan.fill) > 0.98
    s[0, 0] = 200  # the longest sentence must have room, at the price of padding
    assert BatchPlan(make_corpus(s, 16 + 0 * s), BatchConfig(layout="packed"), seed=0).shapes == (
        (96, 200, 256),
    )


def test_permutations_are_the_same_everywhere():
    assert permutation(10, 0, 0, 0).tolist() == [9, 7, 2, 0, 4, 3, 5, 6, 1, 8]
    assert permutation(10, 3, 1, 2, 5).tolist() == [9, 8, 1, 3, 0, 7, 2, 6, 5, 4]
    for n in (0, 1, 2, 3, 8, 1000):
        assert sorted(permutation(n, 7, 1, 2, 3)) == list(range(n))


def test_a_budget_smaller_than_the_longest_rows_is_an_error():
    corpus = make_corpus(np.array([[5, 30]]), np.array([[5, 40]]))
    with pytest.raises(
        UserError, match=r"batch.tokens is 300; expected at least 320.*8 rows of 40"
    ):
        BatchPlan(corpus, BatchConfig(tokens=300), seed=0)
    BatchPlan(corpus, BatchConfig(tokens=320), seed=0)


def test_a_sentence_longer_than_a_packed_row_is_an_error():
    corpus = make_corpus(np.array([[5, 30]]), np.array([[5, 40]]))
    with pytest.raises(UserError, match=r"batch.row_length is 32; expected at least .* 40"):
        BatchPlan(corpus, BatchConfig(layout="packed", row_length=32), seed=0)


def test_an_empty_corpus_is_an_error():
    with pytest.raises(UserError, match="no pairs"):
        BatchPlan(Corpus.from_lists([], []), BatchConfig(), seed=0)


# Evaluation: batches of a whole corpus


def test_a_whole_corpus_is_every_pair_once() -> None:
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
