"""Several processes as one run: how they find each other, agree, and do work once for all.

JAX's own runtime (``jax.distributed``) joins them: every process runs the same program on its own
devices, and arrays and compiled functions span all devices. Short messages travel through the
runtime's key-value store, where a process can wait for hours, unlike in a collective. With a single
process the functions here just do the work.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax

from transformer_jax.config import Processes
from transformer_jax.errors import UserError, one_line
from transformer_jax.machine import find_devices

log = logging.getLogger(__name__)

T = TypeVar("T")

_START_SECONDS = 300  # a cluster may start its processes minutes apart
_HEARTBEAT_SECONDS = 40  # a process silent for this long is given up, and all others end
_PREPARING_MILLISECONDS = 7 * 24 * 3600 * 1000  # tokenising a large corpus takes hours
_numbers = itertools.count()  # all processes call these functions in the same order


def start(settings: Processes, *, timeout: int = _START_SECONDS) -> None:
    """Join the other processes; must come before anything else that JAX does.

    Raises:
      UserError: flags that do not go together, no cluster that JAX knows, a coordinator that does
        not answer, or no device of the kind that JAX_PLATFORMS asks for.
    """
    address, count, number = explicit = (
        settings.coordinator_address,
        settings.num_processes,
        settings.process_id,
    )
    if explicit == (None, None, None):
        if not settings.distributed:
            find_devices()
            return
    elif address is None or count is None or number is None:
        raise UserError(
            f"--coordinator-address is {address}, --num-processes {count}, --process-id {number}; "
            "expected all three of them, or --distributed alone on a cluster that JAX knows."
        )
    elif not 0 <= number < count:
        raise UserError(
            f"--process-id is {number}; expected 0 to {count - 1}, below --num-processes."
        )
    elif not re.fullmatch(r".+:\d+", address):
        raise UserError(f"--coordinator-address is {address!r}; expected HOST:PORT of process 0.")
    elif number == 0:
        log.info(
            "Process 0 of %d: waiting up to %d s for the others at %s.", count, timeout, address
        )
    try:
        with _ended_after(timeout, address):
            jax.distributed.initialize(
                *explicit,
                # With an explicit address JAX must not look for a cluster, which may say otherwise.
                cluster_detection_method=None if address is None else "deactivate",
                initialization_timeout=timeout + 60,
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"The processes did not find each other: {one_line(error)} Expected a "
            "cluster that JAX knows (Slurm, Open MPI, Kubernetes, Cloud TPU), or "
            "--coordinator-address, --num-processes and --process-id."
        ) from None
    find_devices()
    counts = jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count()
    log.info("Process %d of %d; %d devices of %d.", *counts)


@contextmanager
def _ended_after(timeout: int, address: str | None) -> Iterator[None]:
    """End the program after so many seconds in this context: at its own timeout JAX aborts with a
    stack trace.
    """

    def end() -> None:
        print(
            f"error: The processes did not find each other within {timeout} s; expected all of "
            f"them to run, and process 0 to be reachable at {address or 'its address'}.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_first() -> bool:
    """Whether this process speaks for all: writes logs, figures, the config."""
    return jax.process_index() == 0


def from_all(value: Any) -> list[Any]:
    """Every process' value (plain JSON), in the order of their numbers."""
    if jax.process_count() == 1:
        return [value]
    folder, client = f"transformer_jax/{next(_numbers)}", _client()
    client.key_value_set(f"{folder}/{jax.process_index():09d}", json.dumps(value))
    client.wait_at_barrier(folder, _PREPARING_MILLISECONDS)
    return [json.loads(text) for _, text in sorted(client.key_value_dir_get(folder))]


@contextmanager
def together() -> Iterator[None]:
    """Leave this context in all processes at the same time. If it fails in one, the others raise
    ``UserError`` with its number and message.
    """
    try:
        yield
    except Exception as error:
        from_all(str(error) or type(error).__name__)
        raise
    for number, failure in enumerate(from_all("")):
        if failure:
            raise UserError(f"Process {number} failed: {failure}")


def from_first(compute: Callable[[], T]) -> T:
    """``compute()`` of process 0 (plain JSON), in every process. Raises as ``together`` does."""
    with together():
        value = compute() if is_first() else None
    return from_all(value)[0]  # type: ignore[no-any-return]


def first_then_others(compute: Callable[[], T]) -> T:
    """``compute()`` in process 0, then in the others. Raises as ``together`` does."""
    for turn in (True, False):
        with together():
            if turn == is_first():
                value = compute()
    return value


def check_agreement(values: dict[str, Any]) -> None:
    """Raise ``UserError`` in all processes unless all have the same values (plain JSON); names what
    differs from process 0.
    """
    values = json.loads(json.dumps(values))  # as they travel: tuples become lists
    expected = from_first(lambda: values)
    differences = [
        f"\n  {name} is {values.get(name)!r}, in process 0 {expected.get(name)!r}"
        for name in sorted(values.keys() | expected.keys())
        if values.get(name) != expected.get(name)
    ]
    with together():
        if differences:
            raise UserError(
                "The processes of this run differ; expected the same command and the same files."
                + "".join(differences)
            )


def _client() -> Any:
    from orbax.checkpoint import multihost  # the only public way to JAX's client

    return multihost.get_jax_distributed_client()
