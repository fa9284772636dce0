"""Watchdog of a run: says what a run was doing when it failed or got stuck."""

from __future__ import annotations

import faulthandler

import jax

from transformer_jax.devices.distributed import lost_contact
from transformer_jax.errors import one_line
from transformer_jax.training.compiling import MEMORY_REMEDIES

_STUCK_SECONDS = 1800.0  # evaluations can take minutes


class TrainingError(RuntimeError):
    """Error that ends training. The run can resume from its last checkpoint.

    Causes: a loss that stays non-finite, running out of memory, or losing contact with the other
    processes.
    """


class Watchdog:
    """Adds the current activity to errors from JAX's runtime.

    If ``poll`` is not called for half an hour, writes the tracebacks of all threads to stderr.
    """

    activity = "before the first step"

    def __enter__(self) -> Watchdog:
        self.poll()
        return self

    def poll(self, activity: str = "") -> None:
        """Reset the timer."""
        self.activity = activity or self.activity
        faulthandler.dump_traceback_later(_STUCK_SECONDS, repeat=True, file=2)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        if not isinstance(error, jax.errors.JaxRuntimeError):
            return
        if "RESOURCE_EXHAUSTED" in str(error):
            raise TrainingError(
                f"Out of memory: {self.activity}. {MEMORY_REMEDIES} ({one_line(error)})"
            ) from error
        if lost_contact(error):
            raise TrainingError(
                f"Process {jax.process_index()} of {jax.process_count()} lost contact with the "
                "other processes, perhaps because one of them exited. Restart all processes "
                "with the same command: they resume from the last checkpoint. "
                f"({one_line(error)})"
            ) from error
