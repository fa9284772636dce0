"""Which settings may change when a run is resumed, and which stay as they were found."""

import dataclasses
from pathlib import Path

import pytest
from runs import ONE, no_evaluation, tiny

from transformer_jax.config import Config
from transformer_jax.config_io import load_config_file
from transformer_jax.data.bucketing import default_buckets
from transformer_jax.training import prepare as preparing
from transformer_jax.training.loop import train
from transformer_jax.training.prepare import prepare
from transformer_jax.training.resuming import differences_on_resume


def test_only_fields_that_matter_stop_a_resume() -> None:
    old = Config()
    new = dataclasses.replace(
        old,
        seed=1,
        training=dataclasses.replace(old.training, steps=5),
        data=dataclasses.replace(old.data, workers=3),
    )
    assert differences_on_resume(old, new) == [("seed", 0, 1)]


def test_a_run_keeps_its_number_of_shapes_on_another_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its batches would be others."""
    assert default_buckets("cpu") == 12 and default_buckets("gpu") == default_buckets("tpu") == 8
    config = no_evaluation(tiny(steps=1))
    config = dataclasses.replace(config, batch=dataclasses.replace(config.batch, buckets=None))
    monkeypatch.setattr(preparing, "default_buckets", lambda platform: 2)
    train(config, tmp_path / "run", devices=ONE)
    assert load_config_file(tmp_path / "run" / "config.json").batch.buckets == 2
    monkeypatch.setattr(preparing, "default_buckets", lambda platform: 3)
    with prepare(config, tmp_path / "run", devices=ONE) as run:
        assert run.config.batch.buckets == 2 and len(run.plan.shapes) == 2
    with prepare(config, tmp_path / "another", devices=ONE) as run:
        assert run.config.batch.buckets == 3
