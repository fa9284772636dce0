"""Messages between processes. Threads stand for the processes here."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import jax
import pytest

from transformer_jax.devices import distributed
from transformer_jax.errors import UserError


class Store:
    """The key-value store and barrier of JAX's client for processes that are threads."""

    def __init__(self, processes: int):
        self.keys: dict[str, str] = {}
        self.barrier = threading.Barrier(processes)

    def key_value_set(self, key: str, value: str) -> None:
        self.keys[key] = value

    def key_value_delete(self, key: str) -> None:
        self.keys.pop(key, None)

    def wait_at_barrier(self, _: str, timeout_in_ms: int) -> None:
        self.barrier.wait(min(timeout_in_ms / 1000, 10))

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(k, v) for k, v in list(self.keys.items()) if k.startswith(f"{folder}/")]


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Call a function in three processes and return their results or errors."""
    local, store = threading.local(), Store(3)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: local.index)
    monkeypatch.setattr(distributed, "_client", lambda: store)
    monkeypatch.setattr(
        distributed,
        "_numbers",
        type("Own", (), {"__next__": lambda self: next(local.numbers)})(),
    )

    def one(index: int, work: Callable[[int], Any]) -> Any:
        local.index, local.numbers = index, count()
        try:
            return work(index)
        except UserError as error:
            return str(error)

    def call(work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(lambda index: one(index, work), range(3)))
        call.left = len(store.keys)  # type: ignore[attr-defined]
        return results

    return call


def test_messages_are_deleted_once_all_have_read_them(in_processes: Any) -> None:
    """An evaluation sends all translations; the coordinator must not keep them."""
    gathered = in_processes(lambda i: [distributed.allgather(f"{i} {n}") for n in range(5)])
    assert gathered == [[[f"{i} {n}" for i in range(3)] for n in range(5)]] * 3
    assert in_processes.left <= 3


def test_a_failure_in_one_process_reaches_all(in_processes: Any) -> None:
    def phases(index: int) -> int:
        newest = distributed.broadcast_from_first(lambda: 7 + index)
        with distributed.raise_on_any_process():
            if index == 2:
                raise UserError("the disk is full")
        return newest

    def fails() -> int:
        raise UserError("no text")

    own, others = "the disk is full", "Process 2 failed: the disk is full"
    assert in_processes(phases) == [others, others, own]
    assert in_processes(lambda i: distributed.broadcast_from_first(lambda: 7 + i)) == [7] * 3
    found = in_processes(lambda _: distributed.broadcast_from_first(fails))
    assert found == ["no text", *["Process 0 failed: no text"] * 2]


@pytest.mark.parametrize("error", [MemoryError(), AssertionError(), OSError(28, "No space left")])
def test_any_error_reaches_all_even_without_a_message(in_processes: Any, error: Exception) -> None:
    """A process that did not hear of it would wait for the others for days."""

    def work(index: int) -> str:
        try:
            with distributed.raise_on_any_process():
                if index == 1:
                    raise error
        except type(error):
            return "raised here"
        return "nobody failed"

    message = f"Process 1 failed: {str(error) or type(error).__name__}"
    assert in_processes(work) == [message, "raised here", message]


def test_different_values_are_named_in_all_processes(in_processes: Any) -> None:
    values = {"seed": 0, "axes": (1, 2)}
    assert in_processes(lambda _: distributed.check_agreement(values)) == [None] * 3
    found = in_processes(lambda i: distributed.check_agreement(values | {"seed": i // 2}))
    assert len(set(found)) == 1
    assert found[0].endswith("Process 2 differs:\n  seed is 1, but 0 in process 0")


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ({"dev": "a"}, {}, "dev is None, but 'a' in process 0"),
        ({}, {"dev": "a"}, "dev is 'a', but None in process 0"),
    ],
)
def test_a_value_that_only_some_processes_have_is_a_difference(
    in_processes: Any, first: dict[str, str], second: dict[str, str], difference: str
) -> None:
    messages = in_processes(lambda i: distributed.check_agreement(second if i else first))
    assert len(set(messages)) == 1
    assert messages[0].endswith(f"Process 1 differs:\n  {difference}")
