"""Signal handling: the signals in ``STOPPING`` set a flag that training polls."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import Any

import jax
from jax.experimental import multihost_utils

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run early, after it has saved its state."""


class Signals:
    """Signal handlers. The first of ``STOPPING`` sets ``received``; a Ctrl-C after it exits.

    Handlers do not raise exceptions, because an exception in a callback of JAX or of the garbage
    collector would be swallowed.
    """

    def __init__(self) -> None:
        self.received: str | None = None  # name of the signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        # Only the main thread can set handlers.
        if threading.current_thread() is threading.main_thread():
            for signal_number in STOPPING:
                # With several processes, JAX's runtime handles SIGTERM and notifies all processes.
                if jax.process_count() == 1 or signal_number != signal.SIGTERM:
                    self._before[signal_number] = signal.signal(signal_number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signal_number, handler in self._before.items():
            signal.signal(signal_number, handler)

    def stop_after(self, step: int) -> bool:
        """Return True if training must stop after this step.

        With several processes, a signal to any of them stops all of them after the same step.
        """
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM.name
        return self.received is not None

    def _handle(self, signal_number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)
            return
        self.received = signal.Signals(signal_number).name
        # print() could raise here if the signal interrupted another print().
        with suppress(OSError):
            os.write(2, b"stopping; saving ... (press Ctrl-C to quit immediately)\n")
