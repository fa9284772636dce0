"""Markup on a trained model: tags kept, nested, and around the words that align.

    python benchmarks/markup.py --workdir W --input test.en --pages pages/*.html

Marks one word of each sentence with <b id="N">. The tag is well placed if it encloses a target word
that the model's hard alignment links to the marked word (or if no word is linked to it). For each
page, compares all tags, their nesting, comments, untranslated elements, placeholders and the number
of lines before and after.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformer_jax import Request, Scorer, Translator, read_lines, run_program
from transformer_jax.translation.documents.placeholders import PLACEHOLDERS, find_spans
from transformer_jax.translation.markup import Document


@dataclass(frozen=True)
class Arguments:
    """Measure how markup survives translation."""

    workdir: str
    """Work directory or model folder."""
    input: str | None = None
    """Sentences to mark."""
    pages: Annotated[tuple[str, ...], tyro.conf.arg()] = ()
    """HTML pages to translate."""
    limit: int = 300
    """Number of sentences."""
    layer: int | None = None
    """Decoder layer of the alignments; None: as model.alignment_layer says."""


class Structure(HTMLParser):
    """Tags, comments and untranslated text, in the order of the document, and whether each end tag
    ends the innermost element.
    """

    def __init__(self, text: str):
        super().__init__()
        self.found = list[str]()
        self.ends = list[tuple[str, bool]]()
        self._kept = list[str]()
        self._open = list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(self.get_starttag_text() or "")
        self._open.append(tag)
        if tag in ("code", "pre", "script", "style"):
            self._kept.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.found.append(f"</{tag}>")
        if tag in self._open:
            self.ends.append((tag, self._open[-1] == tag))
            while self._open.pop() != tag:
                pass
        if self._kept and self._kept[-1] == tag:
            self._kept.pop()

    def handle_comment(self, data: str) -> None:
        self.found.append(data)

    def handle_data(self, data: str) -> None:
        if self._kept:
            self.found.append(data)


def words(text: str) -> list[str]:
    """Return the words of a text, without tags and punctuation at their ends."""
    plain = re.sub("<[^>]*>", "", text).replace("&lt;", "<").replace("&gt;", ">")
    return [word.strip(".,;:!?\"'()") for word in plain.replace("&amp;", "&").split()]


def sentences(translator: Translator, arguments: Arguments) -> None:
    """Print how many of the marked sentences keep their tag, and have it next to the right word."""
    lines = [line for line in read_lines(arguments.input or "") if line.strip()][: arguments.limit]
    requests = []
    marked = []
    for number, line in enumerate(lines):
        split = [*re.finditer(r"\w+", line)] or [*re.finditer(r"\S+", line)]
        place = split[number % len(split)]
        marked.append(len(line[: place.start()].split(" ")) - 1)
        escaped = [
            part.replace("&", "&amp;").replace("<", "&lt;")
            for part in (line[: place.start()], place[0], line[place.end() :])
        ]
        text = f'{escaped[0]}<b id="{number}">{escaped[1]}</b>{escaped[2]}'
        requests.append(Request(text, format="html"))
    start = time.perf_counter()
    pages = [each.text for each in translator.documents(requests, layer=arguments.layer)]
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    best = [translations[0] for translations in translator.stream(lines)]
    plain = time.perf_counter() - start
    scorer = Scorer(translator.model, translator.tokenizer, translator.config)
    aligned = scorer.align(list(zip(lines, best)), layer=arguments.layer)
    present = placed = linked = unchanged = 0
    for number, (text, word, translation) in enumerate(zip(pages, marked, aligned)):
        tag = re.fullmatch(rf'([^<]*)<b id="{number}">([^<]*)</b>([^<]*)', text)
        present += tag is not None
        unchanged += words(text) == words(
            translation.text.replace("&", "&amp;").replace("<", "&lt;")
        )
        hard = translation.alignment.hard() if translation.alignment else ""
        pairs = [tuple(map(int, pair.split("-"))) for pair in hard.split()]
        targets = {j for i, j in pairs if i == word}
        if tag and targets:
            first = len(tag[1].rstrip().split())
            first -= not tag[1].endswith(" ") and bool(tag[1])
            linked += 1
            placed += bool(targets & set(range(first, first + max(1, len(tag[2].split())))))
    print(f"{len(lines)} sentences: tags present and well-formed in {present}, words unchanged in")
    print(f"{unchanged}; around an aligned word in {placed} of {linked} that have one ")
    print(f"({placed / max(1, linked):.1%}). {seconds:.1f} s, without markup {plain:.1f} s.")


def main(arguments: Arguments) -> None:
    """Measure sentences, pages or both."""
    translator = Translator.from_workdir(arguments.workdir)
    if arguments.input:
        sentences(translator, arguments)
    num_right = 0
    for page in arguments.pages:
        with open(page, encoding="utf-8", newline="") as file:
            text = file.read()
        [translation] = translator.documents([Request(text, format="html")], layer=arguments.layer)
        lost = differences(text, translation.text, translator)
        num_right += not lost
        print(f"{page}: {', '.join(lost) or 'right'}")
    if arguments.pages:
        print(f"{num_right} of {len(arguments.pages)} pages have the same tags and untranslated")
        print("parts, well nested, the same placeholders, and all lines.")


def differences(before: str, after: str, translator: Translator) -> list[str]:
    """Return which kinds of parts differ between a page and its translation."""
    structures = [Structure(page) for page in (before, after)]
    placeholders = []
    for page in (before, after):
        spans = find_spans(page, PLACEHOLDERS)
        placeholders.append(Counter(page[start:end] for start, end in spans))
    num_lines = [
        len(Document(page, "html", translator.tokenizer).lines) for page in (before, after)
    ]
    kinds = {
        "tags": sorted(structures[0].found) != sorted(structures[1].found),
        "nesting": sorted(structures[0].ends) != sorted(structures[1].ends),
        "placeholders": placeholders[0] != placeholders[1],
        "lines": num_lines[0] != num_lines[1],
    }
    return [kind for kind, is_different in kinds.items() if is_different]


if __name__ == "__main__":
    raise SystemExit(run_program(lambda: main(tyro.cli(Arguments))))
