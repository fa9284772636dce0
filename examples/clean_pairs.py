"""Clean parallel text: duplicates, lengths, scripts, and the best share by a model's own score.

    python examples/clean_pairs.py --source all.en --target all.de --output clean --workdir W

clean/rules.source and clean/rules.target have each pair once, without pairs with an empty side, a
side of more than --max-characters, sides whose lengths differ by more than --max-ratio, or a side
with fewer than half of its letters in its script (--scripts, as in Unicode's character names). With
a trained model in --workdir, clean/source and clean/target have the share --keep of these pairs
with the highest log-probability per character. The same command continues after it was stopped.
"""

import unicodedata
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import numpy as np
import tyro

from transformer_jax import PairsConfig, read_lines, read_pairs, run_program
from transformer_jax.storage.files import check_not_input, write_atomically
from transformer_jax.translation.__main__ import main as decode


def main(
    source: str,
    target: str,
    output: Path,
    workdir: str = "",
    keep: float = 0.8,
    max_ratio: float = 2.5,
    max_characters: int = 500,
    scripts: tuple[str, str] = ("LATIN", "LATIN"),
) -> None:
    rules = [output / "rules.source", output / "rules.target"]
    for file in (*rules, output / "source", output / "target"):
        check_not_input(str(file), source, target)
    output.mkdir(parents=True, exist_ok=True)
    seen = set[bytes]()
    counts = Counter[str]()
    kept = list[tuple[str, str]]()
    for pair in read_pairs(PairsConfig(source=(source,), target=(target,))):
        digest = blake2b("\n".join(pair).encode(), digest_size=16).digest()
        short, long = sorted(len(line.strip()) for line in pair)
        reasons = {
            "empty": not short,
            "long": long > max_characters,
            "ratio": long > max_ratio * short + 10,
            "script": not all(map(is_mostly, pair, scripts)),
            "duplicate": digest in seen or seen.add(digest),
        }
        reason = next((name for name, applies in reasons.items() if applies), "kept")
        counts[reason] += 1
        kept += [pair] if reason == "kept" else []
    write(kept, rules)
    print(dict(counts))
    if workdir:
        of = blake2b(repr([workdir, kept]).encode(), digest_size=4).hexdigest()
        scores = str(output / f"scores-{of}")
        flags = ["--workdir", workdir, "--input", str(rules[0]), "--score-targets", str(rules[1])]
        if status := decode([*flags, "--output", scores, "--resume"]):
            raise SystemExit(status)
        scored = zip(map(float, read_lines(scores)), kept, strict=True)
        means = np.nan_to_num([x / (1 + len(line)) for x, (_, line) in scored], nan=-np.inf)
        best = sorted(np.argsort(-means)[: round(keep * len(kept))])
        write([kept[i] for i in best], [output / "source", output / "target"])
        print(f"{len(best):,} of {len(kept):,} pairs kept by score")


def is_mostly(line: str, script: str) -> bool:
    return sum(2 * unicodedata.name(x, "").startswith(script) - 1 for x in line if x.isalpha()) >= 0


def write(pairs: list[tuple[str, str]], files: list[Path]) -> None:
    for side, file in enumerate(files):
        write_atomically(file, "".join(f"{pair[side]}\n" for pair in pairs))


if __name__ == "__main__":
    raise SystemExit(run_program(lambda: tyro.cli(main)))
