"""Start programs as copies of a process that has already imported what they import.

Importing JAX, Flax and Orbax takes most of a short program's time. ``start_programs_warm`` changes
``subprocess.Popen``: a process of tests asks a helper, this file run as a program, for train.py,
decode.py and ``-m transformer_jax.…``. The helper forks, and the copy runs the program as Python
would have, with its arguments, environment, folder and standard streams. It is a child of the
process that asked, because the process between them ends. Other programs start as usual, and so do
these without Linux or with other settings of JAX.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

# train.py restarts Python with these settings of malloc unless it has some.
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def start_programs_warm() -> None:
    """Change how ``subprocess.Popen`` starts the package's programs."""
    start_as_usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def start(
        self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *settings: Any
    ) -> None:
        pass_fds, cwd, env = settings[:3]
        pipes = settings[6:12]
        *_, new_session, process_group = settings
        environment = dict(os.environ if env is None else env)
        is_plain = not (executable or preexec_fn or pass_fds or new_session or process_group != -1)
        if not (is_plain and _is_ours(args) and _has_settings_of_jax(environment)):
            start_as_usual(self, args, executable, preexec_fn, close_fds, *settings)
            return
        ends_of_child = pipes[0], pipes[3], pipes[5]
        self.pid = _helper().start(
            [number if end == -1 else end for number, end in enumerate(ends_of_child)],
            arguments=[os.fspath(argument) for argument in args[1:]],
            environment=environment,
            folder=os.path.abspath(cwd or ""),
        )
        self._child_created = True
        self._close_pipe_fds(*pipes)

    if sys.platform == "linux":
        subprocess.Popen._execute_child = start  # type: ignore[attr-defined]


def _is_ours(args: Any) -> bool:
    """True for train.py, decode.py and the package's other programs."""
    if isinstance(args, str) or len(args) < 2 or args[0] != sys.executable:
        return False
    if args[1] == "-m":
        return str(args[2]).startswith("transformer_jax.")
    return Path(args[1]).name in ("train.py", "decode.py")


def _has_settings_of_jax(environment: dict[str, str]) -> bool:
    """True if only the compilation cache can differ from what the helper's JAX has read."""
    return all(
        environment.get(name) == os.environ.get(name)
        for name in {*environment, *os.environ}
        if name.startswith("JAX_") and name != "JAX_COMPILATION_CACHE_DIR"
    )


class _Helper:
    """A running helper. It ends with this process."""

    def __init__(self) -> None:
        self._requests, of_helper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with of_helper:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(of_helper.fileno())],
                pass_fds=[of_helper.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | MALLOC,
            )
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the helper."""
        self._requests.close()
        self._process.kill()
        self._process.wait()

    def start(self, streams: list[int], **request: Any) -> int:
        """Start a program with these standard streams. Returns its process id."""
        _adopt_orphans(True)
        socket.send_fds(self._requests, [json.dumps(request).encode()], streams)
        answer = self._requests.recv(100)
        _adopt_orphans(False)
        return int(answer)


_helper = functools.cache(_Helper)


def _adopt_orphans(is_on: bool) -> None:
    """Become the parent of descendants whose parent ends."""
    ctypes.CDLL(None).prctl(36, int(is_on), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def wait_for_program(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Answer requests with the ids of new processes. Returns in these: what to run."""
    while True:
        message, streams, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if not between:
            program = os.fork()
            if not program:
                os.close(read)
                os.close(write)
                return json.loads(message), streams
            os.write(write, str(program).encode())
            os._exit(0)
        os.waitpid(between, 0)
        requests.send(os.read(read, 100))
        for descriptor in (read, write, *streams):
            os.close(descriptor)


def become(environment: dict[str, str], folder: str, streams: list[int]) -> None:
    """Take over an environment, a folder and standard streams."""
    import jax

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.chdir(folder)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    others = [entry for entry in sys.path if entry not in inherited]
    sys.path[:] = [*filter(None, given), *others]
    os.environ.clear()
    os.environ.update(MALLOC | environment)
    jax.config.update("jax_compilation_cache_dir", environment.get("JAX_COMPILATION_CACHE_DIR"))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(arguments: list[str]) -> None:
    """Run a script or, after ``-m``, a module."""
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    """Import what the programs import, and start them on request."""
    from sitecustomize import WithoutPyTorch

    sys.path.pop(0)  # this folder
    sys.meta_path.insert(0, WithoutPyTorch())  # type: ignore[arg-type]
    import transformer_jax.training.loop
    import transformer_jax.translation.translator  # noqa: F401

    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        request, streams = wait_for_program(requests)
    become(request["environment"], request["folder"], streams)
    run(request["arguments"])


if __name__ == "__main__":
    main()
