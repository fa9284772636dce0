"""Changed settings: what a resumed run, another process or a fine-tuning run may set differently.

Each setting declares its role in its type (``roles.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformer_jax.errors import short_repr
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import flatten
from transformer_jax.settings.roles import setting_roles

ROLES = setting_roles(Config)


class Difference(NamedTuple):
    """Setting whose value changed."""

    name: str
    old: Any
    new: Any

    @property
    def changeable(self) -> bool:
        """True if a run can resume with the new value under ``--allow-changes``."""
        return ROLES[self.name].on_resume == "changeable"


def differences_on_resume(old: Config, new: Config) -> list[Difference]:
    """Return the settings that differ and would change the results of the resumed run."""
    old_values = flatten(old)
    new_values = flatten(new)
    differences = [
        Difference(name, old_values[name], new_values[name])
        for name, role in ROLES.items()
        if role.on_resume != "free" and old_values[name] != new_values[name]
    ]
    return [difference for difference in differences if _has_effect(difference, old, new)]


def differences_in_fine_tuning(old: Config, new: Config) -> list[Difference]:
    """Return the settings of model and tokenizer that a run from another's model must keep."""
    return [
        difference
        for difference in differences_on_resume(old, new)
        if difference.name.startswith(("model.", "tokenizer."))
        and not difference.changeable
        and not ROLES[difference.name].changes_in_fine_tuning
    ]


def settings_of_all_processes(config: Config) -> dict[str, Any]:
    """Return the settings that all processes of a run must agree on."""
    return {
        name: value
        for name, value in flatten(config).items()
        if not ROLES[name].differs_between_processes
    }


def fields_that_differ(differences: Sequence[Difference]) -> str:
    """Format differences as the last lines of a message."""
    lines = [
        f"\n  {name}: {short_repr(old)} in the checkpoint, {short_repr(new)} now"
        for name, old, new in differences
    ]
    return "Fields that differ:" + "".join(lines)


def changeable_settings() -> str:
    """List the settings that a run can change under ``--allow-changes``, for its help text."""
    return ", ".join(name for name, role in ROLES.items() if role.on_resume == "changeable")


def _has_effect(difference: Difference, old: Config, new: Config) -> bool:
    if difference.name == "training.steps":
        # All learning rates of such a schedule depend on it.
        return old.optimizer.decays_to_end or new.optimizer.decays_to_end
    if difference.name == "model.dtype":
        return difference.new != "auto"  # auto keeps the recorded choice
    return True
