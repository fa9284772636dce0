"""Run all accelerator benchmarks of docs/performance.md with one command.

    python -m benchmarks.all --data data/multi30k --output results
    python -m benchmarks.all --toy --output toy          # tiny sizes on any device, including CPUs

``--toy`` reads the files that examples/number_names.py writes in data/numbers.
``--data`` is the folder with the text for configs/multi30k.py. Parts run one after another, the
most important first, each in its own process and at most twice as long as it should take.
``--output`` receives each part's results (PART.json, or PART/summary.json for a training run), its
log (PART.log), and results.md with all tables so far. A repeated command continues: it skips the
parts with results and runs the others from their start. A part that fails or does not fit into
``--minutes`` is reported, and the next part starts; 12 minutes are enough for one H200 up to
``multi30k_cold``. Parts that need more devices than this machine has are left for a larger machine;
without a GPU or TPU, all parts are. On a GPU, PyTorch, Hugging Face and CTranslate2 are measured in
turn with our engine. CTranslate2 needs ``pip install nvidia-cublas-cu12``.

``train_base_2`` to ``train_base_8`` and ``train_big_fsdp_8`` train on that many devices, with the
same number of pairs on each. ``bart`` decodes greedily with a model of BART-large's shape, from 260
to 440 source tokens to 64 output tokens. ``multi30k_cold`` starts with an empty compilation cache,
``multi30k_warm`` reuses this cache, and ``multi30k_2`` to ``multi30k_4`` use other seeds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple

from benchmarks.in_turn import ROOT, Table, absolute, markdown


class Program(NamedTuple):
    """A command with its output flag, other engines to compare on one GPU, and toy sizes."""

    command: str
    others: str
    toy: str


class Part(NamedTuple):
    """A run of a program."""

    seconds: float  # on an H200
    program: str
    flags: str = ""
    devices: int = 1


_TO_FILE = "--output {output}/{name}.json"
_DECODE = f"-m benchmarks.decode {_TO_FILE} --threads 8 --engines ours"
_TOY_DECODE = "--config demo --sentences 4 --batch-sizes 4 --rounds 1"
PROGRAMS = {
    "attention": Program(
        f"-m benchmarks.attention {_TO_FILE}", "", "--lengths 24 --positions 48 --heads 2"
    ),
    "train": Program(
        f"-m benchmarks.train {_TO_FILE} --pairs 784 --steps 40 --dtype bfloat16 --engines ours",
        "torch_compile",
        "--config demo --pairs 8 --length 8 --steps 2 --dtype float32 --rounds 1",
    ),
    "decode": Program(_DECODE, "huggingface ctranslate2 ctranslate2_int8", _TOY_DECODE),
    "bart": Program(
        f"{_DECODE} --config benchmarks/bart_large.py --beam-size 1 --lengths 260 440 "
        "--output-length 64",
        "",
        f"{_TOY_DECODE} --lengths 6 9 --output-length 5",
    ),
    "recipe": Program(
        "train.py --workdir {output}/{name} --config multi30k --data.root {data}",
        "",
        "--config demo --data.train.limit 200 --data.dev.limit 8 --data.test.limit 8 "
        "--batch.tokens 512 --training.steps 4 --training.eval-every 4 "
        "--training.checkpoint-every 4 --model.num-layers 1",
    ),
}
MINUTES = 12.0
PARTS = {
    "train_base": Part(90, "train", "--config wmt14_base"),
    **{
        f"train_base_{n}": Part(40, "train", f"--config wmt14_base --devices {n}", n)
        for n in (8, 4, 2)
    },
    "decode_512": Part(80, "decode", "--batch-sizes 512 --sentences 3003"),
    "decode_128": Part(70, "decode", "--batch-sizes 128 --sentences 1024"),
    "train_big": Part(110, "train", "--config wmt14_big"),
    "train_big_fsdp_8": Part(70, "train", "--config wmt14_big --devices 8 --fsdp 8", 8),
    "attention": Part(60, "attention"),
    "multi30k_cold": Part(240, "recipe", "--seed 1"),
    **{
        f"bart_{rows}": Part(40, "bart", f"--batch-sizes {rows} --sentences {8 * rows}")
        for rows in (128, 64, 32)
    },
    "decode_32": Part(65, "decode", "--batch-sizes 32 --sentences 256"),
    "multi30k_warm": Part(170, "recipe", "--seed 1"),
    **{f"multi30k_{seed}": Part(170, "recipe", f"--seed {seed}") for seed in (2, 3, 4)},
}
# Hides other devices from parts for one device, because some programs use all visible devices.
ONE_DEVICE = {
    "CUDA_VISIBLE_DEVICES": "0",
    "TPU_VISIBLE_DEVICES": "0",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
}


def figures(output: Path, name: str) -> Table:
    """Read the result table of a part. Returns an empty table if the part has no results."""
    path = output / f"{name}.json"
    summary = output / name / "summary.json"
    if path.exists():
        return json.loads(path.read_text())["table"]
    if not summary.exists():
        return {}
    run = json.loads(summary.read_text())
    reported = "train_seconds", "tokens_per_second"
    return {name: {"test BLEU": run["test"]["bleu"]} | {key: run[key] for key in reported}}


def find_devices() -> tuple[str, int]:
    """Find the platform and number of devices in another process, because a TPU can be used by only
    one process at a time.
    """
    program = "import jax; print(jax.default_backend(), jax.local_device_count())"
    command = [sys.executable, "-c", program]
    words = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return words[-2], int(words[-1])


def main() -> int:
    """Run the chosen parts. Returns 1 if a part that can run here has no results, otherwise 0."""
    flags = ArgumentParser(description=__doc__)
    add = flags.add_argument
    add("--data", type=absolute, default=ROOT / "data" / "multi30k")
    add("--output", type=absolute, required=True, help="folder for results")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--minutes", type=float, default=MINUTES)
    add("--toy", action="store_true", help="tiny sizes, to check that the command works")
    arguments = flags.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    latest = time.monotonic() + 60 * arguments.minutes
    states = {}
    platform, devices = find_devices()
    for name in arguments.parts:
        part = PARTS[name]
        left = latest - time.monotonic()
        if figures(output, name):
            states[name] = "done"
        elif platform == "cpu" and not arguments.toy:
            states[name] = "waits for a GPU or TPU"
        elif devices < part.devices:
            states[name] = f"waits for {part.devices} devices"
        elif left < part.seconds:
            states[name] = f"skipped: needs about {part.seconds} s, {max(0, left):.0f} s are left"
        else:
            program = PROGRAMS[part.program]
            compared = platform == "gpu" and part.devices == 1
            words = [program.command, program.others if compared else "", part.flags]
            words += [program.toy] if arguments.toy else []
            command = " ".join(words).format(data=arguments.data, output=output, name=name).split()
            # timeout also stops child processes
            time_limit = str(min(left, 2 * part.seconds))
            limited = ["timeout", "--kill-after=10", time_limit, sys.executable, *command]
            seen = ONE_DEVICE if part.devices == 1 else {}
            cache = output / "compiled"
            if part.program == "recipe":
                seen = seen | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
                shutil.rmtree(output / name, ignore_errors=True)  # an interrupted run
            if name == "multi30k_cold":
                shutil.rmtree(cache, ignore_errors=True)
            with (output / f"{name}.log").open("w") as log:
                done = subprocess.run(
                    limited, cwd=ROOT, stdout=log, stderr=log, env=os.environ | seen
                )
            failed = f"failed with status {done.returncode}, see {name}.log"
            states[name] = failed if done.returncode else "done"
        print(f"{name}: {states[name]}", file=sys.stderr)
        parts = [
            f"## {x}\n\n{state}\n\n{markdown(figures(output, x))}\n" for x, state in states.items()
        ]
        (output / "results.md").write_text("\n".join(parts))
    return int(any(not state.startswith(("done", "waits")) for state in states.values()))


if __name__ == "__main__":
    sys.exit(main())
