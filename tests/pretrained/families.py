"""Small pretrained models with random weights, one of each family, as transformers saves them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

WORDS = [f"w{i}" for i in range(24)]
# Sizes are odd on purpose: d_k is not d_model / heads, the vocabulary is not a multiple of 8.
_FAIRSEQ: dict[str, Any] = {
    "d_model": 20,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 28,
    "decoder_ffn_dim": 28,
    "max_position_embeddings": 64,
}
_MARIAN: dict[str, Any] = _FAIRSEQ | {
    **{"activation_function": "swish", "scale_embedding": True},
    **{"pad_token_id": 26, "eos_token_id": 0, "decoder_start_token_id": 26},
    **{"bos_token_id": 0, "forced_eos_token_id": 0},
}
_T5: dict[str, Any] = {
    "d_model": 20,
    "d_kv": 5,
    "d_ff": 28,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "m2m_100": ("M2M100", _FAIRSEQ),
    "nllb": ("M2M100", _FAIRSEQ | {"scale_embedding": False}),
    "bart": (
        "Bart",
        _FAIRSEQ | {"normalize_before": False, "normalize_embedding": True},
    ),
    "mbart": (
        "MBart",
        _FAIRSEQ
        | {"normalize_before": True, "normalize_embedding": True}
        | {"d_model": 16, "scale_embedding": True, "decoder_start_token_id": 2}
        | {"tokenizer_class": "MBart50Tokenizer"},
    ),
    "mbart, first version": (
        "MBart",
        _FAIRSEQ
        | {"normalize_before": True, "normalize_embedding": True}
        | {"d_model": 16, "scale_embedding": True, "decoder_start_token_id": 29},
    ),
    "pegasus": (
        "Pegasus",
        _FAIRSEQ
        | {"normalize_before": True, "normalize_embedding": False}
        | {"scale_embedding": True, "pad_token_id": 0, "eos_token_id": 1},
    ),
    "marian": ("Marian", _MARIAN),
    "marian, two vocabularies": (
        "Marian",
        _MARIAN
        | {"share_encoder_decoder_embeddings": False, "scale_embedding": False}
        | {"pad_token_id": 5, "decoder_start_token_id": 5, "decoder_vocab_size": 22},
    ),
    "marian, untied": (
        "Marian",
        _MARIAN | {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    ),
    "t5": ("T5", _T5),
    "t5 1.1": ("T5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5", _T5 | {"feed_forward_proj": "gated-gelu"}),
}


def special_tokens(case: str) -> list[str]:
    if CASES[case][0] in ("M2M100", "Bart", "MBart"):
        return ["<s>", "<pad>", "</s>", "<unk>"]
    return ["<pad>", "</s>", "<unk>"]


def vocabularies(case: str) -> list[dict[str, int]]:
    """Their ids of the source and target tokens."""
    if CASES[case][0] != "Marian":
        tokens = [*special_tokens(case), *WORDS, *languages(case)]
        return [{token: i for i, token in enumerate(tokens)}] * 2
    pieces, pad = [f"▁{word}" for word in WORDS], CASES[case][1]["pad_token_id"]
    if "decoder_vocab_size" not in CASES[case][1]:
        return [{token: i for i, token in enumerate(["</s>", "<unk>", *pieces, "<pad>"])}] * 2
    source = ["</s>", "<unk>", *pieces[::-1]]
    target = ["</s>", *pieces[5:], "<unk>"]
    source.insert(pad, "<pad>")
    target.insert(pad, "<pad>")
    return [{token: i for i, token in enumerate(tokens)} for tokens in (source, target)]


def model_class(case: str) -> Any:
    name = CASES[case][0]
    ending = "MTModel" if name == "Marian" else "ForConditionalGeneration"
    return getattr(transformers, name + ending)


def languages(case: str) -> list[str]:
    found = {"m2m_100": ["__en__", "__de__"], "nllb": ["eng_Latn", "deu_Latn"]}
    return found.get(case, ["en_XX", "de_DE"] if "mbart" in case else [])


def template(case: str) -> list[str]:
    """What the tokenizer of the published model puts around a line, $A."""
    codes = languages(case)[:1]
    if case == "bart":
        return ["<s>", "$A", "</s>"]
    if case == "mbart, first version":
        return ["$A", "</s>", *codes]
    return [*(codes if CASES[case][0] in ("M2M100", "MBart") else []), "$A", "</s>"]


# With these seeds, outputs differ and many end before the limit.
_SEEDS = {"m2m_100": 11, "bart": 3, "mbart": 1, "pegasus": 18, "t5": 2, "t5 1.1": 1, "mt5": 1}
_SEEDS |= {
    "mbart, first version": 44,
    "marian": 9,
    "marian, two vocabularies": 2,
    "marian, untied": 2,
}


def write(case: str, folder: Path, *, spare: int | None = None) -> Any:
    """Save a model of this family to ``folder``. Returns it.

    ``spare``: rows of the embedding matrix without a token; T5 has such rows.
    """
    name, fields = CASES[case]
    vocabulary, target = vocabularies(case)
    if spare is None:
        spare = 3 if "T5" in name else 0
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(vocab_size=len(vocabulary) + spare, **fields)
    model = model_class(case)(config).eval()
    generator = torch.Generator().manual_seed(_SEEDS.get(case, 0))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if name in ("Marian", "Pegasus") and "embed_positions" in parameter_name:
                continue
            norm = "norm" in parameter_name and parameter_name.endswith("weight")
            spread = 0.3 if parameter.ndim > 1 else 0.2
            if parameter_name.endswith("Attention.q.weight"):  # T5 does not scale dot products
                spread *= config.d_kv**-0.5
            noise = spread * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + (1.0 if norm else 0.0))
            if name == "Marian" and parameter_name.endswith(("shared.weight", "tokens.weight")):
                parameter[config.pad_token_id] = 0  # as in OPUS-MT; CTranslate2 requires it
        if hasattr(model, "final_logits_bias"):
            bias = model.final_logits_bias
            bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))
        _end_sentences(model, config, min(len(vocabulary), len(target)))
    if case == "bart":  # as in facebook/bart-large-cnn's generation_config.json
        model.generation_config.forced_bos_token_id = vocabulary["<s>"]
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if name == "Marian":
        _write_sentencepiece(folder, vocabulary, target)
        return model
    fast = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.decoder = decoders.Metaspace()
    fast.add_special_tokens([*special_tokens(case), *languages(case)])
    around = template(case)
    special_ids = [(token, vocabulary[token]) for token in around if token != "$A"]
    fast.post_processor = processors.TemplateProcessing(
        single=" ".join(around), special_tokens=special_ids
    )
    fast.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    if "<s>" in vocabulary:
        special["bos_token"] = "<s>"
    settings = special | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def _write_sentencepiece(folder: Path, vocabulary: dict[str, int], target: dict[str, int]) -> None:
    """Write Marian's files. Pieces are words."""
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 9),
        model_writer=content,
        model_type="word",
        vocab_size=len(WORDS) + 3,
        minloglevel=2,
    )
    separate = vocabulary is not target
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}
    files = {"vocab": vocabulary, "tokenizer_config": settings}
    files |= {"target_vocab": target} if separate else {}
    for name, file in files.items():
        (folder / f"{name}.json").write_text(json.dumps(file))
    for name in ("source", "target"):
        (folder / f"{name}.spm").write_bytes(content.getvalue())


def _end_sentences(model: Any, config: Any, size: int) -> None:
    """Change the embedding of EOS so that its logit is often, but not always, the largest."""
    source, target = torch.randint(4, size, (2, 16, 12), generator=torch.Generator().manual_seed(9))
    target[:, 0] = config.decoder_start_token_id
    found = model(input_ids=source, decoder_input_ids=target, output_hidden_states=True)
    hidden = found.decoder_hidden_states[-1].reshape(-1, config.d_model)
    mean = hidden.mean(0)
    scale = config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0
    logit = found.logits.max(-1).values.mean() * 0.9
    embedding = model.get_output_embeddings().weight
    embedding[config.eos_token_id] = mean * logit / (mean @ mean * scale)
