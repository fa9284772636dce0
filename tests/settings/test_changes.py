"""Roles of settings: every setting has one, and it decides what may change when a run resumes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from transformer_jax.settings.changes import (
    changeable_settings,
    differences_in_fine_tuning,
    differences_on_resume,
    settings_of_all_processes,
)
from transformer_jax.settings.config import Config, MeshConfig, OptimizerConfig, TokenizerConfig
from transformer_jax.settings.config_files import flatten
from transformer_jax.settings.roles import Fixed, Free, setting_roles


def test_every_setting_has_a_role() -> None:
    assert setting_roles(Config).keys() == flatten(Config()).keys()


@dataclass(frozen=True)
class Section:
    width: Fixed[int] = 1
    depth: int = 2


@dataclass(frozen=True)
class Settings:
    section: Section = field(default=Section())


@dataclass(frozen=True)
class MarkedSettings:
    section: Free[Section] = field(default=Section())


def test_a_setting_without_a_role_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"section\.depth has no role"):
        setting_roles(Settings)


def test_the_mark_of_a_section_holds_for_all_its_settings() -> None:
    roles = setting_roles(MarkedSettings)
    assert [role.on_resume for role in roles.values()] == ["free", "free"]


def test_differences_that_stop_a_resume() -> None:
    old = Config()
    free = replace(
        old,
        training=replace(old.training, steps=5),
        data=replace(old.data, workers=3),
        mesh=MeshConfig(fsdp=2),
    )
    assert differences_on_resume(old, free) == []
    [seed] = differences_on_resume(old, replace(free, seed=1))
    assert seed == ("seed", 0, 1) and not seed.changeable
    [dropout] = differences_on_resume(old, replace(old, model=replace(old.model, dropout=0.3)))
    assert dropout == ("model.dropout", 0.1, 0.3) and dropout.changeable
    frozen = replace(old.training, freeze=("encoder.*",))
    [freeze] = differences_on_resume(old, replace(old, training=frozen))
    assert freeze == ("training.freeze", (), ("encoder.*",)) and freeze.changeable
    [name] = differences_on_resume(old, replace(old, optimizer=OptimizerConfig("adafactor")))
    assert name == ("optimizer.name", "adam", "adafactor") and not name.changeable


@pytest.mark.parametrize("decay", ["linear", "cosine", "a schedule of tomorrow"])
def test_the_last_step_of_a_decay_changes_only_with_a_flag(decay: str) -> None:
    optimizer = OptimizerConfig()
    object.__setattr__(optimizer, "decay", decay)
    old = Config(optimizer=optimizer)
    longer = replace(old, training=replace(old.training, steps=200_000))
    [steps] = differences_on_resume(old, longer)
    assert steps == ("training.steps", 100_000, 200_000) and steps.changeable


@pytest.mark.parametrize("decays", [("linear", "constant"), ("constant", "linear")])
def test_steps_matter_if_the_old_or_the_new_schedule_ends_with_them(
    decays: tuple[Any, Any],
) -> None:
    old, new = (Config(optimizer=OptimizerConfig(decay=decay)) for decay in decays)
    longer = replace(new, training=replace(new.training, steps=200_000))
    names = [difference.name for difference in differences_on_resume(old, longer)]
    assert names == ["optimizer.decay", "training.steps"]


def test_fine_tuning_may_change_languages_but_not_the_architecture() -> None:
    old = Config()
    tokenizer = TokenizerConfig(source_language="en", bpe_dropout=0.1)
    new = replace(old, tokenizer=tokenizer, model=replace(old.model, dropout=0.3), seed=1)
    assert differences_in_fine_tuning(old, new) == []
    new = replace(new, model=replace(old.model, num_layers=3), tokenizer=TokenizerConfig(500))
    names = [difference.name for difference in differences_in_fine_tuning(old, new)]
    assert names == ["model.num_layers", "tokenizer.vocab_size"]


def test_processes_may_only_have_their_own_paths_and_workers() -> None:
    config = Config()
    assert flatten(config).keys() - settings_of_all_processes(config).keys() == {
        "data.root",
        "data.workers",
    }


def test_the_help_of_allow_changes_lists_what_can_change() -> None:
    names = changeable_settings().split(", ")
    assert {"model.dropout", "optimizer.beta1", "batch.layout", "batch.tokens"} <= {*names}
    assert {"training.r_drop", "data.train.weights"} <= {*names}
    fixed = {"model.d_model", "optimizer.name", "optimizer.ema_decay", "data.dev.weights", "seed"}
    assert not fixed & {*names}
