"""What translating and scoring share: the models of training runs, and work in blocks of lines."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from transformer_jax.checkpoint import load_model
from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.checks import vocabulary_sizes
from transformer_jax.decoding.records import T, blocks
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MOST_WARNINGS = 10


class TrainedModels:
    """What ``Translator`` and ``Scorer`` share: the models of one or several training runs."""

    def __init__(
        self,
        models: Transformer | Sequence[Transformer],
        tokenizer: Tokenizer,
        config: DecodingConfig | None = None,
        *,
        devices: Sequence[jax.Device] = (),
    ):
        """The rows of a batch are spread over ``devices``, which must divide ``config.batch_size``
        for a translator; without any the work is done where the parameters are.

        Raises:
          UserError: a model with another vocabulary; for a translator also settings that do not go
            together, or not with the model.
        """
        models = [models] if isinstance(models, Transformer) else list(models)
        tokens = tokenizer.source.vocab_size, tokenizer.target.vocab_size
        sizes = vocabulary_sizes(models)
        if tokens != sizes:
            raise UserError(
                f"The tokenizer has {tokens} source and target tokens, the model {sizes}; expected "
                "those of one training run."
            )
        self.tokenizer = tokenizer
        self.config = DecodingConfig() if config is None else config
        self._set_up(models, devices)

    def _set_up(self, models: list[Transformer], devices: Sequence[jax.Device]) -> None:
        raise NotImplementedError

    @classmethod
    def from_workdir(
        cls,
        workdir: str | Path | Sequence[str | Path],
        *,
        average: int | None = None,
        devices: Sequence[jax.Device] = (),
        **settings: Any,
    ) -> Self:
        """The models of a training run, or of several that work as one.

        ``workdir`` is a work directory or one of its checkpoints, a folder or a URL; ``settings``
        replace fields of the (first) run's ``decoding`` config; ``average`` is that of
        ``load_model``.

        Raises:
          UserError: runs with different tokenizers; as ``load_model`` and the constructor.
        """
        workdirs = [workdir] if isinstance(workdir, str | Path) else list(workdir)
        if not workdirs:
            raise UserError("workdir is empty; expected one or more work directories.")
        loaded = [load_model(local_workdir(each), average=average) for each in workdirs]
        configs, models, tokenizers = zip(*loaded, strict=True)
        for other, tokenizer in zip(workdirs, tokenizers, strict=True):
            if tokenizer.fingerprint != tokenizers[0].fingerprint:
                raise UserError(
                    f"{str(other)!r} has another vocabulary than {str(workdirs[0])!r}; expected "
                    "models that were trained with the same tokenizer (train.py --tokenizer.model, "
                    "--tokenizer.target-model)."
                )
        decoding = dataclasses.replace(configs[0].decoding, **settings)
        return cls(models, tokenizers[0], decoding, devices=devices)

    def blocks(self, items: Iterable[T], window: int | None) -> Iterator[list[T]]:
        """``blocks`` of ``window`` items (None: 100 batches); ``UserError`` if it is below 1."""
        if window is not None and window < 1:
            raise UserError(f"window is {window}; expected 1 or more.")
        return blocks(items, window or 100 * self.config.batch_size)


def warn_first(count: int, message: str, *arguments: Any) -> None:
    """Log the warning if its ``count`` is among the first few: a large file may have thousands."""
    if count <= _MOST_WARNINGS:
        last = " (Further ones are not shown.)" if count == _MOST_WARNINGS else ""
        logger.warning(message + last, *arguments)
