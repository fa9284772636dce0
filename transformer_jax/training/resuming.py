"""Which settings may change when a run is resumed, and which may differ between its processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformer_jax.config import Config
from transformer_jax.config_io import flatten
from transformer_jax.errors import shown

# Beginnings of the names of settings that do not change what a given step computes.
_FREE_ON_RESUME = (
    "model.vocab_size",  # these two follow from the tokenizer
    "model.source_vocab_size",
    "mesh.",
    "decoding.",
    "data.root",
    "data.cache",
    "data.workers",
    "data.dev.",  # if it changed, the best result so far is forgotten
    "data.test.",
    "data.train.source",  # names only: what the files contain is checked
    "data.train.target",
    "training.",  # but what --allow-changes permits
)

# Settings that --allow-changes lets a run change midway. The result is not what either value alone
# would have given.
_CHANGEABLE = (
    "batch.",
    "optimizer.",
    "training.label_smoothing",
    "training.r_drop",
    "training.steps",
    "training.start_from",  # only read before the first step
    "model.dropout",
    "model.attention_dropout",
    "model.feed_forward_dropout",
    "model.remat",
    "model.dtype",
    "model.matmul_precision",
)

FREE_BETWEEN_PROCESSES = ("data.root", "data.cache", "data.workers")
"""Settings that each process of a run may choose for its own machine."""


class Difference(NamedTuple):
    """A setting whose value changed."""

    name: str
    old: Any
    new: Any

    @property
    def changeable(self) -> bool:
        """Whether ``--allow-changes`` lets a run resume with the new value."""
        return self.name.startswith(_CHANGEABLE)


def differences_on_resume(old: Config, new: Config) -> list[Difference]:
    """The settings that differ and would change what the resumed run computes."""
    old_flat, new_flat = flatten(old), flatten(new)
    # These schedules reach zero at training.steps, so that every step's rate depends on it.
    ends = bool({"linear", "cosine"} & {old.optimizer.decay, new.optimizer.decay})
    return [
        Difference(name, old_flat[name], new_flat[name])
        for name in old_flat
        if old_flat[name] != new_flat[name]
        and (name.startswith(_CHANGEABLE) or not name.startswith(_FREE_ON_RESUME))
        and (ends or name != "training.steps")
    ]


def fields_that_differ(
    differences: Sequence[Difference], *, where: str = "in the work directory"
) -> str:
    """The last lines of a message: each difference, with the old value as the one ``where``."""
    lines = [
        f"\n  {each.name}: {shown(each.old)} {where}, {shown(each.new)} now" for each in differences
    ]
    return "Fields that differ:" + "".join(lines)
