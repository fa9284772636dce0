"""Data loader: the plan's batches on any number of devices, errors, threads, prefetching."""

import threading
import time
from contextlib import closing

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.data.batching import Batch, BatchPlan
from transformer_jax.data.corpus import Corpus
from transformer_jax.data.loader import load_batches
from transformer_jax.settings.config import BatchConfig


def make_plan(layout: str = "bucketed") -> BatchPlan:
    random = np.random.default_rng(0)
    sides = [
        [random.integers(4, 90, length).tolist() for length in random.integers(1, 25, 200)]
        for _ in range(2)
    ]
    return BatchPlan(
        Corpus.from_lists(*sides),
        BatchConfig(layout=layout, tokens=512, buckets=4, row_length=64),
        seed=0,
    )


def mesh_sharding(devices: int) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, 1), ("data", "fsdp"))
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def assert_same(loaded: Batch, expected: Batch) -> None:
    for x, y in zip(loaded, expected, strict=True):
        assert (x is None) == (y is None)
        if y is not None:
            assert isinstance(x, jax.Array) and x.dtype == np.int32
            np.testing.assert_array_equal(x, y)


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("grain")]


def assert_threads_end() -> None:
    until = time.monotonic() + 60
    while loader_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not loader_threads()


@pytest.mark.parametrize(
    "devices", [None, 1, *(pytest.param(n, marks=pytest.mark.devices(n)) for n in (2, 8))]
)
@pytest.mark.parametrize("layout", ["bucketed", "packed"])
def test_the_same_batches_on_any_number_of_devices(layout, devices):
    plan = make_plan(layout)
    sharding = mesh_sharding(devices) if devices else None
    batches = list(load_batches(plan, sharding=sharding, start=0, stop=30))
    assert len(batches) == 30
    for step, batch in enumerate(batches):
        assert_same(batch, plan.batch(step))
        if sharding:
            assert batch.source_BS.sharding.is_equivalent_to(sharding, 2)
            assert (
                batch.source_BS.addressable_shards[0].data.shape[0]
                == len(batch.source_BS) // devices
            )


def test_loading_from_a_later_step():
    plan = make_plan()
    with closing(load_batches(plan, start=17)) as batches:  # without end
        for step in range(17, 45):
            assert_same(next(batches), plan.batch(step))
    assert list(batches) == []


@pytest.mark.parametrize("layout", ["bucketed", "packed"])
def test_only_rows_of_local_devices_are_built(layout, monkeypatch):
    class PartOfAPod:
        """Eight devices. This process has numbers 6, 1 and 5."""

        def addressable_devices_indices_map(self, shape):
            B, _ = shape
            return {
                device: (slice(device * B // 8, (device + 1) * B // 8), slice(None))
                for device in (6, 1, 5)
            }

    class Recording(BatchPlan):
        def batch(self, step, rows=slice(None)):
            asked.append(rows)
            return super().batch(step, rows)

    asked: list[np.ndarray] = []
    monkeypatch.setattr(
        jax, "make_array_from_process_local_data", lambda _, x, __: jax.numpy.asarray(x)
    )
    plan, recording = make_plan(layout), make_plan(layout)
    recording.__class__ = Recording
    for step, batch in enumerate(load_batches(recording, sharding=PartOfAPod(), stop=10)):
        B, _, _ = plan.shape(step)
        of_1, of_5, of_6 = (np.arange(n * B // 8, (n + 1) * B // 8) for n in (1, 5, 6))
        of_all = np.concatenate([of_1, of_5, of_6])
        np.testing.assert_array_equal(asked[step], of_all)
        assert_same(batch, plan.batch(step, of_all))


def test_an_error_is_raised_when_its_batch_is_requested():
    class Broken(BatchPlan):
        def batch(self, step, rows=slice(None)):
            if step == 5:
                raise OSError("the disk is gone")
            return super().batch(step, rows)

    plan = make_plan()
    plan.__class__ = Broken
    batches = load_batches(plan)
    for step in range(5):
        assert_same(next(batches), make_plan().batch(step))
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert_threads_end()


def test_threads_end_with_the_last_batch_or_when_closed():
    plan = make_plan()
    assert len(list(load_batches(plan, stop=5))) == 5
    assert_threads_end()
    batches = load_batches(plan)
    next(batches)
    assert loader_threads()
    batches.close()
    batches.close()
    assert_threads_end()
    assert list(load_batches(plan, start=9, stop=9)) == []


def test_batches_are_prefetched():
    second = threading.Event()

    class Slow(BatchPlan):
        def batch(self, step, rows=slice(None)):
            time.sleep(0.5)
            if step == 1:
                second.set()
            return super().batch(step, rows)

    plan = make_plan()
    plan.__class__ = Slow
    with closing(load_batches(plan)) as batches:
        next(batches)
        assert second.wait(60)  # before anything asks for it
        time.sleep(0.3)
        began = time.perf_counter()
        next(batches)
        assert time.perf_counter() - began < 0.4
