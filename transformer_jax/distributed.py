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
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from transformer_jax.config import Processes
from transformer_jax.errors import UserError
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
    else:
        _wait_for(address, timeout)
    try:
        jax.distributed.initialize(
            *explicit,
            # With an explicit address JAX must not look for a cluster, which may say otherwise.
            cluster_detection_method=None if address is None else "deactivate",
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"The processes did not find each other: {' '.join(str(error).split())} Expected a "
            "cluster that JAX knows (Slurm, Open MPI, Kubernetes, Cloud TPU), or "
            "--coordinator-address, --num-processes and --process-id."
        ) from None
    find_devices()
    counts = jax.process_index(), jax.process_count(), jax.local_device_count(), jax.device_count()
    log.info("Process %d of %d; %d devices of %d.", *counts)


def _wait_for(address: str, timeout: float) -> None:
    """Wait until process 0 listens. JAX would wait as long, but then abort with a stack trace."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise UserError(
                    f"The coordinator at {address} did not answer within {timeout:.0f} s "
                    f"({error}); expected process 0 to run there, reachable from this machine."
                ) from None
            time.sleep(0.5)


def is_first() -> bool:
    """Whether this process speaks for all: writes logs, figures, the config."""
    return jax.process_index() == 0


def from_first(compute: Callable[[], T]) -> T:
    """``compute()`` of process 0, in every process; plain JSON.

    If it fails, the others raise ``UserError`` with its message.
    """
    if jax.process_count() == 1:
        return compute()
    key, client = f"transformer_jax/first/{next(_numbers)}", _client()
    if is_first():
        try:
            value = compute()
        except BaseException as error:
            client.key_value_set(key, json.dumps({"error": str(error) or type(error).__name__}))
            raise
        client.key_value_set(key, json.dumps({"value": value}))
        return value
    answer = json.loads(client.blocking_key_value_get(key, _PREPARING_MILLISECONDS))
    if "error" in answer:
        raise UserError(f"Process 0 failed: {answer['error']}")
    return answer["value"]


def first_then_others(prepare: Callable[[], T]) -> T:
    """``prepare()`` in process 0, then in all others, which find its files in the shared folder.

    Raises as ``from_first`` and ``all_or_none`` do.
    """
    results: list[T] = []
    from_first(lambda: results.append(prepare()))
    return all_or_none(lambda: results[0] if results else prepare())


def all_or_none(work: Callable[[], T]) -> T:
    """``work()`` in every process; if it fails in one, the others raise ``UserError`` with its
    number and message instead of waiting for it.
    """
    try:
        result = work()
    except Exception as error:
        _from_all(str(error) or type(error).__name__)
        raise
    for number, failure in _from_all("").items():
        if failure:
            raise UserError(f"Process {number} failed: {failure}")
    return result


def wait_for_others() -> None:
    """Wait until all processes are here."""
    if jax.process_count() > 1:
        barrier = f"transformer_jax/barrier/{next(_numbers)}"
        _client().wait_at_barrier(barrier, _PREPARING_MILLISECONDS)


def check_agreement(values: Mapping[str, Any]) -> None:
    """Raise ``UserError`` in all processes unless all have the same values (plain JSON); names the
    processes that differ from process 0, and in what.
    """
    of_process = _from_all(values)
    expected = of_process[0]
    problems = [
        f"process {number}: {name} is {its.get(name)!r}, in process 0 {expected.get(name)!r}"
        for number, its in of_process.items()
        for name in sorted(its.keys() | expected.keys())
        if its.get(name) != expected.get(name)
    ]
    if problems:
        raise UserError(
            "The processes of this run differ; expected the same command and the same files.\n  "
            + "\n  ".join(problems)
        )


def _from_all(value: Any) -> dict[int, Any]:
    """Every process' value (plain JSON), by its number."""
    if jax.process_count() == 1:
        return {0: value}
    folder, client = f"transformer_jax/from_all/{next(_numbers)}", _client()
    client.key_value_set(f"{folder}/{jax.process_index()}", json.dumps(value))
    wait_for_others()
    found = client.key_value_dir_get(folder)
    return dict(sorted((int(key.rpartition("/")[2]), json.loads(text)) for key, text in found))


def _client() -> Any:
    from orbax.checkpoint import multihost  # the only public way to JAX's client

    return multihost.get_jax_distributed_client()
