"""Run all accelerator benchmarks of docs/performance.md with one command.

    python -m benchmarks.all --data data/multi30k --output results

``--data`` has the text for configs/multi30k.py. Parts run in sequence, the most valuable first,
each in its own process. ``--output`` receives each part's results (PART.json, or PART/summary.json
of a training run), its log (PART.log), and results.md with all tables so far. Finished parts do not
run again. Parts that fail, or do not fit into ``--minutes``, are reported, and the next part
starts.

``multi30k_cold`` starts with an empty compilation cache, ``multi30k_warm`` reuses this cache, and
``multi30k_2`` to ``multi30k_4`` use other seeds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

from benchmarks.in_turn import ROOT, Table, absolute, markdown

_TRAIN = "-m benchmarks.train --pairs 784 --steps 40 --dtype bfloat16 --engines ours torch_compile"
_DECODE = "-m benchmarks.decode --threads 8 --engines ours huggingface"
_RECIPE = "train.py --config multi30k --data.root {data} --compilation-cache {output}/compiled"
PARTS = {  # seconds on an H200, program
    "train_base": (90, f"{_TRAIN} --config wmt14_base"),
    "decode_128": (55, f"{_DECODE} --batch-sizes 128 --sentences 1024"),
    "decode_512": (55, f"{_DECODE} --batch-sizes 512 --sentences 3003"),
    "multi30k_cold": (240, f"{_RECIPE} --seed 1"),
    "train_big": (110, f"{_TRAIN} --config wmt14_big"),
    "decode_32": (55, f"{_DECODE} --batch-sizes 32 --sentences 256"),
    "multi30k_warm": (170, f"{_RECIPE} --seed 1"),
    **{f"multi30k_{seed}": (170, f"{_RECIPE} --seed {seed}") for seed in (2, 3, 4)},
}


def figures(output: Path, name: str) -> Table:
    """Result table of a part; empty if it has no results."""
    path, summary = output / f"{name}.json", output / name / "summary.json"
    if path.exists():
        return json.loads(path.read_text())["table"]
    if not summary.exists():
        return {}
    run = json.loads(summary.read_text())
    kept = "first_step_seconds", "train_seconds", "tokens_per_second"
    return {name: {"test BLEU": run["test"]["bleu"]} | {key: run[key] for key in kept}}


def main() -> int:
    """Run the chosen parts; exit status 1 if any part has no results."""
    flags = ArgumentParser(description=__doc__)
    add = flags.add_argument
    add("--data", type=absolute, default=ROOT / "data" / "multi30k")
    add("--output", type=absolute, required=True, help="folder for results")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--minutes", type=float, default=9.0)
    arguments = flags.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    latest, states = time.monotonic() + 60 * arguments.minutes, {}
    for name in arguments.parts:
        seconds, program = PARTS[name]
        left = latest - time.monotonic()
        if figures(output, name):
            states[name] = "done"
        elif left < seconds:
            states[name] = f"skipped: needs about {seconds} s, {max(0, left):.0f} s are left"
        else:
            place = (
                f"--workdir {{output}}/{name}"
                if "--data." in program
                else f"--output {{output}}/{name}.json"
            )
            command = f"{program} {place}".format(data=arguments.data, output=output).split()
            # stops child processes too
            limited = ["timeout", "--kill-after=10", str(min(left, 2 * seconds)), sys.executable]
            with (output / f"{name}.log").open("w") as log:
                done = subprocess.run([*limited, *command], cwd=ROOT, stdout=log, stderr=log)
            failed = f"failed with status {done.returncode}, see {name}.log"
            states[name] = failed if done.returncode else "done"
        print(f"{name}: {states[name]}", file=sys.stderr)
        parts = [
            f"## {x}\n\n{state}\n\n{markdown(figures(output, x))}\n" for x, state in states.items()
        ]
        (output / "results.md").write_text("\n".join(parts))
    return int(any(state != "done" for state in states.values()))


if __name__ == "__main__":
    sys.exit(main())
