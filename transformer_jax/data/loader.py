"""Batches of a plan as arrays on the devices, prepared ahead of the step that needs them in Grain's
thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from transformer_jax.data.batching import Batch, BatchPlan

# builds a thousand batches a second; more would contend for the interpreter lock with the training
# loop
_THREADS = 1


class Loader(Iterator[Batch]):
    """The batches of steps start, start + 1, ..., stop - 1 (without end if stop is None), in order;
    see ``load_batches``.

    ``waited`` is the seconds the caller has spent waiting for batches so far; set it to 0 to
    measure a stretch. An error in a batch is raised where that batch is asked for. ``close``,
    leaving a ``with`` block, or the last batch ends the threads.
    """

    def __init__(
        self,
        plan: BatchPlan,
        *,
        sharding: NamedSharding | None,
        start: int,
        stop: int | None,
        prefetch: int,
    ) -> None:
        self.waited = 0.0
        source = _DeviceBatches(plan, sharding, start, stop)
        options = grain.ReadOptions(
            num_threads=min(_THREADS, prefetch), prefetch_buffer_size=prefetch
        )
        self._batches: Any = (
            iter(grain.MapDataset.source(source).to_iter_dataset(options))
            if len(source)
            else iter(())
        )

    def __next__(self) -> Batch:
        began = time.perf_counter()
        try:
            return next(self._batches)
        except BaseException:
            self.close()
            raise
        finally:
            self.waited += time.perf_counter() - began

    def close(self) -> None:
        """End the threads; batches not yet taken are dropped. The loader is at its end then."""
        if hasattr(self._batches, "close"):
            self._batches.close()
        self._batches = iter(())

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_batches(
    plan: BatchPlan,
    *,
    sharding: NamedSharding | None = None,
    start: int = 0,
    stop: int | None = None,
    prefetch: int = 4,
) -> Loader:
    """Batches of the plan's steps from ``start`` as jax arrays, up to ``prefetch`` of them built
    and on their way ahead.

    ``sharding`` places [B, L] arrays (rows over devices); of each batch this process reads only the
    rows that its own devices hold. None: whole batches on the default device. ``prefetch`` 0 builds
    each batch when it is asked for.
    """
    return Loader(plan, sharding=sharding, start=start, stop=stop, prefetch=prefetch)


def place(arrays: Any, shardings: Any) -> Any:
    """A tree of NumPy arrays, the same in every process, as global jax arrays with these shardings
    (a tree like it).
    """
    return jax.tree.map(
        lambda x, to: jax.make_array_from_callback(x.shape, to, lambda index: x[index]),
        arrays,
        shardings,
    )


class _DeviceBatches:
    """What Grain reads: item i is the batch of step start + i, already on the devices."""

    def __init__(
        self, plan: BatchPlan, sharding: NamedSharding | None, start: int, stop: int | None
    ) -> None:
        self._plan, self._sharding, self._start = plan, sharding, start
        self._length = max(0, stop - start) if stop is not None else sys.maxsize - start

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        step = self._start + int(index)
        sharding = self._sharding
        if sharding is None:
            return jax.tree.map(jax.device_put, self._plan.batch(step))
        B, _, _ = self._plan.shape(step)
        first, end = _local_rows(sharding, B)
        local = self._plan.batch(step, slice(first, end))
        return jax.tree.map(lambda rows: _place(rows, first, B, sharding), local)

    def __repr__(self) -> str:
        return f"batches from step {self._start}"


def _local_rows(sharding: NamedSharding, B: int) -> tuple[int, int]:
    """The smallest range of rows that covers those on this process's devices."""
    slices = [
        index[0]
        for index in sharding.addressable_devices_indices_map((B, 1)).values()
        if index is not None
    ]
    bounds = [rows.indices(B)[:2] for rows in slices]
    return min(first for first, _ in bounds), max(end for _, end in bounds)


def _place(local_rows: np.ndarray, first: int, B: int, sharding: NamedSharding) -> jax.Array:
    def rows_of_device(index: Any) -> np.ndarray:
        begin, end, _ = index[0].indices(B)
        return local_rows[begin - first : end - first, index[1]]

    return jax.make_array_from_callback((B, local_rows.shape[1]), sharding, rows_of_device)
