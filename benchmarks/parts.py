"""Milliseconds of our training step by part, from a trace of ``jax.profiler`` on a CPU.

    python -m benchmarks.parts                                     # base, float32
    python -m benchmarks.parts --dtype bfloat16                    # mixed precision
    python -m benchmarks.parts --config multi30k --pairs 256

A turn is ``--steps`` steps in a trace, on the batches of ``benchmarks.train``. Events in the trace
name operations of the compiled step. An operation's metadata (``op_name``) has the path of JAX's
named scopes, such as ``transpose(jvp(feed_forward))`` in the backward pass. A fusion has the path
of its root, so it can include cheap operations of other parts.

Columns: matmuls and other operations in the forward and the backward pass, per step, in the fastest
round. The loss also computes its gradient in the forward pass. "rest" is the time without an
operation, such as loops; it is negative if operations ran at the same time on several threads.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.hlo import kernels
from benchmarks.in_turn import Answer, Engine, Table, finish, measure, parser, workers
from benchmarks.train import make_batches, read_config

# An operation belongs to the first of these names that is in its path.
_PARTS = {
    "add_any": "sums of gradients",
    "loss": "loss",
    "embedding": "embedding",
    "dot_product_attention": "attention: dot products, softmax",
    "attention": "attention: projections",
    "feed_forward": "feed-forward",
    "dropout": "dropout",
    "norm": "norms",
    "residual": "residual connections",
    "jvp": "masks and other operations of the model",
    "convert_element_type": "casts",
}
_COLUMNS = "matmuls", "other", "backward matmuls", "backward other"


def part(source: str) -> str:
    """Return the part of the training step to which an operation with this path belongs."""
    names = set(re.findall(r"\w+", source))
    return next((part for name, part in _PARTS.items() if name in names), "optimizer")


def operation_times(folder: Path) -> Counter[str]:
    """Add up the milliseconds of each operation in a trace."""
    import jax

    [file] = folder.rglob("*.xplane.pb")
    times: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                times[dict(event.stats).get("hlo_op", "")] += event.duration_ns / 1e6
    return times


def by_part(program: str, times: Counter[str]) -> dict[str, Counter[str]]:
    """Add up the times of a compiled program's operations by part and column."""
    table: dict[str, Counter[str]] = {}
    for kernel in kernels(program):  # without loops and calls, whose events contain other events
        column = "matmuls" if kernel.flops else "other"
        if "transpose(" in kernel.source:
            column = f"backward {column}"
        table.setdefault(part(kernel.source), Counter())[column] += times.pop(kernel.name, 0)
    return table


def start(_: str, job: Answer) -> Engine:
    """Compile the training step. Each turn runs it, and returns the milliseconds by part."""
    import jax

    from transformer_jax import Batch, MeshConfig, batch_sharding, make_mesh
    from transformer_jax.training.step import make_step_functions

    config, mesh = read_config(job), make_mesh(MeshConfig(), jax.devices()[:1])
    functions = make_step_functions(config, mesh)
    pairs = (Batch(*sides) for sides in make_batches(job, config.model.vocab_size))
    batches = [jax.device_put(pair, batch_sharding(mesh)) for pair in pairs]
    state = functions.init()
    train_step = functions.train_step.lower(state, batches[0]).compile()
    program, options = train_step.as_text(), jax.profiler.ProfileOptions()
    options.python_tracer_level = 0

    def run() -> Answer:
        nonlocal state
        state, _ = jax.block_until_ready(train_step(state, batches[0]))
        with TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                begin = time.perf_counter()
                for number, batch in enumerate(islice(cycle(batches), job["steps"])):
                    with jax.profiler.StepTraceAnnotation("train", step_num=number):
                        state, _ = train_step(state, batch)
                jax.block_until_ready(state)
                seconds = time.perf_counter() - begin
            parts = by_part(program, operation_times(Path(folder)))
        return {"parts": parts, "milliseconds": 1e3 * seconds}

    return run


def table_of(answer: Answer, steps: int) -> Table:
    """Make the table of one round: milliseconds per step by part and column, and in total."""
    found, whole = dict(answer["parts"]), answer["milliseconds"]
    found["rest"] = Counter(other=whole - sum(row.total() for row in found.values()))
    rows = sorted(found.items(), key=lambda item: -item[1].total())
    table: Table = {}
    for name, row in rows:
        table[name] = {column: row[column] / steps for column in _COLUMNS}
        table[name] |= {"ms": row.total() / steps, "%": 100 * row.total() / whole}
    table["all"] = {column: sum(row[column] for row in table.values()) for column in table["rest"]}
    return table


def main() -> None:
    """Measure, and print the table."""
    flags = parser(__doc__)
    add = flags.add_argument
    add("--config", default="wmt14_base", help="recipe or file; default: wmt14_base")
    add("--pairs", type=int, default=32, help="sentence pairs per step")
    add("--length", type=int, default=32)
    add("--steps", type=int, default=4)
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = flags.parse_args()
    job = vars(arguments) | {"devices": 1}
    with workers("parts", ["ours"], job) as engines:
        _, rounds = measure(
            engines, arguments.rounds, lambda x: job["steps"] / x["milliseconds"], "steps/ms"
        )
    fastest = min((answers["ours"] for answers in rounds[1:]), key=lambda x: x["milliseconds"])
    finish(table_of(fastest, job["steps"]), rounds, arguments)


if __name__ == "__main__":
    main()
