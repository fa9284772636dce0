"""A pretrained model in transformers' format: architecture, parameters, tokenizer, settings."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.errors import UserError, short_repr
from transformer_jax.model.positions import sinusoidal_positions
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.config_file import read_config
from transformer_jax.pretrained.families import ACTIVATIONS
from transformer_jax.pretrained.files import LazyArray, open_tensors, read_files
from transformer_jax.pretrained.search_settings import from_transformers
from transformer_jax.pretrained.tokenizer_files import PretrainedTokenizer
from transformer_jax.pretrained.weights import (
    from_library,
    plain_weights,
    put_sines_first,
    to_library,
)
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

# Files that an export copies, apart from the weights.
COPIED_FILES = ("*.json", "*.model", "*.spm", "*.txt")
_EMBEDDING_COPY = re.compile(r"(encoder|decoder)\.embed_tokens\.weight$")
_SOFTMAX_WEIGHT = re.compile(r"lm_head\.weight$")
# Copies of tied matrices, and sinusoids.
_REDUNDANT_TENSORS = re.compile(
    r"(embed_tokens|lm_head|shared)\.weight$|embed_positions\.weights?$|"
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias"
)


class Pretrained:
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
        self.folder = folder
        self._files = read_files(folder)
        self.config_file = read_config(self._files)
        self.model_type = self.config_file.model_type
        self.family = self.config_file.family
        self._allow_pickle = allow_pickle
        names = dict(self.family.weight_names.names)
        if not self.config_file.shares_embeddings:
            names |= self.family.separate_names
        if str(self.config_file.fields.get("feed_forward_proj")).startswith("gated"):
            names = {
                name: foreign_name.replace(".wi.", ".wi_1.") for name, foreign_name in names.items()
            }
        self.weight_names = self.family.weight_names._replace(names=names)
        self.special_ids = self.config_file.special
        self._tokenizer = PretrainedTokenizer(self._files, self.config_file)
        self._exported_changes: dict[
            str, dict[str, Any]
        ] = {}  # fields of files that an export changes
        file_languages = self._tokenizer.languages()
        if file_languages.layout == "start":
            self.languages = self._choose_language_pair(file_languages, languages)
        else:
            self.languages = file_languages.with_defaults(*languages)

    @cached_property
    def _tensors(self) -> dict[str, LazyArray]:
        tensors = open_tensors(self.folder, self._allow_pickle)
        embedding_name = self.weight_names.names["target_embedding.matrix"]
        prefix = "model." if embedding_name.startswith("model.") else ""
        if not any(name.startswith(prefix) for name in tensors):  # without a head, as BartModel
            tensors = {prefix + name: tensor for name, tensor in tensors.items()}
        # A tied matrix can have any of its names.
        if self.config_file.shares_embeddings:
            is_tied = self.config_file.fields.get("tie_word_embeddings") is not False
            for pattern in (_EMBEDDING_COPY, _SOFTMAX_WEIGHT) if is_tied else (_EMBEDDING_COPY,):
                for name in filter(pattern.search, sorted(tensors)):
                    tensors.setdefault(embedding_name, tensors[name])
        return tensors

    def model_config(self, tied: bool | None = None) -> ModelConfig:
        """Return the architecture, and check settings that have no counterpart.

        ``tied``: the softmax uses the embedding matrix (None: as the weights do).
        """
        if tied is None:  # files can store a tied matrix twice
            tied = self._is_copy(self.weight_names.names["softmax_matrix"])
        foreign_fields = self.config_file.fields
        fields = self._architecture()
        if "d_k" in fields:
            fields["d_v"] = fields["d_k"]
            fields["attention_dropout"] = fields["feed_forward_dropout"] = fields["dropout"]
            is_untied = foreign_fields.get("tie_word_embeddings") is False
            scales = foreign_fields.get("scale_decoder_outputs", not is_untied)
            fields["output_scale"] = scales and self.model_type != "mt5"
        if self.model_type == "m2m_100":  # positions are numbered from there
            fields["position_offset"] = self.special_ids.pad + 1
        if self.config_file.shares_embeddings:
            fields["tie_embeddings"] = "all" if tied else "embeddings"
        else:
            fields["tie_embeddings"] = "target" if tied else "none"
        has_one_vocabulary = len(self._tokenizer.ids) == 1
        return ModelConfig(
            **fields,
            vocab_size=self.config_file.vocab_size,
            source_vocab_size=None if has_one_vocabulary else foreign_fields["vocab_size"],
            pad_id=self.special_ids.pad,
            eos_id=self.special_ids.eos,
            decoder_start_id=self.special_ids.decoder_start,
        )

    def _architecture(self) -> dict[str, Any]:
        """Return the fields of ``ModelConfig`` that are fields of config.json, or fixed."""
        foreign_fields = self.config_file.fields
        required = dict(self.family.required)
        for name in ("ffn_dim", "attention_heads"):
            if f"encoder_{name}" in foreign_fields:
                required[f"decoder_{name}"] = (foreign_fields[f"encoder_{name}"],)
        embedding_scales = {True: "tokens", False: "none"}
        fields: dict[str, Any] = dict(self.family.settings)
        for name, field in self.family.fields.items():
            value = foreign_fields[name]
            if field == "activation":
                required[name] = tuple(ACTIVATIONS)
                value = ACTIVATIONS.get(value)
            elif field == "embedding_scale":
                value = embedding_scales[value]
            fields[field] = value
        if self.family.fields.get("feed_forward_proj"):  # what transformers derives from it
            kind = str(foreign_fields["feed_forward_proj"])
            function = kind.removeprefix("gated-")
            function = "gelu_new" if kind == "gated-gelu" else function
            required["is_gated_act"] = (kind.startswith("gated-"),)
            required["dense_act_fn"] = (function,)
        for name, allowed in required.items():
            if foreign_fields.get(name, allowed[0]) not in allowed:
                raise UserError(
                    f"{name} in config.json is {short_repr(foreign_fields[name])}; expected "
                    f"{' or '.join(map(repr, allowed))} for {self.family.name}."
                )
        return fields

    def _is_copy(self, name: str) -> bool:
        """True if a tensor equals the target embeddings, or does not exist."""
        embeddings = self._tensors.get(self.weight_names.names["target_embedding.matrix"])
        tensor = self._tensors.get(name)
        if tensor is None or embeddings is None or tensor is embeddings:
            return True
        return tensor.shape == embeddings.shape and np.array_equal(tensor.read(), embeddings.read())

    def parameters(self, config: ModelConfig) -> dict[str, LazyArray]:
        """Return the parameters by name, and check the names and shapes of all tensors."""
        names = {*self.weight_names.names.values()}
        tensors = {
            name: tensor
            for name, tensor in self._tensors.items()
            if name in names
            or not _REDUNDANT_TENSORS.search(name)
            or (name.endswith("embed_tokens.weight") and not self._is_copy(name))
        }
        location = f"The {self.family.name} weights in {str(self.folder)!r}"
        return from_library(
            tensors, config, self.weight_names, location, optional="final_logits_bias"
        )

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
        sides = self._tokenizer.sides()
        return Tokenizer(
            sides[0], sides[-1], languages=self.languages, pretrained=self._zip_other_files()
        )

    def _choose_language_pair(
        self, file_languages: Languages, languages: tuple[str, str]
    ) -> Languages:
        """Fix source and target language of a model that starts with the target's."""
        ids = self._tokenizer.ids[-1]
        start = self.special_ids.decoder_start
        tokens_of_start = [token for token in file_languages.tokens.values() if ids[token] == start]
        defaults = file_languages.source, [*tokens_of_start, file_languages.target][0]
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
        has_one_vocabulary = len(self._tokenizer.ids) == 1
        return Config(
            model=model,
            tokenizer=TokenizerConfig(vocab_size=model.vocab_size, joint=has_one_vocabulary),
            # a low learning rate for fine-tuning
            optimizer=OptimizerConfig(peak_learning_rate=1e-4, warmup_steps=1000),
            # as in transformers, where these biases are not parameters
            training=TrainingConfig(freeze=("softmax_bias",) if model.softmax_bias else ()),
            data=DataConfig(max_source_length=limit, max_target_length=limit),
            decoding=dataclasses.replace(decoding, max_source_length=longest),
        )

    def _zip_other_files(self) -> bytes:
        """Return a zip archive of all files but the weights, for exports."""
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            files = {file for pattern in COPIED_FILES for file in self.folder.glob(pattern)}
            if (
                self._exported_changes
            ):  # records the languages, even if the original has no such file
                files.add(self.folder / "tokenizer_config.json")
            for file in sorted(files):
                if file.name == "tokenizer.json" or "index.json" in file.name or file.is_dir():
                    continue
                content = b""
                if changes := self._exported_changes.get(file.name):
                    fields = self._files[file.name] | changes
                    content = json.dumps(fields, indent=2).encode()
                else:
                    content = file.read_bytes()
                archive.writestr(zipfile.ZipInfo(file.name), content)
        return target.getvalue()
