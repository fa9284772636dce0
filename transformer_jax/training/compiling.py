"""Training steps, compiled in a thread pool in the order in which the run needs their shapes."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax

from transformer_jax.cli import COMPILING
from transformer_jax.data.loader import abstract_batch
from transformer_jax.errors import UserError
from transformer_jax.machine import num_cores
from transformer_jax.sharding import batch_sharding
from transformer_jax.training.prepare import Prepared

log = logging.getLogger(__name__)


LESS_MEMORY = (
    "Set optimizer.accumulate_steps (the same batch in microbatches) or model.remat, lower "
    "batch.tokens, or split the parameters over devices (mesh.fsdp); a run that has begun takes "
    "the first three with --allow-changes."
)
"""What to do where a training step does not fit."""


class CompileAhead:
    """Compiles ``run``'s training step for each shape (B, S, T) of a batch; starts at once."""

    def __init__(self, run: Prepared):
        devices = list(run.mesh.devices.flat)
        self._functions, self._packed = run.functions, run.plan.packed
        self._rows, self._memory = batch_sharding(run.mesh), memory_limit(devices)
        self._on_gpu = devices[0].platform == "gpu"
        # Tuning a kernel waits for its GPU to be idle, and a step's collectives wait for the other
        # GPUs and processes: at the same time they could wait for each other.
        self._all_first = jax.process_count() > 1 or (self._on_gpu and len(devices) > 1)
        # Traced side by side, under Python's lock, the first would be ready as late as the others.
        self._tracing = threading.Lock()
        # XLA partly uses several cores for one function.
        self._pool = ThreadPoolExecutor(max(1, num_cores() // 2), thread_name_prefix=COMPILING)
        self._began = time.monotonic()
        shapes = run.plan.first_uses(int(run.state.step), run.config.training.steps)
        self._steps = {shape: self._pool.submit(self._compile, shape) for shape in shapes}

    def wait(self, shape: tuple[int, int, int], poll: Callable[[str], None]) -> Any:
        """The compiled step of this shape. Until it is ready, ``poll`` is called with the state of
        compiling ten times a second, and may raise.

        Raises, for whichever shape, ``UserError`` if it does not fit into memory, or the compiler's
        error.
        """
        needed = [each for key, each in self._steps.items() if self._all_first or key == shape]
        while True:
            done = [each for each in self._steps.values() if each.done()]
            for each in done:
                each.result()
            if all(each.done() for each in needed):
                return self._steps[shape].result()
            seconds = time.monotonic() - self._began
            poll(f"compiling shape {len(done) + 1} of {len(self._steps)}, {seconds:.0f} s")
            wait(needed, timeout=0.1)

    def close(self) -> None:
        """Compile no more shapes. A running thread ends on its own; only several processes wait for
        it, as they must leave each other in good order.
        """
        self._pool.shutdown(wait=jax.process_count() > 1, cancel_futures=True)

    def _compile(self, shape: tuple[int, int, int]) -> Any:
        name = "training step of {} rows of {} + {} tokens".format(*shape)
        train_step, state = self._functions.train_step, self._functions.abstract_state
        try:
            with self._tracing:
                batch = abstract_batch(shape, self._rows, packed=self._packed)
                lowered = train_step.lower(state, batch)
            step = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if not (self._on_gpu and "RESOURCE_EXHAUSTED" in str(error)):
                raise
            # Kernels are tuned in the memory that running steps leave; later there may be more.
            log.warning("No memory to compile the %s while training runs.", name)
            return train_step
        needed = memory_needed(step) + bytes_on_device(state)  # a copy is saved while steps run
        if self._memory is not None and needed > self._memory:
            raise UserError(
                f"The {name} needs {needed / 1e9:.1f} GB of each device's memory (as compiled, and "
                f"with all else that is there); expected at most the {self._memory / 1e9:.1f} GB "
                f"that JAX has there. {LESS_MEMORY}"
            )
        return step


def memory_limit(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that JAX may use on each device; None if the backend does not know."""
    [device, *_] = [each for each in devices if each.process_index == jax.process_index()]
    return (device.memory_stats() or {}).get("bytes_limit")


def memory_needed(compiled: jax.stages.Compiled) -> int:
    """Bytes on each device while a function runs: arguments, results, and what is in between."""
    sizes = compiled.memory_analysis()
    if sizes is None:  # some backends do not say
        return 0
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes  # results in the place of donated arguments
        + sizes.temp_size_in_bytes
    )


def bytes_on_device(arrays: Any) -> int:
    """Bytes of a tree of arrays, or of their shapes with shardings, on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
    )
