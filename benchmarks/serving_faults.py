"""What ``serving.py`` asks of a service when clients vanish, and when it is told to end."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import http_load
from benchmarks.http_load import IGNORED, REFUSED, UNREAD, Address, Answer
from benchmarks.serving_engines import Job, Server, measure

GAUGES = ("transformer_rows_busy", "transformer_sentences_waiting")
_IDLE_SECONDS = 0.5  # that a service must stay idle for
_AFTERWARDS = 5.0  # seconds of load that it must still bear


@dataclass(frozen=True)
class Outcome:
    """Figures, by what they are; and what is wrong, a line each."""

    figures: dict[str, Any]
    wrong: list[str]


def gauges(address: Address) -> list[float]:
    """The values of ``GAUGES`` in /metrics, each the sum over its labels."""
    _, text = http_load.get(address, "/metrics")
    found = []
    for name in GAUGES:
        values = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)", text, re.MULTILINE)
        if not values:
            raise SystemExit(f"error: /metrics has no {name}.")
        found.append(sum(map(float, values)))
    return found


def vanish(
    server: Server, job: Job, *, count: int, idle_within: float, clients: int, seconds: float
) -> Outcome:
    """``count`` clients vanish at once: the service becomes idle within so many seconds, and
    answers others as before.
    """
    requests = job.requests(server.address)
    answered = http_load.run(http_load.vanish(server.address, requests, clients=count))
    begin, idle_since = time.perf_counter(), None
    while True:
        values, now = gauges(server.address), time.perf_counter()
        if any(values):
            idle_since = None
        elif idle_since is None:
            idle_since = now
        if now - begin > idle_within if idle_since is None else now - idle_since > _IDLE_SECONDS:
            break
        time.sleep(0.01)
    figures: dict[str, Any] = {"vanished": count - answered, "answered_before": answered}
    figures["seconds_until_idle"] = None if idle_since is None else idle_since - begin
    figures |= dict(zip(GAUGES, values, strict=True))
    wrong = [f"{name} is {value:g}" for name, value in zip(GAUGES, values) if value]
    then = measure(server, job, clients=clients, seconds=min(seconds, _AFTERWARDS))
    after = ("requests", "errors", "differ")
    figures |= {f"{name}_afterwards": then.figures[name] for name in after}
    if then.figures["errors"] == then.figures["requests"]:
        wrong.append("no request is answered afterwards")
    return Outcome(figures, [*wrong, *then.wrong])


def sigterm(server: Server, job: Job, *, clients: int, seconds: float) -> Outcome:
    """SIGTERM under load: what was accepted is answered, and the exit status is 0.

    What was sent before the signal must be translated. What came later may also be turned away with
    503. A request may be left unread: its connection is closed, but was before it came.
    """
    signalled: list[float] = []

    def terminate() -> None:
        signalled.append(time.perf_counter())
        server.terminate()

    requests = job.requests(server.address)
    work = http_load.load(
        server.address, requests, clients=clients, seconds=seconds, then=terminate
    )
    answers: list[Answer] = http_load.run(work)
    status = server.wait()
    [at] = signalled
    seconds_to_exit = time.perf_counter() - at if status is not None else None
    allowed = [answer for answer in answers if answer.status == 200 or _may_fail(answer, at)]
    faults = [answer for answer in answers if answer not in allowed]
    good = [answer for answer in answers if answer.status == 200]
    _, _, wrong = job.check([*faults, *good])
    if status != 0:
        wrong.append(f"the exit status is {status}; expected 0 (None: it does not end)")
    figures = {
        "answered": len(good),
        "answered_after_signal": sum(answer.end > at for answer in good),
        "turned_away": sum(answer.status == 503 for answer in allowed),
        "left_unread": sum(answer.fault == UNREAD for answer in allowed),
        "closed_without_answer": sum(answer.fault == IGNORED for answer in faults),
        "errors": len(faults),
        "differ": job.check(good)[1],
        "exit_status": status,
        "seconds_to_exit": seconds_to_exit,
    }
    return Outcome(figures, wrong)


def _may_fail(answer: Answer, at: float) -> bool:
    """Whether a service that was told at ``at`` to end may leave this one without a
    translation.
    """
    if answer.fault == UNREAD:
        return answer.end > at
    late = answer.end if answer.fault == REFUSED else answer.begin
    return late > at and (answer.status == 503 or answer.fault == REFUSED)
