"""Settings that may change when a run is resumed."""

from runs import changed

from transformer_jax.settings.config import Config, OptimizerConfig
from transformer_jax.training.resuming import differences_on_resume


def test_differences_that_stop_a_resume() -> None:
    old = Config()
    free = changed(old, training={"steps": 5}, data={"workers": 3})
    assert differences_on_resume(old, free) == []
    [seed] = differences_on_resume(old, changed(free, seed=1))
    assert seed == ("seed", 0, 1) and not seed.changeable
    [dropout] = differences_on_resume(old, changed(old, model={"dropout": 0.3}))
    assert dropout == ("model.dropout", 0.1, 0.3) and dropout.changeable
    [freeze] = differences_on_resume(old, changed(old, training={"freeze": ("encoder.*",)}))
    assert freeze == ("training.freeze", (), ("encoder.*",)) and freeze.changeable
    [name] = differences_on_resume(old, changed(old, optimizer={"name": "adafactor"}))
    assert name == ("optimizer.name", "adam", "adafactor") and not name.changeable


def test_the_last_step_of_a_decay_changes_only_with_a_flag() -> None:
    old = Config(optimizer=OptimizerConfig(decay="cosine"))
    longer = changed(old, training={"steps": 200_000})
    [steps] = differences_on_resume(old, longer)
    assert steps == ("training.steps", 100_000, 200_000) and steps.changeable
