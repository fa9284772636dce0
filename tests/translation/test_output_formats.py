"""Output: plain text, n-best lists, JSONL, documents."""

from __future__ import annotations

import dataclasses
import io
import json
import time

import numpy as np
import pytest

from transformer_jax.translation.alignment import Alignment
from transformer_jax.translation.input_file import Record, read_records
from transformer_jax.translation.output_formats import JsonWriter, OutputFlags, TextWriter
from transformer_jax.translation.requests import Translation

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
ALIGNED = dataclasses.replace(BEST, alignment=ALIGNMENT)
RECORD = Record("yes fine", line_number=5)


def json_lines(output, line, translations):
    [record] = read_records(io.BytesIO(line.encode()), "jsonl")
    written = JsonWriter(output).text(record, translations)
    return written


SECOND_ALIGNED = dataclasses.replace(SECOND, alignment=OTHER)


@pytest.mark.parametrize(
    ("settings", "translations", "lines"),
    [
        ({}, [BEST], ["ja gut"]),
        ({}, [NOTHING], [""]),
        ({"nbest": 2}, [BEST, SECOND], ["4 ||| ja gut ||| -1.2346", "4 ||| nein ||| -2.0000"]),
        ({"alignments": "hard"}, [ALIGNED], ["ja gut ||| 0-0 1-1"]),
        ({"alignments": "hard"}, [NOTHING], [" ||| "]),
        (
            {"alignments": "hard", "nbest": 2},
            [ALIGNED, SECOND_ALIGNED],
            ["4 ||| ja gut ||| -1.2346 ||| 0-0 1-1", "4 ||| nein ||| -2.0000 ||| 1-0"],
        ),
    ],
)
def test_text_output(settings, translations, lines):
    assert TextWriter(OutputFlags(**settings)).text(RECORD, translations).splitlines() == lines


def test_text_output_of_scores():
    assert TextWriter(OutputFlags(), log_probs=True).text(RECORD, [BEST]) == "-2.5000\n"


def test_objects_keep_their_fields():
    line = (
        r'{ "id":1e2, "text": "yes\u0020fine","meta": {"b": [1.10, null], "a": "\ud800", "ü": 1} }'
    )
    written = json_lines(OutputFlags(), line, [BEST])
    values = json.loads(written)
    assert list(values) == ["id", "text", "meta", "translation", "score", "log_prob"]
    assert (values["translation"], values["score"], values["log_prob"]) == ("ja gut", -1.2346, -2.5)
    assert json.loads(line).items() <= values.items() and '"ü": 1' in written


@pytest.mark.parametrize(
    "value",
    [
        *("1e400", "-0", "9" * 10**6, "1.50", "1.00000000000000000001", "7" * 4000, "-1E+5"),
        *('{"a": 1, "a" :2}', "[[], {},\t[ -0 ]]", '"\\ud800 \\u00fc \\/ : , }"', "null"),
    ],
)
def test_other_fields_are_copied_as_written(value):
    line = f' {{"{{x": {value} , "ü":{value},"ü" : 2,"text":"yes"}} '
    written = json_lines(OutputFlags(), line, [NOTHING])
    expected = f'{{"{{x": {value}, "ü": {value}, "ü": 2, "text": "yes", "translation": ""'
    assert written.startswith(expected)


def test_fields_of_an_earlier_translation_are_replaced():
    line = {"score": 9, "text": "yes fine", "translation": "old", "id": "ü", "tokens": 3}
    written = json_lines(OutputFlags(), json.dumps(line), [NOTHING])
    assert json.loads(written) == line | {"translation": "", "score": 0, "log_prob": 0}
    assert written.count('"translation"') == 1


def test_n_best_objects():
    values = json.loads(json_lines(OutputFlags(nbest=2), '{"text": "x"}', [BEST, SECOND]))
    assert values["translation"] == "ja gut"
    assert values["hypotheses"] == [
        {"translation": "ja gut", "score": -1.2346, "log_prob": -2.5},
        {"translation": "nein", "score": -2.0, "log_prob": -3.0},
    ]


def test_tokens_and_alignments_in_objects():
    output = OutputFlags(token_scores=True, alignments="soft")
    values = json.loads(json_lines(output, '{"text": "yes fine"}', [ALIGNED]))
    assert values["tokens"] == ["▁ja", "▁gut", "</s>"]
    assert values["token_scores"] == [-1.0, -1.25, -0.25]
    assert values["source_tokens"] == ["▁yes", "▁fine", "</s>"]
    assert values["alignment"] == [[0.9, 0.0, 0.1], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]]
    values = json.loads(json_lines(output, '{"text": ""}', [NOTHING]))
    for name in ("tokens", "token_scores", "source_tokens", "alignment"):
        assert values[name] == []
    values = json.loads(
        json_lines(OutputFlags(alignments="hard"), '{"text": "yes fine"}', [ALIGNED])
    )
    assert values["alignment"] == "0-0 1-1"


def test_nan_and_infinity_are_null_in_json():
    broken = Translation("x", float("-inf"), float("nan"), 1, (), (float("nan"),))
    assert json.loads(json_lines(OutputFlags(), '{"text": "x"}', [broken]))["score"] is None


def test_a_long_number_takes_linear_time():
    line = json.dumps({"text": "x"})[:-1] + f', "id": {"9" * 10**6}}}'
    start = time.process_time()
    written = json_lines(OutputFlags(), line, [NOTHING])
    assert "9" * 10**6 in written and time.process_time() - start < 0.5
