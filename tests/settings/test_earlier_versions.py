"""config.json files of earlier versions of this package."""

import dataclasses

import pytest

from transformer_jax.errors import UserError
from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import config_from_dict


@pytest.mark.parametrize(("start", "start_id"), [("bos", 1), ("eos", 2), ("pad", 0)])
def test_renamed_fields(start: str, start_id: int) -> None:
    values = dataclasses.asdict(Config())
    for name in ("pad_id", "eos_id", "decoder_start_id", "train_decoder_start"):
        del values["model"][name]
    for name in ("bpe_dropout", "bpe_dropout_samples"):
        del values["tokenizer"][name]
    values["model"] |= {"decoder_start": start, "language_last": False}
    values["tokenizer"] |= {"sampling": 0.1, "sampled_epochs": 4}
    config = config_from_dict(values)
    model = config.model
    assert (model.decoder_start_id, model.pad_id, model.eos_id) == (start_id, 0, 2)
    assert (config.tokenizer.bpe_dropout, config.tokenizer.bpe_dropout_samples) == (0.1, 4)
    assert values["model"]["decoder_start"] == start  # the argument is unchanged


@pytest.mark.parametrize("field", [{"language_last": True}, {"decoder_start": ["bos"]}])
def test_fields_without_a_counterpart(field: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"Unknown config field model.{next(iter(field))}"):
        config_from_dict({"model": field})
