"""Reference beam search in plain Python for one sentence: slow and obviously correct.

The model is a callable: ``log_probs(tokens)`` gives the float [V] log-probabilities of the next
token after ``tokens`` (a tuple, without BOS). There is no batch or padding, and only ``patience``
stops early. Sums are Python floats.

``reference_search`` runs beam search under the constraints in ``Rules``. ``every_hypothesis``
enumerates all sequences instead and filters complete ones by the constraints. The two share only
the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

PAD, EOS = 0, 2
Tokens = tuple[int, ...]
LogProbs = Callable[[Tokens], np.ndarray]


class Hypothesis(NamedTuple):
    """A finished hypothesis."""

    tokens: Tokens
    """Tokens with EOS."""
    score: float
    """Log-probability / length penalty, for ranking."""
    log_prob: float
    """The model's log-probability."""
    token_log_probs: tuple[float, ...]
    """Log-probability of each token."""


@dataclass(frozen=True)
class Rules:
    """Constraints of a search and its length penalty."""

    max_length: int
    """Maximum length with EOS. At the last position only EOS is allowed, regardless of the other
    rules. 0: no hypothesis.
    """
    length_penalty: float = 0.6
    """alpha in ((c + length) / (c + 1))^alpha; the length includes EOS."""
    length_offset: float = 5
    """c in the length penalty."""
    min_length: int = 0
    """Minimum number of tokens before EOS."""
    prefix: Sequence[int] = ()
    """Tokens that must come first, regardless of the other rules except at the last position. They
    count toward scores and lengths.
    """
    suppress: Sequence[int] = ()
    """Forbidden tokens, in addition to PAD. Without EOS, only the last position ends a hypothesis.
    """
    no_repeat_ngram: int = 0
    """Length of n-grams that may not repeat; EOS is never forbidden. 0: off."""

    def forced(self, position: int) -> int | None:
        """Return the only token allowed at a position, or None."""
        if position == self.max_length - 1:
            return EOS
        return self.prefix[position] if position < len(self.prefix) else None

    def allowed(self, tokens: Tokens, token: int) -> bool:
        """Check whether ``token`` may come after ``tokens``."""
        forced = self.forced(len(tokens))
        if forced is not None:
            return token == forced
        if token == PAD or token in self.suppress:
            return False
        if token == EOS:
            return len(tokens) >= self.min_length
        n = self.no_repeat_ngram
        return not n or (*tokens, token)[-n:] not in ngrams(tokens, n)

    def hypothesis(self, tokens: Tokens, token_log_probs: Sequence[float]) -> Hypothesis:
        """A finished hypothesis with its score."""
        log_prob = sum(token_log_probs)
        score = (
            log_prob
            / ((self.length_offset + len(tokens)) / (self.length_offset + 1)) ** self.length_penalty
        )
        return Hypothesis(tokens, score, log_prob, tuple(token_log_probs))


def ngrams(tokens: Tokens, n: int) -> list[Tokens]:
    """All n-grams of a sequence."""
    return [tokens[start : start + n] for start in range(len(tokens) - n + 1)]


class _Candidate(NamedTuple):
    tokens: Tokens
    log_prob: float
    token_log_probs: tuple[float, ...]


def reference_search(
    log_probs: LogProbs,
    rules: Rules,
    *,
    beam_size: int,
    num_hypotheses: int | None = None,
    patience: float | None = None,
) -> list[Hypothesis]:
    """Return the ``num_hypotheses`` (default: ``beam_size``) best finished hypotheses, best first.

    Each step ranks the 2W best continuations of the W live hypotheses. Continuations with EOS among
    the first W are finished; the W best others stay live. A hypothesis with no allowed continuation
    of positive probability dies. A beam of 1 is greedy: it stops at its first EOS. With
    ``patience``, the search stops after the step in which the number of finished hypotheses reaches
    beam size x patience (rounded, halves up), but not before it has ``num_hypotheses``.

    Ties between continuations go to the better beam, then to the more likely token, then to the
    lower token. Ties between finished hypotheses go to the shorter one, then to the better
    continuation.
    """
    num_hypotheses = num_hypotheses or beam_size
    enough = math.inf
    if patience is not None:
        enough = max(num_hypotheses, math.floor(beam_size * patience + 0.5))
    live = [_Candidate((), 0.0, ())]
    finished: list[Hypothesis] = []
    for _ in range(rules.max_length):
        candidates = []
        # Some models compute several hypotheses faster at once.
        if hasattr(log_probs, "look_ahead"):
            log_probs.look_ahead([parent.tokens for parent in live])
        for beam, parent in enumerate(live):
            for token, log_prob in enumerate(np.asarray(log_probs(parent.tokens)).tolist()):
                if log_prob == -math.inf or not rules.allowed(parent.tokens, token):
                    continue
                child = _Candidate(
                    (*parent.tokens, token),
                    parent.log_prob + log_prob,
                    (*parent.token_log_probs, log_prob),
                )
                candidates.append(((-child.log_prob, beam, -log_prob, token), child))
        best = [child for _, child in sorted(candidates)[: 2 * beam_size]]
        ends = [child for child in best[:beam_size] if child.tokens[-1] == EOS]
        finished += [rules.hypothesis(child.tokens, child.token_log_probs) for child in ends]
        live = [child for child in best if child.tokens[-1] != EOS][:beam_size]
        if (beam_size == 1 and ends) or len(finished) >= enough:
            break
    return _best_first(finished)[:num_hypotheses]


def every_hypothesis(log_probs: LogProbs, rules: Rules) -> list[Hypothesis]:
    """Enumerate all sequences of positive probability that keep the rules, best first. Ties go to
    the shorter sequence, then to lower tokens. Only for toy models.
    """
    return _best_first(
        [
            rules.hypothesis(tokens, token_log_probs)
            for tokens, token_log_probs in sorted(
                _sequences(log_probs, rules.max_length), key=lambda found: len(found[0])
            )
            if keeps_rules(tokens, rules)
        ]
    )


def keeps_rules(tokens: Tokens, rules: Rules) -> bool:
    """Check whether a search may return this sequence, which includes EOS."""
    text, end, n = tokens[:-1], len(tokens) - 1, rules.no_repeat_ngram
    if tokens[-1] != EOS or EOS in text or PAD in text or len(tokens) > rules.max_length:
        return False
    begun = list(rules.prefix[: rules.max_length - 1])
    if list(tokens[: len(begun)]) != begun:
        return False
    if (
        end < rules.max_length - 1
        and (end < rules.min_length or EOS in rules.suppress)
        and end >= len(begun)
    ):
        return False
    chosen = range(len(begun), end)
    if any(text[t] in rules.suppress for t in chosen):
        return False
    # An n-gram may occur twice only where the prefix repeats it.
    return not n or all(
        text[t - n + 1 : t + 1] not in ngrams(text[:t], n) for t in chosen if t >= n - 1
    )


def _sequences(
    log_probs: LogProbs, most: int, tokens: Tokens = ()
) -> Iterator[tuple[Tokens, tuple[float, ...]]]:
    """Yield all sequences of positive probability that end in EOS within ``most`` tokens, with the
    log-probability of each token.
    """
    if most < 1:
        return
    for token, log_prob in enumerate(np.asarray(log_probs(tokens)).tolist()):
        if log_prob == -math.inf or token == PAD:
            continue
        if token == EOS:
            yield (EOS,), (log_prob,)
        else:
            for after, others in _sequences(log_probs, most - 1, (*tokens, token)):
                yield (token, *after), (log_prob, *others)


def _best_first(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)  # stable


def chain(log_probs_LVV: np.ndarray, *, bos: int = 1) -> LogProbs:
    """Return a model whose next token depends on the position and the previous token."""
    return lambda tokens: log_probs_LVV[len(tokens), tokens[-1] if tokens else bos]
