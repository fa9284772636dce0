"""Translate a corpus with a teacher, in shards: distillation and back-translation.

    python examples/translate_corpus.py --workdir TEACHER --input train.en --output kd --shard 0/4

translates every fourth line, beginning with the first, to kd/0-of-4. Run all shards, each on its
own device or host with the same --output. The last one writes kd/source and kd/target, without
pairs that have an empty side or whose lengths differ by more than --max-ratio. Several work
directories after --workdir are an ensemble. With --swap, the translations are the source
(back-translation). The same command continues after it was stopped. --method sample, --temperature
and --beam-size are those of decode.py.
"""

from itertools import zip_longest
from pathlib import Path
from typing import Literal

import tyro

from transformer_jax import read_lines, run_program
from transformer_jax.storage.files import check_not_input
from transformer_jax.translation.__main__ import main as decode


def main(
    workdir: tuple[str, ...],
    input: str,
    output: Path,
    shard: str = "0/1",
    swap: bool = False,
    beam_size: int = 4,
    method: Literal["beam", "sample"] = "beam",
    temperature: float = 1.0,
    max_ratio: float = 3.0,
) -> None:
    for name in ("source", "target"):
        check_not_input(str(output / name), input)
    output.mkdir(parents=True, exist_ok=True)
    file = output / shard.replace("/", "-of-")
    flags = ["--workdir", *workdir, "--input", input, "--output", str(file), "--resume"]
    search = ["--method", method]
    search += ["--beam-size", str(beam_size)] if method == "beam" else []
    search += ["--temperature", str(temperature)] if method == "sample" else []
    if status := decode([*flags, *search, "--shard", shard]):
        raise SystemExit(status)
    lines = list(read_lines(input))
    count = int(shard.split("/")[1])
    # A shard that is still being written can end in part of a line, even of a character.
    files = [output / f"{i}-of-{count}" for i in range(count)]
    written = [file.read_bytes().split(b"\n")[:-1] if file.exists() else [] for file in files]
    shards = [[line.decode() for line in shard] for shard in written]
    missing = [i for i in range(count) if len(shards[i]) < len(lines[i::count])]
    if missing:
        print(f"{file} is complete; shards {missing} of {count} are not")
        return
    translations = (
        line for row in zip_longest(*shards, fillvalue="") for line in row
    )  # padded at the end
    clean = [pair for pair in zip(lines, translations) if fits(*pair, max_ratio)]
    for name, side in ("source", int(swap)), ("target", int(not swap)):
        new = output / f"{name}.{shard.replace('/', '-')}.new"
        new.write_text("".join(f"{pair[side]}\n" for pair in clean))
        new.replace(output / name)
    print(f"{output}: {len(clean):,} of {len(lines):,} pairs kept")


def fits(line: str, translation: str, max_ratio: float) -> bool:
    short, long = sorted(len(text.strip()) for text in (line, translation))
    return short > 0 and long <= max_ratio * short + 10


if __name__ == "__main__":
    raise SystemExit(run_program(lambda: tyro.cli(main)))
