"""Conversion to and from ``torch.nn.Transformer`` with its embeddings and softmax."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_jax import ModelConfig, Transformer, UserError, model_from_arrays
from transformer_jax.pretrained.export_files import check_fields, check_head_widths
from transformer_jax.pretrained.files import LazyArray
from transformer_jax.pretrained.weights import (
    WeightNames,
    from_library,
    to_library,
    with_biases,
)

_LIBRARY = WeightNames(
    names={
        "source_embedding.matrix": "source_embedding.weight",
        "source_embedding.position_matrix": "positions[0]",
        "target_embedding.matrix": "target_embedding.weight",
        "target_embedding.position_matrix": "positions[1]",
        "softmax_matrix": "output.weight",
        "softmax_bias": "output.bias",
        "final_norm": "{side}.norm.{}",
        "self_attention.query": "self_attn.in_proj_{}",
        "self_attention.key": "self_attn.in_proj_{}",
        "self_attention.value": "self_attn.in_proj_{}",
        "self_attention.output": "self_attn.out_proj.{}",
        "self_attention_residual": "norm1.{}",
        "cross_attention.query": "multihead_attn.in_proj_{}",
        "cross_attention.key": "multihead_attn.in_proj_{}",
        "cross_attention.value": "multihead_attn.in_proj_{}",
        "cross_attention.output": "multihead_attn.out_proj.{}",
        "cross_attention_residual": "norm2.{}",
        "feed_forward.inner": "linear1.{}",
        "feed_forward.output": "linear2.{}",
        "encoder.feed_forward_residual": "norm2.{}",
        "decoder.feed_forward_residual": "norm3.{}",
    },
    layer="{side}.layers.{number}.",
)
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
_SETTINGS = ("num_heads", "dropout", "add_zero_attn", "norm_first", "eps", "p")  # of modules


class TorchModules(NamedTuple):
    """The PyTorch modules of a model. A tied matrix is a single Parameter."""

    transformer: nn.Transformer
    source_embedding: nn.Embedding
    target_embedding: nn.Embedding
    output: nn.Linear
    positions: str | tuple[Tensor, Tensor]
    """See ``from_torch``."""


def from_torch(
    transformer: nn.Transformer,
    source_embedding: nn.Embedding | Tensor,
    *,
    target_embedding: nn.Embedding | Tensor | None = None,
    output: nn.Linear | Tensor | None = None,
    positions: str | Tensor | tuple[Tensor, Tensor] = "interleaved",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> Transformer:
    """Convert PyTorch modules to a model with copies of their weights. The model scales embeddings
    by sqrt(d_model) before it adds positions (section 3.4). The PyTorch code must do the same.

    The model is batch-first, regardless of ``batch_first``. Its special token ids are 0 (PAD),
    1 (BOS), 2 (EOS) and 3 (UNK).

    Args:
      source_embedding: a ``torch.nn.Embedding``, or its matrix [V, D].
      target_embedding: the same for the target (default: the source embedding).
      output: projection from decoder output to logits; default: the target embedding's matrix.
        Tied matrices stay tied.
      positions: positional encoding of the PyTorch code: ``interleaved`` for
        ``sinusoidal_positions``, a learned table [L, D], or a (source, target) pair of tables.
      dtype: see ``ModelConfig``.

    Raises:
      UserError: a class, setting or shape is unsupported. The message includes its location.
    """
    try:
        fields = _read_settings(transformer)
    except (AttributeError, IndexError) as error:
        raise UserError(
            f"The first encoder layer has missing settings ({error}); expected a "
            "torch.nn.Transformer with the layers of torch.nn."
        ) from None
    ends, tied = _read_ends(source_embedding, target_embedding, output)
    of_positions, tables = _read_positions(positions, shared=tied in ("all", "embeddings"))
    source_size, vocab_size = (len(ends[f"{s}_embedding.weight"]) for s in ("source", "target"))
    config = ModelConfig(
        vocab_size=vocab_size,
        source_vocab_size=None if source_size == vocab_size else source_size,
        tie_embeddings=tied,
        softmax_bias="output.bias" in ends,
        dtype=dtype,
        **fields,
        **of_positions,
    )
    _check_modules(transformer, config)
    state = transformer.state_dict() | ends | tables
    tensors = {name: LazyArray.of(x.detach().float().cpu().numpy()) for name, x in state.items()}
    parameters = from_library(tensors, config, _LIBRARY, "The modules", optional="bias$")
    return model_from_arrays(config, {name: np.asarray(x) for name, x in parameters.items()})


def to_torch(model: Transformer) -> TorchModules:
    """Convert a model to batch-first PyTorch modules in training mode, with copies of its weights.

    ``nn.Transformer`` has no embeddings or positions. Scale embeddings by sqrt(d_model) and add
    ``positions`` yourself. Missing biases become zeros.

    Raises:
      UserError: a config field that nn.Transformer does not support.
    """
    config = model.config
    check_fields(
        config,
        "torch.nn.Transformer",
        activation=tuple(_ACTIVATIONS),
        norm=("post", "pre"),
        final_norm=(None, True, False),
        norm_type=("layer",),
        positions=("interleaved", "tensor2tensor", "learned"),
        tie_embeddings=("all", "embeddings", "target", "none"),
    )
    check_head_widths(config, "torch.nn.Transformer")
    weights = to_library(with_biases(model), _LIBRARY)
    tensors = {name: torch.tensor(x) for name, x in weights.items()}
    target = nn.Embedding.from_pretrained(tensors["target_embedding.weight"], freeze=False)
    source = target
    if "source_embedding.weight" in tensors:
        source = nn.Embedding.from_pretrained(tensors["source_embedding.weight"], freeze=False)
    tensors.setdefault("output.weight", target.weight)
    transformer = _blank_transformer(config)
    output = nn.Linear(config.d_model, config.vocab_size, bias=config.softmax_bias, device="meta")
    for module, prefix in ((transformer, ""), (output, "output.")):
        state = {name: tensors[prefix + name] for name in module.state_dict()}
        module.load_state_dict(state, assign=True)
    positions: str | tuple[Tensor, Tensor] = config.positions
    if config.positions == "learned":
        table_LD = tensors["positions[1]"]
        positions = tensors.get("positions[0]", table_LD), table_LD
    return TorchModules(transformer, source, target, output, positions)


def _blank_transformer(config: ModelConfig) -> nn.Transformer:
    """Create an ``nn.Transformer`` on the meta device, which allocates no memory."""
    with warnings.catch_warnings():  # nested tensors are not used
        warnings.simplefilter("ignore", UserWarning)
        transformer = nn.Transformer(
            *(config.d_model, config.num_heads, config.num_layers, config.decoder_layers),
            *(config.d_ff, config.dropout, _ACTIVATIONS[config.activation]),
            layer_norm_eps=config.norm_epsilon,
            batch_first=True,
            norm_first=config.norm == "pre",
            device="meta",
        )
    transformer.encoder.use_nested_tensor = False
    if not config.has_final_norm:
        transformer.encoder.norm = transformer.decoder.norm = None
    for name, module in transformer.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = config.attention_dropout
        if name.endswith(".dropout"):
            module.p = config.feed_forward_dropout
    return transformer


def _read_settings(transformer: nn.Transformer) -> dict[str, Any]:
    """Read ``ModelConfig`` fields from the first encoder layer; see ``_check_modules``."""
    layer = transformer.encoder.layers[0]
    num_layers = len(transformer.encoder.layers)
    num_decoder_layers = len(transformer.decoder.layers)
    has_final_norm = transformer.encoder.norm is not None
    has_bias = any(name.endswith("bias") for name in transformer.state_dict())
    return {
        "d_model": transformer.d_model,
        "d_ff": layer.linear1.out_features,
        "num_heads": layer.self_attn.num_heads,
        "num_layers": num_layers,
        "num_decoder_layers": None if num_layers == num_decoder_layers else num_decoder_layers,
        "norm": "pre" if layer.norm_first else "post",
        "final_norm": None if has_final_norm == layer.norm_first else has_final_norm,
        "norm_epsilon": layer.norm1.eps,
        "activation": _activation_name("encoder.layers.0", layer.activation),
        "dropout": layer.dropout1.p,
        "attention_dropout": layer.self_attn.dropout,
        "feed_forward_dropout": layer.dropout.p,
        **dict.fromkeys(("attention_bias", "feed_forward_bias", "norm_bias"), has_bias),
    }


def _check_modules(transformer: nn.Transformer, config: ModelConfig) -> None:
    """Raise a ``UserError`` that names the first module with another class or other settings."""
    modules = _described(transformer)
    expected = _described(_blank_transformer(config))
    for name in modules | expected:
        module = modules.get(name, "missing")
        expected_module = expected.get(name, "no module")
        if module != expected_module:
            raise UserError(
                f"transformer.{name} is {module}; expected {expected_module}. All layers need the "
                "classes of torch.nn and the same settings. (nn.Transformer(activation=nn.GELU()) "
                "leaves ReLU in the decoder. Pass the function instead: torch.nn.functional.gelu.)"
            )


def _described(transformer: nn.Transformer) -> dict[str, str]:
    """Return the class and settings of each module."""
    descriptions = {}
    for name, module in transformer.named_modules():
        settings = {key: vars(module)[key] for key in _SETTINGS if key in vars(module)}
        if hasattr(module, "activation"):
            settings["activation"] = _activation_name(name, module.activation)
        if not name.endswith(".activation"):
            listed = ", ".join(f"{key}={value}" for key, value in settings.items())
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            descriptions[name] = f"{kind}({listed})"
    return descriptions


def _activation_name(place: str, function: Callable[[Tensor], Tensor]) -> str:
    """Identify an activation by its values, so that modules and user functions also work."""
    x = torch.linspace(-4, 4, 65)
    y = function(x.clone())
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(y, known(x), rtol=0, atol=1e-6):
            return name
    raise UserError(
        f"activation in transformer.{place} is {function!r}; expected one of "
        f"{', '.join(_ACTIVATIONS)}."
    )


def _read_ends(source: Any, target: Any, output: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of the embeddings and the output layer, keyed by their names in
    ``_LIBRARY``, and the value of ``tie_embeddings``.
    """
    tensors: dict[str, Tensor] = {}
    target = source if target is None else target
    output = target if output is None else output
    modules = {"source_embedding": source, "target_embedding": target, "output": output}
    for name, module in modules.items():
        max_norm_note = " with max_norm" if getattr(module, "max_norm", None) else ""
        if isinstance(module, Tensor):
            tensors[f"{name}.weight"] = module
        elif type(module) in (nn.Embedding, nn.Linear) and not max_norm_note:
            tensors |= {f"{name}.{leaf}": x for leaf, x in module.state_dict().items()}
        else:
            raise UserError(
                f"{name} is a {type(module).__name__}{max_norm_note}; expected a "
                "torch.nn.Embedding, a torch.nn.Linear as output, or a matrix."
            )
    addresses = [tensors[f"{name}.weight"].data_ptr() for name in modules]
    tying = {(True, True): "all", (True, False): "embeddings", (False, True): "target"}
    return tensors, tying.get((addresses[0] == addresses[1], addresses[1] == addresses[2]), "none")


def _read_positions(positions: Any, *, shared: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read ``ModelConfig`` fields and learned tables. If ``shared``, there is one embedding."""
    if positions == "interleaved":
        return {"positions": positions}, {}
    if isinstance(positions, str):
        raise UserError(f"positions is {positions!r}; expected 'interleaved' or a learned table.")
    source_LD, target_LD = positions if isinstance(positions, tuple) else (positions, positions)
    tables_LD = source_LD.detach().cpu(), target_LD.detach().cpu()
    if shared and not np.array_equal(*tables_LD, equal_nan=True):
        raise UserError(
            "source and target have separate position tables but share one embedding; expected one "
            "table, because each embedding has its own position table."
        )
    tables = {"positions[0]": source_LD, "positions[1]": target_LD}
    return {"positions": "learned", "max_positions": len(target_LD)}, tables
