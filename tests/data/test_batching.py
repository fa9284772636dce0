"""Batch plan: deterministic, each pair once per epoch, little padding, few shapes."""

import gzip
import hashlib
from collections import Counter, defaultdict

import jax.numpy as jnp
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

from transformer_jax.data.batching import Batch, BatchPlan, permutation
from transformer_jax.data.bucketing import choose_widths, fill_buckets
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.packing import pack
from transformer_jax.errors import UserError
from transformer_jax.settings.config import BatchConfig


@layouts
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_batch_is_a_pure_function_of_the_step(layout, data):
    corpus = random_corpus(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 300)))
    seed = data.draw(st.integers(-5, 2**40))
    plan = BatchPlan(corpus, small_config(layout), seed=seed)
    in_order = [plan.batch(step) for step in range(40)]
    for step in data.draw(st.lists(st.integers(0, 39), min_size=5, max_size=5)):
        assert_same(plan.batch(step), in_order[step])
    step = data.draw(st.integers(0, 39))
    alone = BatchPlan(corpus, small_config(layout), seed=seed)
    assert_same(alone.batch(step), in_order[step])


@layouts
def test_batches_equal_those_of_earlier_versions(layout):
    """So that existing runs can resume."""
    plan = BatchPlan(random_corpus(5, 2000), small_config(layout), seed=5)
    digest = hashlib.sha256(repr((plan.shapes, plan.steps_per_epoch)).encode())
    for step in (*range(60), 5000, 10**6):
        digest.update(repr(plan.shape(step)).encode())
        for array in plan.batch(step):
            if array is not None:
                digest.update(array.tobytes())
    assert (
        digest.hexdigest()[:16]
        == {"bucketed": "24dda613e154b539", "packed": "2cbece3e9f328d2b"}[layout]
    )


@layouts
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_slice_of_rows_equals_those_rows_of_the_batch(layout, data):
    plan = BatchPlan(random_corpus(0, 150), small_config(layout), seed=3)
    step = data.draw(st.integers(0, 100))
    rows = data.draw(st.slices(plan.shape(step)[0]))
    whole = plan.batch(step)
    assert_same(plan.batch(step, rows), Batch(*(None if x is None else x[rows] for x in whole)))


@layouts
@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 99),
    num_pairs=st.integers(1, 300),
    tokens=st.sampled_from([256, 512, 4096]),
)
def test_an_epoch_has_every_pair_once(layout, seed, num_pairs, tokens):
    """All epochs have the same number of batches of each shape."""
    corpus = random_corpus(seed, num_pairs)
    config = small_config(layout, tokens)
    plan = BatchPlan(corpus, config, seed=seed)
    lengths, shapes = corpus.lengths().T.tolist(), []
    assert len(plan.shapes) <= (config.buckets if layout == "bucketed" else 1)
    for epoch in range(2):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        found = []
        for step in steps:
            batch, (B, S, T) = plan.batch(step), plan.shape(step)
            assert batch.source_BS.shape == (B, S) and batch.target_BT.shape == (B, T)
            assert B % config.row_multiple == 0 and 0 < B * max(S, T) <= tokens
            assert all(x is None or x.dtype == np.int32 for x in batch)
            segments = batch.source_segments_BS, batch.target_segments_BT
            assert [x is not None for x in segments] == [layout == "packed"] * 2
            assert batch.source_BS.any()
            found += sequences_of(batch)
        assert sorted(found) == [(j, *lengths[j]) for j in range(num_pairs)]
        shapes.append(Counter(map(plan.shape, steps)))
    assert set(shapes[0]) == set(plan.shapes) and all(count == shapes[0] for count in shapes)


def test_only_batches_of_the_largest_shape_have_empty_rows():
    """Spread evenly, because a batch with few rows would weigh as much as a full one."""
    plan = BatchPlan(random_corpus(1, 997), small_config("bucketed"), seed=0)
    empty = defaultdict(list)
    for step in range(plan.steps_per_epoch):
        empty[plan.shape(step)].append((~plan.batch(step).source_BS.any(1)).sum())
    largest = plan.shapes[-1]
    assert len(plan.shapes) == 4 and not any(sum(empty[shape]) for shape in plan.shapes[:-1])
    assert 0 < sum(empty[largest]) < largest[0]
    assert max(empty[largest]) - min(empty[largest]) <= 1 < len(empty[largest])


def test_buckets_have_pairs_from_short_to_long():
    """A bucket gets as many pairs as fill its batches, and is as wide as its longest pair."""
    config, lengths_2N = small_config("bucketed"), np.stack(random_lengths(0, 500))
    wanted = [(8, 8), (16, 16), (60, 60)]
    buckets = fill_buckets(lengths_2N, wanted, config.tokens, config.row_multiple)
    assert len(buckets) == 3 and buckets[-1][0] == tuple(lengths_2N.max(1))
    s, t = lengths_2N
    pairs = [rows_kB.ravel() for _, rows_kB in buckets]
    assert sorted(np.concatenate(pairs))[:500] == list(range(500))
    assert set(pairs[-1][pairs[-1] >= 500]) <= {500}  # empty rows
    before = 0
    for ((S, T), (most_S, most_T)), here in zip(zip((w for w, _ in buckets), wanted), pairs):
        here = here[here < 500]
        assert most_S >= S and most_T >= T
        assert s[here].max() <= S and t[here].max() <= T
        held = set(np.flatnonzero((s <= most_S) & (t <= most_T)))
        before += len(here)
        assert len(held) - before < 64  # not a full batch


@layouts
def test_order_depends_on_seed_and_epoch(layout):
    corpus = random_corpus(0, 600)
    plan, other = (BatchPlan(corpus, small_config(layout), seed=seed) for seed in (0, 1))
    per_epoch = plan.steps_per_epoch
    first, second = (
        [sequences_of(plan.batch(e * per_epoch + i)) for i in range(5)] for e in (0, 3)
    )
    assert first != second
    assert first != [sequences_of(other.batch(i)) for i in range(5)]
    # shapes are shuffled within an epoch, differently in the next
    sizes, next_sizes = (
        [plan.shape(e * per_epoch + i)[1] for i in range(per_epoch)] for e in (0, 1)
    )
    assert layout == "packed" or (sizes != sorted(sizes) and sizes != next_sizes)
    far = 10**9
    assert plan.batch(far).source_BS.shape == plan.shape(far)[:2]
    with pytest.raises(ValueError, match="non-negative"):
        plan.batch(-1)


def test_every_epoch_is_shuffled_differently():
    """Even if an epoch is exactly 8 batches of one shape and 8 of another."""
    lengths = np.array([10] * 128 + [20] * 64)
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


@pytest.mark.parametrize("num_pairs", [1, 2, 7])
@layouts
def test_a_small_corpus_is_one_padded_batch(layout, num_pairs):
    plan = BatchPlan(random_corpus(0, num_pairs), BatchConfig(layout=layout, tokens=4096), seed=0)
    assert plan.steps_per_epoch == len(plan.shapes) == 1
    for step in range(3):
        assert sorted(j for j, _, _ in sequences_of(plan.batch(step))) == list(range(num_pairs))


def test_first_uses_are_in_the_order_of_the_steps() -> None:
    plan = BatchPlan(random_corpus(0, 150), small_config("bucketed"), seed=3)
    shapes = [plan.shape(step) for step in range(5, 40)]
    assert len(set(shapes)) == len(plan.shapes) > 1
    assert plan.first_uses(5, 40) == list(dict.fromkeys(shapes))
    assert plan.first_uses(5, 6) == shapes[:1] and plan.first_uses(7, 7) == []
    assert set(plan.first_uses(5, 10**12)) == set(plan.shapes)


@layouts
def test_fill_is_the_fraction_of_real_tokens(layout):
    plan = BatchPlan(random_corpus(5, 400), small_config(layout), seed=0)
    batches = [plan.batch(step) for step in range(2 * plan.steps_per_epoch)]
    sides = list(zip(*((batch.source_BS, batch.target_BT) for batch in batches)))
    shares = [sum((x != 0).sum() for x in side) / sum(x.size for x in side) for side in sides]
    np.testing.assert_allclose(plan.fill, shares)


@layouts
def test_little_padding(layout):
    plan = BatchPlan(
        random_corpus(0, 100_000), BatchConfig(layout=layout, tokens=8192, buckets=12), seed=0
    )
    assert min(plan.fill) >= (0.84 if layout == "bucketed" else 0.95), plan.fill


@pytest.mark.exhaustive
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
        np.array([len(ids) + 1 for ids in processor.encode(side, num_threads=2)]) for side in sides
    ]
    corpus = make_corpus(*lengths)
    for tokens, share in ((4096, 0.87), (25_000, 0.84)):  # the latter are 20 to 70 steps per epoch
        bucketed = BatchPlan(corpus, BatchConfig(tokens=tokens, buckets=12), seed=0)
        assert len(bucketed.shapes) <= 12 and min(bucketed.fill) >= share, bucketed.fill
    packed = BatchPlan(corpus, BatchConfig(layout="packed", tokens=4096), seed=0)
    assert min(packed.fill) >= 0.95, packed.fill


def test_a_few_rare_lengths_do_not_get_a_bucket():
    """A bucket counts as a whole batch, here of 250 rows."""
    for rare, own in ((3, 0), (1000, 1)):
        lengths_N = np.repeat([10, 20, 30], [1000, rare, 1000])
        assert choose_widths(np.stack([lengths_N] * 2), 3, 5000).count((20, 20)) == own


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60),
    st.integers(1, 8),
)
def test_widths_increase_up_to_the_longest_pair(pairs, buckets):
    s, t = np.array(pairs).T
    widths = choose_widths(np.array([s, t]), buckets, 200)
    assert len(widths) == buckets and (np.diff(widths, axis=0) >= 0).all()
    assert widths[-1] == (s.max(), t.max())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), max_size=200), st.integers(0, 5))
def test_packed_rows_do_not_overflow(pairs, seed):
    s, t = np.array(pairs, np.int32).reshape(-1, 2).T
    row = pack(s, t, 20, 30, np.random.default_rng(seed).permutation(len(s)))
    assert row.shape == s.shape
    if len(row):
        assert (np.bincount(row) > 0).all()
        assert np.bincount(row, s).max() <= 20 and np.bincount(row, t).max() <= 30


def test_packing_a_pair_longer_than_a_row_is_an_error():
    fits, longer = np.array([20, 1]), np.array([21, 1])
    assert pack(fits, fits, 20, 20, np.arange(2)).max() + 1 == 2
    for source, target in ((longer, fits), (fits, longer)):
        with pytest.raises(AssertionError, match="a pair longer than a row"):
            pack(source, target, 20, 20, np.arange(2))


def test_packing_full_length_pairs_needs_a_row_each():
    s = np.array([64] * 10 + [1] * 5)
    assert pack(s, s, 64, 64, np.arange(15)).max() + 1 == 11


def test_widths_of_packed_rows_have_the_texts_ratio():
    s = np.full(38_400, 8)
    plan = BatchPlan(make_corpus(s, 2 * s), BatchConfig(layout="packed", row_length=256), seed=0)
    assert plan.shapes == ((96, 128, 256),) and min(plan.fill) > 0.96
    s[0] = 200  # rows must fit the longest sentence, with more padding
    assert BatchPlan(make_corpus(s, 16 + 0 * s), BatchConfig(layout="packed"), seed=0).shapes == (
        (96, 200, 256),
    )


def test_permutations_are_the_same_on_all_machines():
    assert permutation(10, 0, 0, 0).tolist() == [9, 7, 2, 0, 4, 3, 5, 6, 1, 8]
    assert permutation(10, 3, 1, 2, 5).tolist() == [9, 8, 1, 3, 0, 7, 2, 6, 5, 4]
    for n in (0, 1, 2, 3, 8, 1000):
        assert sorted(permutation(n, 7, 1, 2, 3)) == list(range(n))


LONG = make_corpus(np.array([5, 30]), np.array([5, 40]))


@pytest.mark.parametrize(
    ("corpus", "config", "message"),
    [
        (LONG, {"tokens": 319}, r"batch.tokens is 319; expected at least 320.*8 rows of 40"),
        (
            make_corpus(np.array([10**6]), np.array([10**6])),  # too long to count all lengths
            {},
            "batch.tokens is 25000; expected at least 8000000",
        ),
        (
            LONG,
            {"layout": "packed", "row_length": 39},
            "batch.row_length is 39; expected at least 40, ",
        ),
    ],
)
def test_impossible_batches(corpus, config, message):
    with pytest.raises(UserError, match=message):
        BatchPlan(corpus, BatchConfig(**config), seed=0)


def test_rows_may_be_as_long_as_the_longest_sentence():
    plan = BatchPlan(LONG, BatchConfig(layout="packed", row_length=40), seed=0)
    assert max(plan.shapes[0][1:]) == 40


def test_a_corpus_without_pairs():
    with pytest.raises(AssertionError, match="the corpus has no pairs"):
        BatchPlan(Corpus.from_lists([], []), small_config("bucketed"), seed=0)


def test_a_step_can_be_an_array():
    plan = BatchPlan(random_corpus(0, 40), small_config("bucketed"), seed=0)
    step = jnp.int32(plan.steps_per_epoch + 1)
    assert plan.shape(step) == plan.shape(int(step))
    assert_same(plan.batch(step), plan.batch(int(step)))


def test_batches_of_just_the_longest_rows():
    assert BatchPlan(LONG, BatchConfig(tokens=320), seed=0).shapes[-1] == (8, 30, 40)
