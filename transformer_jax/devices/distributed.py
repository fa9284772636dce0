"""Multi-process runs: startup, agreement, and work that one process does for all.

JAX's runtime (``jax.distributed``) connects the processes. Every process runs the same program on
its own devices, and arrays and compiled functions span all devices. Short messages use the
runtime's key-value store, where a process can wait for hours, unlike in a collective. With a single
process, these functions work without communication.
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
from importlib.metadata import entry_points
from typing import Any, TypeVar

import jax

from transformer_jax.devices.machine import find_devices
from transformer_jax.errors import UserError, one_line
from transformer_jax.settings.config import Processes

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEARTBEAT_SECONDS = 40  # a process silent for this long counts as dead, and the whole run ends
_PREPARING_MILLISECONDS = 7 * 24 * 3600 * 1000  # tokenizing a large corpus can take hours
_numbers = itertools.count()  # all processes call these functions in the same order


def start(settings: Processes) -> None:
    """Connect to the other processes of the run. Call this before any other use of JAX.

    Raises:
      UserError: incompatible flags, a cluster that JAX does not support, a coordinator that does
        not respond, no device of the type in JAX_PLATFORMS, or only a CPU although a JAX plugin is
        installed.
    """
    timeout = settings.start_timeout
    address = settings.coordinator_address
    explicit_settings = address, settings.num_processes, settings.process_id
    if explicit_settings == (None, None, None) and not settings.distributed:
        find_devices()
        return
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise UserError(f"--coordinator-address is {address!r}; expected HOST:PORT of process 0.")
    if settings.process_id == 0:
        logger.info("Process 0: waiting up to %d s for all processes at %s.", timeout, address)
    with _ended_after(timeout):
        try:
            jax.distributed.initialize(
                *explicit_settings,
                # With an explicit address, JAX must not detect a cluster: its settings can differ.
                cluster_detection_method=None if address is None else "deactivate",
                initialization_timeout=timeout + 60,
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            )
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"The processes could not connect: {one_line(error)} Use a cluster that "
                "JAX supports (Slurm, Open MPI, Kubernetes, Cloud TPU), or pass "
                "--coordinator-address, --num-processes and --process-id."
            ) from None
        find_devices()  # waits for the devices of all processes
    number = jax.process_index()
    count = jax.process_count()
    plugins = [plugin.name for plugin in entry_points(group="jax_plugins")]
    if plugins and jax.default_backend() == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        raise UserError(
            f"Process {number} of {count} found only a CPU, although the JAX plugin "
            f"{', '.join(plugins)} is installed; expected a device for each process. Start at most "
            "one process for each device (nvidia-smi lists NVIDIA GPUs, CUDA_VISIBLE_DEVICES hides "
            "some), or set JAX_PLATFORMS=cpu to train on CPUs."
        )
    logger.info(
        "Process %d of %d; %d of %d devices.",
        number,
        count,
        jax.local_device_count(),
        jax.device_count(),
    )


@contextmanager
def _ended_after(timeout: int) -> Iterator[None]:
    """Exit the program if this context takes longer than ``timeout`` seconds.

    JAX's own timeout would abort with a stack trace.
    """

    def end() -> None:
        print(
            f"error: The processes did not connect within {timeout} s (--start-timeout); check "
            "that all of them are running and can reach process 0.",
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
    """Return True in process 0, which writes logs, metrics and the config for all processes."""
    return jax.process_index() == 0


def allgather(value: Any) -> list[Any]:
    """Gather a JSON-serializable value from every process, ordered by process id."""
    if jax.process_count() == 1:
        return [value]
    number = next(_numbers)
    client = _client()
    process = f"{jax.process_index():09d}"
    folder = f"transformer_jax/{number}"
    client.key_value_set(f"{folder}/{process}", json.dumps(value))
    client.wait_at_barrier(folder, _PREPARING_MILLISECONDS)
    # Every process is here, so all have read the previous values.
    client.key_value_delete(f"transformer_jax/{number - 1}/{process}")
    return [json.loads(text) for _, text in sorted(client.key_value_dir_get(folder))]


@contextmanager
def raise_on_any_process() -> Iterator[None]:
    """Wait at the end of this context until all processes reach it.

    If one process fails inside the context, all others raise ``UserError`` with its id and error
    message.
    """
    try:
        yield
    except Exception as error:
        allgather(str(error) or type(error).__name__)
        raise
    for number, failure in enumerate(allgather("")):
        if failure:
            raise UserError(f"Process {number} failed: {failure}")


def broadcast_from_first(compute: Callable[[], T]) -> T:
    """Return process 0's ``compute()``, which must be JSON-serializable, in every process.

    Raises the same errors as ``raise_on_any_process``.
    """
    with raise_on_any_process():
        value = compute() if is_first() else None
    return allgather(value)[0]  # type: ignore[no-any-return]


def lost_contact(error: BaseException | None) -> bool:
    """Return True if JAX's runtime raised the error in a multi-process run."""
    return jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError)


def check_agreement(values: dict[str, Any]) -> None:
    """Raise ``UserError`` in all processes unless they all have the same values.

    The message lists the differences between the first process that differs and process 0.
    """
    values = json.loads(json.dumps(values))  # as after transmission: tuples become lists
    by_process = allgather(values)
    expected = by_process[0]
    for number, actual in enumerate(by_process):
        differences = [
            f"\n  {name} is {actual.get(name)!r}, but {expected.get(name)!r} in process 0"
            for name in sorted(actual.keys() | expected.keys())
            if actual.get(name) != expected.get(name)
        ]
        if differences:
            raise UserError(
                "The processes of this run have different settings or data; start all of them "
                f"with the same command and the same files. Process {number} differs:"
                + "".join(differences)
            )


def _client() -> Any:
    from orbax.checkpoint import multihost  # the only public access to JAX's client

    return multihost.get_jax_distributed_client()
