"""The first and last allowed value of every kind of setting."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from transformer_jax import (
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainingConfig,
    UserError,
)

LAST = 2**31 - 1


@pytest.mark.parametrize(
    ("section", "name", "allowed", "forbidden"),
    [
        (TrainingConfig, "steps", [1, LAST], [0, -1, LAST + 1, 1.0, True]),
        (TrainingConfig, "patience", [0, LAST], [-1, LAST + 1]),
        (TrainingConfig, "label_smoothing", [0, 0.0, 0.999], [1.0, -1e-9]),
        (TrainingConfig, "r_drop", [0.0, 5, 1e38], [-1e-9, 1.1e38, float("nan")]),
        (TrainingConfig, "simcut", [0.0, 3, 1e38], [-1e-9, 1.1e38, float("nan")]),
        (TrainingConfig, "simcut_rate", [0.0, 0.05, 0.999], [-1e-9, 1.0, float("nan")]),
        (TrainingConfig, "average", ["auto", 1, 5], ["all", 0, 6]),  # 5 are kept
        (ModelConfig, "norm_epsilon", [1e-38, 1], [0.0, -1.0, float("inf")]),
        (DecodingConfig, "patience", [None, 1e-9, 1, 1e38], [0.0, -1.0, float("nan"), "none"]),
        (DecodingConfig, "temperature", [1e-9, 1, 1e38], [0.0, True, "1"]),
        (DecodingConfig, "top_p", [1e-9, 1.0], [0.0, 1.0001]),
        (DecodingConfig, "max_extra_length", [1, 2**16], [0, 2**16 + 1]),
        (DecodingConfig, "max_length", [None, 1, 2**16], [0, 2**16 + 1]),
        (DecodingConfig, "max_source_length", [3, 2**16], [2, 2**16 + 1]),
        (DecodingConfig, "min_length", [0, 50], [51, -1]),  # max_extra_length is 50
        (TokenizerConfig, "character_coverage", [0.98, 1], [0.979, 1.001]),
        (OptimizerConfig, "peak_learning_rate", [None, 1e-9], [0.0, "none"]),
    ],
)
def test_first_and_last_values(
    section: Any, name: str, allowed: list[Any], forbidden: list[Any]
) -> None:
    for value in allowed:
        assert getattr(section(**{name: value}), name) == value
    for value in forbidden:
        with pytest.raises(UserError, match=rf"^\w+\.{name} is .*; expected "):
            section(**{name: value})


def test_each_limit_on_the_length_of_a_translation_counts() -> None:
    sizes = [1, 5, 50, 256, 300]
    for source, extra, max_length, positions in product(sizes, sizes, [None, *sizes], sizes):
        decoding = DecodingConfig(max_extra_length=extra, max_length=max_length)
        limits = [source + extra, positions] + ([max_length] if max_length else [])
        assert decoding.max_target_length(source, positions) == min(limits)


@pytest.mark.parametrize("longer", ["max_source_length", "max_target_length"])
def test_learned_positions_must_cover_the_longer_side(longer: str) -> None:
    data = DataConfig(**{"max_source_length": 20, "max_target_length": 20} | {longer: 30})

    def check(**model: Any) -> None:
        config = Config(model=ModelConfig(**model), data=data)
        config.check(config.training_rules())

    check(positions="learned", max_positions=30)
    with pytest.raises(UserError, match=r"model\.max_positions is 29; expected at least 30"):
        check(positions="learned", max_positions=29)
    check(max_positions=1)  # sinusoids have no limit
