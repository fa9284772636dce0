"""Compiles a run's functions in a thread pool, in the order in which steps need them.

The plan knows every shape before the first step. JAX keeps a compiled function in the cache of the
jitted function, where the call finds it, so the caller only waits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

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

_SECONDS_BETWEEN_POLLS = 0.1


class Job(NamedTuple):
    """A jitted function to compile for one shape."""

    name: str  # such as "training step of 64 rows of 40 + 40 tokens"
    lower: Callable[[], jax.stages.Lowered]
    remedy: str  # settings that help if it does not fit into the device's memory
    beside: int = 0  # bytes on each device that are in use then and no argument of the function


class CompiledJob(NamedTuple):
    """The result of a job."""

    name: str
    seconds: float  # from tracing to the compiled function
    memory_bytes: int  # on each device, with everything that is there at that time


class CompileAhead:
    """Compiles jobs in their order while training runs.

    Attributes:
      finished: results that the caller has not taken yet.
      seconds: from the start to the last result.
    """

    def __init__(
        self, jobs: Iterable[Job], *, devices: Sequence[jax.Device], poll: Callable[[], bool]
    ):
        """Starts at once. The functions run on ``devices``. ``wait`` calls ``poll`` several times a
        second and stops waiting when it returns True.
        """
        self._jobs = {job.name: job for job in jobs}
        self._poll, self._memory = poll, memory_limit(devices)
        self._futures: dict[str, Future[None]] = {}
        self._pool = ThreadPoolExecutor(num_threads(), thread_name_prefix=COMPILING)
        # Traced side by side, under Python's lock, the first would be ready as late as the others.
        self._tracing = threading.Lock()
        self._ahead = jax.process_count() == 1  # several processes must compile together
        self._on_gpu = devices[0].platform == "gpu"
        # Tuning a kernel waits for its GPU to be idle, and a step's collectives wait for the other
        # GPUs: at the same time they could wait for each other.
        self._all_first = self._on_gpu and len(devices) > 1
        self.finished: deque[CompiledJob] = deque()
        self.began, self.seconds = time.monotonic(), 0.0
        if self._ahead:
            for job in self._jobs.values():
                self._submit(job)

    @property
    def total(self) -> int:
        """The number of functions to compile."""
        return len(self._jobs)

    @property
    def done(self) -> int:
        """The number of compiled functions."""
        return sum(future.done() for future in self._futures.values())

    def wait(self, name: str) -> bool:
        """Wait until the function of this name is compiled; returns False if ``poll`` says to stop.
        A function without a job is compiled by its caller.

        Raises:
          UserError: a function does not fit into the device's memory, or the compiler failed.
        """
        if name in self._jobs and name not in self._futures:
            self._submit(self._jobs[name])
        needed = [
            future for each, future in self._futures.items() if self._all_first or each == name
        ]
        while True:
            ready, stop = all(future.done() for future in needed), self._poll()
            for future in self._futures.values():
                if future.done():
                    future.result()  # raises the error of a job that failed, whichever it is
            if ready or stop:
                return ready
            wait(needed, timeout=_SECONDS_BETWEEN_POLLS)

    def close(self) -> None:
        """Start no more jobs. A running job ends on its own; nobody waits for it."""
        running = [each for each in self._futures.values() if not (each.cancel() or each.done())]
        self._pool.shutdown(wait=not running)  # idle threads end at once

    def _submit(self, job: Job) -> None:
        self._futures[job.name] = self._pool.submit(self._compile, job)

    def _compile(self, job: Job) -> None:
        try:
            with self._tracing:
                began = time.monotonic()
                lowered = job.lower()
            needed = memory_needed(lowered.compile()) + job.beside
        except UserError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:400]
            if self._ahead and self._on_gpu and "RESOURCE_EXHAUSTED" in reason:
                # Kernels are tuned in the memory that running steps leave; later there may be more.
                log.warning("No memory to compile the %s while training runs.", job.name)
                return
            raise UserError(
                f"The {job.name} could not be compiled: {reason or type(error).__name__}. Expected "
                "a version of JAX that compiles it; try another (pip install -U jax), or report it."
            ) from error
        if self._memory is not None and needed > self._memory:
            raise UserError(
                f"The {job.name} needs {needed / 1e9:.1f} GB of each device's memory (as compiled, "
                f"and with all else that is there); expected at most the "
                f"{self._memory / 1e9:.1f} GB that JAX has there. {job.remedy}"
            )
        now = time.monotonic()
        self.seconds = now - self.began
        self.finished.append(CompiledJob(job.name, now - began, needed))


def training_jobs(run: Prepared) -> list[Job]:
    """The training steps still to come, each shape once, in the order of first use."""
    functions, rows = run.functions, batch_sharding(run.mesh)

    def lower(shape: tuple[int, int, int]) -> jax.stages.Lowered:
        batch = abstract_batch(shape, rows, packed=run.plan.packed)
        return functions.train_step.lower(functions.abstract_state, batch)

    saved = bytes_on_device(functions.abstract_state)  # a copy is saved while steps run
    return [
        Job(step_name(shape), partial(lower, shape), LESS_MEMORY, saved)
        for shape in run.plan.first_uses(int(run.state.step), run.config.training.steps)
    ]


def step_name(shape: tuple[int, int, int], kind: str = "training") -> str:
    """The name of the step on batches of this shape."""
    return "{} step of {} rows of {} + {} tokens".format(kind, *shape)


def num_threads() -> int:
    """The number of functions to compile at a time: XLA partly uses several cores for one."""
    return max(1, num_cores() // 2)


def memory_limit(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that JAX may use on each device; None if the backend does not know."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    return ((local or [None])[0].memory_stats() or {}).get("bytes_limit")


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
