"""BLEU as in the paper (section 6.1, Table 2): cased, on Moses tokens with compounds split.

    python examples/paper_bleu.py --hypotheses test.out --references test.de --language de

prints BLEU without smoothing and its signature. It is usually higher than sacreBLEU's BLEU and not
comparable with it. As in tensor2tensor's get_ende_bleu.sh, Unicode punctuation is replaced, Moses
tokenizes the text, and "rich-text" is split into three tokens. Unlike the script, this program also
tokenizes the references. With --tokenized, it only splits compounds. Requires sacremoses.
"""

import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import tyro
from sacrebleu.metrics import BLEU

import transformer_jax as tj
from transformer_jax.errors import needs_extra


def main(hypotheses: Path, references: Path, language: str, tokenized: bool = False) -> None:
    tokenize = str if tokenized else moses(language)
    sides = [
        [
            re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokenize(line))
            for line in tj.read_lines(file)
        ]
        for file in (hypotheses, references)
    ]
    if len(sides[0]) != len(sides[1]) or not sides[0]:
        counts = f"{len(sides[0]):,} and {len(sides[1]):,}"
        raise SystemExit(f"The files have {counts} lines; expected the same number, at least 1.")
    metric = BLEU(tokenize="none", force=True, smooth_method="none")
    score = metric.corpus_score(sides[0], [sides[1]])
    rules = "none" if tokenized else f"moses-{language}-sacremoses-{version('sacremoses')}"
    signature = str(metric.get_signature()).replace("tok:none", f"tok:{rules}+compounds-split")
    print(f"BLEU|{signature} = {score.score:.2f} {' '.join(str(score).split(' ')[3:])}")


def moses(language: str) -> Callable[[str], str]:
    """Return the Moses tokenizer of a language, such as de."""
    with needs_extra("paper"):
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
        from sacremoses.corpus import NonbreakingPrefixes
    known = sorted(set(NonbreakingPrefixes().available_langs.values()))
    if language not in known:
        raise SystemExit(f"Language {language!r} is not one of {', '.join(known)}.")
    tokenizer = MosesTokenizer(language)
    punctuation = MosesPunctNormalizer()

    def tokenize(line: str) -> str:
        text = punctuation.replace_unicode_punct(line)
        return tokenizer.tokenize(text, return_str=True)

    return tokenize


if __name__ == "__main__":
    raise SystemExit(tj.run_program(lambda: tyro.cli(main)))
