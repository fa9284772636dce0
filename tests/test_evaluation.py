"""Scores: sacreBLEU's values, its signature, and clear errors."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import sacrebleu

from transformer_jax.errors import UserError
from transformer_jax.evaluation import bleu, check_bleu, chrf, evaluate, paper_bleu

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
        check_bleu("13b")
    check_bleu("none")


def test_paper_bleu_splits_moses_tokens_at_hyphens():
    hypotheses = [
        "Er nutzt das „rich-text“-Format, sagt Dr. Müller.",
        "Es geht nicht weiter - nie.",
    ]
    references = [
        "Sie nutzt das „Rich-text“-Format, sagt Dr. Müller.",
        "Es geht weiter - oder nie.",
    ]
    ours = [
        "Er nutzt das &quot; rich ##AT##-##AT## text &quot; -Format , sagt Dr. Müller .",
        "Es geht nicht weiter - nie .",
    ]
    theirs = [
        "Sie nutzt das &quot; Rich ##AT##-##AT## text &quot; -Format , sagt Dr. Müller .",
        "Es geht weiter - oder nie .",
    ]
    settings = {"tokenize": "none", "smooth_method": "none", "force": True}
    expected = sacrebleu.corpus_bleu(ours, [theirs], **settings).score
    found = paper_bleu(hypotheses, references, language="de")
    assert found.value == expected > bleu(hypotheses, references).value
    tokenizer = f"moses-de-sacremoses-{version('sacremoses')}+compounds-split"
    assert f"|tok:{tokenizer}|smooth:none|" in found.signature
    given = paper_bleu(ours[:1], theirs[:1], language="de", tokenized=True)
    assert "tok:none+compounds-split" in given.signature
    # The hyphen is a token, so no 4-gram matches.
    assert paper_bleu(["a rich-text b"], ["a rich text b"], language="de").value == 0
    with pytest.raises(UserError, match="bleu_language is 'german'; expected .* de, .* fr"):
        paper_bleu(hypotheses, references, language="german")


def test_one_evaluation_has_both_kinds_of_bleu():
    both = evaluate(HYPOTHESES, REFERENCES, language="en")
    assert both.bleu == bleu(HYPOTHESES, REFERENCES)
    assert both.paper_bleu == paper_bleu(HYPOTHESES, REFERENCES, language="en")
    assert str(both).split("\n")[:2] == [str(both.bleu), str(both.paper_bleu)]
    tokenized = evaluate(HYPOTHESES, REFERENCES, tokenize="none", language="en")
    assert tokenized.paper_bleu and "tok:none+" in tokenized.paper_bleu.signature
