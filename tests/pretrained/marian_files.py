"""Small models with random weights in Marian's own format, as Marian 1.10 writes them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import yaml

from transformer_jax.tokenization.segmenters import SentencePieceSegmenter

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORDS += ["eleven", "twelve"]
LINES = [" ".join(np.random.default_rng(i).choice(WORDS, 5)) for i in range(60)]
# Differences from the fields of ``config``: OPUS-MT's, pre-norm, and separate matrices.
SHAPES: dict[str, dict[str, Any]] = {
    "opus-mt": {"tied-embeddings-all": True},
    "pre-norm": {
        "transformer-preprocess": "n",
        "transformer-postprocess": "da",
        "transformer-postprocess-top": "n",
        "transformer-ffn-activation": "relu",
        "tied-embeddings": True,
        "transformer-heads": 4,
        "enc-depth": 3,
        "dec-depth": 1,
    },
    "untied": {"transformer-postprocess-emb": "nd", "transformer-heads": 1, "enc-depth": 1},
}

# Seed, and what is added to the bias of EOS: with these, translations differ and many end.
DRAWS = {"opus-mt": (19, 2.0), "pre-norm": (5, 3.0), "untied": (0, 3.0)}


def config(shape: str, sizes: list[int]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "type": "transformer",
        "dim-vocabs": sizes,
        "dim-emb": 16,
        "enc-depth": 2,
        "dec-depth": 2,
        "skip": False,
        "right-left": False,
        "input-types": [],
        "tied-embeddings": False,
        "tied-embeddings-src": False,
        "tied-embeddings-all": False,
        "transformer-heads": 2,
        "transformer-no-projection": False,
        "transformer-dim-ffn": 24,
        "transformer-ffn-depth": 2,
        "transformer-ffn-activation": "swish",
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
        "transformer-postprocess-emb": "d",
        "transformer-postprocess-top": "",
        "transformer-decoder-autoreg": "self-attention",
        "transformer-tied-layers": [],
        "transformer-guided-alignment-layer": "last",
        "transformer-train-position-embeddings": False,
        "ulr": False,
        "lemma-dim-emb": 0,
        "version": "v1.10.0 6f6d484 2021-02-06 15:35:16 -0800",
    }
    return fields | SHAPES[shape]


def arrays(shape: str, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """Weights by their names in Marian, drawn in this order."""
    seed, end_bias = DRAWS[shape]
    rng = np.random.default_rng(seed)
    width = fields["dim-emb"]
    inner = fields["transformer-dim-ffn"]
    weights = {}

    def draw(name: str, *axes: int, spread: float, center: float = 0.0) -> None:
        noise = spread * rng.standard_normal(axes)
        weights[name] = (center + noise).astype(np.float32)

    def draw_norm(name: str, suffix: str = "") -> None:
        draw(f"{name}_ln_scale{suffix}", 1, width, spread=0.2, center=1.0)
        draw(f"{name}_ln_bias{suffix}", 1, width, spread=0.2)

    def draw_sublayer_norm(name: str) -> None:
        is_before = "n" in fields["transformer-preprocess"]
        draw_norm(name, "_pre" if is_before else "")

    source_size, target_size = fields["dim-vocabs"]
    if fields["tied-embeddings-all"]:
        draw("Wemb", source_size, width, spread=0.4)
    else:
        draw("encoder_Wemb", source_size, width, spread=0.4)
        draw("decoder_Wemb", target_size, width, spread=0.4)
        if not fields["tied-embeddings"]:
            draw("decoder_ff_logit_out_Wt", target_size, width, spread=0.4)
    draw("decoder_ff_logit_out_b", 1, target_size, spread=0.3)
    weights["decoder_ff_logit_out_b"][0, 0] += end_bias
    for side in ("encoder", "decoder"):
        for number in range(1, fields[f"{side[:3]}-depth"] + 1):
            layer = f"{side}_l{number}"
            for attention in ("self", "context")[: 1 + (side == "decoder")]:
                for letter in "qkvo":
                    draw(f"{layer}_{attention}_W{letter}", width, width, spread=0.4)
                    draw(f"{layer}_{attention}_b{letter}", 1, width, spread=0.2)
                draw_sublayer_norm(f"{layer}_{attention}_Wo")
            draw(f"{layer}_ffn_W1", width, inner, spread=0.4)
            draw(f"{layer}_ffn_b1", 1, inner, spread=0.2)
            draw(f"{layer}_ffn_W2", inner, width, spread=0.4)
            draw(f"{layer}_ffn_b2", 1, width, spread=0.2)
            draw_sublayer_norm(f"{layer}_ffn_ffn")
        if fields["transformer-postprocess-top"]:
            draw_norm(f"{side}_top")
        if "n" in fields["transformer-postprocess-emb"]:
            draw_norm(f"{side}_emb", "_pre")
    return weights


def write(shape: str, folder: Path) -> None:
    """Write a model to a new folder. OPUS-MT's has a vocabulary in YAML, the others have two
    SentencePiece models.
    """
    folder.mkdir(parents=True)
    models = [_sentencepiece(LINES), _sentencepiece([line.upper() for line in LINES])]
    pieces = [[*SentencePieceSegmenter(model).ids] for model in models]
    names = ["source.spm", "target.spm"]
    for name, model in zip(names, models):
        (folder / name).write_bytes(model)
    if shape == "opus-mt":
        names = ["vocab.yml", "vocab.yml"]
        pieces = [[*dict.fromkeys(pieces[0] + pieces[1])]] * 2
        write_vocabulary(folder / names[0], pieces[0])
    fields = config(shape, [len(side) for side in pieces])
    write_model(folder / "model.npz", fields, arrays(shape, fields))
    decoder = {
        "relative-paths": True,
        "models": ["model.npz"],
        "vocabs": names,
        "beam-size": 6,
        "normalize": 1,
        "word-penalty": 0,
        "mini-batch": 1,
    }
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoder, sort_keys=False))


def write_model(file: Path, fields: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    text = yaml.safe_dump(fields, sort_keys=False).encode() + b"\0"
    np.savez(file, **weights, **{"special:model.yml": np.frombuffer(text, np.int8)})


def write_vocabulary(file: Path, tokens: list[str]) -> None:
    """Write tokens as yaml-cpp does: quoted where YAML needs quotes."""
    lines = []
    for number, token in enumerate(tokens):
        quoted = token.replace("\\", "\\\\").replace('"', '\\"')
        key = token if token.isalnum() else f'"{quoted}"'
        lines.append(f"{key}: {number}\n")
    file.write_text("".join(lines))


def _sentencepiece(lines: list[str]) -> bytes:
    """Train a model with the ids that Marian asks for."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=content,
        model_type="unigram",
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
        bos_id=-1,
        eos_id=0,
        unk_id=1,
    )
    return content.getvalue()
