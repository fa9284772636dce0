"""The names and shapes of a MarianMT model's weights, and reading them from a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.interop.weights import (
    Attention,
    FeedForward,
    Layer,
    Linear,
    Norm,
    Weights,
    reordered,
    sines_first,
)
from transformer_jax.model.layers import sinusoidal_positions

_POSITION_TABLES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


def tensors_of(weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    """Names and tensors of a MarianMT state dict; linear layers are [O, I] there."""
    if weights.source_matrix_VD is weights.target_matrix_VD:
        yield "model.shared.weight", weights.target_matrix_VD
    else:
        yield "model.encoder.embed_tokens.weight", weights.source_matrix_VD
        yield "model.decoder.embed_tokens.weight", weights.target_matrix_VD
    if weights.softmax_matrix_VD is not weights.target_matrix_VD:
        yield "lm_head.weight", weights.softmax_matrix_VD
    yield "final_logits_bias", weights.softmax_bias_V[None]
    for side, layers in (("encoder", weights.encoder), ("decoder", weights.decoder)):
        for i, layer in enumerate(layers):
            prefix = f"model.{side}.layers.{i}."
            yield from _attention_tensors(prefix + "self_attn", layer.self_attention)
            if layer.cross_attention is not None:
                yield from _attention_tensors(prefix + "encoder_attn", layer.cross_attention)
            yield from _linear_tensors(prefix + "fc1", layer.feed_forward.inner)
            yield from _linear_tensors(prefix + "fc2", layer.feed_forward.output)
            yield from _norm_tensors(prefix + "final_layer_norm", layer.feed_forward.norm)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    if (folder / "model.safetensors").exists():
        try:
            from safetensors.flax import load_file
        except ImportError as error:
            raise UserError(
                f"Reading model.safetensors needs the package: pip install safetensors ({error})."
            ) from None
        try:
            tensors = load_file(folder / "model.safetensors")
        except Exception as error:  # its own type, which the package does not export everywhere
            raise UserError(
                f"{str(folder / 'model.safetensors')!r} is damaged; fetch it again ({error})."
            ) from None
    elif (folder / "pytorch_model.bin").exists():
        try:
            import torch
        except ImportError as error:
            raise UserError(
                f"Reading pytorch_model.bin needs PyTorch: pip install torch, or fetch model.safetensors ({error})."
            ) from None
        try:
            read = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        except Exception as error:  # pickle's, zipfile's and its own
            raise UserError(
                f"{str(folder / 'pytorch_model.bin')!r} cannot be read: {error}"
            ) from None
        tensors = {name: tensor.float().numpy() for name, tensor in read.items()}
    else:
        raise UserError(
            f"No weights in {str(folder)!r}; expected model.safetensors or pytorch_model.bin."
        )
    return {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}


def weights_from(
    tensors: dict[str, np.ndarray],
    theirs: dict[str, Any],
    vocab_sizes: tuple[int, int],
    folder: Path,
) -> tuple[Weights, str]:
    """The weights of a state dict, checked against its config ``theirs``, with dimensions in our
    order; and the kind of positions. Takes what it reads out of ``tensors``.
    """
    shared, tied = theirs["share_encoder_decoder_embeddings"], theirs["tie_word_embeddings"]
    d_model = theirs["d_model"]
    tables = [tensors.pop(name) for name in _POSITION_TABLES if name in tensors]
    _merge_names(tensors, shared=shared, tied=tied)
    tensors.setdefault("final_logits_bias", np.zeros((1, vocab_sizes[1]), np.float32))
    depths = theirs["encoder_layers"], theirs["decoder_layers"]
    expected = _expected_shapes(
        *depths, d_model, theirs["encoder_ffn_dim"], vocab_sizes, shared=shared, tied=tied
    )
    for what, names in (
        ("lack", sorted(expected.keys() - tensors)),
        ("have unknown", sorted(tensors.keys() - expected)),
    ):
        if names:
            listed = ", ".join(names[:3]) + (
                f" and {len(names) - 3} more" if len(names) > 3 else ""
            )
            raise UserError(
                f"The weights in {str(folder)!r} {what} {listed}; expected those that config.json describes."
            )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{name} in {str(folder)!r} has shape {tensors[name].shape}; expected {shape}, as config.json describes."
            )
    if shared:
        source = target = tensors["model.shared.weight"]
    else:
        source, target = (
            tensors[f"model.{side}.embed_tokens.weight"] for side in ("encoder", "decoder")
        )
    positions, learned = _positions(tables, d_model, folder, shared=shared and tied)
    weights = Weights(
        source_matrix_VD=source,
        target_matrix_VD=target,
        softmax_matrix_VD=target if tied else tensors["lm_head.weight"],
        softmax_bias_V=tensors["final_logits_bias"][0],
        source_positions_LD=learned[0] if learned else None,
        target_positions_LD=learned[1] if learned else None,
        encoder=_layers_from(tensors, "encoder", theirs["encoder_layers"]),
        decoder=_layers_from(tensors, "decoder", theirs["decoder_layers"]),
        encoder_norm=None,
        decoder_norm=None,
    )
    # MarianMT's sinusoids are the paper's with all sines first.
    return (
        reordered(weights, np.argsort(sines_first(d_model)))
        if positions == "interleaved"
        else weights
    ), positions


def _merge_names(tensors: dict[str, np.ndarray], *, shared: bool, tied: bool) -> None:
    """Give a tied matrix the first of its names alone: files may have it under any of them, or
    under several.
    """
    names = ["model.decoder.embed_tokens.weight"] + (["lm_head.weight"] if tied else [])
    if shared:
        names = ["model.shared.weight", "model.encoder.embed_tokens.weight", *names]
    for name in names[1:]:
        if name in tensors and np.array_equal(
            tensors.setdefault(names[0], tensors[name]), tensors[name]
        ):
            del tensors[name]


def _positions(
    tables: list[np.ndarray], d_model: int, folder: Path, *, shared: bool
) -> tuple[str, list[np.ndarray] | None]:
    """Which positions the tables hold: sinusoids, ours or the model's own, or anything else, which
    is learned.
    """
    if not tables:
        return "interleaved", None
    length = len(tables[0])
    interleaved_LD = sinusoidal_positions(length, d_model)[:, sines_first(d_model)]
    for kind, table_LD in (
        ("interleaved", interleaved_LD),
        ("split", sinusoidal_positions(length, d_model, layout="split")),
    ):
        if all(t.shape == table_LD.shape and np.allclose(t, table_LD, atol=1e-3) for t in tables):
            return kind, None
    if len(tables) != 2 or any(t.shape != (length, d_model) for t in tables):
        raise UserError(
            f"The position tables in {str(folder)!r} are not two of width {d_model}; expected one for each side."
        )
    if shared and not np.array_equal(tables[0], tables[1]):
        raise UserError(
            f"Encoder and decoder have different learned positions in {str(folder)!r}, but one embedding; here positions are "
            "part of an embedding, so it cannot be imported."
        )
    return "learned", tables


def _layers_from(tensors: dict[str, np.ndarray], side: str, count: int) -> tuple[Layer, ...]:
    """The layers of ``side`` (encoder or decoder); takes what it reads out of ``tensors``."""

    def linear(name: str) -> Linear:
        return Linear(tensors.pop(f"{name}.weight").T, tensors.pop(f"{name}.bias"))

    def norm(name: str) -> Norm:
        return Norm(tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.bias"))

    def attention(name: str) -> Attention:
        query, key, value, output = (
            linear(f"{name}.{part}_proj") for part in ("q", "k", "v", "out")
        )
        return Attention(query, key, value, output, norm(f"{name}_layer_norm"))

    layers = []
    for i in range(count):
        prefix = f"model.{side}.layers.{i}."
        cross = attention(prefix + "encoder_attn") if side == "decoder" else None
        feed_forward = FeedForward(
            linear(prefix + "fc1"), linear(prefix + "fc2"), norm(prefix + "final_layer_norm")
        )
        layers.append(Layer(attention(prefix + "self_attn"), cross, feed_forward))
    return tuple(layers)


def _expected_shapes(
    encoder_layers: int,
    decoder_layers: int,
    d_model: int,
    d_ff: int,
    vocab_sizes: tuple[int, int],
    *,
    shared: bool,
    tied: bool,
) -> dict[str, tuple[int, ...]]:
    """What ``tensors_of`` gives for such a model: every name with its shape, tied matrices once."""
    source, target = vocab_sizes
    shapes: dict[str, tuple[int, ...]] = {"final_logits_bias": (1, target)}
    if shared:
        shapes["model.shared.weight"] = (target, d_model)
    else:
        shapes["model.encoder.embed_tokens.weight"] = (source, d_model)
        shapes["model.decoder.embed_tokens.weight"] = (target, d_model)
    if not tied:
        shapes["lm_head.weight"] = (target, d_model)
    for side, count, attentions in (
        ("encoder", encoder_layers, ["self_attn"]),
        ("decoder", decoder_layers, ["self_attn", "encoder_attn"]),
    ):
        linears = {
            f"{a}.{part}_proj": (d_model, d_model)
            for a in attentions
            for part in ("q", "k", "v", "out")
        }
        linears |= {"fc1": (d_ff, d_model), "fc2": (d_model, d_ff)}
        norms = [f"{a}_layer_norm" for a in attentions] + ["final_layer_norm"]
        for prefix in (f"model.{side}.layers.{i}." for i in range(count)):
            for name, shape in linears.items():
                shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
            for name in norms:
                shapes |= {f"{prefix}{name}.weight": (d_model,), f"{prefix}{name}.bias": (d_model,)}
    return shapes


def _attention_tensors(name: str, attention: Attention) -> Iterator[tuple[str, np.ndarray]]:
    for part, linear in zip(("q", "k", "v", "out"), attention[:4], strict=True):
        yield from _linear_tensors(f"{name}.{part}_proj", linear)
    yield from _norm_tensors(f"{name}_layer_norm", attention.norm)


def _linear_tensors(name: str, linear: Linear) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{name}.weight", linear.kernel_IO.T
    yield f"{name}.bias", linear.bias_O


def _norm_tensors(name: str, norm: Norm) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{name}.weight", norm.scale_D
    yield f"{name}.bias", norm.bias_D
