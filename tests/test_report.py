"""Training reports of finished and unfinished runs, and their display in a browser."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from random_models import lines_of_words, make_model, train_tokenizer

from transformer_jax.report import __main__ as program
from transformer_jax.report.page import word_diff
from transformer_jax.runs.model_folder import save_model
from transformer_jax.settings.config import (
    Config,
    DataConfig,
    DecodingConfig,
    PairsConfig,
    TrainingConfig,
)
from transformer_jax.settings.config_files import to_json
from transformer_jax.translation.translator import Translator

LINES = lines_of_words(12)
HOSTILE = "<script>alert(1)</script><img src='http://example.org/a.png'>"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A finished run whose dev set is a text file."""
    folder = tmp_path_factory.mktemp("runs") / "it's one"
    sources, targets = folder.with_name("dev.en"), folder.with_name("dev.de")
    sources.write_text("\n".join([*LINES[:3], "two <b>three</b> &amp;"]) + "\n")
    targets.write_text("\n".join(line.upper() for line in LINES[:4]) + "\n")
    tokenizer = train_tokenizer(LINES)
    model = make_model(tokenizer, num_layers=1, num_decoder_layers=1)
    config = Config(
        model=model.config,
        data=DataConfig(dev=PairsConfig("text", (str(sources),), (str(targets),))),
        training=TrainingConfig(steps=4),
        decoding=DecodingConfig(beam_size=2, max_extra_length=4, max_source_length=16),
    )
    save_model(folder, config, model, tokenizer)
    memory = {"peak_memory_bytes": {"host": 2_500_000_000}}
    environment = {"python": "3.12.1", "versions": {"jax": "0.11.2"}}
    lines = [
        {"kind": "start", "step": 0, "parameters": 1234, "source_fill": 0.75, "target_fill": 0.5}
        | {"environment": environment},
        *(
            {"kind": "train", "step": step, "loss": 8 / step, "perplexity": 100.0 / step}
            | {"learning_rate": step / 1000, "tokens_per_second": 100.0 * step}
            | memory
            for step in range(1, 5)
        ),
        {"kind": "dev", "step": 4, "dev_loss": 2.5, "dev_perplexity": None, "dev_bleu": 33.333},
        {"kind": "save", "step": 4, "time": 1.8e9, "held_seconds": 90.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"steps": 4, "stopped_by": None, "train_seconds": 3700.0, **environment}
    summary |= {
        "training_flops": {"counted": 3.3e18},
        "test": {"bleu": 28.4, "bleu_signature": "nrefs:1|v <b>"},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be modified."""
    return Path(shutil.copytree(original, tmp_path / "one"))


def write_report(folder: Path, *runs: Path, flags: tuple[str, ...] = ("--samples", "0")) -> str:
    file = folder / "report.html"
    where = ["--workdir", *map(str, runs), "--output", str(file)]
    assert program.main([*where, *flags]) == 0
    return file.read_text()


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    """``report(*runs, flags=...)`` runs the program and returns its page."""
    return partial(write_report, tmp_path)


@pytest.fixture(scope="module")
def page(original: Path, tmp_path_factory) -> str:
    """The finished run's page, without translations."""
    return write_report(tmp_path_factory.mktemp("finished"), original)


def tables(page: str) -> dict[str, list[str]]:
    """Cells of each row of each table, by row header."""
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page)
    return {head: re.findall("<td>(.*?)</td>", cells) for head, cells in rows}


def problems(page: str) -> list[str]:
    [found] = re.findall(r'<section class="missing">(.*?)</section>', page, re.DOTALL) or [""]
    return re.findall("<li>(.*?)</li>", found)


def test_results_match_the_files(page):
    rows = tables(page)
    expected = {
        "status": "finished, step 4 of 4",
        "parameters": "1,234",
        "best dev_loss": "2.5",
        "best dev_bleu": "33.333",
        "test.bleu": "28.4",
        "test.bleu_signature": "nrefs:1|v &lt;b&gt;",
        "train_seconds": "3,700",
        "training_flops.counted": "3.3e+18",
        "tokens_per_second": "400",
        "source_fill": "0.75",
        "held_seconds": "90",
        "peak_memory_bytes.host": "2,500,000,000",
        "last entry": "2027-01-15 08:00 UTC",
        "python": "3.12.1",
        "versions.jax": "0.11.2",
    }
    assert {name: rows[name][0] for name in expected} == expected
    assert not {"name", "seconds", "step"} & rows.keys()
    assert not problems(page) and "Translations" not in page


def test_curves_match_their_alt_texts(page, original):
    curves = re.findall(r'<img src="data:image/svg\+xml;base64,(.*?)" alt="(.*?)\.">', page)
    data, words = curves[0]
    said = f"Loss by step. {original} (train): 2 at step 4; {original} (dev): 2.5 at step 4"
    assert html.unescape(words) == said
    titles = [words.split(" by ")[0] for _, words in curves]
    assert titles == ["Loss", "Perplexity", "BLEU", "Learning rate", "Tokens per second"]
    picture = ElementTree.fromstring(base64.b64decode(data))
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"step", "2", "8"} <= texts


def test_settings_that_differ_come_first(report, run, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other"))
    config = other / "config.json"
    config.write_text(config.read_text().replace('"steps": 4', '"steps": 8'))
    page = report(run, other)
    assert page.index("Different between runs") < page.index("Changed from the default")
    different = page[page.index("Different between") : page.index("Changed from the default")]
    assert tables(different)["training.steps"] == ["4", "8", "100,000"]
    assert "seed" not in tables(different) and tables(page)["seed"] == ["0", "0", "0"]
    assert tables(page)["parameters"] == ["1,234", "1,234"]
    page = report(run)
    assert "Different between" not in page and tables(page)["training.steps"] == ["4", "100,000"]


def test_unfinished_and_new_runs(report, run, tmp_path):
    (run / "summary.json").unlink()
    new = Path(shutil.copytree(run, tmp_path / "new"))
    (new / "metrics.jsonl").unlink()
    page = report(run, new)
    assert tables(page)["status"] == ["unfinished, step 4 of 4", "unfinished, step 0 of 4"]
    assert not problems(page)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", b'{"kind": "start", "step": 0}\n{"kind\n', "corrupt: line 2 .* column 2"),
        ("metrics.jsonl", b"\xff\x00\n", "corrupt: .*utf-8"),
        ("summary.json", b'{"steps": ', "summary.json' is corrupt: .* line 1 column 1"),
        *(
            (name, text, f"{name}' is corrupt: ")
            for name in ("summary.json", "metrics.jsonl")
            for text in (b"null\n", b"[]\n", b'"x"\n', b"{}\n", b"[" * 100_000 + b"\n")
        ),
        ("config.json", None, "config.json' does not exist"),
        ("config.json", b"\xff\x00", "config.json': The config is not valid"),
    ],
)
def test_missing_configs_and_corrupt_files_are_errors(run, name, content, message, capsys):
    (run / name).unlink()
    if content:
        (run / name).write_bytes(content)
    file = run / "report.html"
    assert program.main(["--workdir", str(run), "--output", str(file), "--samples", "0"]) == 2
    assert re.search(message, capsys.readouterr().err) and not file.exists()


@pytest.mark.parametrize("name", ["summary.json", "config.json", "metrics.jsonl"])
def test_a_lone_surrogate_in_a_file_is_shown_as_a_question_mark(report, run, name):
    """JSON can hold one, for example from a file name that is not UTF-8."""
    file = run / name
    *lines, last = file.read_text().rstrip("\n").split("\n")
    content = json.loads(file.read_text()) if name.endswith(".json") else json.loads(last)
    if name == "config.json":
        content["data"]["root"] = "folder \udce9"
    else:
        content["note"] = "folder \udce9"
    kept = "".join(f"{line}\n" for line in lines) if name.endswith(".jsonl") else ""
    file.write_text(kept + json.dumps(content) + "\n")
    page = report(run)
    assert not problems(page) and "\udce9" not in page
    assert name == "metrics.jsonl" or "folder ?" in page


def test_an_incomplete_line_is_ignored(report, run):
    """A run may be writing it."""
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "dev", "step": 4, "dev_bl')
    page = report(run)
    assert tables(page)["best dev_bleu"] == ["33.333"] and not problems(page)


def test_early_stopping_is_named(report, run):
    summary = json.loads((run / "summary.json").read_text()) | {"stopped_early": True}
    (run / "summary.json").write_text(json.dumps(summary))
    assert tables(report(run))["status"] == ["stopped early, step 4 of 4"]


def test_the_summary_of_a_resumed_run_is_ignored(report, run):
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "train", "step": 5, "loss": 1}\n')
    assert tables(report(run))["status"] == ["unfinished, step 5 of 4"]


def test_a_corrupt_checkpoint_affects_only_translations(report, run):
    (run / "manifest.json").write_bytes(b"")
    page = report(run, flags=())
    assert f"{run}: Translations and attention are incomplete" in problems(page)[0]
    assert tables(page)["test.bleu"] == ["28.4"]


def test_a_missing_dev_set_is_reported(report, run, monkeypatch):
    monkeypatch.setattr(Translator, "from_workdir", lambda *_, **__: None)
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace("dev.en", "gone.en"))
    [problem] = problems(report(run, flags=()))
    assert "Translations and attention are incomplete: " in problem and "gone.en" in problem


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--workdir", "nowhere", "--output", "a.html"],
            "expected a work directory written by train.py",
        ),
        (["--workdir", ".", "--output", "a.html", "--samples", "-1"], "expected 0 or more"),
        (["--workdir", "--output", "a.html"], "expected one or more work directories"),
        (["--workdir", ".", "--output", ".", "--samples", "0"], "error: '"),
    ],
)
def test_invalid_flags_are_errors(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(to_json(Config()))
    assert program.main(flags) == 2
    assert said in capsys.readouterr().err


WORDS = st.lists(st.sampled_from(["a", "b", "cd", "<e>"]), max_size=8).map(" ".join)


@given(WORDS, WORDS)
@example("a cd", "ad")
@example("ad", "a cd")
def test_a_diff_contains_both_sides(reference, translation):
    """If either side has a space, the diff never splits a word."""
    found = word_diff(reference, translation)
    for mark, side in (("ins", reference), ("del", translation)):
        text = "".join(words for tag, words in found if tag != mark)
        assert "".join(text.split()) == "".join(side.split())
        if " " in reference + translation:
            parts = [words for tag, words in found if tag != mark]
            assert [word for words in parts for word in words.split()] == side.split()
    if reference == translation:
        assert {tag for tag, _ in found} <= {""}


def test_a_diff_compares_words_or_characters():
    marked = [(tag, words) for tag, words in word_diff("a man sleeps", "a dog sleeps") if tag]
    assert marked == [("del", "man"), ("ins", "dog")]
    marked = [(tag, words) for tag, words in word_diff("她睡觉", "他睡觉") if tag]
    assert marked == [("del", "她"), ("ins", "他")]


@pytest.fixture(scope="module")
def complete(original, tmp_path_factory) -> Path:
    """A page with translations and attention maps."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    flags = ["--output", str(file), "--samples", "3", "--text", HOSTILE]
    assert program.main(["--workdir", str(original), *flags]) == 0
    return file


def test_translations_match_the_model(complete, original):
    translations = Translator.from_workdir(original, batch_size=8).translate([LINES[0], LINES[2]])
    page = complete.read_text()
    cards = re.findall("<article><dl>(.*?)</dl>", page, re.DOTALL)
    assert len(cards) == 2  # every second line of four
    for card, line, translation in zip(cards, (LINES[0], LINES[2]), translations, strict=True):
        source, reference, found = re.findall("<dd.*?>(.*?)</dd>", card)
        assert (source, reference) == (line, line.upper())
        kept = re.sub("<del>.*?</del>|</?ins>", "", found)
        assert kept.split() == translation.split()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_a_browser_shows_the_page_without_other_requests(browser, complete, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    fetched, said = [], []
    page.on("request", lambda request: fetched.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(complete.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert [url for url in fetched if not url.startswith("data:")] == [complete.as_uri()]
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") == width  # no horizontal overflow
    links = page.locator("nav a").all()
    assert [page.locator(link.get_attribute("href")).count() for link in links] == [1] * 6
    images = page.evaluate(
        "[...document.images].map(i => [i.complete && i.naturalWidth > 99, i.alt])"
    )
    assert len(images) == 5 + 3 and all(shown and alt for shown, alt in images)
    headings = page.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert " ".join(headings) == "Curves Results Translations Attention Settings Environment"
    assert page.evaluate("document.querySelectorAll('script, b, table a').length") == 0
    assert HOSTILE in page.inner_text("main")  # as text
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert dark == (scheme == "dark")
    page.close()
