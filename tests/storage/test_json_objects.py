"""JSON objects that something else has changed."""

from pathlib import Path

import pytest

from transformer_jax import UserError
from transformer_jax.storage.files import parse_object


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ('{"step": 1', "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("\x00\xff", "is not valid JSON"),
        ("null", "contains None; expected a JSON object"),
        ("[]", r"contains \[\]; expected a JSON object"),
        ("{}", "step is missing; expected int"),
        ('{"step": "1"}', "step is '1'; expected int"),
        ('{"step": true}', "step is True; expected int"),
        ('{"step": 1}', "files is missing; expected an object"),
        ('{"step": 1, "files": []}', r"files is \[\]; expected an object"),
        ('{"step": 1, "files": {}, "loss": "x"}', r"loss is 'x'; expected int \| float \| None"),
    ],
)
def test_errors_name_the_file_and_the_field(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=message) as raised:
        parse_object(path.read_bytes(), str(path), step=int, files=dict, loss=int | float | None)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_other_fields_are_kept() -> None:
    text = '{"step": 1, "loss": 0.5, "more": [1]}'
    content = parse_object(text, "file.json", step=int, loss=int | float | None)
    assert content == {"step": 1, "loss": 0.5, "more": [1]}
