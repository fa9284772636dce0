"""Settings that may change when a run is resumed."""

import dataclasses

from transformer_jax.config import Config
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
