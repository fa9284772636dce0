"""What is written: plain lines, n-best lists, JSON objects whose other fields come out as they came
in.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from transformer_jax.decoding.alignment import Alignment
from transformer_jax.decoding.output import Output
from transformer_jax.decoding.records import Record, read_records
from transformer_jax.decoding.translator import Translation
from transformer_jax.errors import UserError

BEST = Translation("ja gut", -1.23456, -2.5, 3, ("▁ja", "▁gut"), (-1.0, -1.25, -0.25))
SECOND = Translation("nein", -2.0, -3.0, 2, ("▁nein",), (-1.0, -2.0))
NOTHING = Translation("", 0.0, 0.0, 0)
ALIGNMENT = Alignment(
    ("▁yes", "▁fine", "</s>"),
    ("▁ja", "▁gut", "</s>"),
    np.array([[0.9, 0, 0.1], [0.25, 0.5, 0.25], [0, 0, 1]]),
    [0, 1],
    [0, 1],
)
OTHER = Alignment(
    ("▁yes", "▁fine", "</s>"), ("▁nein", "</s>"), np.array([[0, 1, 0], [0, 0, 1]]), [0, 1], [0]
)
RECORD = Record(4, "yes fine")


def json_lines(output, line, translations, alignments=None):
    [record] = read_records([line.encode()], format="jsonl")
    [written] = output.lines(record, translations, alignments)
    return written


def test_text():
    assert Output().lines(RECORD, [BEST]) == ["ja gut"]
    assert Output().lines(RECORD, [NOTHING]) == [""]
    assert Output(nbest=2).lines(RECORD, [BEST, SECOND]) == [
        "4 ||| ja gut ||| -1.2346",
        "4 ||| nein ||| -2.0000",
    ]
    assert Output(scores=True).lines(RECORD, [BEST]) == ["-2.5000"]


def test_text_with_alignments():
    hard = Output(alignments="hard")
    assert hard.lines(RECORD, [BEST], [ALIGNMENT]) == ["ja gut ||| 0-0 1-1"]
    assert hard.lines(RECORD, [NOTHING], [None]) == [" ||| "]
    both = Output(nbest=2, alignments="hard").lines(RECORD, [BEST, SECOND], [ALIGNMENT, OTHER])
    assert both == ["4 ||| ja gut ||| -1.2346 ||| 0-0 1-1", "4 ||| nein ||| -2.0000 ||| 1-0"]


def test_objects_keep_their_fields():
    line = r'{ "id":1e2, "text": "yes\u0020fine","meta": {"b": [1.10, null], "a": "\ud800"} }'
    written = json_lines(Output("jsonl"), line, [BEST])
    assert written.startswith(line[:-2])  # to the letter
    values = json.loads(written)
    assert list(values) == ["id", "text", "meta", "translation", "score", "log_prob"]
    assert (values["translation"], values["score"], values["log_prob"]) == ("ja gut", -1.2346, -2.5)


def test_fields_of_an_earlier_translation_are_replaced():
    line = json.dumps(
        {"score": 9, "text": "yes fine", "translation": "old", "id": "ü", "tokens": 3}
    )
    written = json_lines(Output("jsonl"), line, [NOTHING])
    assert json.loads(written) == {
        "text": "yes fine",
        "id": "ü",
        "tokens": 3,
        "translation": "",
        "score": 0,
        "log_prob": 0,
    }
    assert written.count('"translation"') == 1


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        (
            r'{ "score" : 9 , "big": 1e400,"text":"a\u00e9\"}"  ,"x" :{"score": [1.10, {}]}}',
            r'"big": 1e400, "text":"a\u00e9\"}", "x" :{"score": [1.10, {}]}',
        ),
        (
            '{"text": "x", "n": 0.10000000000000000001, "score": null}',
            '"text": "x", "n": 0.10000000000000000001',
        ),
        (
            '{"text": "x", "log_prob": {"text": 1}, "n": 1, "n": 2.0 }',
            '"text": "x", "n": 1, "n": 2.0',
        ),
    ],
)
def test_what_is_not_replaced_stays_to_the_letter(line, rest):
    assert (
        json_lines(Output("jsonl"), line, [NOTHING])
        == f'{{{rest}, "translation": "", "score": 0.0, "log_prob": 0.0}}'
    )


def test_n_best_objects():
    values = json.loads(json_lines(Output("jsonl", nbest=2), '{"text": "x"}', [BEST, SECOND]))
    assert values["translation"] == "ja gut"
    assert values["hypotheses"] == [
        {"translation": "ja gut", "score": -1.2346, "log_prob": -2.5},
        {"translation": "nein", "score": -2.0, "log_prob": -3.0},
    ]


def test_tokens_and_alignments_in_objects():
    output = Output("jsonl", token_scores=True, alignments="soft")
    values = json.loads(json_lines(output, '{"text": "yes fine"}', [BEST], [ALIGNMENT]))
    assert values["tokens"] == ["▁ja", "▁gut", "</s>"] and values["token_scores"] == [
        -1.0,
        -1.25,
        -0.25,
    ]
    assert values["source_tokens"] == ["▁yes", "▁fine", "</s>"]
    assert values["alignment"] == [[0.9, 0.0, 0.1], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]]
    values = json.loads(json_lines(output, '{"text": ""}', [NOTHING], [None]))
    assert (
        values["tokens"]
        == values["token_scores"]
        == values["source_tokens"]
        == values["alignment"]
        == []
    )
    values = json.loads(
        json_lines(Output("jsonl", alignments="hard"), '{"text": "yes fine"}', [BEST], [ALIGNMENT])
    )
    assert values["alignment"] == "0-0 1-1"


def test_what_has_no_number_in_json_is_null():
    broken = Translation("x", float("-inf"), float("nan"), 1, (), (float("nan"),))
    assert json.loads(json_lines(Output("jsonl"), '{"text": "x"}', [broken]))["score"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbest": 0}, "nbest is 0"),
        ({"token_scores": True}, "--token-scores does not go with --format text"),
        ({"alignments": "soft"}, "--alignments soft does not go with --format text"),
    ],
)
def test_what_a_format_cannot_say(options, message):
    with pytest.raises(UserError, match=message):
        Output(**options)
