"""Runs on a mix of corpora: resuming, changed corpora and weights, empty corpora, one corpus."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from number_names import number_names
from runs import ONE, changed, no_evaluation, tiny

from transformer_jax.errors import UserError
from transformer_jax.pretrained.loading import load_model
from transformer_jax.settings.config import Config, PairsConfig
from transformer_jax.training.loop import train
from transformer_jax.training.prepare import prepare

TAGS = ("<2de>", "<2en>", "<copy>")


def mixed(root: Path, weights: tuple[float, ...] = (1.0, 1.0, 2.0), **training: Any) -> Config:
    """Three corpora of number names: 300 to German, 200 to English, 60 English to English."""
    root.mkdir(exist_ok=True)
    en, de = zip(*number_names("train", 300))
    for name, lines in (("en", en), ("de", de), ("few.en", en[:200]), ("few.de", de[:200])):
        (root / name).write_text("".join(f"{line}\n" for line in lines))
    (root / "same").write_text("".join(f"{line}\n" for line in en[:60]))
    sides = ("en", "few.de", "same"), ("de", "few.en", "same")
    pairs = PairsConfig("text", *sides, tags=TAGS, weights=weights)
    config = no_evaluation(tiny(**{"steps": 12, "checkpoint_every": 4} | training))
    return changed(
        config,
        data={"root": str(root), "train": pairs},
        tokenizer={"user_defined_symbols": TAGS},
    )


def test_a_killed_run_has_the_same_batches_and_parameters(tmp_path: Path) -> None:
    config = mixed(tmp_path / "text")
    train(config, tmp_path / "whole", devices=ONE)
    for steps in (4, 8, 12):
        train(changed(config, training={"steps": steps}), tmp_path / "parts", devices=ONE)
    whole, parts = (
        nnx.to_pure_dict(nnx.state(load_model(tmp_path / name)[1], nnx.Param))
        for name in ("whole", "parts")
    )
    chex.assert_trees_all_equal(whole, parts)


def test_shares_of_the_mix_of_a_run(tmp_path: Path) -> None:
    with prepare(mixed(tmp_path / "text"), tmp_path / "run", devices=ONE) as run:
        assert run.corpora["train"].num_pairs == sum(run.corpora["train"].sizes)
        tags = run.tokenizer.source.ids(TAGS)
        steps = range(run.plan.steps_per_epoch)
        batches = [run.plan.batch(step).source_BS for step in steps]
        counts = np.array([sum((batch == tag).sum() for batch in batches) for tag in tags])
    np.testing.assert_allclose(counts / counts.sum(), [0.25, 0.25, 0.5], atol=0.005)


def test_the_same_batches_on_eight_devices(tmp_path: Path) -> None:
    config, plans = mixed(tmp_path / "text"), []
    for count in (1, len(jax.devices())):
        work = tmp_path / str(count)
        with prepare(config, work, devices=jax.devices()[:count]) as run:
            plans.append(run.plan)
    one, all_devices = plans
    for step in range(2 * one.steps_per_epoch):
        chex.assert_trees_all_equal(one.batch(step), all_devices.batch(step))


def test_a_corpus_that_changed_since_the_start_is_an_error(tmp_path: Path) -> None:
    config = mixed(tmp_path / "text", steps=1)
    train(config, tmp_path / "run", devices=ONE)
    file = tmp_path / "text" / "same"
    file.write_text(file.read_text() + "one\n")
    with pytest.raises(UserError, match=r"The training text differs .* expected the same files"):
        train(config, tmp_path / "run", devices=ONE)


def test_other_weights_need_a_flag_and_other_tags_another_run(tmp_path: Path) -> None:
    config = mixed(tmp_path / "text", steps=1)
    train(config, tmp_path / "run", devices=ONE)
    other = mixed(tmp_path / "text", (1.0, 1.0, 1.0), steps=2)
    with pytest.raises(UserError, match=r"data.train.weights: \(1.0, 1.0, 2.0\) in the checkpoint"):
        train(other, tmp_path / "run", devices=ONE)
    assert train(other, tmp_path / "run", devices=ONE, allow_changes=True)["steps"] == 2
    pairs = dataclasses.replace(other.data.train, tags=TAGS[::-1])
    swapped = changed(other, data={"train": pairs})
    with pytest.raises(UserError, match="data.train.tags: "):
        train(swapped, tmp_path / "run", devices=ONE, allow_changes=True)


def test_a_run_cannot_become_a_mix(tmp_path: Path) -> None:
    plain = {"tags": (), "weights": ()}
    config = mixed(tmp_path / "text", steps=1)
    pairs = dataclasses.replace(config.data.train, **plain)
    train(changed(config, data={"train": pairs}), tmp_path / "run", devices=ONE)
    pairs = dataclasses.replace(pairs, weights=(1.0, 1.0, 2.0))
    with pytest.raises(UserError, match=r"a mix \(weights or temperature\) only if it was one"):
        train(
            changed(config, data={"train": pairs}),
            tmp_path / "run",
            devices=ONE,
            allow_changes=True,
        )


@pytest.mark.parametrize("settings", [{}, {"tags": (), "weights": ()}])
def test_an_empty_corpus_is_an_error_before_the_tokenizer_is_trained(
    settings: Any, tmp_path: Path
) -> None:
    """Also if the corpora are not a mix."""
    config = mixed(tmp_path / "text", steps=1)
    pairs = dataclasses.replace(config.data.train, **settings)
    config = changed(config, data={"train": pairs})
    (tmp_path / "text" / "same").write_text("")
    with pytest.raises(
        UserError, match=r"^data.train has no pairs in \('same',\). Check the files"
    ):
        train(config, tmp_path / "run", devices=ONE)
    assert not (tmp_path / "run" / "tokenizer.model").exists()
