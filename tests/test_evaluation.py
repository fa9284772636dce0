"""Scores: sacreBLEU's values, its signature, and clear errors."""

from __future__ import annotations

import pytest
import sacrebleu

from transformer_jax.errors import UserError
from transformer_jax.evaluation import bleu, bleu_metric, chrf, evaluate

HYPOTHESES = ["The cat sat on the mat.", "Two dogs run, fast!", "It is raining today ."]
REFERENCES = ["The cat sat on a mat.", "Two dogs run fast!", "It's raining today."]


def test_identical_texts_score_100():
    assert bleu(REFERENCES, REFERENCES).value == pytest.approx(100)
    assert chrf(REFERENCES, REFERENCES).value == pytest.approx(100)
    assert bleu([line.lower() for line in REFERENCES], REFERENCES).value < 100


@pytest.mark.parametrize("tokenize", ["13a", "none", "intl", "char"])
def test_bleu_equals_sacrebleu(tokenize):
    score = bleu(HYPOTHESES, REFERENCES, tokenize=tokenize)
    assert score.value == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], tokenize=tokenize).score
    for part in (f"tok:{tokenize}", "case:mixed", sacrebleu.__version__):
        assert part in score.signature
    assert str(score).startswith(f"BLEU|{score.signature} = {score.value:.2f} ")
    assert "hyp_len" in str(score)


def test_chrf_equals_sacrebleu():
    score = chrf(HYPOTHESES, REFERENCES)
    assert score.value == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert str(score) == f"chrF2|{score.signature} = {score.value:.2f}"


def test_an_evaluation_has_all_three_scores():
    references = [HYPOTHESES[0], *REFERENCES[1:]]
    found = evaluate(HYPOTHESES, references, tokenize="char")
    assert found.bleu == bleu(HYPOTHESES, references, tokenize="char")
    assert found.chrf == chrf(HYPOTHESES, references)
    assert found.exact_match == 1 / 3
    assert evaluate(["a "], ["a"]).exact_match == 0
    assert str(found) == f"{found.bleu}\n{found.chrf}\nexact match 33.33%"


@pytest.mark.parametrize("score", [bleu, chrf, evaluate])
def test_line_counts_must_match(score):
    with pytest.raises(UserError, match="3 lines to score and 2 reference lines"):
        score(HYPOTHESES, REFERENCES[:2])
    with pytest.raises(UserError, match="0 lines to score and 0 .* expected .* at least one"):
        score([], [])
    with pytest.raises(UserError, match="5 lines to score and 5 .* expected two lists"):
        score("three", "seven")


def test_unknown_tokenizers():
    with pytest.raises(UserError, match=r"'13b' cannot be used .* sacreBLEU supports .*13a"):
        bleu(HYPOTHESES, REFERENCES, tokenize="13b")
    with pytest.raises(UserError, match=r"'13b' cannot be used"):
        bleu_metric("13b")
    bleu_metric("none")
