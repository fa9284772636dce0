"""Fine-tuning: the tokenizer and the parameters of the model that a run starts from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import numpy as np

from transformer_jax.data.sources import ParallelText
from transformer_jax.devices.sharding import map_named
from transformer_jax.errors import UserError
from transformer_jax.pretrained.loading import load_saved_model
from transformer_jax.settings.changes import differences_in_fine_tuning, fields_that_differ
from transformer_jax.settings.config import Config
from transformer_jax.storage.files import local_path
from transformer_jax.tokenization.learning import evenly_spread
from transformer_jax.tokenization.new_pieces import learn_pieces, read_pieces
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
        # A recipe based on its config has the tokens that it added itself.
        before = saved_model.config.tokenizer
        settings = config.tokenizer
        self._new_languages = [x for x in settings.new_languages if x not in before.new_languages]
        self._new_pieces = settings.new_pieces if settings.new_pieces != before.new_pieces else ""
        self._max_sentences = settings.max_training_sentences

    def tokenizer(self, text: ParallelText) -> Tokenizer:
        """Return the model's tokenizer with the run's new symbols, languages and pieces. ``text``
        is the training text.
        """
        tokenizer = self._tokenizer.with_symbols(self._new_symbols)
        tokenizer = tokenizer.with_new_languages(self._new_languages)
        if not self._new_pieces:
            return tokenizer
        if self._new_pieces.isdecimal():
            lines, other_lines = self._lines_to_learn_from(text)
            limit = int(self._new_pieces)
            pieces = learn_pieces(tokenizer.source.segmenter, lines, other_lines, limit)
        else:
            pieces = read_pieces(local_path(self._new_pieces))
        return tokenizer.with_new_pieces(pieces)

    def _lines_to_learn_from(self, text: ParallelText) -> tuple[list[str], list[str]]:
        """Return the lines in new languages, and those in others. Without new languages, all lines
        are of the first kind.
        """
        codes = {entry.partition(":")[0] for entry in self._new_languages}
        lines = []
        other_lines = []
        for pair in evenly_spread(text.text_pairs(), max(1, self._max_sentences // 2)):
            for line, code in zip(pair[:2], pair.languages):
                if codes and code not in codes:
                    other_lines.append(line)
                else:
                    lines.append(line)
        return lines, other_lines

    def parameters(self, abstract: Parameters, tokenizer: Tokenizer) -> Parameters:
        """Return the model's parameters with a row for each new token of the run's ``tokenizer``.
        ``abstract`` has the run's shapes. A new row is the mean of other rows.
        """
        parameters = jax.tree.map(_with_added_rows, self._parameters, abstract)
        trained_before = self._tokenizer.new_rows
        new_rows = {i: ids for i, ids in tokenizer.new_rows.items() if i not in trained_before}
        return map_named(partial(_with_rows, new_rows), parameters)


def _with_added_rows(values_VD: np.ndarray, abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    """Append a row with the mean of all rows for each token added to the vocabulary."""
    missing = np.subtract(abstract.shape, values_VD.shape)
    return np.pad(values_VD, [(0, count) for count in missing], mode="mean")


def _with_rows(new_rows: Mapping[int, Sequence[int]], name: str, values: np.ndarray) -> np.ndarray:
    """Set rows of a vocabulary's matrix, or softmax biases, each to the mean of rows of others."""
    if VOCABULARY_MATRIX.search(name) or name == "softmax_bias":
        for token_id, start_ids in new_rows.items():
            if start_ids:
                values[token_id] = values[list(start_ids)].mean(0, dtype=np.float64)
    return values
