"""Runs on several pairs of languages: resuming, devices, shares, and BLEU by pair."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from number_names import number_names
from runs import (
    ONE,
    assert_same_losses,
    assert_same_states,
    changed,
    entries,
    no_evaluation,
    tiny,
)

from transformer_jax.errors import UserError
from transformer_jax.settings.config import Config, PairsConfig
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.loop import train
from transformer_jax.training.prepare import prepare
from transformer_jax.translation.requests import Request
from transformer_jax.translation.translator import Translator

PAIRS = [("en", "de"), ("de", "en"), ("en", "en")]
SHARES = (1.0, 2.0, 1.0)


def write_lines(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for split, count in (("train", 300), ("dev", 12), ("test", 6)):
        for code, lines in zip(("en", "de"), zip(*number_names(split, count))):
            (folder / f"{split}.{code}").write_text("".join(f"{line}\n" for line in lines))


def pairs_of(split: str, pairs: list[tuple[str, str]] = PAIRS, **settings: Any) -> PairsConfig:
    sources, targets = zip(*pairs)
    files = [tuple(f"{split}.{code[:2]}" for code in side) for side in (sources, targets)]
    languages = {"source_languages": sources, "target_languages": targets}
    return PairsConfig("text", *files, **(languages | settings))


def config_of(folder: Path, **training: Any) -> Config:
    write_lines(folder)
    config = tiny(**{"steps": 8, "checkpoint_every": 4, "eval_every": 8} | training)
    data = {"root": str(folder), "train": pairs_of("train", weights=SHARES)}
    data |= {"dev": pairs_of("dev"), "test": pairs_of("test")}
    return changed(config, data=data, tokenizer={"new_languages": ("en", "de")})


def test_runs_resume_bit_exactly(tmp_path: Path) -> None:
    config = no_evaluation(config_of(tmp_path / "text"))
    train(config, tmp_path / "whole", devices=ONE)
    for steps in (4, 8):
        part = changed(config, training={"steps": steps})
        train(part, tmp_path / "resumed", devices=ONE)
    assert_same_states(config, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.devices(8)
def test_runs_are_equal_on_eight_devices(tmp_path: Path) -> None:
    config = no_evaluation(config_of(tmp_path / "text"))
    train(config, tmp_path / "whole", devices=ONE)
    train(config, tmp_path / "eight")
    assert_same_losses(tmp_path)


@pytest.mark.parametrize("count", [3, 12])
def test_shares_of_pairs_are_exact_and_a_batch_mixes_them(count: int, tmp_path: Path) -> None:
    pairs = PAIRS if count == 3 else [(f"en{i}", f"de{i}") for i in range(12)]
    weights = SHARES if count == 3 else tuple(float(1 + i % 3) for i in range(12))
    targets = [target for _, target in pairs]
    config = no_evaluation(config_of(tmp_path / "text"))
    config = changed(
        config,
        data={"train": pairs_of("train", pairs, weights=weights)},
        tokenizer={"new_languages": tuple(dict.fromkeys(code for pair in pairs for code in pair))},
    )
    with prepare(config, tmp_path / "run", devices=ONE) as run:
        tags = run.tokenizer.source.ids([f"<2{code}>" for code in dict.fromkeys(targets)])
        batches = [run.plan.batch(step).source_BS for step in range(run.plan.steps_per_epoch)]
    counts = np.array([[(batch == tag).sum() for tag in tags] for batch in batches])
    expected = np.zeros(len(tags))
    for target, weight in zip(targets, weights):
        expected[list(dict.fromkeys(targets)).index(target)] += weight
    shares = counts.sum(0) / counts.sum()
    np.testing.assert_array_equal(shares, expected / expected.sum())
    assert (np.count_nonzero(counts, axis=1) == len(tags)).mean() > 0.5


def test_metrics_summary_and_report_have_bleu_and_chrf_of_each_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path / "text", bleu_sentences=6)
    summary = train(config, tmp_path / "run", devices=ONE)
    names = ["en-de", "de-en", "en-en"]
    assert list(summary["test"]["languages"]) == names
    assert [each["sentences"] for each in summary["test"]["languages"].values()] == [6, 6, 6]
    [entry] = entries(tmp_path / "run", "dev")
    for name in names:
        assert {f"dev_bleu_{name}", f"dev_chrf_{name}"} <= entry.keys()
        assert summary[f"best_dev_chrf_{name}"] == entry[f"dev_chrf_{name}"]
    said = capsys.readouterr().err
    assert "en-de: BLEU" in said and ", en-en " in said
    # Decoding with a target language is what the run scored.
    translator = Translator.from_workdir(tmp_path / "run")
    lines = (tmp_path / "text" / "test.en").read_text().splitlines()[:2]
    as_tag = translator.translate([f"<2de> {line}" for line in lines])
    assert translator.translate([Request(line, target_language="de") for line in lines]) == as_tag
    assert [*Tokenizer.load(tmp_path / "run" / "model").languages.tokens] == ["en", "de"]


def test_bad_input_is_named_before_training(tmp_path: Path) -> None:
    config = config_of(tmp_path / "text")
    run = tmp_path / "run"
    lacking = changed(config, data={"dev": pairs_of("dev", PAIRS[:2])})
    with pytest.raises(
        UserError, match=r"data.dev has no pairs with the languages en-en, but data"
    ):
        train(lacking, run, devices=ONE)
    wrong = [*PAIRS[:2], ("en", "fr")]
    for name in ("train", "test"):
        data = {name: pairs_of(name, wrong), "dev": PairsConfig()}
        (tmp_path / "text" / f"{name}.fr").write_text("un\n" * (300 if name == "train" else 6))
        message = rf"data.{name}: target_language is 'fr'; expected one of: en, de\."
        with pytest.raises(UserError, match=message):
            train(changed(config, data=data), tmp_path / f"run-{name}", devices=ONE)
    rows = [{"a": "one", "b": "eins", "to": code} for code in ("de", "xx")]
    (tmp_path / "text" / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = PairsConfig("jsonl", ("rows",), (), "a", "b", target_language_field="to")
    with pytest.raises(UserError, match=r"rows, line 2: target_language is 'xx'; expected one of"):
        train(changed(config, data={"test": fields}), tmp_path / "rows", devices=ONE)
    relative = dataclasses.replace(config.tokenizer, new_languages=("en", "de:en"))
    with pytest.raises(UserError, match="tokenizer.new_languages is .*codes without a relative"):
        train(changed(config, tokenizer=relative), run, devices=ONE)
    frozen = changed(config, training={"freeze": ("*",)})  # only fine-tuning has new rows
    with pytest.raises(UserError, match="training.freeze is .*, which matches every parameter"):
        train(frozen, tmp_path / "frozen", devices=ONE)
    assert jax.tree.leaves(list(run.glob("checkpoints/*"))) == []
