"""Pictures: what they show, at any length and in any script, and the program's own."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from transformer_jax.config import Config, OptimizerConfig, TrainingConfig
from transformer_jax.config_io import to_json
from transformer_jax.errors import UserError
from transformer_jax.pictures import __main__ as program
from transformer_jax.pictures.drawing import attention_lines, attention_maps, save_picture
from transformer_jax.training.optimizer import learning_rate_schedule

ROOT = Path(__file__).resolve().parents[1]
DRAWINGS = (attention_maps, attention_lines)


def weights(*shape: int) -> np.ndarray:
    exponentials = np.exp(2 * np.random.default_rng(0).normal(size=shape))
    return (exponentials / exponentials.sum(axis=-1, keepdims=True)).astype(np.float32)


def texts_of(figure):
    hidden = [axis for axes in figure.axes if not axes.axison for axis in (axes.xaxis, axes.yaxis)]
    ticks = {text for axis in hidden for text in axis.findobj(matplotlib.text.Text)}
    return [text for text in figure.findobj(matplotlib.text.Text) if text not in ticks]


def test_a_map_has_the_weights_of_its_layer_and_head():
    weights_NHTS = weights(2, 3, 4, 5)
    figure = attention_maps("abcd", "vwxyz", weights_NHTS, layers=[-1], heads=[3, 1])
    maps = figure.axes[:-1]  # the last is the scale
    assert [axes.get_title(loc="left") for axes in maps] == ["layer 2, head 3", "layer 2, head 1"]
    for axes, head in zip(maps, (2, 0), strict=True):
        [image] = axes.images
        np.testing.assert_array_equal(image.get_array(), weights_NHTS[1, head])
        assert image.get_clim() == (0, weights_NHTS[1, [0, 2]].max())
        assert [label.get_text() for label in axes.get_yticklabels()] == [*"abcd"]
        assert [label.get_text() for label in axes.get_xticklabels()] == [*"vwxyz"]


@pytest.mark.parametrize("draw", DRAWINGS)
def test_weights_of_another_shape_are_refused(draw):
    for shape in ((2, 3, 2), (1, 1, 2, 3), (0, 1, 3, 2)):
        with pytest.raises(UserError, match=r"weights_NHTS is of shape .*\(layers, heads, 3, 2\)"):
            draw("abc", "de", np.ones(shape))


def test_a_line_is_as_opaque_as_its_weight_and_has_its_heads_colour():
    weights_NHTS = np.maximum(weights(1, 2, 3, 4), 0.03)
    weights_NHTS[0, 1, 2, 3] = 0.001  # too faint to be drawn
    axes, _ = attention_lines("abc", "wxyz", weights_NHTS, heads=[2], only=[0, 2]).axes
    [lines] = axes.collections
    shades = lines.get_edgecolor()
    assert len(shades) == 2 * 4 - 1
    largest = weights_NHTS[0, 1, [0, 2]].max()
    np.testing.assert_allclose(shades[:4, 3], weights_NHTS[0, 1, 0] / largest, rtol=1e-6)
    assert f"largest weight {largest:.2g}" in [text.get_text() for text in texts_of(axes.figure)]
    assert [tuple(segment.round(2)[:, 0]) for segment in lines.get_segments()] == [(0.02, 0.98)] * 7
    assert [[*segment[:, 1]] for segment in lines.get_segments()][-1] == [2, 2]
    orange = matplotlib.colors.to_rgb("tab:orange")
    assert {tuple(shade[:3]) for shade in shades} == {orange}
    [legend] = [text for text in texts_of(axes.figure) if text.get_text() == "2"]
    assert legend.get_color() == pytest.approx(orange)
    faint = [text.get_text() for text in axes.texts if text.get_alpha() == 0.5]
    assert faint == ["b"]


@pytest.mark.parametrize("draw", DRAWINGS)
@pytest.mark.parametrize(("length", "heads"), [(1, 1), (5, 8), (60, 1)])
def test_no_text_touches_another_and_none_leaves_the_picture(draw, length, heads):
    tokens = [f"▁token{i}" for i in range(length)]
    figure = draw(tokens, tokens, weights(1, heads, length, length), title="t" * 60)
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    boxes = [text.get_window_extent() for text in texts_of(figure) if text.get_text()]
    assert len(boxes) > 2 * length
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
    places = np.array([[*box.min, *box.max] for box in boxes]) / figure.dpi * 72
    low, high = places[:, None, :2], places[None, :, 2:]
    overlap = np.minimum(high, high.swapaxes(0, 1)) - np.maximum(low, low.swapaxes(0, 1))
    np.fill_diagonal(overlap[..., 0], -1)
    assert overlap.min(axis=2).max() < 1  # point


@pytest.mark.parametrize("draw", DRAWINGS)
@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_any_script_is_drawn_without_a_warning(draw, ending, tmp_path, caplog):
    tokens = ["▁我", "爱", "مرحبا", "🙂", "$x^2$", "<s>&", "a\x00b\ud800\ufffe"]
    shape = weights(1, 1, 7, 7)
    file = tmp_path / f"a.{ending}"
    with caplog.at_level(logging.WARNING):
        save_picture(draw(tokens, tokens, shape), file)
    assert "م" not in caplog.text  # which matplotlib's own font has
    if ending == "svg":
        texts = [element.text for element in ElementTree.parse(file).getroot().iter()]
        for token in [*tokens[:6], "a\ufffdb\ufffd\ufffd"]:
            assert texts.count(token) == 2


def test_characters_without_a_font_are_named(monkeypatch, caplog):
    fonts = matplotlib.font_manager.fontManager
    own = [font for font in fonts.ttflist if font.name.startswith(("DejaVu", "Last Resort"))]
    monkeypatch.setattr(fonts, "ttflist", own)
    attention_maps("我a", "b🙂", weights(1, 1, 2, 2))
    [message] = caplog.messages
    assert message.startswith("No installed font has 我 🙂: .png and .pdf show boxes")


def test_the_same_picture_is_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg", "a.pdf", "b.pdf"):
        save_picture(attention_lines("ab", "cd", weights(1, 1, 2, 2)), tmp_path / name)
    for ending in ("svg", "pdf"):
        first, second = (tmp_path / f"{name}.{ending}" for name in "ab")
        assert first.read_bytes() == second.read_bytes()


def test_a_huge_picture_is_drawn_at_fewer_dots_an_inch(tmp_path, monkeypatch):
    figure = attention_lines("ab", "cd", weights(1, 1, 2, 2))
    sizes = []
    monkeypatch.setattr(type(figure), "savefig", lambda _, *args, dpi, **__: sizes.append(dpi))
    save_picture(figure, tmp_path / "a.png")
    figure.set_size_inches(1300, 4)
    save_picture(figure, tmp_path / "a.png")
    assert sizes == [150, 50]


def test_background_is_transparent(tmp_path):
    save_picture(attention_maps("ab", "cd", weights(1, 1, 2, 2)), tmp_path / "a.png")
    assert matplotlib.image.imread(tmp_path / "a.png")[0, 0, 3] == 0


def refused(capsys, *flags):
    """What tyro's box says."""
    with pytest.raises(SystemExit, match="2"):
        program.main(list(flags))
    return capsys.readouterr().err


def test_program_draws_positions(tmp_path, capsys):
    file = tmp_path / "p.svg"
    flags = "positions", "--length", "5", "--output"
    assert program.main([*flags, str(file), "--d-model", "8"]) == 0
    assert {"dimension", "position"} <= {e.text for e in ElementTree.parse(file).getroot().iter()}
    message = refused(capsys, *flags, str(file), "--d-model", "7")
    assert "d_model is 7; expected an even number." in message
    assert program.main([*flags, "p.jpeg"]) == 2
    expected = "expected a name that ends in one of .svg, .png, .pdf."
    assert capsys.readouterr().err == f"error: output is 'p.jpeg'; {expected}\n"


def test_documented_commands_work(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    documents = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    command = r"^    python -m transformer_jax\.pictures (.*?)(?:  #.*)?$"
    commands = {found for text in documents for found in re.findall(command, text, re.MULTILINE)}
    assert len(commands) >= 3
    for number, flags in enumerate(commands):
        words = flags.split()
        place = words.index("--output") + 1
        words[place] = str(tmp_path / f"{number}{Path(words[place]).suffix}")
        assert program.main(words) == 0 and Path(words[place]).is_file()


def test_program_draws_the_schedule_of_configs(tmp_path, capsys):
    config = Config(
        optimizer=OptimizerConfig(warmup_steps=10, peak_learning_rate=0.5, decay="cosine"),
        training=TrainingConfig(steps=30),
    )
    (file := tmp_path / "c.json").write_text(to_json(config))
    task = program.Schedule("s.svg", config=(str(file), "demo"), warmup_steps=(10, 20))
    curves = program._curves(task)
    *ours, _, _ = curves
    assert ours == [f"{file}: d_model 512, warm-up {warmup}" for warmup in (10, 20)]
    for (steps, rates), warmup in zip(curves.values(), (10, 20), strict=False):
        optimizer = dataclasses.replace(config.optimizer, warmup_steps=warmup)
        schedule = learning_rate_schedule(optimizer, 512, 30)
        np.testing.assert_array_equal(steps, range(1, 31))
        np.testing.assert_allclose(rates, [schedule(step - 1) for step in steps], rtol=1e-6)
    (steps, rates), *_ = program._curves(program.Schedule("s.svg", d_model=(512, 256))).values()
    assert steps[rates.argmax()] == 4000 and steps[-1] == Config().training.steps

    file = tmp_path / "s.svg"
    assert program.main(["schedule", "--output", str(file), "--steps", "100"]) == 0
    texts = {element.text for element in ElementTree.parse(file).getroot().iter()}
    assert {"d_model 512, warm-up 4,000", "learning rate", "step"} <= texts
    message = refused(capsys, "schedule", "--output", str(file), "--warmup-steps", "0")
    assert "warmup_steps is (0,); expected positive numbers." in message
