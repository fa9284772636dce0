"""The library under ``serving.py``, in a process of its own (in_turn.py); not for use by hand.

``translator`` translates all lines in one stream, then line by line, with the settings of the
service; ``one_by_one`` only line by line, with one row, as decode.py does at a terminal.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from benchmarks.in_turn import Runner, serve
from transformer_jax.compilation_cache import keep_compiled
from transformer_jax.data.sources import read_lines
from transformer_jax.decoding.devices import devices_for_rows
from transformer_jax.decoding.flags import checked_flags
from transformer_jax.decoding.translator import Translator
from transformer_jax.model.layers import compute_dtype, use_matmul_precision
from transformer_jax.training.summary import environment

_WARM_UP = 20  # single lines


class Library:
    """A ``Translator`` as decode.py makes it."""

    def __init__(self, job: dict[str, Any], *, in_one_stream: bool):
        flags = [] if in_one_stream else ["--batch-size", "1"]
        arguments, config = checked_flags(["--workdir", job["workdir"], *job["flags"], *flags])
        keep_compiled(arguments.compilation_cache)
        use_matmul_precision(config.model)
        devices = devices_for_rows(arguments.search.batch_size)  # before JAX starts
        self._translator = Translator.from_workdir(
            arguments.workdir, devices=devices, **vars(arguments.search)
        )
        precision = str(jnp.dtype(compute_dtype(config.model)))
        self.about = {"precision": precision, "environment": environment()}
        self._lines, self._seconds = list(read_lines(job["input"])), job["seconds"]
        self._in_one_stream = in_one_stream
        by_length = sorted(self._lines, key=len)
        for line in by_length[:: max(1, len(by_length) // _WARM_UP)]:
            self._translator.translate([line])
        if in_one_stream:
            self._translator.translate(self._lines)

    def __call__(self) -> dict[str, Any]:
        """Seconds for all lines, and ms for each of as many single lines as the time allows."""
        found: dict[str, Any] = {}
        if self._in_one_stream:
            begin = time.perf_counter()
            found["lines"] = len(list(self._translator.stream(self._lines)))
            found["seconds"] = time.perf_counter() - begin
        found["ms_of_lines"] = times = []
        until = time.perf_counter() + self._seconds
        for line in self._lines:
            begin = time.perf_counter()
            if begin >= until:
                break
            self._translator.translate([line])
            times.append(1e3 * (time.perf_counter() - begin))
        return found

    def extras(self) -> dict[str, Any]:
        return {}


def main() -> None:
    """``python -m benchmarks.serving_ours NAME FOLDER``."""
    name, folder = sys.argv[1:]
    job = json.loads(Path(folder, "job.json").read_text())

    def load() -> Runner:
        return Library(job, in_one_stream=name == "translator")

    serve(load)


if __name__ == "__main__":
    main()
