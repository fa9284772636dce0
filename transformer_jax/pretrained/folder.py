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
    sines_first,
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
KEPT = ("*.json", "*.model", "*.spm", "*.txt")
_SHARED = re.compile(r"(encoder|decoder)\.embed_tokens\.weight$")
_HEAD = re.compile(r"lm_head\.weight$")
# Copies of tied matrices, and sinusoids.
_REDUNDANT = re.compile(
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
        names = dict(self.family.library.names)
        if not self.config_file.shares_embeddings:
            names |= self.family.separate
        if str(self.config_file.fields.get("feed_forward_proj")).startswith("gated"):
            names = {name: foreign.replace(".wi.", ".wi_1.") for name, foreign in names.items()}
        self.library = self.family.library._replace(names=names)
        self.special_ids = self.config_file.special
        self._tokenizer = PretrainedTokenizer(self._files, self.config_file)
        self._changes: dict[str, dict[str, Any]] = {}  # fields of files that an export changes
        of_files = self._tokenizer.languages()
        if of_files.layout == "start":
            self.languages = self._choose_pair(of_files, languages)
        else:
            self.languages = of_files.with_defaults(*languages)

    @cached_property
    def _tensors(self) -> dict[str, LazyArray]:
        tensors = open_tensors(self.folder, self._allow_pickle)
        shared = self.library.names["target_embedding.matrix"]
        prefix = "model." if shared.startswith("model.") else ""
        if not any(name.startswith(prefix) for name in tensors):  # without a head, as BartModel
            tensors = {prefix + name: tensor for name, tensor in tensors.items()}
        # A tied matrix can have any of its names.
        if self.config_file.shares_embeddings:
            is_tied = self.config_file.fields.get("tie_word_embeddings") is not False
            for pattern in (_SHARED, _HEAD) if is_tied else (_SHARED,):
                for name in filter(pattern.search, sorted(tensors)):
                    tensors.setdefault(shared, tensors[name])
        return tensors

    def model_config(self, tied: bool | None = None) -> ModelConfig:
        """Return the architecture, and check settings that have no counterpart.

        ``tied``: the softmax uses the embedding matrix (None: as the weights do).
        """
        if tied is None:  # files can store a tied matrix twice
            tied = self._is_copy(self.library.names["softmax_matrix"])
        foreign = self.config_file.fields
        fields = self._architecture()
        if "d_k" in fields:
            fields["d_v"] = fields["d_k"]
            fields["attention_dropout"] = fields["feed_forward_dropout"] = fields["dropout"]
            is_untied = foreign.get("tie_word_embeddings") is False
            scales = foreign.get("scale_decoder_outputs", not is_untied)
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
            source_vocab_size=None if has_one_vocabulary else foreign["vocab_size"],
            pad_id=self.special_ids.pad,
            eos_id=self.special_ids.eos,
            decoder_start_id=self.special_ids.decoder_start,
        )

    def _architecture(self) -> dict[str, Any]:
        """Return the fields of ``ModelConfig`` that are fields of config.json, or fixed."""
        foreign = self.config_file.fields
        required = dict(self.family.required)
        for name in ("ffn_dim", "attention_heads"):
            if f"encoder_{name}" in foreign:
                required[f"decoder_{name}"] = (foreign[f"encoder_{name}"],)
        embedding_scales = {True: "tokens", False: "none"}
        fields: dict[str, Any] = dict(self.family.settings)
        for name, field in self.family.fields.items():
            value = foreign[name]
            if field == "activation":
                required[name] = tuple(ACTIVATIONS)
                value = ACTIVATIONS.get(value)
            elif field == "embedding_scale":
                value = embedding_scales[value]
            fields[field] = value
        if self.family.fields.get("feed_forward_proj"):  # what transformers derives from it
            kind = str(foreign["feed_forward_proj"])
            function = kind.removeprefix("gated-")
            function = "gelu_new" if kind == "gated-gelu" else function
            required["is_gated_act"] = (kind.startswith("gated-"),)
            required["dense_act_fn"] = (function,)
        for name, allowed in required.items():
            if foreign.get(name, allowed[0]) not in allowed:
                raise UserError(
                    f"{name} in config.json is {short_repr(foreign[name])}; expected "
                    f"{' or '.join(map(repr, allowed))} for {self.family.name}."
                )
        return fields

    def _is_copy(self, name: str) -> bool:
        """True if a tensor equals the target embeddings, or does not exist."""
        shared = self._tensors.get(self.library.names["target_embedding.matrix"])
        tensor = self._tensors.get(name)
        if tensor is None or shared is None or tensor is shared:
            return True
        return tensor.shape == shared.shape and np.array_equal(tensor.read(), shared.read())

    def parameters(self, config: ModelConfig) -> dict[str, LazyArray]:
        """Return the parameters by name, and check the names and shapes of all tensors."""
        names = {*self.library.names.values()}
        tensors = {
            name: tensor
            for name, tensor in self._tensors.items()
            if name in names
            or not _REDUNDANT.search(name)
            or (name.endswith("embed_tokens.weight") and not self._is_copy(name))
        }
        where = f"The {self.family.name} weights in {str(self.folder)!r}"
        return from_library(tensors, config, self.library, where, optional="final_logits_bias")

    def tensors_of(self, model: Transformer) -> dict[str, np.ndarray]:
        """Return the tensors of a model that was imported from such a folder, by their names.

        Raises ``UserError`` if its architecture or vocabulary is not the folder's.
        """
        config = model.config
        expected = self.model_config(tied=config.ties_softmax)
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            wanted = getattr(expected, field.name)
            is_free = field.name in ("dtype", "remat") or "dropout" in field.name
            if not is_free and value != wanted:
                raise UserError(
                    f"model.{field.name} is {value!r}; expected {wanted!r}, as in the pretrained "
                    f"model, for an export to {self.family.name}."
                )
        tensors = to_library(plain_weights(model), self.library)
        shared_VD = tensors.get("model.shared.weight")
        for side in ("encoder", "decoder"):
            if shared_VD is not None and not config.ties_softmax:  # transformers reads these then
                tensors[f"model.{side}.embed_tokens.weight"] = shared_VD.copy()
            if self.model_type == "pegasus":  # transformers also saves the sinusoids
                length = self.config_file.fields["max_position_embeddings"]
                table_LD = sinusoidal_positions(length, config.d_model)
                tensors[f"model.{side}.embed_positions.weight"] = sines_first("", table_LD)
        return tensors

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Its ids are those of transformers."""
        sides = self._tokenizer.sides()
        return Tokenizer(sides[0], sides[-1], languages=self.languages, pretrained=self._archive())

    def _choose_pair(self, of_files: Languages, languages: tuple[str, str]) -> Languages:
        """Fix source and target language of a model that starts with the target's."""
        ids = self._tokenizer.ids[-1]
        start = self.special_ids.decoder_start
        started = [token for token in of_files.tokens.values() if ids[token] == start]
        defaults = of_files.source, [*started, of_files.target][0]
        pair = []
        for code, default in zip(languages, defaults):
            pair.append(of_files.tokens.get(code, "") if code else default)
        if "" in pair:
            codes = (
                ", ".join(of_files.tokens) or "none, because the tokenizer's files have no codes"
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
            self._changes = {
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
        foreign = self.config_file.fields
        longest = foreign.get("max_position_embeddings") or foreign.get("n_positions") or 512
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

    def _archive(self) -> bytes:
        """Return a zip archive of all files but the weights, for exports."""
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            files = {file for pattern in KEPT for file in self.folder.glob(pattern)}
            if self._changes:  # records the languages, even if the original has no such file
                files.add(self.folder / "tokenizer_config.json")
            for file in sorted(files):
                if file.name == "tokenizer.json" or "index.json" in file.name or file.is_dir():
                    continue
                content = b""
                if changes := self._changes.get(file.name):
                    fields = self._files[file.name] | changes
                    content = json.dumps(fields, indent=2).encode()
                else:
                    content = file.read_bytes()
                archive.writestr(zipfile.ZipInfo(file.name), content)
        return target.getvalue()
