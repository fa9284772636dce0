"""Reports what a run is busy with when that takes far longer than usual.

A step that hangs reports nothing by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from statistics import median

log = logging.getLogger(__name__)


class Watchdog:
    """A thread that watches the clock. The loop names each phase that it enters; the usual length
    of a phase is the median of its kind.

    A phase is late after ``factor`` times its usual length, but at least ``patience`` seconds; one
    of a kind seen less than three times (it may compile) after ``patience_at_first``. A late phase
    is reported again each time its length has doubled.
    """

    def __init__(
        self,
        *,
        who: str,
        patience: float = 15.0,
        patience_at_first: float = 600.0,
        factor: float = 10.0,
    ):
        """``who`` names this process in messages."""
        self._who, self._patience, self._patience_at_first, self._factor = (
            who,
            patience,
            patience_at_first,
            factor,
        )
        self._lengths: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=50))
        self._phase: tuple[str, str, float] | None = None  # kind, name, begin
        self._next_message = 0.0
        self._wake = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, kind: str, what: str = "") -> None:
        """End the phase before and begin this one, called ``what`` in messages."""
        now = time.monotonic()
        if self._phase is not None:
            its_kind, _, since = self._phase
            self._lengths[its_kind].append(now - since)
        self._next_message = now + self._limit(kind)
        self._phase = kind, what or kind, now

    @property
    def phase(self) -> str:
        """What the current phase is called."""
        return "before the first step" if self._phase is None else self._phase[1]

    def close(self) -> None:
        """End the thread; no more messages."""
        self._ended = True
        self._wake.set()
        self._thread.join()

    def _limit(self, kind: str) -> float:
        lengths = self._lengths[kind]
        return (
            max(self._patience, self._factor * median(lengths))
            if len(lengths) >= 3
            else self._patience_at_first
        )

    def _watch(self) -> None:
        while not self._ended:
            self._wake.wait(min(1.0, self._patience / 4))
            phase, now = self._phase, time.monotonic()
            if phase is None or now < self._next_message or self._ended:
                continue
            kind, what, since = phase
            self._next_message = now + (now - since)
            lengths = self._lengths[kind]
            usual = f" (usual: {median(lengths):.1f} s)" if lengths else ""
            log.warning(
                "%s has been busy with one thing for %.0f s: %s%s.",
                self._who,
                now - since,
                what,
                usual,
            )
