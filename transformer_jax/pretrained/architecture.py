"""Architecture and parameters of a pretrained model in transformers' format, without tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.errors import UserError, short_repr
from transformer_jax.pretrained.config_file import read_config
from transformer_jax.pretrained.families import ACTIVATIONS
from transformer_jax.pretrained.files import LazyArray, read_files
from transformer_jax.pretrained.marian import read_marian_files
from transformer_jax.pretrained.weights import from_library
from transformer_jax.settings.config import ModelConfig

_EMBEDDING_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Copies of tied matrices, and sinusoids.
_REDUNDANT_TENSORS = re.compile(
    r"(embed_tokens|lm_head|shared)\.weight$|embed_positions\.weights?$|"
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias"
)
_DECODER_TENSORS = re.compile("decoder|lm_head|final_logits_bias")


class PretrainedModel:
    """The architecture and the parameters in a folder of one of ``FAMILIES``.

    ``allow_pickle`` also reads pytorch_model.bin. Raises ``UserError`` if a file, setting or tensor
    is missing, unexpected or unsupported.
    """

    def __init__(self, folder: Path, *, allow_pickle: bool = False) -> None:
        self.folder = folder
        self.files = read_marian_files(folder) or read_files(folder)
        self.config_file = read_config(self.files)
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

    @property
    def has_one_vocabulary(self) -> bool:
        """True if source and target have the same tokens."""
        return self.config_file.shares_embeddings

    @cached_property
    def _tensors(self) -> dict[str, LazyArray]:
        tensors = self.files.open_tensors(self._allow_pickle)
        embedding_name = self.weight_names.names["target_embedding.matrix"]
        prefix = "model." if embedding_name.startswith("model.") else ""
        if not any(name.startswith(prefix) for name in tensors):  # without a head, as BartModel
            tensors = {prefix + name: tensor for name, tensor in tensors.items()}
        # A tied matrix can have any of its names.
        if self.config_file.shares_embeddings:
            copies = [name for name in sorted(tensors) if name.endswith(_EMBEDDING_COPIES)]
            if self.config_file.fields.get("tie_word_embeddings") is not False:
                copies += [name for name in sorted(tensors) if name.endswith("lm_head.weight")]
            for name in copies:
                tensors.setdefault(embedding_name, tensors[name])
        return tensors

    def model_config(self, tied: bool | None = None) -> ModelConfig:
        """Return the architecture, and check settings that have no counterpart.

        ``tied``: the softmax uses the embedding matrix (None: as the weights do).
        """
        foreign_fields = self.config_file.fields
        if tied is None and self.family.config_name != "config.json":
            tied = foreign_fields["tie_word_embeddings"]
        elif tied is None:  # files of transformers can store a tied matrix twice
            tied = self._is_copy(self.weight_names.names["softmax_matrix"])
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
        return ModelConfig(
            **fields,
            vocab_size=self.config_file.vocab_size,
            source_vocab_size=None if self.has_one_vocabulary else foreign_fields["vocab_size"],
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
        fields: dict[str, Any] = {**self.family.settings, **self.files.settings}
        for name, field in self.family.fields.items():
            value = foreign_fields[name]
            if field == "activation":
                required.setdefault(name, tuple(ACTIVATIONS))
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
            value = foreign_fields.get(name, allowed[0])
            if value not in allowed:
                raise UserError(
                    f"{name} in {self.family.config_name} is {short_repr(value)}; expected "
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

    def parameters(
        self, config: ModelConfig, encoder_shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, LazyArray]:
        """Return the parameters by name, and check the names and shapes of all tensors.

        ``encoder_shapes`` are those of an encoder and its embedding; None: the whole model.
        """
        tensors = self._needed_tensors()
        weight_names = self.weight_names
        if encoder_shapes is not None:
            for name in [*filter(_DECODER_TENSORS.search, tensors)]:
                del tensors[name]
            names = weight_names.names
            names = {"source_embedding.matrix": names["target_embedding.matrix"], **names}
            weight_names = weight_names._replace(names=names)
        return from_library(
            tensors,
            config,
            weight_names,
            f"The {self.family.name} weights in {str(self.folder)!r}",
            optional="final_logits_bias",
            shapes=encoder_shapes,
        )

    def _needed_tensors(self) -> dict[str, LazyArray]:
        """Return all tensors but copies of tied matrices and sinusoids."""
        names = {*self.weight_names.names.values()}
        return {
            name: tensor
            for name, tensor in self._tensors.items()
            if name in names
            or not _REDUNDANT_TENSORS.search(name)
            or (name.endswith("embed_tokens.weight") and not self._is_copy(name))
        }
