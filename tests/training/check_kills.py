"""Compare a run killed many times with SIGKILL to an undisturbed run. Too slow for the test suite.

    python tests/training/check_kills.py [--kills 20] [--seed 0] [--mix]

Half of the kills wait for a save to be under way. The run resumes after each, and its end state,
losses and steps must be those of the undisturbed run, bit for bit. --mix: train on three corpora.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# what runs.command expects
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import chex
from runs import changed, command, entries, final_state, saving, tiny
from test_mixed_runs import mixed


def main() -> None:
    """Run train.py, kill it, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mix", action="store_true")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    training = {"steps": 40 * arguments.kills, "eval_every": 10**6, "checkpoint_every": 4}
    config = tiny(0.1, bleu_sentences=0, **training)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.mix:
            config = changed(mixed(folder / "text", **training), model={"dropout": 0.1})
        workdirs = folder / "undisturbed", folder / "killed"
        finish(command(workdirs[0], folder / "cache", config))
        in_a_save = 0
        for kill in range(arguments.kills):
            began = latest(workdirs[1])
            process = command(workdirs[1], folder / "cache", config)
            goal = began + rng.randrange(1, 40)
            while latest(workdirs[1]) < goal:
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.002)
            while kill % 2 and not saving(workdirs[1]) and process.poll() is None:
                time.sleep(0.0005)
            if not kill % 2:
                time.sleep(rng.random() / 20)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            in_a_save += saving(workdirs[1])
            print(
                f"kill {kill + 1} after step {latest(workdirs[1])}, "
                f"{'in' if saving(workdirs[1]) else 'not in'} a save",
                flush=True,
            )
        finish(command(workdirs[1], folder / "cache", config))
        states = [final_state(config, workdir) for workdir in workdirs]
        chex.assert_trees_all_equal(*states)
        logs = [
            [(entry["step"], entry["loss"]) for entry in entries(workdir)] for workdir in workdirs
        ]
        assert logs[0] == logs[1]
    print(
        f"{arguments.kills} kills, {in_a_save} of them during a save: "
        f"identical bits after {config.training.steps} steps"
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a process that succeeds, reading its messages, which would fill the pipe."""
    _, messages = process.communicate()
    assert process.returncode == 0, messages


def latest(workdir: Path) -> int:
    """Last logged step."""
    return max((entry["step"] for entry in entries(workdir)), default=0)


if __name__ == "__main__":
    main()
