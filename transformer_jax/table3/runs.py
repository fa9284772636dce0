"""The runs of a table, each row with each seed: which are to do, and doing them."""

from __future__ import annotations

import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from transformer_jax.config import Config
from transformer_jax.config_io import flatten, load_config_file, to_json
from transformer_jax.errors import UserError, shown
from transformer_jax.storage import object_or_empty, write_atomically
from transformer_jax.training.resuming import Difference, fields_that_differ

log = logging.getLogger(__name__)

Environment: TypeAlias = Mapping[str, str]
Process: TypeAlias = "subprocess.Popen[bytes]"

_MAY_CHANGE = ("training.steps", "data.root", "data.cache", "data.workers")


class Table(NamedTuple):
    """What ``configs/table3.py`` has."""

    rows: Mapping[str, Any]
    """By name: the paper's figures."""
    change: Callable[[str, Config], Config]
    """The config of a row, from that of base."""


class Run(NamedTuple):
    """One row with one seed."""

    row: str
    config: Config
    folder: Path
    """Its work directory."""

    def __str__(self) -> str:
        return f"{self.row}, seed {self.config.seed}"

    @property
    def log(self) -> Path:
        """What train.py prints, and at its end the exit status."""
        return self.folder.with_suffix(".log")

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the config are done or early stopping ended it, and the test set is
        scored if there is one.
        """
        steps = self.config.training.steps
        return any(
            summary["stopped_by"] is None
            and (summary["steps"] >= steps or summary.get("stopped_early"))  # not in older ones
            for summary in read_json(self.folder / "summary.json")
        )

    @property
    def failure(self) -> str:
        """Why it failed; '' if it did not, or has begun again."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        ended = re.fullmatch(r"exit status (-?\d+)", lines[-1]) if lines else None
        if ended is None or abs(int(ended[1])) % 128 in (0, signal.SIGINT, signal.SIGTERM):
            return ""
        errors = [line for line in lines[-50:] if line.startswith("error: ")] or lines[-2:-1]
        return f"failed, {lines[-1]}: {shown(''.join(errors[-1:]), limit=300)[1:-1]}"


def read_json(path: Path, *, lines: bool = False) -> list[dict[str, Any]]:
    """The JSON object in a file, or those in its lines; without what is not there, or cut short."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = map(object_or_empty, text.split("\n") if lines else [text])
    return [each for each in found if each]


def load_table(path: Path) -> Table:
    """The rows in a file like ``configs/table3.py``."""
    if not path.is_file():
        raise UserError(f"table is {str(path)!r}, which is no file; expected configs/table3.py.")
    found = runpy.run_path(str(path))
    try:
        return Table(found["ROWS"], found["change"])
    except KeyError as error:
        raise UserError(
            f"{str(path)!r} lacks {error.args[0]}; expected ROWS and change(), as in "
            "configs/table3.py."
        ) from None


def chosen_rows(asked: str, known: Iterable[str]) -> list[str]:
    """The rows that ``--rows`` names, in the order of the table."""
    chosen, known = set(), list(known)
    for name in asked.split(","):
        found = [name] if name in known else [row for row in known if name and row.startswith(name)]
        if not found:
            raise UserError(
                f"rows has {shown(name)}; expected names, or how they begin, of {', '.join(known)}."
            )
        chosen |= set(found)
    return [row for row in known if row in chosen]


def prepare(
    base: Config, table: Table, names: Sequence[str], *, workdir: Path, seeds: int
) -> list[Run]:
    """Write base.json; returns the runs that are not finished, those of seed 1 first.

    A row that with this base is the same as an earlier one is left out, with a message.
    """
    if not base.data.dev.is_given:
        raise UserError("data.dev is missing; expected a dev set, to compare the rows on.")
    _check_same_base(workdir / "base.json", base)
    cache = base.data.cache or str(workdir / "corpus")  # one for all
    base = replace(base, data=replace(base.data, cache=cache))
    rows: dict[Config, str] = {}
    for name in names:
        try:
            config = table.change(name, base)
        except UserError as error:
            raise UserError(f"row {name}: {error}") from None
        if config in rows:
            log.info("%s is left out: with this base it is the same as %s.", name, rows[config])
        else:
            rows[config] = name
    workdir.mkdir(parents=True, exist_ok=True)
    write_atomically(workdir / "base.json", to_json(base))
    runs = [
        Run(name, replace(config, seed=seed), workdir / name / f"seed-{seed}")
        for seed in range(1, seeds + 1)
        for config, name in rows.items()
    ]
    return [run for run in runs if not run.is_finished]


def _check_same_base(path: Path, base: Config) -> None:
    """Raise ``UserError`` if the table in this folder has begun with another base."""
    old = flatten(load_config_file(path) if path.exists() else base)
    differences = [
        Difference(name, old[name], value)
        for name, value in flatten(base).items()
        if value != old[name] and name not in _MAY_CHANGE
    ]
    if differences:
        raise UserError(
            f"{str(path.parent)!r} holds a table with another base; choose another --workdir, or "
            f"the same settings. {fields_that_differ(differences, where='in base.json')}"
        )


def environments() -> list[Environment]:
    """Extra environment variables of each process that may train at the same time: on GPUs one
    process for each, otherwise one process with all devices.
    """
    # In a process of its own, as JAX would keep the GPUs' memory.
    code = "from transformer_jax.machine import find_devices as find; print(find()[0].platform, "
    code += "len(find()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.strip().split("\n")[-1].rpartition("UserError: ")[2])
    platform, count = done.stdout.split()
    if platform in ("cpu", "tpu"):
        return [{}]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(int(count))))
    return [{"CUDA_VISIBLE_DEVICES": each} for each in visible.split(",")]


def start(run: Run, environment: Environment) -> Process:
    """Start train.py on this run."""
    config = run.folder.with_suffix(".json")
    config.parent.mkdir(exist_ok=True)
    write_atomically(config, to_json(run.config))
    program = [sys.executable, "-m", "transformer_jax.training"]
    with run.log.open("ab") as output:
        return subprocess.Popen(
            [*program, "--config", str(config), "--workdir", str(run.folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | environment,
            process_group=0,  # Ctrl-C at the terminal comes to this program alone
        )


def train_all(
    runs: Sequence[Run],
    environments: Sequence[Environment],
    *,
    start: Callable[[Run, Environment], Process] = start,
    when_done: Callable[[], object] = lambda: None,
) -> int:
    """Do all runs, as many at a time as there are environments; returns how many failed.

    On Ctrl-C the runs at work save a checkpoint and end; a second one ends them at once.
    """
    waiting, free, failed = deque(runs), list(environments), 0
    working: dict[Run, tuple[Process, Environment]] = {}
    try:
        while waiting or working:
            while waiting and free:
                run, environment = waiting.popleft(), free.pop(0)
                working[run] = start(run, environment), environment
                log.info("%s: begins; its output is in %s.", run, run.log)
            time.sleep(0.1)
            for run in [run for run, (process, _) in working.items() if process.poll() is not None]:
                process, environment = working.pop(run)
                free.append(environment)
                failed += _note_end(run, process.returncode)
                when_done()
    except KeyboardInterrupt:
        log.info("Stopping: runs at work save a checkpoint (Ctrl-C ends them at once).")
        for process, _ in working.values():
            process.terminate()
        for run, (process, _) in working.items():
            _note_end(run, process.wait())
        raise
    finally:
        for process, _ in working.values():
            process.kill()
    return failed


def _note_end(run: Run, status: int) -> bool:
    """Add the exit status to the log; returns whether the run failed."""
    with run.log.open("a", encoding="utf-8") as file:
        file.write(f"\nexit status {status}\n")
    log.info("%s: %s", run, run.failure or ("stopped" if status else "finished"))
    return bool(run.failure)
