"""Compiles what the coming steps will need, in threads, while the steps before them run.

The plan knows every shape before the first step. What is compiled here goes into the jitted
function's own cache, where a call finds it: whoever calls such a function need not know. Only XLA's
part runs in parallel; tracing holds Python's lock.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
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
    """A jitted function to be compiled for one shape."""

    name: str  # such as "training step of 64 rows of 40 + 40 tokens"
    step: int  # the step before which it is needed
    lower: Callable[[], jax.stages.Lowered]
    remedy: str  # settings that help if it does not fit into the device's memory
    beside: int = 0  # bytes on each device that are in use then and no argument of the function


class CompiledJob(NamedTuple):
    """What became of a job."""

    name: str
    seconds: float  # from tracing to the compiled function
    memory_bytes: int  # on each device, with all that is there at that time


class CompileAhead:
    """Compiles jobs in the order in which steps need them.

    With several processes nothing runs ahead, as they must compile together: each job is done when
    it is waited for.

    Attributes:
      finished: what was compiled since the caller last looked and took it.
    """

    def __init__(self, jobs: Iterable[Job], *, devices: Sequence[jax.Device]):
        """Starts at once; ``devices`` are those that the functions run on."""
        first: dict[str, Job] = {}
        for job in sorted(jobs, key=lambda job: job.step):
            first.setdefault(job.name, job)
        self._waiting = dict(reversed(first.items()))  # the next is taken from the end
        self._results: dict[str, Future[None]] = {name: Future() for name in self._waiting}
        self._tracing = threading.Lock()
        self._failure: BaseException | None = None
        self._memory = memory_limit(devices)
        self._together = jax.process_count() > 1
        self._on_gpu = devices[0].platform == "gpu"
        # Tuning a kernel waits for its GPU to be idle, and a step's exchange for other GPUs: at the
        # same time they could wait for each other.
        self._all_first = self._on_gpu and len(devices) > 1 and not self._together
        self._began, self._last = time.monotonic(), 0.0
        self.finished: deque[CompiledJob] = deque()
        if not self._together:
            for _ in range(min(num_threads(), len(first))):
                threading.Thread(target=self._work, name=COMPILING, daemon=True).start()

    @property
    def total(self) -> int:
        """How many there are to compile."""
        return len(self._results)

    @property
    def done(self) -> int:
        """How many are compiled."""
        return sum(result.done() for result in self._results.values())

    @property
    def seconds(self) -> float:
        """From the start until now, or until the last was compiled."""
        return self._last if self.done == self.total else time.monotonic() - self._began

    def is_compiled(self, name: str) -> bool:
        """Whether no call of the function of this name has to wait."""
        return all(result.done() for result in self._needed(name))

    def wait(self, name: str, *, poll: Callable[[], bool]) -> bool:
        """Wait until the function of this name is compiled; False if ``poll``, called all the time,
        says to stop. What no job is about is compiled by its caller.

        Raises as ``check`` does.
        """
        if self._together and (job := self._waiting.pop(name, None)):
            self._do(job)
        for result in self._needed(name):
            while not result.done():
                self.check()
                if poll():
                    return False
                wait([result], timeout=_SECONDS_BETWEEN_POLLS)
        self.check()
        return True

    def check(self) -> None:
        """Raise the error of a job that failed; it names the function.

        Raises:
          UserError: it does not fit into the device's memory, or the compiler failed.
        """
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Start no more jobs. A job at work ends by itself; nobody waits for it."""
        self._waiting.clear()

    def _needed(self, name: str) -> list[Future[None]]:
        """The results that a call of this function waits for."""
        names = list(self._results) if self._all_first else [name]
        return [self._results[each] for each in names if each in self._results]

    def _work(self) -> None:
        while self._waiting and self._failure is None:
            try:
                _, job = self._waiting.popitem()
            except KeyError:  # another thread was faster
                return
            self._do(job)

    def _do(self, job: Job) -> None:
        try:
            with self._tracing:
                began = time.monotonic()
                lowered = job.lower()
            needed = memory_needed(lowered.compile()) + job.beside
            self._check_memory(job, needed)
        except Exception as error:
            self._note_failure(job, error)
        else:
            now = time.monotonic()
            self._last = max(self._last, now - self._began)
            self.finished.append(CompiledJob(job.name, now - began, needed))
        self._results[job.name].set_result(None)

    def _note_failure(self, job: Job, error: Exception) -> None:
        reason = " ".join(str(error).split())[:400]
        if isinstance(error, UserError):
            self._failure = error
        elif self._on_gpu and not self._together and "RESOURCE_EXHAUSTED" in reason:
            # Kernels are tuned in memory that the steps leave, which is more between them.
            log.warning("No memory to compile the %s while training runs.", job.name)
        else:
            self._failure = UserError(
                f"The {job.name} could not be compiled: {reason or type(error).__name__}. Expected "
                "a version of JAX that compiles it; try another (pip install -U jax), or report it."
            )
            self._failure.__cause__ = error

    def _check_memory(self, job: Job, needed: int) -> None:
        if self._memory is not None and needed > self._memory:
            raise UserError(
                f"The {job.name} needs {needed / 1e9:.1f} GB of each device's memory (as compiled, "
                f"and with all else that is there); expected at most the "
                f"{self._memory / 1e9:.1f} GB that JAX has there. {job.remedy}"
            )


def training_jobs(run: Prepared) -> list[Job]:
    """The training steps still to come, each shape once."""
    functions, rows = run.functions, batch_sharding(run.mesh)

    def lower(shape: tuple[int, int, int]) -> jax.stages.Lowered:
        batch = abstract_batch(shape, rows, packed=run.plan.packed)
        return functions.train_step.lower(functions.abstract_state, batch)

    first_uses = run.plan.first_uses(int(run.state.step), run.config.training.steps)
    saved = bytes_on_device(functions.abstract_state)  # a copy is saved while steps run
    return [
        Job(step_name(shape), step, partial(lower, shape), LESS_MEMORY, saved)
        for shape, step in first_uses.items()
    ]


def step_name(shape: tuple[int, int, int], kind: str = "training") -> str:
    """What the step on batches of this shape is called."""
    return "{} step of {} rows of {} + {} tokens".format(kind, *shape)


def num_threads() -> int:
    """How many functions to compile at a time: XLA uses several cores for one, in part."""
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
    """What a tree of arrays, or of their shapes with shardings, takes on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
    )


@atexit.register
def _wait_at_exit() -> None:
    """Wait for jobs at work: C++ would abort if Python ended under them. Programs need not wait
    (``run_program``).
    """
    for thread in threading.enumerate():
        if thread.name == COMPILING:
            thread.join()
