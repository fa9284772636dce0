"""Windows: a large corpus' batches are those of its windows in turn, and one window is all that is
in memory.
"""

import dataclasses
import gc
import hashlib
import math
import weakref
from collections import Counter, defaultdict

import numpy as np
import pytest
from corpora import assert_same, layouts, random_corpus, sequences_of, small_config
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.data import windows as windows_module
from transformer_jax.data.batching import BatchPlan
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.windows import windows_of


def windowed(layout, window):
    return dataclasses.replace(small_config(layout), window=window)


def window_of(corpus, config, sequence):
    """Straight from the definition."""
    width = max(1, config.window // 1024)
    count = math.ceil(math.ceil(corpus.num_pairs / width) / (config.window // width))
    return sequence % corpus.num_pairs // width % count


@settings(deadline=None, max_examples=30)
@given(
    num_pairs=st.integers(1, 20_000),
    num_samples=st.integers(1, 2),
    window=st.integers(1, 30_000),
    seed=st.integers(0, 9),
)
def test_windows_are_stripes_of_the_whole_corpus(num_pairs, num_samples, window, seed):
    corpus = random_corpus(seed, num_pairs, num_samples)
    windows = windows_of(corpus, window)
    members = [stripes.pairs(np.arange(stripes.lengths().shape[-1])) for stripes in windows]
    np.testing.assert_array_equal(np.sort(np.concatenate(members)), np.arange(num_pairs))
    assert len(windows) == 1 if num_pairs <= window else max(map(len, members)) <= window
    sides = corpus.lengths(0, num_pairs)
    for number in (0, len(windows) // 2, len(windows) - 1):
        np.testing.assert_array_equal(windows[number].lengths(), sides[:, :, members[number]])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(windows_module, "_BLOCK", 100)
            blocks = np.concatenate(list(windows[number].blocks()), axis=-1)
        np.testing.assert_array_equal(blocks, sides[:, :, members[number]])
    # Wherever a file ends, every window has its share of what stands before, but for two stripes.
    end = num_pairs // 3
    for pairs in members:
        assert (
            abs(np.count_nonzero(pairs < end) - len(pairs) * end / num_pairs)
            <= 2 * windows[0].width
        )


@layouts
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_a_batch_is_a_pure_function_of_the_step(layout, data):
    corpus = random_corpus(
        data.draw(st.integers(0, 99)), data.draw(st.integers(1, 300)), data.draw(st.integers(1, 2))
    )
    config = windowed(layout, data.draw(st.sampled_from([1, 7, 50, 100])))
    plan = BatchPlan(corpus, config, seed=3)
    in_order = [plan.batch(step) for step in range(30)]
    for step in data.draw(st.lists(st.integers(0, 29), min_size=5, max_size=5)):
        assert_same(plan.batch(step), in_order[step])
        assert in_order[step].source_BS.shape == plan.shape(step)[:2]
    step = data.draw(st.integers(0, 29))
    assert_same(BatchPlan(corpus, config, seed=3).batch(step), in_order[step])
    assert_same(
        plan.batch(step, slice(1, 3)),
        type(in_order[0])(*(x if x is None else x[1:3] for x in in_order[step])),
    )


@layouts
@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 99),
    num_pairs=st.integers(1, 300),
    num_samples=st.integers(1, 2),
    window=st.integers(20, 200),
)
def test_every_pair_comes_once_an_epoch(layout, seed, num_pairs, num_samples, window):
    """As with one window: the stream of a bucket of a window brings each of its sequences once in
    its turn.
    """
    corpus, config, cycles = (
        random_corpus(seed, num_pairs, num_samples),
        windowed(layout, window),
        3,
    )
    plan = BatchPlan(corpus, config, seed=seed)
    times: dict[tuple[int, tuple[int, int, int]], Counter] = defaultdict(Counter)
    step = 0
    while plan.epoch(step) < cycles * num_samples:
        sequences = [j for j, _, _ in sequences_of(plan.batch(step))]
        [number] = {window_of(corpus, config, j) for j in sequences}  # a batch is of one window
        times[number, plan.shape(step)].update(sequences)
        step += 1
    members = defaultdict(set)
    for j, (s, t) in enumerate(zip(corpus.source_lengths.ravel(), corpus.target_lengths.ravel())):
        shape = next(shape for shape in plan.shapes if s <= shape[1] and t <= shape[2])
        members[window_of(corpus, config, j), shape].add(j)
    assert set(times) <= set(members)
    for key, mine in members.items():
        count = times[key]
        assert set(count) <= mine and max(count[j] for j in mine) - min(count[j] for j in mine) <= 1
        if layout == "bucketed":  # in the packed layout a batch of B rows holds more pairs
            assert cycles * len(mine) - key[1][0] < count.total() <= cycles * len(mine)


@layouts
def test_windows_come_whole_and_shuffled_anew_each_epoch(layout):
    corpus, config = random_corpus(0, 2000), windowed(layout, 250)
    plan = BatchPlan(corpus, config, seed=0)
    orders, step = [], 0
    for epoch in range(4):
        numbers = []
        while plan.epoch(step) < epoch + 1:
            numbers.append(window_of(corpus, config, sequences_of(plan.batch(step))[0][0]))
            step += 1
        changes = 1 + np.count_nonzero(np.diff(numbers))
        assert changes == len(set(numbers)) == 8
        orders.append(tuple(dict.fromkeys(numbers)))
    assert len(set(orders)) == 4
    assert abs(step / 4 - plan.steps_per_epoch) < 0.05 * plan.steps_per_epoch
    far = 10**9
    assert plan.epoch(far) == pytest.approx(far / plan.steps_per_epoch, rel=1e-6)


@layouts
def test_shapes_and_fill_are_of_the_whole_corpus(layout):
    corpus = random_corpus(5, 1000, 2)
    one, many = (BatchPlan(corpus, windowed(layout, window), seed=0) for window in (10**6, 90))
    assert many.shapes == one.shapes
    if layout == "bucketed":
        assert (many.fill, many.steps_per_epoch) == (one.fill, one.steps_per_epoch)
    real, padded = np.zeros(2), np.zeros(2)
    for step in range(round(20 * many.steps_per_epoch)):
        batch = many.batch(step)
        real += (batch.source_BS != 0).sum(), (batch.target_BT != 0).sum()
        padded += batch.source_BS.size, batch.target_BT.size
    np.testing.assert_allclose(real / padded, many.fill, rtol=0.01)


@layouts
def test_corpora_within_the_window_have_the_batches_they_always_had(layout):
    """Pinned before there were windows: runs under way depend on it."""
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


class Watched(Corpus):
    """Notes which lengths are asked for."""

    def lengths(self, start, stop):
        self.asked.append((start, stop))
        return super().lengths(start, stop)


def watched(num_pairs, directory=None):
    corpus = random_corpus(1, num_pairs)
    fields = {f.name: getattr(corpus, f.name) for f in dataclasses.fields(corpus)}
    found = Watched(**fields | {"directory": directory})
    object.__setattr__(found, "asked", [])
    return found


def arrays_in(value, seen):
    """Bytes of all arrays that an object holds, its corpus apart; nested ones count once."""
    if isinstance(value, Corpus) or id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        return value.nbytes
    inside = list(value) if isinstance(value, tuple | list) else []
    inside += list(getattr(value, "__dict__", {}).values()) if isinstance(value, BatchPlan) else []
    return sum(arrays_in(x, seen) for x in inside)


@layouts
def test_memory_is_bounded_by_the_window(layout):
    num_pairs, window = 4000, 100
    corpus = watched(num_pairs)
    plan = BatchPlan(corpus, windowed(layout, window), seed=0)
    for step in range(0, 200, 9):
        plan.batch(step)
    assert max(stop - start for start, stop in corpus.asked) <= window
    assert arrays_in(plan, set()) <= 2 * 8 * len(plan.shapes) * num_pairs / window + 1000  # counts
    assert plan._rows.cache_info().maxsize == 1
    assert arrays_in(plan._rows(0), set()) <= 8 * window + 1000
    orders = plan._order_of_rows
    assert orders.cache_info().currsize <= orders.cache_info().maxsize == 3 * len(plan.shapes)


@layouts
def test_a_window_is_gone_with_its_last_use(layout):
    plan = BatchPlan(random_corpus(1, 500), windowed(layout, 100), seed=0)
    plan.batch(0)
    gc.disable()
    try:
        pairs = weakref.ref(plan._rows(0)[0].pairs_N)
        plan._rows(1)
        assert pairs() is None
    finally:
        gc.enable()


@layouts
def test_resuming_makes_one_window_and_counts_nothing_again(layout, tmp_path):
    first, again = watched(1000, tmp_path), watched(1000, tmp_path)
    config = windowed(layout, 100)
    plan = BatchPlan(first, config, seed=0)
    resumed = BatchPlan(again, config, seed=0)
    assert first.asked and not again.asked
    assert (resumed.shapes, resumed.fill, resumed.steps_per_epoch) == (
        plan.shapes,
        plan.fill,
        plan.steps_per_epoch,
    )
    assert_same(resumed.batch(777), plan.batch(777))
    assert (
        sum(stop - start for start, stop in again.asked)
        == plan._windows[0].lengths().shape[-1]
        <= 100
    )
    [stored] = tmp_path.iterdir()
    stored.write_text(stored.read_text()[:50])  # torn
    third = watched(1000, tmp_path)
    assert BatchPlan(third, config, seed=0).fill == plan.fill and third.asked
    BatchPlan(third, dataclasses.replace(config, buckets=3), seed=0)
    assert len(list(tmp_path.iterdir())) == 2
