"""Rehearse a run on a pod with a bucket: eight processes, two slices, no shared folder.

    python tests/training/rehearse_pod.py

Eight processes on this machine simulate the hosts of two slices. Each has its own home, cache and
temporary folder, and they share only an emulated gs:// bucket. The script starts them, kills one,
stops one, makes the bucket fail for a minute, resumes with four processes, and translates. It
prints its observations, and fails if they contradict docs/tutorials/tpu_pod.md.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# runs.command sets the number of devices. One thread each, and less time for compiling.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import chex
from runs import (
    ROOT,
    address,
    command,
    emulated_store,
    entries,
    final_state,
    no_evaluation,
    numbered,
    tiny,
)

from transformer_jax.pretrained.loading import local_workdir
from transformer_jax.runs.checkpoint_folder import complete_steps
from transformer_jax.runs.mirror import mirror_checkpoints
from transformer_jax.settings.config import Config
from transformer_jax.storage.files import remote_path

HOSTS = 8
URL, UNDISTURBED = "gs://ckpt/runs/disturbed", "gs://ckpt/runs/undisturbed"
LATE_SECONDS, FAILING_SECONDS = 15, 60
SILENT_SECONDS = 10  # a process silent for this long in its setup counts as dead
START_SECONDS = 20  # of the start that waits for a process that never comes
PATIENCE_SECONDS = 900  # eight processes compile for minutes on two busy cores


def config(steps: int) -> Config:
    """A config without evaluation that saves every five steps."""
    return no_evaluation(tiny(steps=steps, checkpoint_every=5))


class Pod:
    """Processes that share nothing but the bucket."""

    def __init__(self, folder: Path, url: str, run: Config, *, hosts: list[str], flags: list[str]):
        self.logs = [folder / f"{host}.log" for host in hosts]
        self.folder, self.url, self.run, self.hosts, self.flags = folder, url, run, hosts, flags
        self.coordinator = address()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *numbers: int, program: tuple[str, ...] = ("train.py",)) -> None:
        """Start these processes."""
        for number in numbers:
            home = self.folder / self.hosts[number]
            (home / "tmp").mkdir(parents=True, exist_ok=True)
            own = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "XDG_CACHE_HOME": str(home)}
            with self.logs[number].open("w") as log:
                self.processes.append(
                    command(
                        self.url,
                        home / "compiled",
                        self.run,
                        *numbered(self.coordinator, len(self.hosts), number),
                        *self.flags,
                        folder=home,
                        environment=own,
                        stderr=log,
                        program=program,
                    )
                )

    def said(self, number: int) -> str:
        """Output of a process so far."""
        return self.logs[number].read_text()

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition while all processes run."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            for number, process in enumerate(self.processes):
                assert process.poll() is None, f"{number} ended before {what}: {self.said(number)}"
            assert time.monotonic() < end, f"no {what} within {PATIENCE_SECONDS} s: {self.said(0)}"
            time.sleep(0.5)

    def end(self) -> list[int]:
        """Exit statuses, once all processes have ended."""
        end = time.monotonic() + PATIENCE_SECONDS
        return [process.wait(end - time.monotonic()) for process in self.processes]

    def kill(self) -> None:
        """Stop the remaining processes."""
        for process in self.processes:
            process.kill()


class Rehearsal:
    """The steps of the rehearsal, in order."""

    def __init__(self, folder: Path, emulator: subprocess.Popen[bytes]):
        self.folder, self.emulator = folder, emulator
        self.began = self.at = time.monotonic()
        self.pods: list[Pod] = []

    def say(self, seen: str) -> None:
        """Print what was seen, and the seconds since the last line."""
        now = time.monotonic()
        print(f"{now - self.at:5.0f} s  {seen}", flush=True)
        self.at = now

    def pod(self, steps: int, hosts: str, url: str = URL, *flags: str, count: int = HOSTS) -> Pod:
        """A pod whose hosts have this name."""
        names = [f"{hosts}{number}" for number in range(count)]
        slices = "--mesh.slices", "2"
        pod = Pod(self.folder, url, config(steps), hosts=names, flags=[*slices, *flags])
        self.pods.append(pod)
        return pod

    def newest(self) -> int:
        """The newest complete step in the bucket."""
        return max(complete_steps(remote_path(URL) / "checkpoints"), default=0)

    def a_process_never_comes(self) -> None:
        pod = self.pod(5, "never", URL, "--start-timeout", str(START_SECONDS))
        pod.start(*range(HOSTS - 1))
        began = time.monotonic()
        assert pod.end() == [2] * (HOSTS - 1), pod.said(0)
        seconds = time.monotonic() - began
        assert seconds < START_SECONDS + 60, seconds
        for number in range(HOSTS - 1):
            assert "did not connect within" in pod.said(number), pod.said(number)
        [error] = [line for line in pod.said(0).splitlines() if line.startswith("error")]
        self.say(f"process 7 never starts: the others end after {seconds:.0f} s\n         {error}")

    def one_of_two_is_killed_in_setup(self) -> None:
        """In each phase of ``training/prepare.py``; then the same command succeeds."""
        told = "lost contact with", "tasks have crashed", "service detected fatal"
        for phase in ("open_workdir", "build_files", "open_run"):
            url = f"gs://ckpt/runs/{phase}"
            waits = []
            for killed in (1, 0):
                pod = self.pod(5, f"{phase}-{killed}-", url, count=2)
                here = self.folder / f"{phase}-{killed}"
                script = "tests/training/paused_setup.py"
                pod.start(0, 1, program=(script, phase, str(here), str(SILENT_SECONDS)))
                pod.wait(here.exists, phase)
                pod.processes[killed].kill()
                began, other = time.monotonic(), 1 - killed
                pod.processes[other].wait(SILENT_SECONDS + 60)
                waits.append(f"{time.monotonic() - began:.0f}")
                assert pod.processes[other].returncode != 0, pod.said(other)
                assert any(text in pod.said(other) for text in told), pod.said(other)
            pod.processes.clear()
            pod.start(0, 1)
            assert pod.end() == [0, 0], pod.said(0)
            self.say(
                f"SIGKILL in {phase} to process 1, then 0: the other ends after "
                f"{' and '.join(waits)} s; the same command then succeeds"
            )

    def one_is_killed(self) -> int:
        pod = self.pod(100_000, "a")
        pod.start(*range(HOSTS - 1))
        time.sleep(LATE_SECONDS)
        pod.start(HOSTS - 1)
        pod.wait(lambda: self.newest() > 0, "the first checkpoint")
        self.say(f"process 7 starts {LATE_SECONDS} s late: they train; checkpoint {self.newest()}")
        pod.processes[5].kill()
        statuses = pod.end()
        assert 0 not in statuses, statuses
        killed = self.newest()
        seconds = time.monotonic() - self.at
        assert seconds < 90, seconds
        told = {"lost contact with": 0, "tasks have crashed": 0, "service detected fatal": 0}
        for number in set(range(HOSTS)) - {5}:
            text = next((text for text in told if text in pod.said(number)), None)
            assert text is not None, pod.said(number)
            told[text] += 1
        self.say(f"SIGKILL to process 5: the others end {seconds:.0f} s later, with {told}")
        return killed

    def one_is_stopped(self, killed: int) -> int:
        pod = self.pod(100_000, "b")
        pod.start(*range(HOSTS))
        pod.wait(lambda: "resuming" in pod.said(0), "resuming")
        assert f"resuming at step {killed} " in pod.said(0), pod.said(0)
        self.say(f"all start on new hosts: resuming at step {killed}")
        pod.wait(lambda: self.newest() > killed, "another checkpoint")
        self.say(f"checkpoint {self.newest()}")
        pod.processes[6].send_signal(signal.SIGTERM)
        assert pod.end() == [128 + signal.SIGTERM] * HOSTS, pod.said(0)
        stopped = self.newest()
        assert f"saved at step {stopped}." in pod.said(0), pod.said(0)
        self.say(f"SIGTERM to process 6: all save step {stopped} and exit with status 143")
        return stopped

    def the_bucket_fails(self, stopped: int) -> int:
        steps = stopped + 20
        pod = self.pod(steps, "b")
        pod.start(*range(HOSTS))
        pod.wait(lambda: self.newest() > stopped, "another checkpoint")
        assert f"resuming at step {stopped} " in pod.said(0), pod.said(0)
        self.say(f"all start again: resuming at step {stopped}; checkpoint {self.newest()}")
        self.emulator.send_signal(signal.SIGUSR1)
        time.sleep(FAILING_SECONDS)
        assert [process.poll() for process in pod.processes] == [None] * HOSTS, pod.said(0)
        self.emulator.send_signal(signal.SIGUSR2)
        self.say(f"the bucket answers 503 for {FAILING_SECONDS} s: all wait")
        assert pod.end() == [0] * HOSTS, pod.said(0)
        assert self.newest() == steps
        told = [line for line in pod.said(0).splitlines() if "503" in line]
        assert told, pod.said(0)
        self.say(f"they go on to step {steps}, the last\n         {told[0]}")
        return steps

    def all_is_as_undisturbed(self, steps: int) -> None:
        pod = self.pod(steps, "b", UNDISTURBED)  # with the compiled functions of before
        pod.start(*range(HOSTS))
        assert pod.end() == [0] * HOSTS, pod.said(0)
        workdirs = [local_workdir(url) for url in (URL, UNDISTURBED)]
        losses = [[(each["step"], each["loss"]) for each in entries(w)] for w in workdirs]
        assert losses[0] == losses[1]
        assert [step for step, _ in losses[0]] == list(range(1, steps + 1))
        copies = [shutil.copytree(w, self.folder / "copies" / w.name) for w in workdirs]
        for url, copy in zip((URL, UNDISTURBED), copies):
            mirror_checkpoints(remote_path(url) / "checkpoints", copy / "checkpoints")
        chex.assert_trees_all_equal(*(final_state(config(steps), copy) for copy in copies))
        self.say(f"a run that nothing disturbs: the same {steps} losses and the same last state")

    def four_go_on(self, steps: int) -> None:
        pod = self.pod(steps + 20, "d", count=4)
        pod.start(*range(4))
        assert pod.end() == [0] * 4, pod.said(0)
        assert f"resuming at step {steps} " in pod.said(0), pod.said(0)
        run = local_workdir(URL)
        last = [entry["loss"] for entry in entries(run)][-20:]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["processes"] == 4 and summary["steps"] == steps + 20, summary
        self.say(f"four processes resume at step {steps}: losses {last[0]:.3f} to {last[-1]:.3f}")

    def translated_from_the_bucket(self) -> None:
        home, lines = self.folder / "reader", self.folder / "lines"
        lines.write_text("one\ntwo hundred\n\n")
        own = {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
        flags = "--workdir", URL, "--input", str(lines), "--output", f"{lines}.out"
        program = [sys.executable, str(ROOT / "decode.py"), *flags]
        run = subprocess.run(program, env=os.environ | own, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert len((self.folder / "lines.out").read_text().splitlines()) == 3
        self.say("decode.py translates from the bucket's URL:\n         " + run.stderr.strip())


def main() -> None:
    """Run all steps. After a failure, the logs are kept."""
    folder = Path(tempfile.mkdtemp(prefix="pod-"))
    print(f"logs in {folder}", flush=True)
    with emulated_store(folder / "emulator.log") as (emulator, variables):
        os.environ |= variables | {"XDG_CACHE_HOME": str(folder / "here")}
        rehearsal = Rehearsal(folder, emulator)
        try:
            rehearsal.a_process_never_comes()
            rehearsal.one_of_two_is_killed_in_setup()
            killed = rehearsal.one_is_killed()
            stopped = rehearsal.one_is_stopped(killed)
            steps = rehearsal.the_bucket_fails(stopped)
            rehearsal.all_is_as_undisturbed(steps)
            rehearsal.four_go_on(steps)
            rehearsal.translated_from_the_bucket()
        finally:
            for pod in rehearsal.pods:
                pod.kill()
    shutil.rmtree(folder)
    print(f"all as promised, in {time.monotonic() - rehearsal.began:.0f} s")


if __name__ == "__main__":
    main()
