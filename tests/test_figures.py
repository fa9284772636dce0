"""Contents of plots, and the plotting program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from random_models import lines_of_words, make_model, train_tokenizer

from transformer_jax import (
    Config,
    DecodingConfig,
    Translator,
    UserError,
    save_model,
)
from transformer_jax.report import heat_maps as program
from transformer_jax.report.attention import attention_maps, save_picture, sentence_attention

ROOT = Path(__file__).resolve().parents[1]


def weights(*shape: int) -> np.ndarray:
    exponentials = np.exp(2 * np.random.default_rng(0).normal(size=shape))
    return (exponentials / exponentials.sum(axis=-1, keepdims=True)).astype(np.float32)


def labels(ticks):
    return [label.get_text() for label in ticks]


def texts_in(svg: Path) -> list[str]:
    elements = ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}text")
    return [(element.text or "").strip() for element in elements]


def test_a_map_shows_the_weights_of_its_layer_and_head():
    weights_NHTS = weights(2, 3, 4, 5)
    figure = attention_maps("abcd", "vwxyz", weights_NHTS, layers=[-1], heads=[3, 1])
    maps = figure.axes[:-1]  # the last is the color bar
    assert [axes.get_title() for axes in maps] == ["layer 2, head 3", "layer 2, head 1"]
    for axes, head in zip(maps, (2, 0), strict=True):
        [image] = axes.images
        np.testing.assert_array_equal(image.get_array(), weights_NHTS[1, head])
        assert image.get_clim() == (0, weights_NHTS[1, [0, 2]].max())
        assert labels(axes.get_xticklabels()) == [*"vwxyz"]
    assert labels(maps[0].get_yticklabels()) == [*"abcd"]


def test_weights_must_have_the_shape_of_the_tokens():
    for shape in ((2, 3, 2), (1, 1, 2, 3), (0, 1, 3, 2)):
        with pytest.raises(UserError, match=r"weights_NHTS has shape .*\(layers, heads, 3, 2\)"):
            attention_maps("abc", "de", np.ones(shape))


@pytest.mark.parametrize(("length", "heads"), [(1, 1), (5, 8), (60, 1)])
def test_text_stays_inside_the_figure(length, heads):
    tokens = [f"▁token{i}" for i in range(length)]
    figure = attention_maps(tokens, tokens, weights(1, heads, length, length), title="title")
    figure.draw_without_rendering()
    drawn = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
    boxes = [text.get_window_extent() for text in drawn if text.get_text().strip() in tokens]
    assert len(boxes) >= 2 * length
    width, height = figure.bbox.size
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


def test_svg_keeps_text_of_any_script(tmp_path):
    tokens = ["▁我", "爱", "مرحبا", "🙂", "$x^2$", "<s>&"]
    save_picture(attention_maps(tokens, tokens, weights(1, 1, 6, 6)), tmp_path / "a.svg")
    texts = texts_in(tmp_path / "a.svg")
    assert all(texts.count(token) == 2 for token in tokens)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    lines = lines_of_words(12)
    tokenizer = train_tokenizer(lines)
    model = make_model(tokenizer, num_layers=2, num_decoder_layers=3)
    decoding = DecodingConfig(beam_size=2, max_extra_length=6, max_source_length=16, batch_size=1)
    config = Config(model=model.config, decoding=decoding)
    save_model(folder, config, model, tokenizer)
    return folder


@pytest.fixture(scope="module")
def translator(workdir):
    found = Translator.from_workdir(workdir, batch_size=1)
    found.translate(["one"])  # compiles and logs that before any program runs
    return found


@pytest.fixture
def draw(workdir, translator, tmp_path, monkeypatch, capsys):
    """Run the program; returns (exit status, output file, stderr). The model is loaded once."""
    monkeypatch.setattr(Translator, "from_workdir", lambda *_, **__: translator)

    def run(*flags, text="one two three", output="a.svg"):
        file = tmp_path / output
        where = ["--workdir", str(workdir), "--text", text, "--output", str(file)]
        status = program.main([*where, *map(str, flags)])
        return status, file, capsys.readouterr().err

    return run


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_maps_of_all_layers_and_heads(draw, translator, kind):
    status, file, err = draw("--kind", kind)
    assert (status, err) == (0, "")
    texts = texts_in(file)
    queries, keys, weights_NHTS = sentence_attention(translator, "one two three").of(kind)
    layers, heads = weights_NHTS.shape[:2]
    for layer in range(1, layers + 1):
        for head in range(1, heads + 1):
            assert f"layer {layer}, head {head}" in texts
    for token in {*queries, *keys}:
        assert texts.count(token) == layers * queries.count(token) + heads * keys.count(token)


def test_output_formats(draw):
    for output, start in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")):
        status, file, _ = draw("--heads", "1", "--layers", "1", output=output)
        assert status == 0 and file.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads", "3"], "head is 3; expected 1 to 2, or -1 (the last) to -2."),
        (["--layers", "0"], "layer is 0; expected 1 to 3, or -1 (the last) to -3."),
        (["--text", "  "], "text is '  '; expected a sentence."),
        (["--output", "a.bmp"], "output is 'a.bmp': Format 'bmp' is not supported"),
        (["--output", "a"], "output is 'a': Format '' is not supported"),
        (["--output", "no/folder/a.svg"], "'no/folder/a.svg'"),
    ],
)
def test_invalid_flags_are_one_line_errors(draw, flags, message):
    status, file, err = draw(*flags)
    assert status == 2 and not file.exists()
    assert err.splitlines()[-1].startswith(f"error: {message}")


def test_the_program_reads_a_work_directory(workdir, tmp_path, capsys):
    file = tmp_path / "a.svg"
    flags = ["--text", "one two", "--target", "TWO", "--output", str(file), "--heads", "1"]
    assert program.main(["--workdir", str(workdir), *flags]) == 0
    assert "▁TWO" in texts_in(file)
    capsys.readouterr()
    assert program.main(["--workdir", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_documented_commands_work(draw, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    documents = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    lines = "".join(documents).replace("\\\n", " ").splitlines()
    command = r" {4}python -m transformer_jax\.report\.heat_maps (.*?)(?:  #.*)?"
    commands = {found[1] for line in lines if (found := re.fullmatch(command, line))}
    assert len(commands) >= 3
    for number, flags in enumerate(commands):
        words = shlex.split(flags.replace("--layers 5", "--layers 2"))
        place = words.index("--output") + 1
        words[place] = str(tmp_path / f"{number}{Path(words[place]).suffix}")
        assert program.main(words) == 0 and Path(words[place]).is_file()
