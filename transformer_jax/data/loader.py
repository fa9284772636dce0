"""Data loader: prefetches batches onto the devices in a Grain thread."""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator
from contextlib import closing
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from transformer_jax.data.batching import Batch, BatchPlan

# One thread builds a thousand batches per second. More threads would compete with the training
# loop for the GIL.
_READ_OPTIONS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


def load_batches(
    plan: BatchPlan,
    *,
    sharding: NamedSharding | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Generator[Batch, None, None]:
    """Prefetch batches for steps ``start`` to ``stop`` - 1 (None: no end) as jax arrays.

    ``sharding`` splits the rows of [B, L] arrays over devices. Each process builds only the rows
    for its own devices. With None, whole batches go to the default device. An error in a batch is
    raised when that batch is requested. The threads exit after the last batch, after an error, and
    on ``close``.
    """
    steps = range(start, sys.maxsize if stop is None else stop)
    if not steps:
        return
    build = functools.partial(_on_devices, plan, sharding)
    batches: Any = iter(grain.MapDataset.source(steps).map(build).to_iter_dataset(_READ_OPTIONS))
    with closing(batches):
        yield from batches


def abstract_batch(
    shape: tuple[int, int, int],
    sharding: NamedSharding,
    *,
    packed: bool = False,
    aligned: bool = False,
) -> Batch:
    """Return an abstract batch of shape (B, S, T), for compilation."""
    B, S, T = shape
    source, target = (jax.ShapeDtypeStruct((B, L), np.int32, sharding=sharding) for L in (S, T))
    segments = [source, target] if packed else []
    return Batch(source, target, *segments)._replace(links_BT=target if aligned else None)


def to_global_arrays(arrays: Any, abstract: Any) -> Any:
    """Build global jax arrays from a tree of NumPy arrays that is the same in every process.

    ``abstract`` is a tree of abstract arrays with the shardings.
    """
    return jax.tree.map(
        lambda x, abstract_array: jax.make_array_from_callback(
            x.shape, abstract_array.sharding, lambda index: x[index]
        ),
        arrays,
        abstract,
    )


def _on_devices(plan: BatchPlan, sharding: NamedSharding | None, step: int) -> Batch:
    if sharding is None:
        return jax.tree.map(jax.device_put, plan.batch(step))
    B, _, _ = plan.shape(step)
    # The mesh follows the hardware's topology, so a process's rows may not be contiguous.
    indices = sharding.addressable_devices_indices_map((B, 1)).values()
    rows = np.unique(np.concatenate([np.arange(B)[index[0]] for index in indices if index]))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x, (B, x.shape[1])),
        plan.batch(step, rows),
    )
