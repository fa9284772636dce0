"""A pretrained model in transformers' format: architecture, parameters, tokenizer, settings."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.model.positions import sinusoidal_positions
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.architecture import PretrainedModel
from transformer_jax.pretrained.search_settings import from_transformers
from transformer_jax.pretrained.tokenizer_files import PretrainedTokenizer
from transformer_jax.pretrained.weights import plain_weights, put_sines_first, to_library
from transformer_jax.settings.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.tokenization.languages import Languages
from transformer_jax.tokenization.tokenizer import Tokenizer


class Pretrained(PretrainedModel):
    """A folder with config.json, weights and a tokenizer, of one of ``FAMILIES``.

    ``allow_pickle`` also reads pytorch_model.bin. ``languages`` are the codes of source and target
    by default. Raises ``UserError`` if a file, setting, tensor or language is missing, unexpected
    or unsupported.
    """

    def __init__(
        self,
        folder: Path,
        *,
        allow_pickle: bool = False,
        languages: tuple[str, str] = ("", ""),
    ) -> None:
        super().__init__(folder, allow_pickle=allow_pickle)
        architectures = self.config_file.fields.get("architectures") or []
        if any("EncoderModel" in str(name) for name in architectures):
            raise UserError(
                f"{str(folder)!r} has only an encoder ({architectures[0]}); expected a model that "
                "also has a decoder. TextEncoder.from_pretrained loads encoders."
            )
        self._tokenizer = PretrainedTokenizer(self.files, self.config_file)
        # Fields of files that an export changes.
        self._exported_changes: dict[str, dict[str, Any]] = {}
        file_languages = self._tokenizer.languages()
        if file_languages.layout == "start":
            self.languages = self._choose_language_pair(file_languages, languages)
        else:
            self.languages = file_languages.with_defaults(*languages)

    @property
    def has_one_vocabulary(self) -> bool:
        return len(self._tokenizer.ids) == 1

    def to_tensors(self, model: Transformer) -> dict[str, np.ndarray]:
        """Return the tensors of a model that was imported from such a folder, by their names.

        Raises ``UserError`` if its architecture or vocabulary is not the folder's.
        """
        config = model.config
        expected = self.model_config(tied=config.ties_softmax)
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            expected_value = getattr(expected, field.name)
            is_free = field.name in ("dtype", "remat") or "dropout" in field.name
            if not is_free and value != expected_value:
                raise UserError(
                    f"model.{field.name} is {value!r}; expected {expected_value!r}, as in the "
                    f"pretrained model, for an export to {self.family.name}."
                )
        tensors = to_library(plain_weights(model), self.weight_names)
        shared_VD = tensors.get("model.shared.weight")
        for side in ("encoder", "decoder"):
            if shared_VD is not None and not config.ties_softmax:  # transformers reads these then
                tensors[f"model.{side}.embed_tokens.weight"] = shared_VD.copy()
            if self.model_type == "pegasus":  # transformers also saves the sinusoids
                length = self.config_file.fields["max_position_embeddings"]
                table_LD = sinusoidal_positions(length, config.d_model)
                tensors[f"model.{side}.embed_positions.weight"] = put_sines_first("", table_LD)
        return tensors

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Its ids are those of transformers."""
        return self._tokenizer.build(self.languages, self._zip_other_files())

    def _choose_language_pair(
        self, file_languages: Languages, languages: tuple[str, str]
    ) -> Languages:
        """Fix source and target language of a model that starts with the target's."""
        ids = self._tokenizer.ids[-1]
        start = self.special_ids.decoder_start
        start_languages = [token for token in file_languages.tokens.values() if ids[token] == start]
        defaults = file_languages.source, [*start_languages, file_languages.target][0]
        pair = []
        for code, default in zip(languages, defaults):
            pair.append(file_languages.tokens.get(code, "") if code else default)
        if "" in pair:
            codes = (
                ", ".join(file_languages.tokens)
                or "none, because the tokenizer's files have no codes"
            )
            raise UserError(
                f"--source-language and --target-language are {languages}; expected two of: "
                f"{codes}. The model in {str(self.folder)!r} is from mBART's first version, which "
                "is imported for one language pair, by python -m transformer_jax.pretrained import."
            )
        source, target = pair
        self.special_ids = self.special_ids._replace(decoder_start=ids[target])
        if any(languages):
            start_id = {"decoder_start_token_id": ids[target]}
            self._exported_changes = {
                "config.json": start_id,
                "generation_config.json": start_id,
                "tokenizer_config.json": {"src_lang": source, "tgt_lang": target},
            }
        return Languages({}, source, "", "start")

    def config(self, model: ModelConfig) -> Config:
        """Return settings for decoding and for fine-tuning."""
        ids = self._tokenizer.ids[-1]
        tokens = {i: token for token, i in ids.items() if i != model.pad_id}  # PAD never is
        decoding = from_transformers(
            self.config_file.generation,
            tokens,
            self.config_file.generation_file,
            model.eos_id,
        )
        # The longest input that the model was trained on. T5's has no limit of its own.
        foreign_fields = self.config_file.fields
        longest = (
            foreign_fields.get("max_position_embeddings")
            or foreign_fields.get("n_positions")
            or 512
        )
        limit = min(longest, model.position_limit, 256)
        return Config(
            model=model,
            tokenizer=TokenizerConfig(vocab_size=model.vocab_size, joint=self.has_one_vocabulary),
            # a low learning rate for fine-tuning
            optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=1000),
            # as in transformers, where these biases are not parameters
            training=TrainingConfig(freeze=("softmax_bias",) if model.softmax_bias else ()),
            data=DataConfig(max_source_length=limit, max_target_length=limit),
            decoding=dataclasses.replace(decoding, max_source_length=longest),
        )

    def _zip_other_files(self) -> bytes:
        """Return a zip archive of all files but the weights, for exports."""
        contents = {}
        for file in sorted({file for x in self.files.copied_files for file in self.folder.glob(x)}):
            if file.is_file() and file.name != "tokenizer.json" and "index.json" not in file.name:
                contents[file.name] = file.read_bytes()
        for name, changes in self._exported_changes.items():
            # The languages are recorded even if the original has no tokenizer_config.json.
            if name in contents or name == "tokenizer_config.json":
                contents[name] = json.dumps(self.files[name] | changes, indent=2).encode()
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in (contents | self.files.other_contents()).items():
                archive.writestr(zipfile.ZipInfo(name), content)
        return target.getvalue()
