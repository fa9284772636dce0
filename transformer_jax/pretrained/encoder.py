"""Encoders of pretrained models, alone: text or token ids to hidden states."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import ArrayLike

from transformer_jax.devices.sharding import map_named, parameters_by_name, state_shardings
from transformer_jax.errors import UserError, short_repr
from transformer_jax.model.layers import Embedding, Encoder
from transformer_jax.pretrained.architecture import PretrainedModel
from transformer_jax.pretrained.files import LazyArray, PretrainedFiles
from transformer_jax.pretrained.hub import find_pretrained
from transformer_jax.pretrained.tokenizer_files import PretrainedTokenizer
from transformer_jax.settings.checks import checked
from transformer_jax.settings.config import ModelConfig
from transformer_jax.tokenization.rows import pad_rows, with_eos
from transformer_jax.tokenization.tokenizer import Tokenizer


class EncoderModel(nnx.Module):
    """Source embedding and encoder. Parameters have the names that they have in ``Transformer``.

    If ``sines_first``, the result has the dimensions of sines before those of cosines.
    """

    def __init__(self, config: ModelConfig, *, sines_first: bool = False, rngs: nnx.Rngs):
        """Initialize the parameters with ``rngs``."""
        self.config = config
        self.sines_first = sines_first
        vocab_size = config.source_vocab_size or config.vocab_size
        self.source_embedding = Embedding(vocab_size, config, rngs=rngs)
        self.encoder = Encoder(config, rngs=rngs)

    @checked
    def __call__(self, source_BS: Array, mask_BS: Array) -> Array:
        """Encode token ids [B, S]. Returns hidden states [B, S, D].

        All positions attend to those where ``mask_BS`` is True, as in transformers.
        """
        num_rows, length = source_BS.shape
        x_BSD = self.source_embedding(source_BS, jnp.arange(length)[None], num_positions=length)
        mask_BHSS = jnp.broadcast_to(mask_BS[:, None, None], (num_rows, 1, length, length))
        hidden_BSD = self.encoder(x_BSD, mask_BHSS)
        if self.sines_first:
            hidden_BSD = jnp.concatenate([hidden_BSD[..., ::2], hidden_BSD[..., 1::2]], axis=-1)
        return hidden_BSD


class TextEncoder:
    """The encoder of a pretrained model, such as the text encoder of an image model.

    Attributes:
      model: an nnx module, ``hidden_BSD = model(source_BS, mask_BS)``, for your own ``jax.jit``.
      config: its architecture.
    """

    def __init__(self, model: EncoderModel, read_tokenizer: Callable[[], Tokenizer]):
        """Take a model, and a function that reads its tokenizer when it is first needed."""
        self.model = model
        self.config = model.config
        self._graph, self._parameters = nnx.split(model)
        self._read_tokenizer = read_tokenizer

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        subfolder: str = "",
        weights: Literal["float32", "stored"] = "float32",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        mesh: Mesh | None = None,
    ) -> Self:
        """Load an encoder from a folder in transformers' format or from the Hugging Face Hub.

        Args:
          name: a model with or without a decoder, or an image model.
          subfolder: folder of the encoder, such as ``text_encoder_2``, whose tokenizer is in
            ``tokenizer_2``. Default: that of the first encoder of T5 in model_index.json, if any.
          weights: type of the parameters: float32, or the type in the file, such as bfloat16.
          dtype: type of matmuls (``ModelConfig.dtype``).
          mesh: mesh of ``make_mesh`` to shard the parameters over. Each device gets its shards
            only, and the host reads one tensor at a time.

        Raises:
          UserError: a file, setting or tensor is missing, unexpected or unsupported.
        """
        folder, tokenizer_folder = _find_folders(str(name), subfolder)
        pretrained = PretrainedModel(folder)
        config = dataclasses.replace(pretrained.model_config(tied=True), dtype=dtype)
        sines_first = pretrained.weight_names.sines_first
        abstract = nnx.eval_shape(
            lambda: EncoderModel(config, sines_first=sines_first, rngs=nnx.Rngs(0))
        )
        graph, state = nnx.split(abstract, nnx.Param)
        shapes = {x: leaf.shape for x, leaf in parameters_by_name(nnx.to_pure_dict(state)).items()}
        parameters = pretrained.parameters(config, shapes)
        values = _place_on_mesh(nnx.to_pure_dict(state), parameters, weights, mesh)

        def read_tokenizer() -> Tokenizer:
            files = (
                pretrained.files
                if tokenizer_folder == folder
                else PretrainedFiles(tokenizer_folder)
            )
            tokenizer = PretrainedTokenizer(files, pretrained.config_file)
            return tokenizer.build(tokenizer.languages())

        return cls(nnx.merge(graph, values), read_tokenizer)

    def encode(self, source: Sequence[str] | ArrayLike, mask: ArrayLike | None = None) -> Array:
        """Return hidden states [B, S, D] of texts, or of token ids [B, S].

        ``mask`` [B, S] is True (or 1) for the tokens to attend to; None: for all but PAD.
        """
        if isinstance(source, str):
            raise UserError(f"source is {short_repr(source)}; expected a list of texts.")
        source_BS = source
        if isinstance(source, Sequence) and all(isinstance(text, str) for text in source):
            source_BS, mask = self.tokenize(source)
        ids_BS = np.asarray(source_BS)
        mask_BS = ids_BS != self.config.pad_id if mask is None else np.asarray(mask)
        return _encode(self._graph, self._parameters, ids_BS, mask_BS.astype(bool))

    def tokenize(
        self, texts: Sequence[str], length: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids [B, S], padded, and the mask [B, S] of tokens other than padding.

        ``length`` is S, to which longer texts are cut; None: the longest text.
        """
        eos_id = self.config.eos_id
        affixes = self.tokenizer.affixes()
        num_after = max(1, len(affixes.after_source))
        rows = []
        for ids in self.tokenizer.source.encode(texts):
            row = with_eos(affixes.source(ids), eos_id)
            if length is not None and len(row) > length:
                row = row[: length - num_after] + row[-num_after:]
            rows.append(row)
        lengths = [len(row) for row in rows]
        padded_length = length or max(lengths, default=1)
        ids_BS = pad_rows(rows, self.config.pad_id, length=padded_length)
        mask_BS = np.arange(padded_length) < np.array(lengths)[:, None]
        return ids_BS, mask_BS

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ``UserError`` if its files are missing."""
        return self._read_tokenizer()


@partial(jax.jit, static_argnums=0)
def _encode(graph: Any, parameters: Any, source_BS: Array, mask_BS: Array) -> Array:
    model: EncoderModel = nnx.merge(graph, parameters)
    return model(source_BS, mask_BS)


def _find_folders(name: str, subfolder: str) -> tuple[Path, Path]:
    """Return the folders of the encoder and of its tokenizer, after a download if necessary."""
    if subfolder:
        tokenizer = re.sub("text_encoder", "tokenizer", subfolder)
        patterns = ("*.json", "*.model", "*.txt")
        files = [f"{folder}/{end}" for folder in (subfolder, tokenizer) for end in patterns]
        root = find_pretrained(name, files=[*files, f"{subfolder}/*.safetensors"])
        has_tokenizer = (root / tokenizer).is_dir()
        return root / subfolder, root / (tokenizer if has_tokenizer else subfolder)
    root = find_pretrained(name)
    index = PretrainedFiles(root)["model_index.json"]
    for component, kind in index.items():
        if isinstance(kind, list) and str(kind[-1]).endswith("T5EncoderModel"):
            return _find_folders(name, component)
    return root, root


def _place_on_mesh(
    abstract: Any, parameters: Mapping[str, LazyArray], weights: str, mesh: Mesh | None
) -> Any:
    """Read parameters, one at a time, and place their shards on their devices."""
    one_device = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: one_device, abstract)
    if mesh is not None:
        shardings = state_shardings(abstract, mesh)

    def place(name: str, leaf: Any, sharding: Sharding) -> Array:
        array = parameters[name]
        x = np.asarray(array) if weights == "float32" else array.read()
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: x[index])

    return map_named(place, abstract, shardings)
