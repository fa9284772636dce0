"""Parse trees, read from a treebank and linearized as target sequences (section 6.3).

Sequences follow Vinyals et al. (2015): ``(S (NP XX )NP (VP XX (NP XX XX )NP )VP XX )S``, with XX
for each word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transformer_jax import UserError, read_lines

WORD = "XX"
"""Placeholder for a word in a sequence."""

_TOKEN = re.compile(r"[()]|[^\s()]+")
_BRACKET = re.compile(r"[()][^()]+$")  # in a sequence
_NUMBER = re.compile(r"#\d+")  # number of a word
_FUNCTION = re.compile(r"(?<=.)[-=|].*")  # suffix of NP-SBJ-1, NP=2, PRT|ADVP
_ROOTS = ("", "TOP", "ROOT")
_EMPTY = "-NONE-"


class Constituent(NamedTuple):
    """A label over the words from ``start`` to ``end`` (exclusive)."""

    label: str
    start: int
    end: int


class Parse(NamedTuple):
    """A sentence and its tree."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    """Part of speech of each word."""
    constituents: tuple[Constituent, ...]
    """In the order of their opening brackets, so each constituent precedes its children."""

    def __str__(self) -> str:
        """Format the tree in Penn style on one line. Brackets in words become -LRB- and -RRB-."""
        words = [word.replace("(", "-LRB-").replace(")", "-RRB-") for word in self.words]
        leaves = [f"({tag} {word})" for tag, word in zip(self.tags, words, strict=True)]
        return f"( {' '.join(self._tokens(leaves, named_ends=False))} )".replace(" )", ")")

    def sequence(self, *, numbered: bool = False) -> str:
        """Return the linearized tree, a target sequence without words. If ``numbered``, each word
        is a number and a tag (#0 NNP) instead of XX.
        """
        words = [WORD] * len(self.words)
        if numbered:
            words = [f"#{n} {tag}".removesuffix(f" {WORD}") for n, tag in enumerate(self.tags)]
        return " ".join(self._tokens(words, named_ends=True))

    def _tokens(self, leaves: Sequence[str], *, named_ends: bool) -> Iterator[str]:
        waiting = list(reversed(self.constituents))
        open_constituents = list[Constituent]()
        for position, leaf in enumerate([*leaves, ""]):
            while open_constituents and open_constituents[-1].end == position:
                ended = open_constituents.pop()
                yield f"){ended.label}" if named_ends else ")"
            while waiting and waiting[-1].start == position:
                constituent = waiting.pop()
                open_constituents.append(constituent)
                yield f"({constituent.label}"
            if leaf:
                yield leaf


def bracket_symbols(labels: str) -> tuple[str, ...]:
    """Return symbols for ``tokenizer.user_defined_symbols`` that make each bracket one token. By
    default, SentencePiece never joins a parenthesis with letters. ``labels`` are separated by
    spaces.
    """
    return tuple(f"▁{bracket}{label}" for label in labels.split() for bracket in "()")


def with_numbers(words: Sequence[str]) -> list[str]:
    """Put its number before each word: #0 John #1 barks."""
    return [token for n, word in enumerate(words) for token in (f"#{n}", word)]


def without_numbers(tokens: Sequence[str]) -> Sequence[str]:
    """Return the words of a numbered source. Other sources are returned unchanged."""
    words = tokens[1::2]
    return words if with_numbers(words) == list(tokens) else tokens


@dataclass
class _Node:
    start: int  # number of words in the tree before this node
    end: int = 0
    line: int = 0
    label: str = ""
    word: str = ""


def read_parses(file: str | Path) -> Iterator[Parse]:
    """Read and clean the trees of a treebank file in Penn format (also ``.gz``).

    Cleaning removes traces, constituents that contain only traces, the root above S, and function
    tags (NP-SBJ-1 becomes NP). ``( )`` is the tree of an empty line.

    Raises:
        UserError: the file has an invalid format or is not UTF-8. The message includes the line
          number.
    """
    for nodes in _read_trees(file):
        words = [node for node in nodes if node.word and node.label != _EMPTY]
        spans = (
            Constituent(_FUNCTION.sub("", node.label), node.start, node.end)
            for node in nodes
            if not node.word and node.start < node.end
        )
        if words or not any(node.word for node in nodes):
            yield Parse(
                tuple(node.word for node in words),
                tuple(node.label for node in words),
                tuple(span for span in spans if span.label not in _ROOTS),
            )


def _read_trees(file: str | Path) -> Iterator[list[_Node]]:
    """Yield the nodes of each tree, in the order of their opening brackets."""
    line = num_words = 0
    nodes = list[_Node]()
    path = list[_Node]()  # nodes that are still open
    for line, text in enumerate(read_lines(file), 1):
        for token in _TOKEN.findall(text):
            if token == "(":
                if path and path[-1].word:
                    raise _not_a_tree(file, line, f"( after the word {path[-1].word!r}")
                path.append(_Node(num_words, line=line))
                nodes.append(path[-1])
                continue
            if not path:
                raise _not_a_tree(file, line, f"{token!r} outside all brackets")
            node = path[-1]
            has_children = node is not nodes[-1]
            if token == ")":
                path.pop()
                node.end = num_words
                is_empty_tree = not path and not node.label
                if not (node.word or has_children or is_empty_tree):
                    raise _not_a_tree(file, line, f"({node.label}) has no word and no constituent")
                if not path:
                    yield nodes
                    nodes = []
                    num_words = 0
            elif node.word or has_children:
                problem = f"unexpected word {token!r} after a word or a constituent"
                raise _not_a_tree(file, line, problem)
            elif node.label:
                node.word = token
                num_words += node.label != _EMPTY
            else:
                node.label = token
    if path:
        problem = f"the tree that starts here lacks {len(path)} of its closing brackets"
        raise _not_a_tree(file, path[0].line, problem)


def from_sequence(words: Sequence[str], sequence: str) -> tuple[Parse, bool]:
    """Convert a sequence to a tree over ``words``. Also returns whether the sequence is well-formed
    and has the right number of words.

    Every sequence gives a tree. In a numbered sequence, tags are ignored. A closing bracket closes
    the innermost open constituent, regardless of its label. Surplus brackets and words are ignored.
    Missing words are added to the last constituent, and empty constituents are dropped.
    """
    count = len(words)
    position = 0
    nodes = list[_Node]()
    path = list[_Node]()  # nodes that are still open
    last_outermost: _Node | None = None  # the last outermost node
    tokens = sequence.split()
    if any(map(_NUMBER.fullmatch, tokens)):
        tokens = [token for token in tokens if token[0] in "()" or _NUMBER.fullmatch(token)]
    for token in tokens:
        if token[0] not in "()":
            position = min(position + 1, count)
        elif _BRACKET.match(token) is None:
            continue
        elif token[0] == "(":
            node = _Node(position, label=token[1:])
            path.append(node)
            nodes.append(node)
        elif path:
            node = path.pop()
            node.end = position
            if not path:
                last_outermost = node
    if last_outermost and not path and last_outermost.end == position:
        path = [last_outermost]
    for node in path:
        node.end = count
    constituents = tuple(
        Constituent(node.label, node.start, node.end) for node in nodes if node.start < node.end
    )
    parse = Parse(tuple(words), (WORD,) * count, constituents)
    # Only a well-formed sequence is the same after a conversion to a tree and back.
    plain_tokens = [token if token[0] in "()" else WORD for token in tokens]
    return parse, plain_tokens == parse.sequence().split()


def _not_a_tree(file: str | Path, line: int, problem: str) -> UserError:
    return UserError(
        f"{file}, line {line}: {problem}; expected trees such as "
        "( (S (NP (DT the) (NN dog)) (VP (VBZ barks))) )."
    )
