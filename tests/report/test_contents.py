"""Every figure of a report: the right run, step, color, scale, sentence, layer and token."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import math
import os
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from random_models import WORDS, lines_of_words, make_model, train_tokenizer

from transformer_jax import Config, DecodingConfig, ModelConfig, PairsConfig, Translator, UserError
from transformer_jax.report import __main__ as program
from transformer_jax.report import attention, facts, heat_maps
from transformer_jax.report import page as page_module
from transformer_jax.report import runs as runs_module
from transformer_jax.report.attention import SentenceAttention
from transformer_jax.report.page import page as render
from transformer_jax.report.runs import Run
from transformer_jax.settings.config_files import to_json

SVG = "{http://www.w3.org/2000/svg}"
DIFF = ("del", "ins")
BLUE, ORANGE = "#1f77b4", "#ff7f0e"  # the first two colors of matplotlib's default style
TRAIN = {  # step: values; the last step is not the best
    1: {"loss": 9.0, "perplexity": 1000.0, "learning_rate": 0.001, "gradient_norm": 100.0},
    2: {"loss": 5.0, "perplexity": 10.0, "learning_rate": 0.002, "gradient_norm": 1.0},
    4: {"loss": 3.0, "perplexity": 100.0, "learning_rate": 0.001, "gradient_norm": 10.0},
}
DEV = {2: {"dev_loss": 2.0, "dev_bleu": 30.0}, 4: {"dev_loss": 2.5, "dev_bleu": 25.0}}


def write_run(
    folder: Path, *, config: Config | None = None, curves: float = 0, **summary: Any
) -> str:
    """Write the files of a run; its curves are ``curves`` times the values above, 0: none."""
    folder.mkdir()
    (folder / "config.json").write_text(to_json(config or Config()))
    entries: list[dict[str, Any]] = []
    for kind, values in (("train", TRAIN), ("dev", DEV)) if curves else ():
        for step, figures in values.items():
            scaled = {name: value * curves for name, value in figures.items()}
            entries.append({"kind": kind, "step": step, "time": 1.8e9 + 3600 * step, **scaled})
    entries.sort(key=lambda entry: entry["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
    if summary:
        (folder / "summary.json").write_text(json.dumps({"steps": 4, **summary}))
    return str(folder)


def report(tmp_path: Path, runs: list[str], *flags: str) -> str:
    output = tmp_path / "report.html"
    flags = flags or ("--samples", "0")
    assert program.main(["--workdir", *runs, "--output", str(output), *flags]) == 0
    return output.read_text()


@pytest.fixture
def two(tmp_path: Path) -> tuple[list[str], str]:
    """Two runs, and the report on them. All values of the second are half of the first's."""
    first = write_run(tmp_path / "first", curves=1, test={"bleu": 28.4}, stopped_by=None)
    second = write_run(tmp_path / "second", curves=0.5, test={"bleu": 14.2}, stopped_by="SIGTERM")
    return [first, second], report(tmp_path, [first, second])


def rows(page: str, section: str) -> dict[str, list[str]]:
    """Cells of the rows of a section's tables, by row header; key "": the cells of the head."""
    part = page[page.index(f'<section id="{section}"') :].partition("</section>")[0]
    found = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', part)
    cells = {head: re.findall("<td>(.*?)</td>", row) for head, row in found}
    return {"": re.findall('<th scope="col">(.*?)</th>', part), **cells}


def svg(url: str) -> ElementTree.Element:
    return ElementTree.fromstring(base64.b64decode(url.partition("base64,")[2]))


def charts(page: str) -> dict[str, tuple[ElementTree.Element, str]]:
    """Picture and alt text of each chart, by caption."""
    figure = r'<figure><figcaption>(.*?)</figcaption><img src="(.*?)" alt="(.*?)">'
    return {name: (svg(url), html.unescape(alt)) for name, url, alt in re.findall(figure, page)}


def lines(picture: ElementTree.Element) -> list[tuple[str, bool, float, np.ndarray]]:
    """Each curve of a chart: color, whether its points are marked, opacity, points (right, up)."""
    found = []
    for group in picture.iter(f"{SVG}g"):
        path = group.find(f"{SVG}path")
        if not re.fullmatch(r"line2d_\d+", group.get("id", "")) or path is None:
            continue
        style = dict(re.findall(r"([a-z-]+): ([^;]+)", path.get("style", "")))
        if "clip-path" in path.attrib and style.get("stroke") in (BLUE, ORANGE):
            points = re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))
            opacity = float(style.get("stroke-opacity", 1))
            is_marked = group.find(f"{SVG}g") is not None
            found.append((style["stroke"], is_marked, opacity, np.array(points, float) * (1, -1)))
    return found


def test_curves_show_the_values_of_each_run_at_their_steps(two):
    """Colors stand for runs, dots for the dev set; some scales are logarithmic."""
    (first, second), page = two
    fields = {
        "Loss": ("loss", "dev_loss", False),
        "Perplexity": ("perplexity", "", True),
        "BLEU": ("", "dev_bleu", False),
        "Learning rate": ("learning_rate", "", False),
        "Gradient norm": ("gradient_norm", "", True),
    }
    found = charts(page)
    assert [*found] == [*fields]
    for title, (train, dev, is_log) in fields.items():
        picture, alt = found[title]
        expected, said = [], []
        for name, color, scale in ((first, BLUE, 1.0), (second, ORANGE, 0.5)):
            for kind, field, entries in (("train", train, TRAIN), ("dev", dev, DEV)):
                if field:
                    values = [scale * entry[field] for entry in entries.values()]
                    expected.append((color, kind == "dev", [*entries], values))
                    said.append(f"{name} ({kind}): {values[-1]:.4g} at step 4")
        assert alt == f"{title} by step. {'; '.join(said)}."
        drawn = lines(picture)
        assert [(color, dots) for color, dots, *_ in drawn] == [each[:2] for each in expected]
        for _, dots, opacity, _ in drawn:
            assert opacity == 1 if dots else opacity < 1  # "Pale lines show training"
        points = np.concatenate([points for *_, points in drawn])
        steps, values = (np.concatenate([each[i] for each in expected]) for i in (2, 3))
        for place, numbers in zip(points.T, (steps, np.log(values) if is_log else values)):
            slope, at_0 = np.polyfit(numbers, place, 1)
            assert slope > 0
            np.testing.assert_allclose(slope * numbers + at_0, place, atol=0.01)
        texts = [text.text for text in picture.iter(f"{SVG}text")]
        assert "step" in texts


def test_each_run_has_the_color_of_its_curves_its_status_and_its_name(two):
    runs, page = two
    header = re.findall(r'background: (#\w+)"></span><strong>(.*?)</strong>\s*(.*?)</li>', page)
    statuses = ["finished, step 4 of 100,000", "stopped by SIGTERM, step 4 of 100,000"]
    assert header == [*zip((BLUE, ORANGE), runs, statuses)]
    assert f"<title>Training report: {runs[0]}, {runs[1]}</title>" in page
    assert re.search(r"Generated 20\d\d-\d\d-\d\d \d\d:\d\d UTC", page)


def test_every_run_has_its_own_column(two):
    runs, page = two
    results = rows(page, "results")
    assert results[""] == ["result", *runs]
    expected = {
        "best dev_loss": ["2", "1"],
        "best dev_bleu": ["30", "15"],
        "dev_loss": ["2.5", "1.25"],
        "test.bleu": ["28.4", "14.2"],
        "loss": ["3", "1.5"],
        "last entry": ["2027-01-15 12:00 UTC"] * 2,
    }
    assert {name: results[name] for name in expected} == expected


def test_a_field_that_only_one_run_has_stays_in_its_column(tmp_path):
    given = [{}, {"note": 7}], [{"note": 7}, {}]
    for number, summaries in enumerate(given):
        runs = [
            write_run(tmp_path / f"{number}-{place}", test={"bleu": 1}, **summary)
            for place, summary in enumerate(summaries)
        ]
        cells = rows(report(tmp_path, runs), "results")["note"]
        assert cells == ["7" if summary else "" for summary in summaries]


def test_settings_are_in_the_column_of_their_run_and_the_default_is_last(tmp_path):
    def config(**training: Any) -> Config:
        return dataclasses.replace(
            Config(), training=dataclasses.replace(Config().training, **training)
        )

    first = write_run(tmp_path / "a", config=config(steps=7, eval_every=3))
    second = write_run(tmp_path / "b", config=config(steps=8, eval_every=3))
    page = report(tmp_path, [first, second])
    assert rows(page, "settings")[""][:4] == ["setting", first, second, "default"]
    counts = dict(re.findall(r"<summary>(.*?) \((\d+)\)</summary>", page))
    parts = re.split(r"<summary>", page)[1:]
    names = [re.findall(r'<th scope="row">(.*?)</th>', part) for part in parts]
    assert [int(count) for count in counts.values()] == [len(each) for each in names]
    assert names[:2] == [["training.steps"], ["training.eval_every"]]
    settings = rows(page, "settings")
    assert settings["training.steps"] == ["7", "8", "100,000"]
    default = f"{Config().training.eval_every:,}"
    assert settings["training.eval_every"] == ["3", "3", default]
    [before, *others] = re.findall(r"<details( open)?>", page)
    assert before == " open" and not any(others)  # the differences


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_setting_differs_if_any_run_has_another_value(count):
    default = Config().seed
    for seeds in product((default, default + 1), repeat=count):
        tables = facts.setting_tables([dataclasses.replace(Config(), seed=seed) for seed in seeds])
        [title] = [title for title, table in tables.items() if "seed" in {row[0] for row in table}]
        chosen = "Changed from the default" if seeds[0] != default else "Default"
        assert title == ("Different between runs" if len({*seeds}) > 1 else chosen)


@pytest.mark.parametrize(
    "values",
    [
        (0.0, 0.0, 0.0),
        pytest.param((0.0, 2.0, 0.0), marks=pytest.mark.exhaustive),
        pytest.param((3.0, 0.0, 4.0), marks=pytest.mark.exhaustive),
    ],
)
def test_zero_is_a_value_and_null_is_none(tmp_path, values):
    """In every curve, result and setting. Null, a value that is not finite, is left out."""
    train = ("loss", "perplexity", "learning_rate", "gradient_norm", "tokens_per_second")
    both = [("train", name) for name in train]
    both += [("dev", f"dev_{name}") for name in ("loss", "perplexity", "bleu")]
    config = dataclasses.replace(Config(), model=dataclasses.replace(Config().model, dropout=0.0))
    run = write_run(tmp_path / "a", config=config, test={"bleu": 0.0}, train_seconds=0, few=[0, 0])
    above = dict.fromkeys(("perplexity", "dev_perplexity", "gradient_norm"), 1)  # log scales

    def plus(value: float | None, name: str) -> float | None:
        return None if value is None else value + above.get(name, 0)

    entries = [
        {"kind": kind, "step": step, "time": 1.8e9, name: plus(value, name)}
        for step, value in zip((0, 1, 2, 4), (values[0], None, *values[1:]), strict=True)
        for kind, name in both
    ]
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    page = report(tmp_path, [run])
    found = charts(page)
    assert len(found) == 6
    for title, (picture, alt) in found.items():
        shown = [each for each in both if each[1].replace("_", " ").endswith(title.lower())]
        last = [(kind, plus(values[-1], name)) for kind, name in shown]
        said = [f"{run} ({kind}): {value:g} at step 4" for kind, value in last]
        assert shown and alt == f"{title} by step. {'; '.join(said)}."
        assert [len(points) for *_, points in lines(picture)] == [3] * len(shown)
    results = rows(page, "results")
    assert results["loss"] == results["dev_bleu"] == [f"{values[-1]:g}"]
    assert results["best dev_loss"] == [f"{min(values):g}"]
    assert results["best dev_bleu"] == [f"{max(values):g}"]
    assert (results["test.bleu"], results["train_seconds"]) == (["0"], ["0"])
    assert results["few"] == ["0, 0"]
    assert rows(page, "settings")["model.dropout"] == ["0", f"{Config().model.dropout:g}"]


@pytest.fixture
def dev(tmp_path: Path) -> Config:
    """A config with a dev set of 20 pairs, of which BLEU uses 10. The third source is blank."""
    for suffix in ("en", "de"):
        text = "".join(f"{suffix} {i}\n" for i in range(20))
        (tmp_path / f"dev.{suffix}").write_text(text.replace("en 2\n", "  \n"))
    dev = PairsConfig("text", (str(tmp_path / "dev.en"),), (str(tmp_path / "dev.de"),))
    config = Config(decoding=DecodingConfig(beam_size=2))
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, dev=dev),
        training=dataclasses.replace(config.training, bleu_sentences=10),
    )


@pytest.fixture
def models(monkeypatch) -> list[tuple[str, str]]:
    """Models that add the name of their run. Returns the (run, text) pairs whose attention was
    computed.
    """
    asked = []

    def load(workdir, **_):
        name = Path(workdir).name
        return SimpleNamespace(
            name=name, translate=lambda lines: [f"{line.text} by {name}" for line in lines]
        )

    def attend(translator, text, **_):
        asked.append((translator.name, text))
        return sentence(f"{translator.name}:{text[:9]}")

    monkeypatch.setattr(Translator, "from_workdir", load)
    monkeypatch.setattr(runs_module, "sentence_attention", attend)
    return asked


def sentence(name: str, layers: int = 2, heads: int = 3) -> SentenceAttention:
    """Attention over distinct tokens: 3 source tokens and 2 target tokens."""
    source, target = (f"{name}-s1", f"{name}-s2", "</s>"), (f"{name}-t1", "</s>")
    weights = np.random.default_rng(0).random((layers, heads, 3, 3), np.float32)
    return SentenceAttention(source, target, weights, weights[..., :2, :2], weights[..., :2, :])


def cards(page: str) -> list[list[tuple[str, str]]]:
    found = re.findall("<article><dl>(.*?)</dl>", page, re.DOTALL)
    items = [re.findall("<dt>(.*?)</dt><dd.*?>(.*?)</dd>", card) for card in found]
    return [
        [(head, re.sub("<del>.*?</del>|</?ins>", "", text)) for head, text in card]
        for card in items
    ]


@pytest.mark.parametrize(
    ("samples", "numbers"),
    [(3, [0, 4, 7]), pytest.param(9, [0, 1, *range(3, 10)], marks=pytest.mark.exhaustive)],
)
def test_samples_are_spread_over_the_dev_lines_with_bleu(tmp_path, dev, models, samples, numbers):
    """Lines with an empty side are left out. Source, reference and translations belong together."""
    runs = [write_run(tmp_path / name, config=dev) for name in ("a", "b")]
    page = report(tmp_path, runs, "--samples", str(samples))
    found = [[(head, " ".join(text.split())) for head, text in card] for card in cards(page)]
    assert found == [
        [("source", f"en {i}"), ("reference", f"de {i}")]
        + [(run, f"en {i} by {Path(run).name}") for run in runs]
        for i in numbers
    ]
    assert models == [("a", "en 0"), ("b", "en 0")]  # attention for the first sample


def test_all_dev_lines_can_be_samples_without_bleu(tmp_path, dev, models):
    config = dataclasses.replace(dev, training=dataclasses.replace(dev.training, bleu_sentences=0))
    page = report(tmp_path, [write_run(tmp_path / "a", config=config)], "--samples", "99")
    assert len(cards(page)) == 19 and dict(cards(page)[-1])["source"] == "en 19"


def test_given_texts_replace_the_first_sample_in_attention(tmp_path, dev, models):
    run = write_run(tmp_path / "a", config=dev)
    page = report(tmp_path, [run], "--samples", "2", "--text", "one", "two")
    assert models == [("a", "one"), ("a", "two")]
    heads = re.findall(r'<h3>(.*?): <span dir="auto">(.*?)</span></h3>', page)
    assert heads == [(run, "one"), (run, "two")]
    models.clear()
    page = report(tmp_path, [run], "--samples", "0", "--text", "one")
    assert models == [("a", "one")] and not cards(page)


def test_eight_samples_by_default(tmp_path, dev, models):
    page = report(tmp_path, [write_run(tmp_path / "a", config=dev)], "--text", "one")
    assert len(cards(page)) == 5  # every second of nine
    assert program.Arguments.samples == 8


def test_a_failure_belongs_to_its_run_and_leaves_the_others(tmp_path, dev, models):
    without = dataclasses.replace(dev, data=dataclasses.replace(dev.data, dev=PairsConfig()))
    runs = [write_run(tmp_path / "a", config=without), write_run(tmp_path / "b", config=dev)]
    page = report(tmp_path, runs, "--samples", "1")
    [section] = re.findall(r'<section class="missing">(.*?)</section>', page, re.DOTALL)
    problems = re.findall("<li>(.*?)</li>", section)
    assert problems == [f"{runs[0]}: The run has no dev set to translate."]
    assert [dict(card).keys() - {"source", "reference"} for card in cards(page)] == [{runs[1]}]


def test_attention_maps_show_the_last_layer_with_queries_down_and_keys_across(
    tmp_path, monkeypatch
):
    """Each title has the tokens and weights of its kind."""
    drawn = []

    def draw(queries, keys, weights_NHTS, **settings):
        figure = attention.attention_maps(queries, keys, weights_NHTS, **settings)
        drawn.append([np.asarray(axes.images[0].get_array()) for axes in figure.axes[:-1]])
        return figure

    monkeypatch.setattr(page_module, "attention_maps", draw)
    attended = sentence("x")
    run = Run("r", tmp_path, Config(), [], attention={"text": attended})
    page = render([run]).decode()
    maps = re.findall(r'<summary>([A-Z][a-z-]* ?[a-z-]*)</summary>.*?<img src="(.*?)"', page, re.S)
    kinds = {
        "Cross-attention": "cross",
        "Encoder self-attention": "encoder",
        "Decoder self-attention": "decoder",
    }
    assert [title for title, _ in maps] == [*kinds]
    for (title, url), images in zip(maps, drawn, strict=True):
        queries, keys, weights_NHTS = attended.of(kinds[title])
        np.testing.assert_array_equal(images, weights_NHTS[-1])  # no axes are swapped
        texts = [(text.text or "").strip() for text in svg(url).iter(f"{SVG}text")]
        assert {f"layer 2, head {head}" for head in (1, 2, 3)} <= {*texts}
        assert not any(text.startswith("layer 1") for text in texts)
        for token in {*queries, *keys}:  # keys below each head, queries left of the first
            assert texts.count(token) == queries.count(token) + 3 * keys.count(token)


def test_attention_maps_have_up_to_60_tokens(tmp_path):
    tokens = tuple(f"t{i:02}" for i in range(70))
    weights = np.ones((1, 1, 70, 70), np.float32)
    attended = SentenceAttention(tokens, tokens, weights, weights, weights)
    run = Run("r", tmp_path, Config(), [], attention={"text": attended})
    url = re.findall(r'<img src="(.*?)"', render([run]).decode())[0]
    texts = [(text.text or "").strip() for text in svg(url).iter(f"{SVG}text")]
    assert [text for text in texts if text in tokens] == [*tokens[:60]] * 2


@pytest.mark.parametrize("given", [None, "cuda"])
def test_models_of_a_report_run_on_the_cpu_unless_told_otherwise(tmp_path, monkeypatch, given):
    """Training may be using the accelerator. JAX reads the variable when it starts."""
    monkeypatch.setenv("JAX_PLATFORMS", given or "")  # restores the variable afterwards
    if given is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    report(tmp_path, [write_run(tmp_path / "a")])
    assert os.environ["JAX_PLATFORMS"] == (given or "cpu")


@pytest.mark.parametrize("stopped_by", [None, "SIGINT"])
def test_a_run_without_an_end_is_unfinished(tmp_path, stopped_by):
    done = report(tmp_path, [write_run(tmp_path / "a", stopped_by=stopped_by, train_seconds=1.5)])
    status = "stopped by SIGINT" if stopped_by else "finished"
    assert rows(done, "results")["status"] == [f"{status}, step 4 of 100,000"]
    assert rows(done, "results")["train_seconds"] == ["1.5"]
    assert rows(done, "results")["stopped_by"] == [str(stopped_by)]


def test_text_limits_of_attention_are_inclusive(monkeypatch):
    """1,024 tokens, EOS included, are allowed; 1,025 are not."""
    config = ModelConfig()
    assert attention._padded("text", [5] * 1023 + [2], config).shape == (1, 1024)
    with pytest.raises(
        UserError, match="text has 1025 tokens, EOS included; expected at most 1024"
    ):
        attention._padded("text", [5] * 1024 + [2], config)
    padded = np.asarray(attention._padded("text", [5] * 64 + [2], config))
    assert padded.shape == (1, 128) and padded[0, 63:66].tolist() == [5, 2, 0]


def test_a_rows_color_bar_and_scale_are_shared_by_all_maps():
    weights = np.zeros((2, 2, 1, 2))
    weights[:, :, 0] = [[[0.5, 0.1], [0.2, 0.8]], [[0.3, 0.4], [1.0, 0.9]]]
    figure = attention.attention_maps("q", "kl", weights, layers=[1], title="a title")
    *maps, bar = figure.axes
    assert [axes.images[0].get_clim() for axes in maps] == [(0, 0.8)] * 2  # not layer 2's
    assert bar.get_ylabel() == "weight" and figure.get_suptitle() == "a title"


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_heat_map_programs_title_and_flags(monkeypatch, tmp_path, kind):
    given: dict[str, Any] = {}

    def attend(translator, text, *, target=None):
        given.update(text=text, target=target)
        return sentence("x")

    monkeypatch.setattr(Translator, "from_workdir", lambda *_, **__: None)
    monkeypatch.setattr(attention, "sentence_attention", attend)
    output = tmp_path / "a.svg"
    flags = ["--workdir", "w", "--text", "one", "--target", "eins", "--output", str(output)]
    more = ["--kind", kind, "--layers", "-1", "--heads", "3", "1"]
    assert heat_maps.main([*flags, *more]) == 0
    assert given == {"text": "one", "target": "eins"}
    texts = [(each.text or "").strip() for each in ElementTree.parse(output).iter(f"{SVG}text")]
    titles = {
        "encoder": "encoder self-attention",
        "decoder": "decoder self-attention",
        "cross": "cross-attention, target to source",
    }
    assert titles[kind] in texts and not {*titles.values()} - {titles[kind]} & {*texts}
    heads = [text for text in texts if text.startswith("layer ")]
    assert heads == ["layer 2, head 3", "layer 2, head 1"]
    assert heat_maps.Arguments("w", "t", "o").kind == "cross"


def test_words_missing_from_a_translation_precede_words_it_adds(tmp_path):
    pairs = {("source", "a man sleeps here"): "a dog sleeps"}
    page = render([Run("r", tmp_path, Config(), [], translations=pairs)]).decode()
    assert "a <del>man</del> <ins>dog</ins> sleeps <del>here</del>" in page
    assert "<del>missing</del>, <ins>added</ins>" in page  # the legend


@pytest.mark.parametrize("blank", [" ", ""], ids=["words", "characters"])
@pytest.mark.parametrize("length", [9, 201, 600])
def test_only_differences_are_marked_however_long_the_lines(tmp_path, length, blank):
    """Few distinct words or characters, each of them frequent, as in Chinese."""
    units = "的一是不了人我在有他"
    text = [units[i] for i in np.random.default_rng(length).integers(0, 10, length)]
    middle = length // 2
    edits = {  # translation: what it lacks, what it adds
        "equal": (text, [], []),
        "changed": ([*text[:middle], "新", *text[middle + 1 :]], [text[middle]], ["新"]),
        "first": (["新", *text], [], ["新"]),
        "last": ([*text, "新"], [], ["新"]),
        "shorter": (text[:-5], [blank.join(text[-5:])], []),
    }
    for name, (translated, lacks, adds) in edits.items():
        pairs = {(name, blank.join(text)): blank.join(translated)}
        page = render([Run("r", tmp_path, Config(), [], translations=pairs)]).decode()
        [card] = re.findall("<article>.*?</article>", page, re.DOTALL)
        [diff] = re.findall(r"<dt>r</dt>\s*<dd[^>]*>(.*?)</dd>", card, re.DOTALL)
        marked = [[part.strip() for part in re.findall(f"<{t}>(.*?)</{t}>", diff)] for t in DIFF]
        assert marked == [lacks, adds]
        for tag, whole in zip(reversed(DIFF), (text, translated), strict=True):
            kept = re.sub(f"<{tag}>.*?</{tag}>", "", diff).replace(" ", "")
            assert re.sub("<.*?>", "", kept).strip() == "".join(whole)


def test_numbers_of_a_report_have_six_digits(tmp_path):
    run = write_run(tmp_path / "a", exact=1234567, rounded=math.pi * 1e-4, several=[1, 2])
    results = rows(report(tmp_path, [run]), "results")
    assert [results[name] for name in ("exact", "rounded", "several")] == [
        ["1,234,567"],
        ["0.000314159"],
        ["1, 2"],
    ]


def test_links_lead_to_the_sections_of_the_page_alone(tmp_path, dev, models):
    """A section without content has no link. The page needs no network and runs no scripts."""
    hostile = "<script>alert(1)</script><img src='http://example.org/a.png'>"
    note = {"environment": {"python": hostile}}
    run = write_run(tmp_path / "a", config=dev, curves=1, note=hostile, **note)
    names = ["curves", "results", "translations", "attention", "settings", "environment"]
    for flags, missing in (
        (("--samples", "2", "--text", hostile), []),
        (("--samples", "0"), ["translations", "attention"]),
    ):
        page = report(tmp_path, [run], *flags)
        links = re.findall(r'<a href="#(.*?)">(.*?)</a>', page)
        expected = [name for name in names if name not in missing]
        assert links == [(name, name.capitalize()) for name in expected]
        assert re.findall(r'id="(.*?)"', re.sub(r'src=".*?"', "", page)) == expected
        assert "<script" not in page and "<img src='" not in page
        assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in page
        sources = re.findall(r'(?:src|href)="(.{9})', page)
        assert all(source.startswith(("data:imag", "#")) for source in sources)
        assert html.escape(hostile, quote=False).replace("'", "&#39;") in page
        assert page.startswith("<!DOCTYPE html>") and '<meta charset="utf-8">' in page


def test_the_environment_is_that_of_the_last_start(tmp_path):
    run = write_run(tmp_path / "a")
    starts = [{"kind": "start", "step": i, "environment": {"python": f"3.{i}"}} for i in (11, 12)]
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(s) + "\n" for s in starts))
    assert rows(report(tmp_path, [run]), "environment")["python"] == ["3.12"]


def test_learned_positions_limit_attention_maps():
    tokenizer = train_tokenizer(lines_of_words(12))
    model = make_model(tokenizer, positions="learned", max_positions=20)
    translator = Translator(model, tokenizer, DecodingConfig(max_source_length=16))
    word = next(word for word in WORDS if len(tokenizer.source.encode([word])[0]) == 1)
    with pytest.raises(UserError, match="text has 21 tokens, EOS included; expected at most 20"):
        attention.sentence_attention(translator, " ".join([word] * 20), target="ONE")
