"""Traces of the training steps in ``training.profile``, for xprof and TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from transformer_jax.errors import one_line
from transformer_jax.training.prepare import PreparedRun

logger = logging.getLogger(__name__)


class Profiler:
    """Writer of a trace for xprof, one per process, to ``profile/`` in the work directory.

    For a URL, that is the local mirror. The trace holds exactly the steps in ``training.profile``:
    at both ends, the host waits for the device. Errors are logged, and the run continues.
    """

    def __init__(self, run: PreparedRun):
        profile = run.config.training.profile
        step = int(run.state.step)
        start, self._stop = map(int, (profile or "0:0").split(":"))
        self._start = max(start, step)
        self._trace = ExitStack()
        self._folder = run.workdir.path("profile") / f"process_{jax.process_index()}"
        if profile and min(self._stop, run.config.training.steps) <= step:
            logger.warning(
                f"training.profile is {profile!r}, but the run resumes at step {step}. Choose "
                "later steps."
            )

    def run(self, train_step: Any, step: int, *inputs: Any) -> Any:
        """Call ``train_step`` with the state and the batch, for step number ``step``, from 0."""
        if step == self._start < self._stop:
            jax.block_until_ready(inputs)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python functions would fill the trace
            with _logged_errors():
                trace = jax.profiler.trace(self._folder, profiler_options=options)
                self._trace.enter_context(trace)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            results = train_step(*inputs)
        if step + 1 == self._stop:
            jax.block_until_ready(results)
            self.close()
        return results

    def close(self) -> None:
        """Write the trace if one is being recorded."""
        with _logged_errors():
            self._trace.close()


@contextmanager
def _logged_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the profiler or the disk
        logger.warning("The profile could not be written: %s", one_line(error))
