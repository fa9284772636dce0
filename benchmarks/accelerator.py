"""Every figure of docs/performance.md that needs an accelerator, by one command.

    python -m benchmarks.accelerator --data FOLDER --output FOLDER

FOLDER of ``--data`` has the text that configs/multi30k.py reads. Each part is a process of its own
with a time limit of its own, one after the other, so that each has the accelerator to itself; the
most valuable come first. ``--output`` gets, as they come: what each part found (PART.json) and
printed (PART.log), and the table of all that is there so far (results.md), which is also printed at
the end. A part that fails is reported in it and the next one begins. A part that would not end
within ``--minutes`` is left out; ``--parts`` runs it another time, into the same folder.

Compiled functions are kept in OUTPUT/cache, which begins empty if OUTPUT does. ``--toy`` shows on
any machine that all this works, in sizes that measure nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
WITHOUT_GRAPHS = "--xla_gpu_enable_command_buffer="  # inside CUDA graphs kernels have no names

Row = tuple[str, str, str]  # what, figure, beside it


@dataclass(frozen=True)
class Part:
    """Something to measure: a module that is called with ``flags`` or, at toy size, ``toy``."""

    what: str
    module: str
    flags: str
    toy: str
    seconds: int  # that it is expected to take
    limit: int  # seconds, after which it is ended
    rows: Callable[[dict[str, Any]], Iterator[Row]]
    xla_flags: str = ""
    default: bool = True

    def command(self, arguments: argparse.Namespace, name: str) -> list[str]:
        """The program, its results in OUTPUT/NAME.json."""
        flags = self.toy if arguments.toy else self.flags
        flags = flags.format(data=arguments.data, threads=min(8, os.cpu_count() or 1))
        output = str(arguments.output / f"{name}.json")
        return [sys.executable, "-m", self.module, *flags.split(), "--output", output]


def _peaks(found: dict[str, Any]) -> Iterator[Row]:
    size = found["product_size"]
    yield (
        f"bfloat16 products of {size} x {size} matrices",
        f"{found['product_flops'] / 1e12:,.0f} TFLOP/s",
        "",
    )
    yield "copy within device memory", f"{found['copied_bytes'] / 1e9:,.0f} GB/s", ""


def _training(found: dict[str, Any]) -> Iterator[Row]:
    ours = found["engines"]["ours"]
    others = [
        f"{ratio['of_medians']} x {name} ({found['engines'][name]['target_tokens_per_second']:,.0f}"
        f", compiled in {found['engines'][name]['compile_seconds']:.0f} s)"
        for name, ratio in found["ours_over"].items()
    ]
    if "mfu_of_dense_peak" in ours:
        others.append(f"MFU {ours['mfu_of_dense_peak']:.1%}")
    if "peak_device_gb" in ours:
        memory = [found["engines"][name].get("peak_device_gb", "?") for name in found["engines"]]
        others.append(f"device memory {' / '.join(map(str, memory))} GB")
    shape = f"{found['pairs']} pairs of {found['length']} + {found['length']}"
    yield (
        f"training, {found['model']}, {found['dtype']}, {shape}",
        f"{ours['target_tokens_per_second']:,.0f} target tokens/s "
        f"({ours['milliseconds_a_step']} ms a step)",
        "; ".join(others),
    )
    yield f"compiling that step ({found['model']})", f"{ours['compile_seconds']:.0f} s", "cold"


def _warm(found: dict[str, Any]) -> Iterator[Row]:
    yield (
        f"compiling the {found['model']} step again",
        f"{found['first_step_seconds']:.1f} s",
        f"from the cache; in all {found['seconds']:.0f} s from the start of Python",
    )


def _decoding(found: dict[str, Any]) -> Iterator[Row]:
    for result in found["results"]:
        ours = result["engines"]["ours"]
        beside = [
            f"{ratio['of_medians']} x {name} "
            f"({result['engines'][name]['tokens_per_second']:,.0f}), "
            f"{result['same_lines'][name]:,} of {found['sentences']:,} lines the same"
            for name, ratio in result["ours_over"].items()
        ]
        yield (
            f"decoding, {found['setting']}, batch {result['batch_size']}, "
            f"beam {found['beam_size']}, {ours['precision']}",
            f"{ours['tokens_per_second']:,.0f} output tokens/s",
            "; ".join([*beside, f"compiled in {ours['compile_seconds']} s"]),
        )


def _recipe(found: dict[str, Any]) -> Iterator[Row]:
    bleus = [run["test_bleu"] for run in found["runs"]]
    if len(bleus) == 1:
        [run] = found["runs"]
        yield (
            f"{found['recipe']} from nothing to its test BLEU, {found['cache']} cache",
            f"{run['seconds']:.0f} s",
            f"test BLEU {bleus[0]:.2f}; first step after {run['first_step_seconds']:.0f} s, first "
            f"evaluation after {run['first_evaluation_seconds']:.0f} s; {run['steps']:,} steps in "
            f"{run['train_seconds']:.0f} s; {run['compiled']['shapes']} shapes compiled in "
            f"{run['compiled']['seconds']:.0f} s",
        )
    else:
        each = ", ".join(f"{bleu:.2f}" for bleu in bleus)
        yield (
            f"{found['recipe']}, test BLEU of {len(bleus)} seeds",
            f"{found['mean']:.2f}, standard deviation {found['deviation']:.2f}",
            f"{each}; {found['seconds']:.0f} s in all",
        )


def _profile(found: dict[str, Any]) -> Iterator[Row]:
    for name, milliseconds in found["parts"].items():
        if milliseconds:
            yield f"kernels of a {found['model']} step: {name}", f"{milliseconds:.2f} ms", ""
    yield (
        f"kernels of a {found['model']} step, all",
        f"{found['milliseconds']:.2f} ms",
        f"{found['kernels']:.0f} kernels",
    )


def _resume(found: dict[str, Any]) -> Iterator[Row]:
    yield (
        f"resumed at step {found['resumed_at']} of {found['steps']}",
        "the same bits" if found["equal"] else "OTHER BITS",
        f"`XLA_FLAGS={DETERMINISTIC}`; parameters, optimizer and losses of a run without a break",
    )


_OWN = "benchmarks.accelerator_parts"
_RECIPE = "benchmarks.accelerator_recipe"
_TINY = "--model tiny --repeats 1 --patience 0 --threads 2"
_TINY_TRAINING = f"{_TINY} --pairs 4 --length 6 --steps 2 --engines ours torch_eager"
_TINY_DECODING = f"{_TINY} --sentences 4 --batch-sizes 2 --max-extra-length 8 --engines ours"
_TRAINING = "--repeats 3 --patience 2 --threads {threads} --engines ours torch_compile"
_DECODING = "--model base --repeats 3 --patience 2 --threads {threads} --engines ours huggingface"


def _train_speed(model: str, seconds: int) -> Part:
    return Part(
        f"training {model} against torch.compile",
        "benchmarks.train_speed",
        f"--model {model} {_TRAINING}",
        _TINY_TRAINING,
        seconds,
        200,
        _training,
    )


def _decode_speed(batch_size: int, sentences: int, seconds: int) -> Part:
    return Part(
        f"decoding at batch {batch_size} against Hugging Face",
        "benchmarks.decode_speed",
        f"{_DECODING} --batch-sizes {batch_size} --sentences {sentences}",
        _TINY_DECODING,
        seconds,
        150,
        _decoding,
    )


PARTS = {  # the most valuable first
    "peaks": Part("what the device reaches", _OWN, "peaks", "peaks --toy", 15, 60, _peaks),
    "train_base": _train_speed("base", 90),
    "decode_128": _decode_speed(128, 1024, 55),
    "decode_512": _decode_speed(512, 3003, 55),
    "multi30k": Part(
        "configs/multi30k.py from nothing to its test BLEU",
        _RECIPE,
        "--data {data}",
        "--toy",
        240,
        400,
        _recipe,
    ),
    "resume": Part(
        "resuming, bit for bit",
        _OWN,
        "resume",
        "resume --toy",
        40,
        120,
        _resume,
        DETERMINISTIC,
    ),
    "train_big": _train_speed("big", 110),
    "profile": Part(
        "kernels of the base step, by part",
        _OWN,
        "profile",
        "profile --toy",
        70,
        150,
        _profile,
        WITHOUT_GRAPHS,
    ),
    "compile_warm": Part(
        "compiling the base step once more", _OWN, "compile", "compile --toy", 25, 100, _warm
    ),
    "decode_32": _decode_speed(32, 256, 55),
    "multi30k_warm": Part(
        "the same recipe with what the first run compiled",
        _RECIPE,
        "--data {data} --warm",
        "--toy --warm",
        170,
        300,
        _recipe,
    ),
    "multi30k_seeds": Part(
        "four seeds of the recipe, most of the time together",
        _RECIPE,
        "--data {data} --warm --seeds 1 2 3 4",
        "--toy --warm --seeds 1 2",
        330,
        580,
        _recipe,
        default=False,
    ),
}


def main() -> int:
    """Run the parts that are asked for; 1 if one failed."""
    arguments = _arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    arguments.output = arguments.output.absolute()
    deadline = time.monotonic() + 60 * arguments.minutes
    names = list(arguments.parts)
    if not (arguments.output / "peaks.json").exists() and "peaks" not in names:
        names.insert(0, "peaks")  # it also says what the accelerator is
    states = _read(arguments.output / "parts.json")
    for name in sorted(names, key=list(PARTS).index):
        states[name] = _run(arguments, name, deadline - time.monotonic())
        (arguments.output / "parts.json").write_text(json.dumps(states, indent=2) + "\n")
        (arguments.output / "results.md").write_text(table(arguments.output, states))
        print(f"{name}: {states[name]['outcome']}", file=sys.stderr, flush=True)
        if name == "peaks" and states[name]["outcome"] != "done":
            print((arguments.output / "peaks.log").read_text()[-2000:], file=sys.stderr)
            return 1  # no accelerator: nothing else will work
    print((arguments.output / "results.md").read_text())
    return int(any(states[name]["outcome"] != "done" for name in names))


def _run(arguments: argparse.Namespace, name: str, left: float) -> dict[str, Any]:
    """Run one part; how it ended."""
    part = PARTS[name]
    if left < part.seconds and not arguments.toy:
        return {"outcome": f"left out: needs about {part.seconds} s, {max(0, left):.0f} s are left"}
    limit, begin = min(part.limit, left), time.monotonic()
    (arguments.output / f"{name}.json").unlink(missing_ok=True)
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(arguments.output / "cache"),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {part.xla_flags}".strip(),
    }
    with (arguments.output / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            part.command(arguments, name),
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that all that it starts can be ended with it
        )
        try:
            status = process.wait(timeout=max(1.0, limit))
            outcome = "done" if status == 0 else f"failed: exit status {status}"
        except subprocess.TimeoutExpired:
            outcome = f"failed: not done after {limit:.0f} s"
        finally:
            _end(process)
    if outcome == "done" and not (arguments.output / f"{name}.json").exists():
        outcome = "failed: no results"
    return {
        "outcome": outcome,
        "seconds": round(time.monotonic() - begin, 1),
        "date": datetime.date.today().isoformat(),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and all that it started, whether or not it has ended itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(output: Path, states: dict[str, Any]) -> str:
    """The results in ``output`` as Markdown; ``states``: how each part ended, by name."""
    environment = _read(output / "peaks.json").get("environment", {})
    versions = environment.get("versions", {})
    dates = sorted({state["date"] for state in states.values() if "date" in state})
    head = [
        ", ".join(environment.get("devices", ["?"])),
        f"{environment.get('cpu_cores', '?')} CPU cores",
        f"Python {environment.get('python', '?')}",
        *(f"{name} {versions[name]}" for name in ("jax", "flax") if name in versions),
        " to ".join({dates[0]: None, dates[-1]: None}) if dates else "",
    ]
    lines = [", ".join(head), "", "| what | figure | beside it |", "|---|---|---|"]
    for name in PARTS:
        if name in states:
            try:
                found = _read(output / f"{name}.json")
                rows = list(PARTS[name].rows(found)) if found else []
            except (KeyError, IndexError, TypeError, ValueError) as error:
                rows = [(PARTS[name].what, "incomplete results", repr(error))]
            if (outcome := states[name]["outcome"]) != "done":
                beside = f"`--parts {name}`" if "left out" in outcome else f"see {name}.log"
                rows.append((PARTS[name].what, outcome, beside))
            lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _arguments() -> argparse.Namespace:
    width = max(map(len, PARTS))
    listed = "\n".join(
        f"  {name:<{width}}  {part.seconds:>4} s  {part.what}"
        + ("" if part.default else " (only if asked for)")
        for name, part in PARTS.items()
    )
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nParts, and the seconds that they take on an H200 and 16 CPU cores "
        f"from a cold start:\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"), help="Multi30k's text")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=list(PARTS),
        default=[name for name, part in PARTS.items() if part.default],
        metavar="PART",
        help="default: all but those that run only if asked for",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts; default: 9")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on a CPU, say")
    arguments = parser.parse_args()
    arguments.data = arguments.data.absolute()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
