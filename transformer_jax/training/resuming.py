"""Settings that can change when a run resumes, and settings that can differ between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformer_jax.errors import short_repr
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import flatten

# Name prefixes of settings that do not affect the result of a training step.
_FREE_ON_RESUME = (
    "model.vocab_size",  # these are determined by the tokenizer
    "model.source_vocab_size",
    "model.pad_id",
    "model.eos_id",
    "mesh.",
    "decoding.",
    "data.root",
    "data.workers",
    "data.dev.",  # a change resets the best result
    "data.test.",
    "data.train.source",  # only file names; the contents are checked
    "data.train.target",
    "data.train.alignments",
    "training.",  # except settings in _CHANGEABLE
)

# Settings that can change during a run with --allow-changes. The result differs from a run that
# uses the old or the new value throughout.
_CHANGEABLE = (
    "batch.",
    "data.train.weights",
    "data.train.temperature",
    "optimizer.",
    "training.freeze",
    "training.label_smoothing",
    "training.r_drop",
    "training.simcut",  # and simcut_rate
    "training.guided_alignment",
    "training.steps",
    "training.start_from",  # read only before the first step
    "model.dropout",
    "model.attention_dropout",
    "model.feed_forward_dropout",
    "model.remat",
    "model.alignment_layer",
    "model.dtype",
)

FREE_BETWEEN_PROCESSES = ("data.root", "data.workers")
"""Settings that can differ between the processes of a run."""


class Difference(NamedTuple):
    """Setting whose value changed."""

    name: str
    old: Any
    new: Any

    @property
    def changeable(self) -> bool:
        """True if a run can resume with the new value under ``--allow-changes``."""
        fixed = "optimizer.name", "optimizer.ema_decay"  # they set the structure of the state
        return self.name.startswith(_CHANGEABLE) and self.name not in fixed


def differences_on_resume(old: Config, new: Config) -> list[Difference]:
    """Return the settings that differ and would change the results of the resumed run."""
    old_flat, new_flat = flatten(old), flatten(new)
    # These schedules end at training.steps, so all learning rates depend on it.
    ends = bool({"linear", "cosine"} & {old.optimizer.decay, new.optimizer.decay})
    return [
        Difference(name, old_flat[name], new_flat[name])
        for name in old_flat
        if new_flat[name] != old_flat[name]
        and (name, new_flat[name]) != ("model.dtype", "auto")  # keeps the recorded choice
        and (name.startswith(_CHANGEABLE) or not name.startswith(_FREE_ON_RESUME))
        and (ends or name != "training.steps")
    ]


def fields_that_differ(differences: Sequence[Difference]) -> str:
    """Format differences as the last lines of a message."""
    return "Fields that differ:" + "".join(
        f"\n  {each.name}: {short_repr(each.old)} in the checkpoint, {short_repr(each.new)} now"
        for each in differences
    )
