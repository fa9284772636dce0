"""Ahead-of-time compilation of training steps in a thread pool, in order of first use."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from transformer_jax.cli import ABANDONED_WORK
from transformer_jax.data.loader import abstract_batch
from transformer_jax.devices.distributed import raise_on_any_process
from transformer_jax.devices.machine import num_cores
from transformer_jax.devices.sharding import batch_sharding
from transformer_jax.errors import UserError
from transformer_jax.training.prepare import PreparedRun

logger = logging.getLogger(__name__)


MEMORY_REMEDIES = (
    "Set optimizer.accumulate_steps (gradient accumulation) or model.remat (activation "
    "checkpointing), lower batch.tokens, or shard the parameters over devices (mesh.fsdp). An "
    "existing run accepts the first three with --allow-changes."
)
"""Remedies for a training step that does not fit into memory."""


class CompileAhead:
    """Compilation of a run's training step for each batch shape (B, S, T). Starts immediately."""

    def __init__(self, run: PreparedRun):
        mesh = run.mesh
        device = mesh.local_devices[0]
        self._functions = run.functions
        self._plan = run.plan
        self._row_sharding = batch_sharding(mesh)
        self._memory = memory_limit(device)
        self._on_gpu = device.platform == "gpu"
        # Autotuning waits for an idle GPU, and a step's collectives wait for other GPUs and
        # processes. Running both at the same time could deadlock.
        self._compile_all_first = jax.process_count() > 1 or (self._on_gpu and mesh.size > 1)
        # Shapes are traced one at a time: because of the GIL, tracing them concurrently would delay
        # the first shape until the last one is ready.
        self._trace_lock = threading.Lock()
        # XLA uses several cores per function in some phases. Processes exchange autotuning results,
        # so they all have to compile in the same order.
        threads = max(1, num_cores() // 2) if jax.process_count() == 1 else 1
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compiling")
        shapes = run.plan.first_uses(int(run.state.step), run.config.training.steps)
        self._compiled_steps = {shape: self._pool.submit(self._compile, shape) for shape in shapes}

    def wait(self, shape: tuple[int, int, int], show: Callable[[str], None]) -> Any:
        """Wait for the compiled step for this shape and return it.

        While waiting, calls ``show`` with the compilation progress. Raises the compiler's error for
        any compiled shape, or ``UserError`` if a shape does not fit into memory.
        """
        compiled = [step for step in self._compiled_steps.values() if step.done()]
        self._wait([*compiled, self._compiled_steps[shape]], show)
        return self._compiled_steps[shape].result()

    def before_collectives(self, show: Callable[[str], None]) -> None:
        """Wait for all shapes if several GPUs or processes are used; see ``wait``.

        They must not run collectives while they compile.
        """
        if self._compile_all_first:
            # On CPUs, a collective waits only 30 s for slower processes.
            with raise_on_any_process():
                self._wait(list(self._compiled_steps.values()), show)

    def _wait(self, compilations: list[Future[Any]], show: Callable[[str], None]) -> None:
        for future in compilations:
            if not future.done():
                num_compiled = sum(step.done() for step in self._compiled_steps.values())
                show(f"compiling shape {num_compiled + 1} of {len(self._compiled_steps)}")
            future.result()

    def close(self) -> None:
        """Cancel pending compilations.

        With several processes, waits for running ones, so all processes shut down together.
        Otherwise the program can exit while they run.
        """
        ABANDONED_WORK.update(self._compiled_steps.values())
        self._pool.shutdown(wait=jax.process_count() > 1, cancel_futures=True)

    def _compile(self, shape: tuple[int, int, int]) -> Any:
        name = "training step of {} rows of {} + {} tokens".format(*shape)
        train_step = self._functions.train_step
        state = self._functions.abstract_state
        try:
            with self._trace_lock:
                plan = self._plan
                batch = abstract_batch(
                    shape, self._row_sharding, packed=plan.packed, aligned=plan.aligned
                )
                lowered = train_step.lower(state, batch)
            step = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if not (self._on_gpu and "RESOURCE_EXHAUSTED" in str(error)):
                raise
            # Autotuning uses memory that running steps leave free. More can be free later.
            logger.warning(
                "Out of memory while compiling the %s; it will be compiled when needed.", name
            )
            return train_step
        # Steps run while a copy of the state is saved.
        bytes_needed = memory_needed(step) + bytes_on_device(state)
        if self._memory is not None and bytes_needed > self._memory:
            raise UserError(
                f"The {name} needs {bytes_needed / 1e9:.1f} GB of memory per device (compiled step "
                "and a copy of the state for saving); expected at most the "
                f"{self._memory / 1e9:.1f} GB available to JAX. {MEMORY_REMEDIES}"
            )
        return step


def memory_limit(device: jax.Device) -> int | None:
    """Return the number of bytes that JAX can use on a device, or None if unknown."""
    return (device.memory_stats() or {}).get("bytes_limit")


def memory_needed(compiled: jax.stages.Compiled) -> int:
    """Return a compiled function's bytes per device: arguments, results and temporaries."""
    sizes = compiled.memory_analysis()
    if sizes is None:  # unknown on some backends
        return 0
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes  # results that reuse donated arguments
        + sizes.temp_size_in_bytes
    )


def bytes_on_device(arrays: Any) -> int:
    """Return the bytes per device of a tree of arrays or abstract arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
    )
