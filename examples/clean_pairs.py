"""Clean parallel text: by rules, by statistics of the corpus itself, and by a model's own score.

    python examples/clean_pairs.py --source all.en --target all.de --output clean --workdir W

clean/rules.source and clean/rules.target have the pairs that pass all checks, and the counts of all
other pairs are printed by reason. From 2,000 pairs on, the checks learn from the corpus which
characters each language has (wrong and swapped languages) and which words translate each other
(IBM Model 1: pairs that do not match, truncated pairs). With a trained model in --workdir,
clean/source and clean/target have the fraction --keep of these pairs with the highest
log-probability per character. The same command continues after it was stopped.
"""

import math
import re
import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import tyro

from transformer_jax import PairsConfig, read_lines, read_pairs, run_program
from transformer_jax.storage.files import check_not_input, write_atomically
from transformer_jax.translation.__main__ import main as decode

Pairs = list[tuple[str, str]]

FEWEST_PAIRS = 2_000  # for statistics
BLOCK = 200_000  # pairs whose statistics are learned together
CHINESE_OR_JAPANESE = "\u3040-\u30ff\u3400-\u9fff"
WORD = re.compile(rf"[{CHINESE_OR_JAPANESE}]|[^\W_{CHINESE_OR_JAPANESE}]+")
MARKUP = re.compile(r"</?[a-zA-Z][^<>]*>|&(?:[a-zA-Z]{2,8}|#\d{1,6}|#x[\da-fA-F]{1,5});")
ADDRESS = re.compile(r"https?://\S+|www\.\S+|\S+@\S+\.\w+")
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
REPEATED = re.compile(r"(\w)\1{4}|([^\w\s.])\2{4}|\b(\w+)(?:\W+\3\b){3}", re.IGNORECASE)


def main(
    source: str,
    target: str,
    output: Path,
    workdir: str = "",
    keep: float = 0.8,
    max_ratio: float = 2.5,
    max_characters: int = 500,
    scripts: tuple[str, str] | None = None,
) -> None:
    """Clean two parallel files.

    Args:
      source, target: parallel files or globs.
      output: folder to write.
      workdir: work directory of a model that scores the pairs.
      keep: fraction of pairs to keep by the model's score.
      max_ratio: limit for the ratio of lengths in characters, relative to the corpus's usual ratio.
      max_characters: limit for the length of a side.
      scripts: script of each side, as in Unicode's character names (LATIN). Default: the most
        frequent one.
    """
    rules = [output / "rules.source", output / "rules.target"]
    for file in (*rules, output / "source", output / "target"):
        check_not_input(str(file), source, target)
    output.mkdir(parents=True, exist_ok=True)
    pairs = list(read_pairs(PairsConfig(source=(source,), target=(target,))))
    reasons = find_reasons(pairs, max_ratio, max_characters, scripts)
    clean = [pairs[i] for i in passing(reasons)]
    write(clean, rules)
    print(dict(Counter(reason or "kept" for reason in reasons)))
    if workdir:
        best = best_by_model(clean, rules, workdir, output, keep)
        write(best, [output / "source", output / "target"])
        print(f"{len(best):,} of {len(clean):,} pairs kept by score")


def find_reasons(
    pairs: Pairs,
    max_ratio: float = 2.5,
    max_characters: int = 500,
    scripts: tuple[str, str] | None = None,
) -> list[str]:
    """Return, for each pair, why it should not be in the corpus, or ""."""
    reasons = [reason_by_rules(pair) for pair in pairs]
    passed = passing(reasons)
    scripts = scripts or (most_frequent_script(pairs, 0), most_frequent_script(pairs, 1))
    usual_ratio = median_ratio([pairs[i] for i in passed])
    seen = set[bytes]()
    for i in passed:
        reasons[i] = reason_in_corpus(pairs[i], scripts, usual_ratio, max_ratio, max_characters)
        if not reasons[i]:
            digest = blake2b(repr(list(map(spelling, pairs[i]))).encode(), digest_size=16).digest()
            reasons[i] = "duplicate" if digest in seen else ""
            seen.add(digest)
    for start in range(0, len(pairs), BLOCK):
        block = [i for i in passing(reasons) if start <= i < start + BLOCK]
        if len(block) >= FEWEST_PAIRS:
            chosen = [pairs[i] for i in block]
            for i, reason in zip(block, reasons_by_statistics(chosen), strict=True):
                reasons[i] = reason
    return reasons


def passing(reasons: Sequence[str]) -> list[int]:
    """Return the indices of pairs without a reason against them."""
    return [i for i, reason in enumerate(reasons) if not reason]


def spelling(line: str) -> str:
    """Return the line without white space and differences of case, for comparisons."""
    return "".join(unicodedata.normalize("NFKC", line).casefold().split())


def reason_by_rules(pair: tuple[str, str]) -> str:
    """Return why a pair is unusable, whatever the corpus is, or ""."""
    source, target = pair
    if not all(any(x.isalnum() for x in line) for line in pair):
        return "empty"
    if any(is_broken(line) for line in pair):
        return "characters"
    if is_copied(source, target):
        return "copy"
    if sorted(MARKUP.findall(source)) != sorted(MARKUP.findall(target)):
        return "markup"
    if sorted(ADDRESS.findall(source)) != sorted(ADDRESS.findall(target)):
        return "address"
    if numbers_differ(source, target):
        return "numbers"
    if any(REPEATED.search(line) for line in pair) or is_twice(source) != is_twice(target):
        return "repeated"
    return ""


def is_broken(line: str) -> bool:
    """Return True for control characters and for UTF-8 that was decoded as another encoding."""
    categories = {unicodedata.category(x) for x in line if x != "\t" and not x.isalnum()}
    if categories & {"Cc", "Co", "Cn", "Cs"} or "\ufffd" in line:
        return True
    for encoding in ("latin-1", "cp1252"):
        try:
            return line.encode(encoding).decode() != line
        except UnicodeError:
            continue
    return False


def is_copied(source: str, target: str) -> bool:
    """Return True if one side is the other, contains it, or shares half of its longer words."""
    short, long = sorted((" ".join(source.split()), " ".join(target.split())), key=len)
    if short == long or (len(short.split()) > 1 and f" {short} " in f" {long} "):
        return True
    words = [word for word in short.split() if len(word) > 3 and word.islower()]
    shared = sum(word in long.split() for word in words)
    return shared > 1 and 2 * shared >= len(words)


def numbers_differ(source: str, target: str) -> bool:
    """Return True if both sides have digits, but no number of one is on the other side."""
    digits = [
        {re.sub(r"\D", "", number) for number in NUMBER.findall(line)} for line in (source, target)
    ]
    return all(digits) and not digits[0] & digits[1]


def is_twice(line: str) -> bool:
    """Return True if the second half of a line repeats the first."""
    words = line.split()
    half = len(words) // 2
    return len(words) % 2 == 0 and half > 1 and words[:half] == words[half:]


def reason_in_corpus(
    pair: tuple[str, str],
    scripts: tuple[str, str],
    usual_ratio: float,
    max_ratio: float,
    max_characters: int,
) -> str:
    """Return why a pair does not belong in this corpus, or ""."""
    lengths = [len(line.strip()) for line in pair]
    if max(lengths) > max_characters:
        return "long"
    short, long = sorted((lengths[0] * usual_ratio, lengths[1]))
    if long > max_ratio * short + 10:
        return "ratio"
    if not all(is_mostly(line, script) for line, script in zip(pair, scripts)):
        return "script"
    return ""


def median_ratio(pairs: Pairs) -> float:
    """Return the usual length of a target, as a multiple of its source. Chinese is about 0.3 times
    as long as English.
    """
    ratios = [len(target.strip()) / len(source.strip()) for source, target in pairs]
    return float(np.median(ratios)) if len(ratios) >= FEWEST_PAIRS else 1.0


def script_of(letter: str) -> str:
    """Return a letter's script: the first word of its name. Kana counts as Chinese."""
    script = unicodedata.name(letter, "").partition(" ")[0]
    return "CJK" if script in ("HIRAGANA", "KATAKANA") else script


def most_frequent_script(pairs: Pairs, side: int) -> str:
    """Return the script of most letters on one side."""
    letters = Counter(x for pair in pairs for x in pair[side] if x.isalpha())
    scripts = Counter[str]()
    for letter, count in letters.items():
        scripts[script_of(letter)] += count
    return scripts.most_common(1)[0][0] if scripts else ""


def is_mostly(line: str, script: str) -> bool:
    """Return True if at least half of the letters are in this script."""
    letters = [x for x in line if x.isalpha()]
    script = "CJK" if script in ("HIRAGANA", "KATAKANA") else script
    return 2 * sum(script_of(letter) == script for letter in letters) >= len(letters)


def reasons_by_statistics(pairs: Pairs) -> list[str]:
    """Return, for each pair, why the languages or words do not match, or ""."""
    sources, targets = zip(*pairs, strict=True)
    source_model = CharacterModel(sources)
    target_model = CharacterModel(targets)
    own_source = np.array([source_model.mean_log_prob(line) for line in sources])
    own_target = np.array([target_model.mean_log_prob(line) for line in targets])
    source_as_target = [target_model.mean_log_prob(line) for line in sources]
    target_as_source = [source_model.mean_log_prob(line) for line in targets]
    unusual = np.minimum(in_spreads(own_source, sources), in_spreads(own_target, targets))
    evidence = word_evidence(sources, targets)
    reasons = []
    for i in range(len(pairs)):
        if own_source[i] + own_target[i] < source_as_target[i] + target_as_source[i]:
            reasons.append("swapped")
        elif unusual[i] < -4:
            reasons.append("language")
        elif evidence[i] < -7:
            reasons.append("mismatch")
        else:
            reasons.append("")
    return reasons


class CharacterModel:
    """Probability of each character after the two before it, smoothed with its frequency."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.trigrams = Counter[str]()
        self.contexts = Counter[str]()
        self.characters = Counter[str]()
        for line in lines:
            text = f"  {line.casefold()} "
            self.trigrams.update(text[i : i + 3] for i in range(len(text) - 2))
        for trigram, count in self.trigrams.items():
            self.contexts[trigram[:2]] += count
            self.characters[trigram[2]] += count
        self.total = self.characters.total()
        self.log_probs: dict[str, float] = {}

    def log_prob(self, trigram: str) -> float:
        if trigram not in self.log_probs:
            frequency = (self.characters[trigram[2]] + 0.1) / self.total
            count = self.trigrams[trigram] + 5 * frequency
            self.log_probs[trigram] = math.log(count / (self.contexts[trigram[:2]] + 5))
        return self.log_probs[trigram]

    def mean_log_prob(self, line: str) -> float:
        text = f"  {line.casefold()} "
        return statistics.fmean(self.log_prob(text[i : i + 3]) for i in range(len(text) - 2))


def in_spreads(scores: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """Return how far each mean score is from the usual one. Means of long lines vary less."""
    differences = (scores - np.median(scores)) * np.sqrt([len(line) for line in lines])
    return differences / (1.48 * np.median(np.abs(differences)) + 1e-9)


def word_evidence(sources: Sequence[str], targets: Sequence[str]) -> np.ndarray:
    """Return how much better than chance the words of each pair explain each other: the sum of
    log(p(word | other side) / p(word)) over the known words of both sides.
    """
    source_ids = word_ids(sources)
    target_ids = word_ids(targets)
    return explained(source_ids, target_ids) + explained(target_ids, source_ids)


def word_ids(lines: Sequence[str]) -> list[np.ndarray]:
    """Number the words of all lines. Words that occur in fewer than three lines get 0."""
    words = [WORD.findall(line.casefold())[:60] for line in lines]
    counts = Counter(word for line in words for word in set(line))
    ids = {word: i for i, (word, n) in enumerate(counts.most_common(), 1) if n > 2}
    return [np.array([ids.get(word, 0) for word in line], np.int64) for line in words]


def explained(sources: list[np.ndarray], targets: list[np.ndarray]) -> np.ndarray:
    """Train IBM Model 1 (Brown et al., 1993) and return the evidence for the words of each target,
    without the counts that the pair itself contributes.
    """
    # One entry for each source word and target word of each pair.
    lengths = np.array([[len(s), len(t)] for s, t in zip(sources, targets)])
    source = np.concatenate([np.repeat(s, len(t)) for s, t in zip(sources, targets)])
    target = np.concatenate([np.tile(t, len(s)) for s, t in zip(sources, targets)])
    first_word = np.cumsum(lengths[:, 1]) - lengths[:, 1]
    position = np.concatenate(
        [np.tile(first + np.arange(n), m) for first, (m, n) in zip(first_word, lengths)]
    )
    num_targets = int(target.max()) + 1
    keys, entry = np.unique(source * num_targets + target, return_inverse=True)
    source_of_key = keys // num_targets
    target_of_key = keys % num_targets
    flat_targets = np.concatenate(targets)
    frequency = np.bincount(flat_targets, minlength=num_targets) / len(flat_targets)
    probability = np.full(len(keys), 1.0)
    for _ in range(4):
        likelihood = probability[entry]
        total = np.bincount(position, likelihood)
        expected = likelihood / total[position]
        counts = np.bincount(entry, expected)
        sums = np.bincount(source_of_key, counts)
        # Smoothed: with little evidence, a word is as likely as without its source.
        smoothed = counts + 2 * frequency[target_of_key]
        probability = smoothed / (sums[source_of_key] + 2)
    elsewhere = np.maximum(counts[entry] - expected, 0) + 2 * frequency[target]
    elsewhere /= np.maximum(sums[source] - expected, 0) + 2
    pair_of_word = np.repeat(np.arange(len(targets)), lengths[:, 1])
    likelihood = np.bincount(position, np.where(source == 0, frequency[target], elsewhere))
    likelihood /= lengths[pair_of_word, 0]
    gain = np.log(likelihood / frequency[flat_targets])
    return np.bincount(pair_of_word, np.where(flat_targets > 0, gain, 0), minlength=len(targets))


def best_by_model(
    pairs: Pairs, files: list[Path], workdir: str, output: Path, keep: float
) -> Pairs:
    """Return the fraction ``keep`` of pairs that the model scores best, in their order."""
    of = blake2b(repr([workdir, pairs]).encode(), digest_size=4).hexdigest()
    scores = str(output / f"scores-{of}")
    flags = ["--workdir", workdir, "--input", str(files[0]), "--score-targets", str(files[1])]
    status = decode([*flags, "--output", scores, "--resume"])
    if status:
        raise SystemExit(status)
    means = []
    for score, (_, target) in zip(read_lines(scores), pairs, strict=True):
        means.append(float(score) / (1 + len(target)))
    best_first = np.argsort(-np.nan_to_num(means, nan=-np.inf))
    return [pairs[i] for i in sorted(best_first[: round(keep * len(pairs))])]


def write(pairs: Pairs, files: list[Path]) -> None:
    """Write one side to each file."""
    for side, file in enumerate(files):
        write_atomically(file, "".join(f"{pair[side]}\n" for pair in pairs))


if __name__ == "__main__":
    raise SystemExit(run_program(lambda: tyro.cli(main)))
