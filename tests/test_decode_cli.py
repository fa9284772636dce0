"""decode.py: input, output and exit status."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from flax import nnx
from random_models import write_run

from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.settings.config import (
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.tokenization.special_ids import EOS_ID
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation import __main__ as program
from transformer_jax.translation import loading
from transformer_jax.translation import translator as translator_module
from transformer_jax.translation.flags import Files, ScoringFlags, checked_flags
from transformer_jax.translation.output_formats import TextWriter
from transformer_jax.translation.translator import Translator

ROOT = Path(__file__).resolve().parents[1]
LINES = ["one two three", "", "four five", "three one five two", "   ", "two two", "five"]
TEXT = "".join(line + "\n" for line in LINES).encode()


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A work directory as after training, with three checkpoints of random parameters."""
    folder = tmp_path_factory.mktemp("run")
    pairs = [(line, line.upper()) for line in LINES]
    tokenizer = Tokenizer.train(pairs, TokenizerConfig(vocab_size=30, algorithm="unigram"))
    sizes = {"vocab_size": 30, "d_model": 16, "d_ff": 16, "num_heads": 2, "num_layers": 1}
    search = {"beam_size": 2, "max_extra_length": 4, "max_source_length": 16, "batch_size": 4}
    config = Config(
        model=ModelConfig(**sizes, dtype="float32", tie_embeddings="none"),
        data=DataConfig(max_source_length=16, max_target_length=16),
        training=TrainingConfig(average=2, checkpoint_every=10),
        decoding=DecodingConfig(**search),
    )
    models = {step: Transformer(config.model, rngs=nnx.Rngs(step)) for step in (10, 20, 30)}
    for model in models.values():
        # EOS is unlikely at first.
        model.softmax_matrix[...] = 4 * model.softmax_matrix[...].at[EOS_ID].set(0)
    write_run(folder, config, tokenizer, models, best_step=20)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _built_once():
    """Load models once for equal flags."""
    with pytest.MonkeyPatch.context() as patch:
        load_models = functools.cache(loading.load_models)
        for module in (loading, translator_module):
            patch.setattr(module, "load_models", load_models)
        yield


@pytest.fixture
def decode(workdir, monkeypatch, capsysbinary):
    """Run the program in this process. Returns exit status, stdout and stderr."""

    def run(*flags, stdin=TEXT, folder=workdir):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = program.main(["--workdir", str(folder), *map(str, flags)])
        out, err = capsysbinary.readouterr()
        return status, out.decode(), err.decode()

    return run


@pytest.fixture(scope="module")
def expected(workdir):
    return Translator.from_workdir(workdir).translate(LINES)


def test_one_output_line_for_each_input_line(decode, expected):
    status, out, _ = decode()
    assert status == 0
    assert out == "".join(line + "\n" for line in expected)
    assert [i for i, line in enumerate(out.split("\n")[:-1]) if not line] == [1, 4]


def test_empty_input(decode):
    assert decode(stdin=b"")[:2] == (0, "")
    assert decode(stdin=b"\n")[:2] == (0, "\n")
    assert decode(stdin=b"one two")[1].count("\n") == 1


def test_flags_reach_the_search(decode, workdir):
    checkpoint = workdir / "checkpoints" / "00000020"
    settings = {"beam_size": 3, "length_penalty": 1.0, "patience": 0.5, "batch_size": 2}
    flags = [x for name, value in settings.items() for x in (f"--{name.replace('_', '-')}", value)]
    _, out, _ = decode(*flags, folder=checkpoint)
    translator = Translator.from_workdir(checkpoint, **settings)
    assert out.split("\n")[:-1] == translator.translate(LINES)


def test_n_best(decode, expected):
    _, out, _ = decode("--nbest", 2)
    rows = [line.split(" ||| ") for line in out.split("\n")[:-1]]
    assert [row[1] for i, row in enumerate(rows) if i == 0 or row[0] != rows[i - 1][0]] == expected
    assert [row[0] for row in rows] == ["0", "0", "1", "2", "2", "3", "3", "4", "5", "5", "6", "6"]
    assert all(re.fullmatch(r"-?\d+\.\d{4}", row[2]) for row in rows)


def test_ctranslate2_translates_the_same_lines(decode, expected, workdir):
    flags = ("--length-offset", 0, "--patience", 50)
    status, out, err = decode("--engine", "auto", *flags, "--alignments", "hard")
    assert status == 0 and "Engine ctranslate2" in err
    found = [line.rpartition(" ||| ")[0] for line in out.split("\n")[:-1]]
    assert [bool(line) for line in found] == [bool(line) for line in expected]
    translator = Translator.from_workdir(
        workdir, engine="ctranslate2", length_offset=0.0, patience=50.0
    )
    assert found == translator.translate(LINES)
    # Lines of JSONL can have glossaries.
    record = b'{"text": "one two"}\n'
    status, _, err = decode("--engine", "auto", "--format", "jsonl", stdin=record)
    assert status == 0 and "Engine jax. Glossaries, which lines of JSONL can have, work" in err


def test_reference(decode, expected, tmp_path):
    reference = tmp_path / "reference"
    reference.write_text("".join(line + "\n" for line in expected))
    status, out, err = decode("--reference", reference, "--bleu-tokenize", "char")
    assert status == 0 and out.count("\n") == len(LINES)
    assert re.search(r"^BLEU\|.*tok:char.* = 100\.00 ", err, re.MULTILINE)
    assert re.search(r"^chrF2\|.* = \d", err, re.MULTILINE)
    reference.write_text("one\n")
    status, out, err = decode("--reference", reference)
    assert status == 2 and out.splitlines() == expected
    assert "7 lines to score and 1 reference lines" in err


def test_a_folder_without_a_config(decode, tmp_path):
    status, _, err = decode(folder=tmp_path)
    assert status == 2 and "a work directory's config.json" in err


def test_a_corrupt_checkpoint_is_named_and_another_can_be_chosen(decode, workdir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(workdir, copy)
    (copy / "checkpoints" / "00000030" / "manifest.json").write_text("{}")
    for folder in (copy, copy / "checkpoints" / "00000030"):
        status, out, err = decode(folder=folder)
        assert (status, out) == (2, "") and err.count("error: ") == 1
        assert "00000030 is corrupt: manifest.json is missing or has changed since" in err
        assert "Pass the folder of another checkpoint." in err
    older = Path("checkpoints", "00000020")
    one, other = (decode(folder=folder / older)[:2] for folder in (copy, workdir))
    assert one == other


def test_unknown_flags(workdir, capsys):
    with pytest.raises(SystemExit) as exit_:
        program.main(["--workdir", str(workdir), "--beam", "4"])
    assert exit_.value.code == 2 and "--beam-size" in capsys.readouterr().err


# Log messages of loading and compiling.
_QUIET = r"(Training in .* has not finished.*\n|.*: .*checkpoint.*\.\n|Compiling .*\n)*"


def _start(workdir, *flags):
    modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": modules, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "decode.py"), "--workdir", str(workdir), *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)


def test_a_closed_pipe_ends_the_program_quietly(workdir):
    with _start(workdir, "--batch-size", "1") as closed:
        closed.stdin.write(b"one two\n" * 100)  # 100 lines are read at a time
        closed.stdin.flush()
        assert closed.stdout.readline()
        closed.stdout.close()
        closed.stdin.write(b"one two\n" * 100)
        closed.stdin.close()
        assert closed.wait(60) == 141
        assert re.fullmatch(_QUIET, closed.stderr.read().decode())


def test_a_window_of_1_answers_each_line_at_once_until_ctrl_c(workdir):
    with _start(workdir, "--window", "1", "--alignments", "hard") as process:
        for line in (b"one\n", b"\n", b"two\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"\n")  # before the next line is written
        process.send_signal(signal.SIGINT)  # while it waits for more input
        assert process.wait(60) == 130
        assert re.fullmatch(_QUIET, process.stderr.read().decode())


OBJECTS = "".join(
    f'{{"id": {i}, "text": "{line}", "x": [1.50]}}\n' for i, line in enumerate(LINES)
).encode()


def test_lines_before_an_invalid_line_are_translated(decode, expected):
    status, out, err = decode(stdin=b"one two three\n\nfour five\n\xff\nfive\n")
    assert (status, out) == (2, "".join(line + "\n" for line in expected[:3]))
    assert "line 4: byte 1 is not valid UTF-8" in err
    status, out, err = decode("--format", "jsonl", stdin=OBJECTS[: OBJECTS.index(b"five two") - 3])
    assert status == 2 and out.count("\n") == 3 and "line 4 is not valid JSON" in err


def test_resume_continues_after_an_invalid_line_is_fixed(decode, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    flags = ("--input", source, "--format", "jsonl", "--output", output)
    whole = decode("--format", "jsonl", stdin=OBJECTS + b'{"text": "one"}\n')[1]
    for line, message in [
        ("{", "in.jsonl, line 8 is not valid JSON"),
        ('{"text": "one", "prefix": "€"}', "Line 8: prefix '€' has"),
    ]:
        source.write_bytes(OBJECTS + line.encode() + b"\n")
        status, out, err = decode(*flags)
        assert (status, out) == (2, "") and message in err and "with --resume to continue" in err
        assert output.read_text() == "".join(whole.splitlines(keepends=True)[:7])
        source.write_bytes(OBJECTS + b'{"text": "one"}\n')
        assert decode(*flags, "--resume")[0] == 0 and output.read_text() == whole


def test_resuming_translates_appended_lines(decode, expected, tmp_path):
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(TEXT)
    assert decode("--input", source, "--output", output)[0] == 0
    source.write_bytes(TEXT + b"one\n")
    assert decode("--input", source, "--output", output, "--resume")[0] == 0
    lines = output.read_text().splitlines()
    assert lines[:-1] == expected and len(lines) == len(LINES) + 1


def test_long_numbers_are_copied(decode):
    line = b'{"id": %s, "text": "one"}\n' % (b"7" * 5000)
    status, out, _ = decode("--format", "jsonl", stdin=line)
    assert status == 0 and out.startswith(line.decode()[:-2])


def test_invalid_flags_do_not_overwrite_the_output(decode, tmp_path):
    (tmp_path / "out").write_text("of an earlier run\n")
    layer = ("--alignments", "hard", "--alignment-layer", 3)
    for flags in (("--input", "missing"), ("--nbest", 3), layer):
        assert decode(*flags, "--output", tmp_path / "out")[0] == 2
        assert (tmp_path / "out").read_text() == "of an earlier run\n"


def test_jsonl(decode, expected):
    status, out, _ = decode("--format", "jsonl", "--nbest", 2, "--token-scores", stdin=OBJECTS)
    values = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and out.count('"x": [1.50], ') == len(LINES)
    assert [v["translation"] for v in values] == expected
    assert [(v["id"], v["text"]) for v in values] == list(enumerate(LINES))
    for v in values:
        assert len(v["tokens"]) == len(v["token_scores"])
        assert sum(v["token_scores"]) == pytest.approx(v["log_prob"], abs=1e-3)
        scores = [h["score"] for h in v["hypotheses"]]
        assert scores == sorted(scores, reverse=True)
        assert v["hypotheses"][0]["translation"] == v["translation"]


def test_documents(decode, expected, tmp_path):
    page = "<p>one two <b>three</b></p>\r\n<pre>\n\n</pre>\n<p>four five {x}</p>"
    status, out, _ = decode("--format", "html", stdin=page.encode())
    assert status == 0
    assert re.sub("<.*?>", "", out) == f"{expected[0]}\r\n\n\n\n{expected[2]} {{x}}"
    assert re.findall("<.*?>", out) == re.findall("<.*?>", page)
    _, fields, _ = decode(
        "--format", "jsonl", "--markup", "html", stdin=json.dumps({"text": page}).encode()
    )
    assert json.loads(fields)["translation"] == out
    _, lines, _ = decode(
        "--markup", "xml", "--protect", "fi.e", stdin=b"<a>one two three</a>\n\nfive"
    )
    assert lines == f"<a>{expected[0]}</a>\n\nfive\n"


def test_a_prefix_begins_the_translation(decode):
    line = b'{"en": "one two", "prefix": "FIVE"}\n'
    _, out, _ = decode("--format", "jsonl", "--text-field", "en", stdin=line)
    assert json.loads(out)["translation"].startswith("FIVE")


def test_a_translation_contains_the_terms_of_a_glossary(decode, tmp_path):
    """Of a file and of the line, or a warning names those that do not fit."""
    path = tmp_path / "terms.tsv"
    path.write_text("one\tFIVE\tFOUR\nfour\tONE ONE ONE ONE ONE ONE ONE ONE\n")
    lines = b'{"text": "one two", "glossary": {"two": "THREE"}}\n{"text": "four"}\n'
    flags = "--format", "jsonl", "--glossary", str(path)
    _, out, err = decode(*flags, stdin=lines)
    met, missing = map(json.loads, out.splitlines())
    assert " THREE" in f" {met['translation']}" and "unmet" not in met
    assert any(word in f" {met['translation']}" for word in (" FIVE", " FOUR"))
    assert missing["unmet"] == ["four"] and missing["translation"]
    assert "Line 2: the translation lacks the glossary's terms for: four." in err
    status, _, err = decode(*flags, stdin=b'{"text": "one", "glossary": {"one": "\xe2\x82\xac"}}\n')
    assert status == 2 and "Line 1: glossary: 'one': the target term" in err


def test_alignments(decode, expected):
    status, out, _ = decode("--alignments", "hard")
    assert status == 0
    for line, translation, source in zip(out.split("\n"), expected, LINES, strict=False):
        text, _, pairs = line.partition(" ||| ")
        assert text == translation
        targets = [pair.split("-")[1] for pair in pairs.split()]
        assert sorted(set(map(int, targets))) == list(range(len(translation.split())))
        assert all(int(pair.split("-")[0]) < len(source.split()) for pair in pairs.split())
    plain, aligned = (
        decode("--nbest", 2, *flags)[1].splitlines() for flags in ((), ("--alignments", "hard"))
    )
    assert [line.rpartition(" ||| ")[0] for line in aligned] == plain
    for line in aligned:
        _, text, _, pairs = line.split(" ||| ")
        targets = {int(pair.split("-")[1]) for pair in pairs.split()}
        assert targets == set(range(len(text.split())))


def test_score(decode, tmp_path):
    _, out, _ = decode("--format", "jsonl", stdin=OBJECTS)
    targets = tmp_path / "targets"
    targets.write_text("".join(json.loads(line)["translation"] + "\n" for line in out.splitlines()))
    status, plain, _ = decode("--score-targets", targets, "--nbest", 9)  # has no effect
    assert status == 0 and all(re.fullmatch(r"-\d+\.\d{4}", line) for line in plain.splitlines())
    flags = ("--score-targets", targets, "--format", "jsonl", "--alignments", "soft")
    status, scored, _ = decode(*flags, stdin=OBJECTS)
    for line, number in zip(map(json.loads, scored.splitlines()), plain.splitlines(), strict=True):
        assert line["log_prob"] == pytest.approx(float(number), abs=1e-4)
        assert len(line["token_scores"]) == len(line["tokens"])
        for row in line["alignment"]:
            assert len(row) == len(line["source_tokens"]) and sum(row) == pytest.approx(1, abs=1e-3)


def test_an_ensemble_of_a_model_with_itself_is_that_model(decode, workdir, expected):
    assert decode("--workdir", workdir, workdir)[1] == "".join(line + "\n" for line in expected)


def test_joined_shards_of_samples_equal_the_whole(decode, tmp_path):
    """A line's random numbers depend on its line number, not on its shard."""
    flags = ("--method", "sample", "--seed", 3, "--nbest", 2, "--input", tmp_path / "in")
    (tmp_path / "in").write_bytes(TEXT)
    whole = decode(*flags)[1]
    for i in range(3):
        assert decode(*flags, "--output", tmp_path / f"out.{i}", "--shard", f"{i}/3")[0] == 0
    expected = "".join(x for x in whole.splitlines(True) if x[:2] in ("2 ", "5 "))
    assert (tmp_path / "out.2").read_text() == expected == decode(*flags, "--shard", "2/3")[1]
    joined = subprocess.check_output(["sort", "-nsm", *sorted(tmp_path.glob("out.*"))])
    assert joined.decode() == whole


def test_killed_and_resumed(decode, workdir, tmp_path):
    path = tmp_path / "out"
    lines = [json.dumps({"id": i, "text": LINES[i % 7]}).encode() + b"\n" for i in range(240)]
    flags = ("--format", "jsonl", "--batch-size", "1")  # 100 lines are read at a time
    process = _start(workdir, *flags, "--output", str(path))
    process.stdin.write(b"".join(lines))
    process.stdin.flush()
    while not path.exists() or path.read_bytes().count(b"\n") < 200:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()
    os.truncate(path, path.stat().st_size - 5)

    status, out, _ = decode(*flags, "--output", path, "--resume", stdin=b"".join(lines))
    assert (status, out) == (0, "")
    whole = decode(*flags, stdin=b"".join(lines))[1]
    assert path.read_text() == whole
    status, _, err = decode(*flags, "--output", path, "--resume", stdin=b"".join(lines))
    assert status == 0 and "Skipping 240 sentences that are already translated" in err
    assert path.read_text() == whole
    status, _, err = decode(*flags, "--output", path, "--resume", stdin=b"".join(lines[:-1]))
    assert status == 2
    assert "has 240 sentences, but the input has only 239; expected the same input" in err


def test_flags_of_the_search_default_to_the_runs_settings(workdir):
    arguments, config = checked_flags(["--workdir", str(workdir), "--min-length", "1"])
    assert arguments.search == dataclasses.replace(config.decoding, min_length=1)
    assert config.decoding.beam_size == 2


def test_defaults_that_depend_on_other_flags(workdir):
    def decoding(*flags):
        return checked_flags(["--workdir", str(workdir), *flags])[0].search

    assert decoding("--window", "1").batch_size == 1
    assert decoding("--window", "1", "--batch-size", "4").batch_size == 1
    assert decoding("--window", "9").batch_size == 4
    assert decoding("--method", "sample").beam_size == 1
    assert decoding("--method", "sample", "--nbest", "3").beam_size == 3
    assert decoding("--method", "sample", "--beam-size", "2").beam_size == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--input", "no/such"), "'no/such': No such file or directory; check the path"),
        (("--input", "."), "'.': Is a directory; choose a file instead of a folder"),
        (("--score-targets", "no/such"), "'no/such': No such file or directory"),
        (("--reference", "no/such"), "'no/such': No such file or directory"),
        (("--output", "no/such/file"), "'no/such/file': No such file or directory"),
        (("--input", ""), "'.': Is a directory"),
        (("--output", "."), "'.': Is a directory"),
        (("--output", "x.gz"), "output is 'x.gz'; expected a name without .gz, because output is"),
        (("--text-field", "score"), "--text-field is 'score'; expected another field, because tr"),
        (("--shard", "2/2"), "shard is '2/2'; expected i/n with i from 0 to n - 1"),
        (
            ("--protect", "a("),
            "--protect is ('a(',); expected regular expressions; 'a(' is not one",
        ),
        (
            ("--markup", "html", "--nbest", 2),
            "--nbest, --alignments, --token-scores and --score-targets do",
        ),
        (("--format", "xml", "--shard", "0/2"), "do not apply to --format xml, because the input"),
        (("--window", 0), "window is 0; expected a positive number"),
        (("--nbest", 0), "nbest is 0; expected a positive number"),
        (("--glossary", __file__), "test_decode_cli.py, line 1 is "),
        (("--nbest", 3), "--nbest is 3; expected at most 2, the value of --beam-size"),
        (("--nbest", 1000), "--nbest is 1000; expected a positive number up to 512"),
        (("--beam-size", 0), "decoding.beam_size is 0"),
        (("--max-extra-length", 2**31 - 1), "is 2147483647; expected a number from 1 to 65,536"),
        (("--method", "sample", "--patience", 1), "patience is 1.0; expected None, because decod"),
        (("--alignments", "soft"), "--alignments is 'soft'; expected 'hard', or --format jsonl"),
        (("--suppress", "qqqq"), "decoding.suppress contains 'qqqq'"),
        (("--alignments", "hard", "--alignment-layer", 3), "layer is 3; expected -1 to 0"),
        (("--format", "jsonl", "--text-field", "x"), "line 1 is not valid JSON"),
        (("--reference", __file__, "--bleu-tokenize", "x"), "BLEU tokenizer 'x' cannot be used"),
        (
            ("--engine", "ctranslate2", "--token-scores", "--format", "jsonl"),
            "--engine ctranslate2: --token-scores works only with JAX. Or use --engine jax.",
        ),
        (
            ("--engine", "ctranslate2", "--method", "sample"),
            "--engine ctranslate2: decoding.method is 'sample'; expected 'beam'",
        ),
    ],
)
def test_invalid_flags_give_one_error_line_and_status_2(decode, flags, message):
    status, out, err = decode(*flags)
    assert (status, out) == (2, "")
    *_, last = err.splitlines()  # after log messages of loading
    assert message in last and last.startswith("error: ") and err.count("error: ") == 1


@pytest.mark.parametrize(
    ("flags", "redirection"),
    [
        ("--input x --output ./x", ""),
        ("--score-targets x --output ./x", ""),
        ("--reference x --output linked", ""),
        ("--input x --output symlink", ""),
        ("--output linked", "< x"),
        ("--input x", ">> linked"),
    ],
)
def test_an_input_is_never_the_output(workdir, tmp_path, flags, redirection):
    (tmp_path / "x").write_bytes(TEXT)
    (tmp_path / "linked").hardlink_to(tmp_path / "x")
    (tmp_path / "symlink").symlink_to("x")
    command = f'exec "$@" --workdir {workdir} {flags} {redirection}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, str(ROOT / "decode.py")],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    name = flags.split("--output ")[1] if "--output" in flags else "/dev/stdout"
    message = f"error: --output '{name}' is also an input; expected another file.\n"
    assert (done.returncode, done.stderr.decode()) == (2, message)
    assert (tmp_path / "x").read_bytes() == TEXT


INPUTS = [
    field.name
    for field in (*dataclasses.fields(Files), *dataclasses.fields(ScoringFlags))
    if field.type == "str | None" and field.name not in ("output", "bleu_tokenize")
]


@pytest.mark.parametrize("flag", INPUTS)
def test_the_file_of_every_input_flag_is_never_the_output(workdir, tmp_path, monkeypatch, flag):
    """Also together with other inputs and by another name. Nothing is written."""
    assert INPUTS == ["input", "glossary", "reference", "score_targets"]
    monkeypatch.chdir(tmp_path)
    for name in (*INPUTS, "x"):
        Path(name).write_bytes(TEXT)
    Path("hard").hardlink_to("x")
    Path("soft").symlink_to("x")
    others = [text for name in INPUTS if name != flag for text in (f"--{name}", name)]
    for name, output in (
        *(("x", "x"), ("x", "./x"), ("soft", "x"), ("x", "soft"), ("hard", "x"), ("x", "hard")),
        (f"file://{tmp_path}/x", "x"),
    ):
        for given in ([], others):
            with pytest.raises(UserError, match=f"^--output '{output}' is also an input; expect"):
                argv = ["--workdir", str(workdir), *given, f"--{flag}", name, "--output", output]
                checked_flags(argv)
    argv = ["--workdir", str(workdir), *others, f"--{flag}", "x", "--output", flag]
    assert checked_flags(argv)[0].files.output == flag  # exists, but is not an input here
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {TEXT}


def test_an_input_that_grows_is_reported(decode, expected, tmp_path, monkeypatch):
    path, text = tmp_path / "in", TextWriter.text

    def grow(*arguments, **options):
        with path.open("ab") as file:
            file.write(b"one\n")
        return text(*arguments, **options)

    monkeypatch.setattr(TextWriter, "text", grow)
    path.write_bytes(TEXT)
    status, out, err = decode("--input", path)
    assert (status, out.splitlines()) == (0, expected)
    assert "The input grew by 28 bytes after its end was read. Translate them with --resume" in err


def test_closed_standard_streams_leave_only_translations_in_the_output(workdir, expected, tmp_path):
    (tmp_path / "in").write_bytes(TEXT)
    command = f'exec "$@" --workdir {workdir} --input {tmp_path}/in <&- 2>&-'
    done = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, str(ROOT / "decode.py")],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert (done.returncode, done.stdout.decode().splitlines()) == (0, expected)


def test_a_closed_stdout_is_an_error(workdir):
    """Unless the output is a file."""
    command = [sys.executable, str(ROOT / "decode.py"), "--workdir", str(workdir)]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        input=b"one two\n",
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 2 and b"error: Bad file descriptor; check the path" in done.stderr


def test_lines_can_be_divided_into_sentences(decode, workdir):
    text = "One two. Three five!  Two two.\n\nfive\n"
    sentences = ["One two.", "Three five!", "Two two.", "five"]
    translator = Translator.from_workdir(workdir)
    first, second, third, last = translator.translate(sentences)
    _, out, _ = decode("--split", stdin=text.encode())
    assert [line.split() for line in out.splitlines()] == [
        f"{first} {second}  {third}".split(),
        [],
        last.split(),
    ]
    line = json.dumps({"text": text.split("\n")[0]}).encode()
    flags = ("--format", "jsonl", "--token-scores", "--alignments", "hard", "--split")
    values = json.loads(decode(*flags, stdin=line)[1])
    assert values["tokens"].count("</s>") == 3
    assert len(values["tokens"]) == len(values["token_scores"])
    best = [translations[0] for translations in translator.stream(sentences[:3])]
    assert values["log_prob"] == pytest.approx(sum(each.log_prob for each in best), abs=1e-3)


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_a_document_keeps_its_first_and_last_bytes(decode, end):
    page = f"\ufeff<p><br></p>{end}".encode()
    assert decode("--format", "html", stdin=page) == (0, page.decode(), "")


@pytest.mark.parametrize(
    ("page", "charset"),
    [
        ('<meta charset="iso-8859-1">', "iso-8859-1"),
        ('<META content="text/html; charset=windows-1252">', "windows-1252"),
        ('<?xml version="1.0" encoding="latin1"?><a/>', "latin1"),
        *(("<meta charset=UTF-8>", ""), ('<?xml version="1.0"?><a/>', ""), ("<p></p>", "")),
    ],
)
def test_a_document_in_another_encoding_is_reported(decode, page, charset):
    status, out, err = decode("--format", "html", stdin=page.encode())
    assert (status, out) == (0, page)
    assert (f"declares the encoding {charset}, but is read" in err) == bool(charset)


def test_a_reference_needs_a_whole_output_or_shard(decode, expected, tmp_path):
    reference, output = tmp_path / "reference", tmp_path / "out"
    reference.write_text("".join(line + "\n" for line in expected))
    flags = ("--reference", reference, "--bleu-tokenize", "char")
    _, out, err = decode(*flags, "--shard", "1/2")
    assert out.splitlines() == expected[1::2] and " = 100.00 " in err
    output.write_text(expected[0] + "\n")
    status, _, err = decode(*flags, "--output", output, "--resume")
    assert status == 2 and "out already has 1 sentences, but --reference needs all" in err
    assert output.read_text() == expected[0] + "\n"


def test_flags_without_effect_are_ignored(decode, expected):
    flags = ("--resume", "--token-scores", "--bleu-tokenize", "char")
    flags += ("--text-field", "x", "--alignment-layer", 0)
    assert decode(*flags)[1].splitlines() == expected


def test_a_named_pipe_is_read_once(decode, expected, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(TEXT,))
    writer.start()
    assert decode("--input", tmp_path / "pipe")[1].splitlines() == expected
    writer.join()


def test_invalid_flags_are_reported_before_jax_is_imported(workdir):
    code = """
import sys
from transformer_jax.translation.__main__ import main
for flags in (["--beam-size", "0"], ["--output", "x.gz"], ["--nbest", "3"]):
    assert main([*sys.argv[1:], *flags]) == 2 and "jax" not in sys.modules, flags
"""
    command = [sys.executable, "-c", code, "--workdir", str(workdir)]
    assert subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == 0


def test_without_a_work_directory(capsys):
    assert program.main([]) == 2
    assert "workdir is empty; expected one or more work directories" in capsys.readouterr().err
