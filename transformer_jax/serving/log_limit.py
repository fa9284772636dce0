"""Limit of log messages that clients can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

# Kinds of messages that are counted at once.
_MAX_KINDS = 1000


class LogLimit(logging.Filter):
    """Passes a few warnings of each kind per minute. The next one says how many were left out.

    Messages of one kind have the same text before their values are put in.
    """

    burst = 10
    seconds = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock = clock
        self._window_starts = dict[str, float]()
        self._counts = dict[str, int]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a message."""
        if record.levelno <= logging.INFO:
            return True
        kind = str(record.msg)[:200]
        now = self._clock()
        if now - self._window_starts.get(kind, -self.seconds) >= self.seconds:
            if len(self._counts) > _MAX_KINDS:
                self._window_starts.clear()
                self._counts.clear()
            num_suppressed = self._counts.get(kind, 0) - self.burst
            self._window_starts[kind] = now
            self._counts[kind] = 0
            if num_suppressed > 0:
                record.msg = f"{record.msg} ({num_suppressed} more like it were not logged.)"
        self._counts[kind] += 1
        return self._counts[kind] <= self.burst
