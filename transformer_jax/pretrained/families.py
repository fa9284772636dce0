"""Families of pretrained models: the settings and weight names of each class in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_jax.pretrained.weights import WeightNames

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gated-gelu": "geglu",
    "gated-gelu_new": "geglu",
    "gated-silu": "swiglu",
}


class Family(NamedTuple):
    """A model class of transformers."""

    name: str
    """Name of the class."""
    weight_names: WeightNames
    """Names of its weights."""
    fields: Mapping[str, str]
    """Fields of its config.json, and the fields of ``ModelConfig`` that they set."""
    settings: Mapping[str, Any]
    """The other settings that differ from the paper's."""
    defaults: Mapping[str, Any]
    """Values that the class gives to the fields that its config.json lacks."""
    tokenizer: str
    """Class of the tokenizer if the folder does not name one."""
    separate_names: Mapping[str, str] = {}
    """Names of its weights if source and target do not share embeddings."""
    required: Mapping[str, tuple[Any, ...]] = {}
    """Fields of config.json that have no counterpart here, and their supported values."""
    languages: str = "(?!)"
    """Regular expression for the special tokens of languages; its group is the code."""
    leading_tokens: tuple[str, ...] | None = None
    """Tokens before those of a SentencePiece model, and ..."""
    num_replaced_pieces: int = 0
    """... the number of the model's own first tokens that they replace. None: not supported without
    tokenizer.json."""
    config_name: str = "config.json"
    """Where its settings are."""


# In fairseq's models, encoder and decoder have the same fields.
_FAIRSEQ_FIELDS = {
    "d_model": "d_model",
    "encoder_layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "encoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "d_ff",
    "activation_function": "activation",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "feed_forward_dropout",
    "scale_embedding": "embedding_scale",
    "max_position_embeddings": "max_positions",
}
_FAIRSEQ_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50265,
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "activation_function": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "scale_embedding": False,
    "max_position_embeddings": 1024,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "tie_word_embeddings": True,
}
_LAYER_NAMES = {
    "self_attention.query": "self_attn.q_proj.{}",
    "self_attention.key": "self_attn.k_proj.{}",
    "self_attention.value": "self_attn.v_proj.{}",
    "self_attention.output": "self_attn.out_proj.{}",
    "self_attention_residual": "self_attn_layer_norm.{}",
    "cross_attention.query": "encoder_attn.q_proj.{}",
    "cross_attention.key": "encoder_attn.k_proj.{}",
    "cross_attention.value": "encoder_attn.v_proj.{}",
    "cross_attention.output": "encoder_attn.out_proj.{}",
    "cross_attention_residual": "encoder_attn_layer_norm.{}",
    "feed_forward.inner": "fc1.{}",
    "feed_forward.output": "fc2.{}",
    "feed_forward_residual": "final_layer_norm.{}",
}
_EMBEDDING_NAMES = {
    "target_embedding.matrix": "model.shared.weight",
    "softmax_matrix": "lm_head.weight",
}
_SOFTMAX_BIAS_NAME = {"softmax_bias": "final_logits_bias"}
_FINAL_NORM_NAMES = {"final_norm": "model.{side}.layer_norm.{}"}
_LEARNED_POSITION_NAMES = {
    "source_embedding.position_matrix": "model.encoder.embed_positions.weight",
    "source_embedding.norm.scale": "model.encoder.layernorm_embedding.weight",
    "source_embedding.norm.bias": "model.encoder.layernorm_embedding.bias",
    "target_embedding.position_matrix": "model.decoder.embed_positions.weight",
    "target_embedding.norm.scale": "model.decoder.layernorm_embedding.weight",
    "target_embedding.norm.bias": "model.decoder.layernorm_embedding.bias",
}
_FAIRSEQ_SETTINGS = {"norm_epsilon": 1e-5, "attention_bias": True}
_BART_SETTINGS = {
    **_FAIRSEQ_SETTINGS,
    "positions": "learned",
    "position_offset": 2,
    "embedding_norm": True,
    "share_positions": False,
    "softmax_bias": True,
}
_FAIRSEQ_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
_PEGASUS_TOKENS = ("<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{i}>" for i in range(2, 103)))
_PRE_NORM_SETTINGS = {"norm": "pre", "final_norm": True}


def _make_weight_names(*names: Mapping[str, str], sines_first: bool = False) -> WeightNames:
    merged = {
        name: foreign_name
        for table in (*names, _LAYER_NAMES)
        for name, foreign_name in table.items()
    }
    return WeightNames(merged, "model.{side}.layers.{number}.", sines_first=sines_first)


_T5_NAMES = {
    "target_embedding.matrix": "shared.weight",
    "softmax_matrix": "lm_head.weight",
    "final_norm": "{side}.final_layer_norm.{}",
    "relative_bias": "layer.0.SelfAttention.relative_attention_bias.weight",
    "self_attention.query": "layer.0.SelfAttention.q.{}",
    "self_attention.key": "layer.0.SelfAttention.k.{}",
    "self_attention.value": "layer.0.SelfAttention.v.{}",
    "self_attention.output": "layer.0.SelfAttention.o.{}",
    "self_attention_residual": "layer.0.layer_norm.{}",
    "cross_attention.query": "layer.1.EncDecAttention.q.{}",
    "cross_attention.key": "layer.1.EncDecAttention.k.{}",
    "cross_attention.value": "layer.1.EncDecAttention.v.{}",
    "cross_attention.output": "layer.1.EncDecAttention.o.{}",
    "cross_attention_residual": "layer.1.layer_norm.{}",
    "encoder.feed_forward.inner": "layer.1.DenseReluDense.wi.{}",
    "encoder.feed_forward.gate": "layer.1.DenseReluDense.wi_0.{}",
    "encoder.feed_forward.output": "layer.1.DenseReluDense.wo.{}",
    "encoder.feed_forward_residual": "layer.1.layer_norm.{}",
    "decoder.feed_forward.inner": "layer.2.DenseReluDense.wi.{}",
    "decoder.feed_forward.gate": "layer.2.DenseReluDense.wi_0.{}",
    "decoder.feed_forward.output": "layer.2.DenseReluDense.wo.{}",
    "decoder.feed_forward_residual": "layer.2.layer_norm.{}",
}
_T5_WEIGHTS = WeightNames(_T5_NAMES, "{side}.block.{number}.")
_T5_FIELDS = {
    "d_model": "d_model",
    "d_ff": "d_ff",
    "d_kv": "d_k",
    "num_heads": "num_heads",
    "num_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "relative_attention_num_buckets": "relative_buckets",
    "relative_attention_max_distance": "relative_distance",
    "dropout_rate": "dropout",
    "layer_norm_epsilon": "norm_epsilon",
    "feed_forward_proj": "activation",
}
_T5_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_decoder_layers": None,  # as num_layers
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "decoder_start_token_id": None,
    "tie_word_embeddings": True,
}
_MT5_DEFAULTS = _T5_DEFAULTS | {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
_T5_SETTINGS = {
    **_PRE_NORM_SETTINGS,
    "norm_type": "rms",
    "feed_forward_bias": False,
    "positions": "relative",
    "attention_scale": False,
    "embedding_scale": "none",
}


def _make_t5_family(name: str, defaults: Mapping[str, Any], **settings: Any) -> Family:
    return Family(
        name,
        _T5_WEIGHTS,
        _T5_FIELDS,
        _T5_SETTINGS | settings,
        defaults,
        "T5Tokenizer",
        languages="<2([A-Za-z_]+)>",  # MADLAD-400
        leading_tokens=(),
    )


# Marian's own files (``marian.py``).
_MARIAN_NAMES = {
    "target_embedding.matrix": "Wemb",
    "source_embedding.norm.scale": "encoder_emb_ln_scale",
    "source_embedding.norm.bias": "encoder_emb_ln_bias",
    "target_embedding.norm.scale": "decoder_emb_ln_scale",
    "target_embedding.norm.bias": "decoder_emb_ln_bias",
    "softmax_matrix": "decoder_ff_logit_out_Wt",
    "softmax_bias": "decoder_ff_logit_out_b",
    "final_norm": "{side}_top_{}",
    "self_attention.query": "self_{}q",
    "self_attention.key": "self_{}k",
    "self_attention.value": "self_{}v",
    "self_attention.output": "self_{}o",
    "self_attention_residual": "self_Wo_{}",
    "cross_attention.query": "context_{}q",
    "cross_attention.key": "context_{}k",
    "cross_attention.value": "context_{}v",
    "cross_attention.output": "context_{}o",
    "cross_attention_residual": "context_Wo_{}",
    "feed_forward.inner": "ffn_{}1",
    "feed_forward.output": "ffn_{}2",
    "feed_forward_residual": "ffn_ffn_{}",
}
_MARIAN_FIELDS = {
    "dim-emb": "d_model",
    "enc-depth": "num_layers",
    "dec-depth": "num_decoder_layers",
    "transformer-heads": "num_heads",
    "transformer-dim-ffn": "d_ff",
    "transformer-ffn-activation": "activation",
}
_MARIAN_REQUIRED: dict[str, tuple[Any, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-ffn-activation": ("relu", "swish"),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-decoder-dim-ffn": (0,),
    "transformer-attention-mask": ("default",),
    "transformer-tied-layers": ([],),
    "input-types": ([],),
    "lemma-dim-emb": (0,),
    "lemma-dependency": ("",),
    **dict.fromkeys(
        (
            "transformer-no-projection",
            "transformer-no-bias",
            "transformer-no-affine",
            "transformer-train-positions",
            "transformer-train-position-embeddings",
            "transformer-disable-position-embeddings",
            "output-omit-bias",
            "right-left",
            "ulr",
        ),
        (False,),
    ),
}

FAMILIES = {
    "marian": Family(
        "MarianMTModel",
        _make_weight_names(_EMBEDDING_NAMES, _SOFTMAX_BIAS_NAME, sines_first=True),
        _FAIRSEQ_FIELDS,
        _FAIRSEQ_SETTINGS | {"softmax_bias": True, "train_decoder_start": False},
        _FAIRSEQ_DEFAULTS
        | {"vocab_size": 58101, "pad_token_id": 58100, "decoder_start_token_id": 58100}
        | {"bos_token_id": None, "eos_token_id": 0},
        "MarianTokenizer",
        separate_names={
            "source_embedding.matrix": "model.encoder.embed_tokens.weight",
            "target_embedding.matrix": "model.decoder.embed_tokens.weight",
        },
        required=dict.fromkeys(
            ("normalize_before", "normalize_embedding", "add_final_layer_norm"), (False,)
        ),
    ),
    "marian-npz": Family(
        "Marian",
        WeightNames(
            _MARIAN_NAMES,
            "{side}_l{number}_",
            norm=("ln_scale", "ln_bias"),
            linear=("W", "b"),
            first_layer=1,
        ),
        _MARIAN_FIELDS,
        {
            "positions": "tensor2tensor",
            "embedding_scale": "tokens",
            "attention_bias": True,
            "softmax_bias": True,
            "zero_decoder_start": True,
        },
        {
            "dim-emb": 512,
            "enc-depth": 6,
            "dec-depth": 6,
            "transformer-heads": 8,
            "transformer-dim-ffn": 2048,
            "transformer-ffn-activation": "swish",
            "bos_token_id": None,
        },
        "MarianTokenizer",
        separate_names={
            "source_embedding.matrix": "encoder_Wemb",
            "target_embedding.matrix": "decoder_Wemb",
        },
        required=_MARIAN_REQUIRED,
        config_name="special:model.yml",
    ),
    "m2m_100": Family(
        "M2M100ForConditionalGeneration",
        _make_weight_names(_EMBEDDING_NAMES, _FINAL_NORM_NAMES),
        _FAIRSEQ_FIELDS,
        _FAIRSEQ_SETTINGS | _PRE_NORM_SETTINGS | {"positions": "tensor2tensor"},
        _FAIRSEQ_DEFAULTS
        | {"vocab_size": 128112, "attention_dropout": 0.1}
        | {"activation_function": "relu", "scale_embedding": True},
        "M2M100Tokenizer",
        languages="__([a-z]{2,3})__|([a-z]{3}_[A-Z][a-z]{3})",
        leading_tokens=_FAIRSEQ_TOKENS,
        num_replaced_pieces=3,
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        _make_weight_names(_EMBEDDING_NAMES, _LEARNED_POSITION_NAMES, _SOFTMAX_BIAS_NAME),
        _FAIRSEQ_FIELDS,
        _BART_SETTINGS,
        _FAIRSEQ_DEFAULTS,
        "BartTokenizer",
        required={"normalize_before": (False,), "normalize_embedding": (True,)},
    ),
    "mbart": Family(
        "MBartForConditionalGeneration",
        _make_weight_names(
            _EMBEDDING_NAMES, _LEARNED_POSITION_NAMES, _FINAL_NORM_NAMES, _SOFTMAX_BIAS_NAME
        ),
        _FAIRSEQ_FIELDS,
        _BART_SETTINGS | _PRE_NORM_SETTINGS,
        _FAIRSEQ_DEFAULTS | {"decoder_start_token_id": None},
        "MBartTokenizer",
        required={"normalize_before": (True,), "normalize_embedding": (True,)},
        languages="([a-z]{2}_[A-Z]{2})",
        leading_tokens=_FAIRSEQ_TOKENS,
        num_replaced_pieces=3,
    ),
    "pegasus": Family(
        "PegasusForConditionalGeneration",
        _make_weight_names(
            _EMBEDDING_NAMES, _FINAL_NORM_NAMES, _SOFTMAX_BIAS_NAME, sines_first=True
        ),
        _FAIRSEQ_FIELDS,
        _FAIRSEQ_SETTINGS
        | _PRE_NORM_SETTINGS
        | {"softmax_bias": True, "train_decoder_start": False},
        _FAIRSEQ_DEFAULTS
        | {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "decoder_start_token_id": 0},
        "PegasusTokenizer",
        leading_tokens=_PEGASUS_TOKENS,
        num_replaced_pieces=2,
    ),
    "t5": _make_t5_family("T5ForConditionalGeneration", _T5_DEFAULTS),
    "mt5": _make_t5_family("MT5ForConditionalGeneration", _MT5_DEFAULTS),
    "umt5": _make_t5_family("UMT5ForConditionalGeneration", _MT5_DEFAULTS, relative_bias="layer"),
}
"""Families by ``model_type`` in config.json."""
