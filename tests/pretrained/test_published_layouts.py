"""Stand-ins with the published files of each family, and each field of config.json alone.

published.json has the fields of config.json, generation_config.json and tokenizer_config.json as
the models' owners publish them, the ids of special tokens and the names of copied tensors, with
their sources. A stand-in has the same, but smaller sizes, random weights, and words as tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import models, pre_tokenizers, processors

from tests.pretrained import families
from tests.pretrained.test_published import assert_equal_logits
from transformer_jax import UserError
from transformer_jax.pretrained.families import ACTIVATIONS, FAMILIES
from transformer_jax.pretrained.folder import Pretrained
from transformer_jax.pretrained.loading import import_huggingface

pytestmark = pytest.mark.cpu("compares with PyTorch to within 1e-5")

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "published.json").read_text()
)
# Without tokenizer.json, the published tokenizers are SentencePiece models or bytes; their tokens
# are compared in test_family_tokenizers.py. Here, words are tokens.
AROUND = {
    "BART": ["<s>", "$A", "</s>"],
    "BART, Chinese": ["[CLS]", "$A", "[SEP]"],
    "mBART": ["$A", "</s>", "en_XX"],
    "mBART-50": ["en_XX", "$A", "</s>"],
    "M2M100": ["__en__", "$A", "</s>"],
    "NLLB-200": ["eng_Latn", "$A", "</s>"],
}
LANGUAGES = {
    "mBART": ["en_XX", "de_DE"],
    "mBART-50": ["en_XX", "de_DE"],
    "M2M100": ["__en__", "__de__"],
    "NLLB-200": ["eng_Latn", "deu_Latn"],
    "MADLAD-400": ["<2en>", "<2de>"],
}
SMALL = {"d_model": 16, "encoder_layers": 2, "num_hidden_layers": 2, "decoder_layers": 1}
SMALL |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
SMALL |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
SMALL |= {"d_ff": 24, "d_kv": 6, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 1}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def vocabulary(name: str) -> dict[str, int]:
    """Ids of the tokens: the published special tokens, words, and languages."""
    special: dict[str, int] = PUBLISHED[name]["special"]
    words = ["▁" + word for word in families.WORDS] if name == "OPUS-MT" else families.WORDS
    ids = dict(special)
    free = (i for i in range(1000) if i not in special.values())
    for token in [*words, *LANGUAGES.get(name, [])]:
        ids[token] = next(free)
    if name == "OPUS-MT":
        ids["<pad>"] = next(free)
    return ids


def small_config(name: str, size: int) -> dict[str, Any]:
    """The published config.json with small sizes. Marian's last token is PAD."""
    published = PUBLISHED[name]["config"]
    config = published | {field: value for field, value in SMALL.items() if field in published}
    if name == "OPUS-MT":
        last = size - 1
        config |= {"pad_token_id": last, "decoder_start_token_id": last, "bad_words_ids": [[last]]}
        return config | {"vocab_size": size, "extra_pos_embeddings": size}
    return config | {"vocab_size": size + 3}  # NLLB and T5 have rows without a token


def write(name: str, folder: Path, **changes: Any) -> None:
    """Write a stand-in with the published layout. ``changes`` are fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = vocabulary(name)
    config = small_config(name, max(ids.values()) + 1) | changes
    (folder / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(loaded)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name and "embed_positions" not in parameter_name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    if "generation" in PUBLISHED[name]:
        (folder / "generation_config.json").write_text(json.dumps(PUBLISHED[name]["generation"]))
    rename_tensors(name, folder)
    write_tokenizer(name, folder, ids)


def rename_tensors(name: str, folder: Path) -> None:
    """Give the tensors their published names, with copies of the embeddings."""
    entry = PUBLISHED[name]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    shared = next(tensors[x] for x in ("model.shared.weight", "shared.weight") if x in tensors)
    for copy in entry["copies"]:
        tensors[copy] = shared.copy()
    if entry.get("own_head"):
        rng = np.random.default_rng(1)
        tensors["lm_head.weight"] = rng.standard_normal(shared.shape, np.float32)
    if name == "MADLAD-400":
        del tensors["shared.weight"]
    if name == "BART, Chinese":  # BartModel has no head
        tensors.pop("final_logits_bias", None)
        tensors = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def write_tokenizer(name: str, folder: Path, ids: dict[str, int]) -> None:
    """Write the tokenizer's files, with the published fields."""
    settings = PUBLISHED[name].get("tokenizer", {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if name == "OPUS-MT":
        families._write_sentencepiece(folder, ids, ids)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return
    unknown = "[UNK]" if "[UNK]" in ids else "<unk>"
    fast = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=unknown))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [*PUBLISHED[name]["special"], *LANGUAGES.get(name, [])]
    fast.add_special_tokens(special)
    around = AROUND.get(name, ["$A", "</s>"])
    fast.post_processor = processors.TemplateProcessing(
        single=" ".join(around),
        special_tokens=[(token, ids[token]) for token in around if token != "$A"],
    )
    fast.save(str(folder / "tokenizer.json"))
    if name == "BART, Chinese":
        bert = {"tokenizer_class": "BertTokenizer", "unk_token": unknown}
        (folder / "tokenizer_config.json").write_text(json.dumps(bert))


def options_of(name: str) -> dict[str, Any]:
    """mBART's first version is imported for one language pair."""
    return {"languages": ("en_XX", "de_DE")} if name == "mBART" else {}


# Layouts like another family's; make test-all compares them.
ALIKE = ("mBART-50", "Flan-T5", "mT5", "M2M100")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in ALIKE else ())
        for name in PUBLISHED
    ],
)
def test_the_published_layout_is_imported(name: str, tmp_path: Path) -> None:
    """Equal logits, ids and search settings."""
    write(name, tmp_path)
    assert_equal_logits(tmp_path, **options_of(name))
    config, _, tokenizer = import_huggingface(tmp_path, **options_of(name))
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    generation = theirs.generation_config
    assert config.model.pad_id == theirs.config.pad_token_id
    assert config.model.eos_id == generation.eos_token_id
    if name != "mBART":
        assert config.model.decoder_start_id == generation.decoder_start_token_id
    ours = config.decoding
    assert ours.beam_size == (generation.num_beams or 1)
    assert ours.length_penalty == (generation.length_penalty or 1)
    assert ours.no_repeat_ngram == (generation.no_repeat_ngram_size or 0)
    assert ours.min_length == max((generation.min_length or 0) - 1, 0)
    assert (ours.patience == 1) == (generation.early_stopping is True)
    forced = [generation.forced_bos_token_id] * (generation.forced_bos_token_id is not None)
    if name not in LANGUAGES:
        assert tokenizer.affixes().before_target[: tokenizer.unscored_prefix_length] == forced


# Fields of config.json.

NAMES = {"m2m_100": "M2M100", "bart": "BART", "mbart": "mBART-50", "pegasus": "Pegasus"}
NAMES |= {"marian": "OPUS-MT", "t5": "T5", "mt5": "mT5", "umt5": "UMT5"}
# Values that no published model has. A new field of the table needs one.
UNUSUAL: dict[str, Any] = {
    "d_model": 20,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "activation_function": "gelu_pytorch_tanh",
    "dropout": 0.35,
    "attention_dropout": 0.45,
    "activation_dropout": 0.15,
    "scale_embedding": ...,  # the other value
    "max_position_embeddings": 40,
    "d_ff": 20,
    "d_kv": 5,
    "num_heads": 5,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 20,
    "dropout_rate": 0.35,
    "layer_norm_epsilon": 1e-3,
    "feed_forward_proj": "gated-silu",
}
PARTNERS = {"encoder_attention_heads": "decoder_attention_heads"}
PARTNERS |= {"encoder_ffn_dim": "decoder_ffn_dim", "encoder_layers": "num_hidden_layers"}
# Other names of fields, which have priority in transformers.
ALIASES = {"hidden_size": 20, "num_attention_heads": 4, "num_hidden_layers": 3, "head_dim": 5}
# Fields that are read beside the table. families.py has stand-ins of Marian with two vocabularies.
BESIDE: dict[str, Any] = {
    "tie_word_embeddings": False,
    "pad_token_id": 25,
    "eos_token_id": 25,
    "bos_token_id": 25,
    "decoder_start_token_id": 25,
    "is_gated_act": True,
    "dense_act_fn": "silu",
    "scale_decoder_outputs": False,
    "normalize_before": ...,
    "normalize_embedding": ...,
    "add_final_layer_norm": ...,
    "force_bos_token_to_be_generated": True,
    "n_positions": 40,
}
CLASSES = {name: family for name, family in FAMILIES.items() if "config.json" in family.config_name}
FIELDS = [
    (model_type, field)
    for model_type, family in CLASSES.items()
    for field in [*family.fields, *ALIASES, *BESIDE]
    if field != "head_dim" or "d_kv" in family.fields
]
QUICK = ("t5",)


def unusual_value(published: dict[str, Any], field: str) -> Any:
    value = (UNUSUAL | ALIASES | BESIDE)[field]
    return not published.get(field, False) if value is ... else value


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        pytest.param(*both, marks=() if both[0] in QUICK else pytest.mark.exhaustive)
        for both in FIELDS
    ],
)
def test_one_unusual_field(model_type: str, field: str, tmp_path: Path) -> None:
    """Logits equal those of transformers, or an error names the field."""
    name = NAMES[model_type]
    value = unusual_value(PUBLISHED[name]["config"], field)
    changes = {field: value}
    if field in PARTNERS:
        changes[PARTNERS[field]] = value
    if field == "num_attention_heads":
        changes["decoder_attention_heads"] = value
    write(name, tmp_path, **changes)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config_fields = FAMILIES[model_type].fields
    try:
        model = Pretrained(tmp_path).model_config()
    except UserError as error:
        derived = ("is_gated_act", "dense_act_fn") if field == "feed_forward_proj" else ()
        assert any(word in str(error) for word in (field, "eos_token_id", *derived)), error
        assert field not in config_fields or derived, error
        return
    ours = config_fields.get(field)
    if ours == "activation":
        assert model.activation == ACTIVATIONS[value]
    elif ours and ours != "embedding_scale":
        assert getattr(model, ours) == value
    assert_equal_logits(tmp_path)


def test_every_field_has_an_unusual_value() -> None:
    read = {field for family in CLASSES.values() for field in family.fields}
    assert read == UNUSUAL.keys()


def test_a_forced_token_of_older_models(tmp_path: Path) -> None:
    """force_bos_token_to_be_generated, without forced_bos_token_id, forces BOS."""
    write("BART", tmp_path, forced_bos_token_id=None)
    (tmp_path / "generation_config.json").unlink()
    _, _, tokenizer = import_huggingface(tmp_path)
    theirs: Callable[..., Any] = transformers.AutoModelForSeq2SeqLM.from_pretrained
    assert theirs(tmp_path).generation_config.forced_bos_token_id == 0
    assert tokenizer.affixes().before_target[: tokenizer.unscored_prefix_length] == [0]
