"""Reports what a run is busy with when that takes far longer than usual.

A step that hangs reports nothing by itself.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict, deque
from statistics import median

import jax

log = logging.getLogger(__name__)

_PATIENCE = 15.0  # seconds
_PATIENCE_AT_FIRST = 600.0  # for a kind of phase seen less than three times: it may compile
_FACTOR = 10.0


class Watchdog:
    """A thread that watches the clock. The loop names each phase that it enters; the usual length
    of a phase is the median of its kind.

    A phase is late after ``_FACTOR`` times its usual length, but at least ``_PATIENCE``; one of a
    kind that is still new, after ``_PATIENCE_AT_FIRST``. A late phase is reported again each time
    its length has doubled.
    """

    def __init__(self) -> None:
        self._lengths: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=50))
        self._phase = ("start", "before the first step", time.monotonic())  # kind, name, begin
        self._next_message = math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, kind: str, what: str = "") -> None:
        """End the phase before and begin this one, called ``what`` in messages."""
        now = time.monotonic()
        last_kind, _, since = self._phase
        self._lengths[last_kind].append(now - since)
        lengths = self._lengths[kind]
        known = len(lengths) >= 3
        limit = max(_PATIENCE, _FACTOR * median(lengths)) if known else _PATIENCE_AT_FIRST
        self._next_message = now + limit
        self._phase = kind, what or kind, now

    @property
    def phase(self) -> str:
        """What the current phase is called."""
        return self._phase[1]

    def close(self) -> None:
        """End the thread; no more messages."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, _PATIENCE / 4)):
            (kind, what, since), now = self._phase, time.monotonic()
            if now < self._next_message:
                continue
            self._next_message = now + (now - since)
            lengths = self._lengths[kind]
            usual = f" (usual: {median(lengths):.1f} s)" if lengths else ""
            log.warning(
                "Process %d of %d has been busy with one thing for %.0f s: %s%s.",
                *(jax.process_index(), jax.process_count(), now - since, what, usual),
            )
