"""Milliseconds of our training or decoding step by part, from a trace of ``jax.profiler`` on a CPU.

    python -m benchmarks.parts                                     # base, float32
    python -m benchmarks.parts --dtype bfloat16                    # mixed precision
    python -m benchmarks.parts --config multi30k --pairs 256
    python -m benchmarks.parts --workdir W --input F --threads 1   # beam search, one engine

A turn is ``--steps`` training steps in a trace, on the batches of ``benchmarks.train``. With
``--workdir``, a turn translates the file with ``--pairs`` rows, beam size 4 and the model's data
type; the table has the operations of a decoding step, without the encoder. Events in the trace name
operations of the compiled step. An operation's metadata (``op_name``) has the path of JAX's named
scopes, such as ``transpose(jvp(feed_forward))`` in the backward pass. A fusion has the path of its
root, so it can include cheap operations of other parts.

Columns: matmuls and other operations in the forward and the backward pass, per step, in the fastest
round. The loss also computes its gradient in the forward pass. "rest" is the time without an
operation, such as loops; it is negative if operations ran at the same time on several threads.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.hlo import kernels
from benchmarks.in_turn import Answer, Engine, Table, absolute, finish, measure, parser, workers
from benchmarks.train import make_batches, read_config

# An operation belongs to the first of these names that is in its path; "" is in every path.
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
    "": "optimizer",
}
_SEARCH = {
    "logits": "logits",
    "log_softmax": "normalizer of the logits",
    "top_k": "best tokens of each beam",
    "cache": "writing the KV cache",
} | {name: part for name, part in _PARTS.items() if name not in ("loss", "add_any", "jvp")}
_SEARCH[""] = "beams, constraints, results"
_COLUMNS = "matmuls", "other", "backward matmuls", "backward other"


def part(source: str, parts: dict[str, str] = _PARTS) -> str:
    """Return the part of a step to which an operation with this path belongs."""
    names = {"", *re.findall(r"\w+", source)}
    return next(part for name, part in parts.items() if name in names)


def operation_times(run: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """Trace a call. Returns the milliseconds of each operation, and how often it ran."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    times = Counter[str]()
    counts = Counter[str]()
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        [file] = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op", "")
                times[name] += event.duration_ns / 1e6
                counts[name] += 1
    return times, counts


def by_part(
    program: str, times: Counter[str], parts: dict[str, str] = _PARTS
) -> dict[str, Counter[str]]:
    """Add up the times of a compiled program's operations by part and column."""
    table: dict[str, Counter[str]] = {}
    for kernel in kernels(program):  # without loops and calls, whose events contain other events
        column = "matmuls" if kernel.flops else "other"
        if "transpose(" in kernel.source:
            column = f"backward {column}"
        name = part(kernel.source, parts)
        table.setdefault(name, Counter())[column] += times.pop(kernel.name, 0)
    return table


def start(_: str, job: Answer) -> Engine:
    """Compile the step. Each turn runs it, and returns the milliseconds by part."""
    return start_search(job) if job["workdir"] else start_training(job)


def start_training(job: Answer) -> Engine:
    """Measure the training step."""
    import jax

    from transformer_jax import Batch, MeshConfig, batch_sharding, make_mesh
    from transformer_jax.training.step import make_step_functions

    config = read_config(job)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    functions = make_step_functions(config, mesh)
    pairs = (Batch(*sides) for sides in make_batches(job, config.model.vocab_size))
    batches = [jax.device_put(pair, batch_sharding(mesh)) for pair in pairs]
    state = functions.init()
    train_step = functions.train_step.lower(state, batches[0]).compile()
    program = train_step.as_text()
    seconds = 0.0

    def steps() -> None:
        nonlocal state, seconds
        begin = time.perf_counter()
        for number, batch in enumerate(islice(cycle(batches), job["steps"])):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, _ = train_step(state, batch)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - begin

    def run() -> Answer:
        nonlocal state
        state, _ = jax.block_until_ready(train_step(state, batches[0]))
        parts = by_part(program, operation_times(steps)[0])
        return {"parts": parts, "milliseconds": 1e3 * seconds, "steps": job["steps"]}

    return run


def start_search(job: Answer) -> Engine:
    """Measure the search: each turn translates the file."""
    import numpy as np

    from transformer_jax import Sentence, Translator
    from transformer_jax.data.text_files import read_lines

    settings = {"beam_size": 4, "length_penalty": 0.6, "length_offset": 0.0}
    translator = Translator.from_workdir(job["workdir"], batch_size=job["pairs"], **settings)
    lines = list(read_lines(job["input"]))
    [engine] = translator.engines
    sentences = list(map(Sentence, translator.tokenizer.source.encode(lines)))
    bucket = engine.bucket_of(max(sentences, key=lambda sentence: len(sentence.tokens)))
    arguments = engine._weights, engine.new_rows(bucket), engine.encode(bucket, [])
    counts = [np.int32(0)] * 3
    program = engine._compiled.admit_and_decode.lower(*arguments, *counts).compile().as_text()

    def run() -> Answer:
        engine.search(sentences)
        times, counts = operation_times(lambda: engine.search(sentences))
        parts = by_part(program, times, _SEARCH)
        total = sum(row.total() for row in parts.values())
        [steps] = {counts[k.name] for k in kernels(program) if "/logits/" in k.source and k.flops}
        return {"parts": parts, "milliseconds": total, "steps": steps}

    return run


def table_of(answer: Answer) -> Table:
    """Make the table of one round: milliseconds per step by part and column, and in total."""
    steps = answer["steps"]
    parts = dict(answer["parts"])
    total = answer["milliseconds"]
    parts["rest"] = Counter(other=total - sum(row.total() for row in parts.values()))
    rows = sorted(parts.items(), key=lambda item: -item[1].total())
    table: Table = {}
    for name, row in rows:
        table[name] = {column: row[column] / steps for column in _COLUMNS}
        table[name] |= {"ms": row.total() / steps, "%": 100 * row.total() / total}
    table["all"] = {column: sum(row[column] for row in table.values()) for column in table["rest"]}
    return table


def main() -> None:
    """Measure, and print the table."""
    flags = parser(__doc__)
    add = flags.add_argument
    add("--config", default="wmt14_base", help="recipe or file; default: wmt14_base")
    add("--workdir", help="trained model; with --input, measure beam search")
    add("--input", type=absolute, help="text to translate")
    add("--pairs", type=int, default=32, help="sentence pairs per step; rows of the search")
    add("--length", type=int, default=32)
    add("--steps", type=int, default=4)
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = flags.parse_args()
    job = vars(arguments) | {"devices": 1}
    with workers("parts", ["ours"], job) as engines:
        _, rounds = measure(
            engines, arguments.rounds, lambda x: x["steps"] / x["milliseconds"], "steps/ms"
        )
    fastest = min((answers["ours"] for answers in rounds[1:]), key=lambda x: x["milliseconds"])
    finish(table_of(fastest), rounds, arguments)


if __name__ == "__main__":
    main()
