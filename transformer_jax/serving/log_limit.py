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
        # The start of each kind's window, and the number of its messages in it.
        self._windows = dict[str, tuple[float, int]]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a message."""
        if record.levelno <= logging.INFO:
            return True
        kind = str(record.msg)[:200]
        now = self._clock()
        start, count = self._windows.get(kind, (now, 0))
        if now - start >= self.seconds:
            if count > self.burst:
                record.msg = f"{record.msg} ({count - self.burst} more like it were not logged.)"
            start = now
            count = 0
        if len(self._windows) > _MAX_KINDS:
            self._windows.clear()
        self._windows[kind] = (start, count + 1)
        return count < self.burst
