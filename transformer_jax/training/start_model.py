"""Fine-tuning: the tokenizer and the parameters of the model that a run starts from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from transformer_jax.devices.sharding import map_named
from transformer_jax.errors import UserError
from transformer_jax.pretrained.loading import load_saved_model
from transformer_jax.settings.changes import differences_in_fine_tuning, fields_that_differ
from transformer_jax.settings.config import Config
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.optimizer import VOCABULARY_MATRIX
from transformer_jax.training.step import Parameters

logger = logging.getLogger(__name__)


class StartModel:
    """The model of ``training.start_from``.

    Attributes:
      checksum: checksum of its manifest.
    """

    def __init__(self, config: Config):
        """Load the model for a run with this config.

        Raises ``UserError`` if its model or tokenizer settings differ from ``config``.
        """
        name = config.training.start_from
        logger.info("Starting from the parameters of %s.", name)
        saved_model = load_saved_model(name)
        if differences := differences_in_fine_tuning(saved_model.config, config):
            raise UserError(
                f"training.start_from is {name!r}, but its model or tokenizer settings differ from "
                f"this run's. Use --config {name}. {fields_that_differ(differences)}"
            )
        self.checksum = saved_model.manifest.content["checksum"]
        self._tokenizer = saved_model.tokenizer
        self._parameters = saved_model.parameters
        self._new_symbols = config.tokenizer.user_defined_symbols
        # A recipe based on its config has the languages that it added itself.
        added_before = saved_model.config.tokenizer.new_languages
        self._new_languages = [
            entry for entry in config.tokenizer.new_languages if entry not in added_before
        ]

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer with the run's new symbols and languages."""
        tokenizer = self._tokenizer.with_symbols(self._new_symbols)
        return tokenizer.with_new_languages(self._new_languages)

    def parameters(self, abstract: Parameters, tokenizer: Tokenizer) -> Parameters:
        """Return the model's parameters with a row for each new token of the run's ``tokenizer``.
        ``abstract`` has the run's shapes. A new row is the mean of other rows.
        """
        parameters = jax.tree.map(_with_added_rows, self._parameters, abstract)
        for number, start in tokenizer.new_rows(self._new_languages).items():
            parameters = map_named(partial(_with_row, number, start), parameters)
        return parameters


def _with_added_rows(values_VD: np.ndarray, abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    """Append a row with the mean of all rows for each token added to the vocabulary."""
    missing = np.subtract(abstract.shape, values_VD.shape)
    return np.pad(values_VD, [(0, count) for count in missing], mode="mean")


def _with_row(number: int, start: Sequence[int], name: str, values: np.ndarray) -> np.ndarray:
    """Set one row of a vocabulary's matrix, or one softmax bias, to the mean of rows of others."""
    if start and (VOCABULARY_MATRIX.search(name) or name == "softmax_bias"):
        values[number] = values[list(start)].mean(0, dtype=np.float64)
    return values
