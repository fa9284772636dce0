"""The data loader: prefetches the batches of a plan onto the devices, in Grain's thread."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from transformer_jax.data.batching import Batch, BatchPlan

# One thread builds a thousand batches a second. More threads would contend with the training
# loop for the interpreter lock.
_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


class Loader(Iterator[Batch]):
    """Iterator over batches, in order; see ``load_batches``.

    ``waited`` is the time in seconds that the caller has waited for batches. Set it to 0 to measure
    an interval. An error in a batch is raised when that batch is requested. ``close``, leaving a
    ``with`` block, or the last batch ends the threads.
    """

    def __init__(self, batches: Any) -> None:
        self.waited = 0.0
        self._batches = batches

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
        """End the threads and drop prefetched batches. The loader is then exhausted."""
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
) -> Loader:
    """Prefetch the batches of steps ``start`` to ``stop`` - 1 (None: no end) as jax arrays.

    ``sharding`` places [B, L] arrays (rows over devices). This process reads only the rows that its
    own devices hold. None: whole batches on the default device.
    """
    steps = range(start, sys.maxsize if stop is None else stop)
    if not steps:
        return Loader(iter(()))
    build = functools.partial(_on_devices, plan, sharding)
    return Loader(iter(grain.MapDataset.source(steps).map(build).to_iter_dataset(_OPTIONS)))


def abstract_batch(
    shape: tuple[int, int, int], sharding: NamedSharding, *, packed: bool = False
) -> Batch:
    """Return a batch of this shape (B, S, T) without values, for compilation."""
    B, S, T = shape
    source, target = (jax.ShapeDtypeStruct((B, L), np.int32, sharding=sharding) for L in (S, T))
    return Batch(source, target, source, target) if packed else Batch(source, target)


def place(arrays: Any, shardings: Any) -> Any:
    """Build global jax arrays from a tree of NumPy arrays that is the same in every process.

    ``shardings`` is a tree of the same structure.
    """
    return jax.tree.map(
        lambda x, to: jax.make_array_from_callback(x.shape, to, lambda index: x[index]),
        arrays,
        shardings,
    )


def _on_devices(plan: BatchPlan, sharding: NamedSharding | None, step: int) -> Batch:
    step = int(step)
    if sharding is None:
        return jax.tree.map(jax.device_put, plan.batch(step))
    B, _, _ = plan.shape(step)
    indices = sharding.addressable_devices_indices_map((B, 1)).values()
    bounds = [index[0].indices(B) for index in indices if index is not None]
    # The smallest range of rows that covers all rows of this process's devices.
    first, end = min(bound[0] for bound in bounds), max(bound[1] for bound in bounds)

    def place_rows(rows: np.ndarray) -> jax.Array:
        whole = np.pad(rows, ((first, B - end), (0, 0)))
        return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)

    return jax.tree.map(place_rows, plan.batch(step, slice(first, end)))
