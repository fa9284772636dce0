"""All settings: frozen dataclasses whose fields declare their defaults and allowed values.

The docstring under a field is its ``--help`` text. The defaults are the paper's base model; every
deviation from the paper is a named field. A field's type has two marks: the range of its values
(``checks.py``), and its role when a run resumes (``roles.py``). ``config_files.py`` reads and
writes config files.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from transformer_jax.settings.checks import (
    CharacterCoverage,
    Count,
    Fraction,
    LineLength,
    NonNegative,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Rule,
    Section,
    Size,
    SmallCount,
)
from transformer_jax.settings.roles import Changeable, Fixed, FixedOnResume, Free, PerProcess

Normalization = Literal["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"]
BleuTokenizer = Literal["13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab"]


@dataclass(frozen=True)
class ModelConfig(Section, prefix="model."):
    """Architecture of the Transformer (paper sections 3 and 6.2; symbols as in Table 3)."""

    vocab_size: Free[PositiveInt] = 37_000
    """Size V of the target vocabulary, or of the shared vocabulary. Training sets it from the
    tokenizer; use tokenizer.vocab_size instead."""
    source_vocab_size: Free[PositiveInt | None] = None
    """Size of the source vocabulary if it is separate; None: one shared vocabulary. Training sets
    it from the tokenizer."""
    d_model: Fixed[Size] = 512
    """Width of embeddings and sub-layer outputs."""
    d_ff: Fixed[Size] = 2048
    """Inner width of the feed-forward layers."""
    num_heads: Fixed[Size] = 8
    """Number of attention heads h."""
    d_k: Fixed[PositiveInt | None] = None
    """Width of queries and keys per head; None: d_model / num_heads."""
    d_v: Fixed[PositiveInt | None] = None
    """Width of values per head; None: d_model / num_heads."""
    num_layers: Fixed[SmallCount] = 6
    """Number of layers N in the encoder and in the decoder."""
    num_decoder_layers: Fixed[SmallCount | None] = None
    """Number of decoder layers if different from the encoder; None: num_layers."""
    dropout: Changeable[Fraction] = 0.1
    """Dropout on embeddings and sub-layer outputs (section 5.4)."""
    attention_dropout: Changeable[Fraction] = 0.0
    """Dropout on attention weights (not in the paper, but in tensor2tensor and fairseq)."""
    feed_forward_dropout: Changeable[Fraction] = 0.0
    """Dropout after the activation of the feed-forward layer (not in the paper)."""
    norm: Fixed[Literal["post", "pre"]] = "post"
    """Layer norm after each residual connection (post, as in the paper) or before each sub-layer
    (pre)."""
    final_norm: Fixed[bool | None] = None
    """Add a final norm to the encoder and to the decoder; None: only if model.norm is pre.
    PyTorch's nn.Transformer always has both."""
    norm_type: Fixed[Literal["layer", "rms"]] = "layer"
    """Layer norm or RMS norm. RMS norm does not subtract the mean and has no bias."""
    norm_epsilon: Fixed[PositiveFloat] = 1e-6
    """Epsilon added to the variance in each norm. PyTorch and most imported models use 1e-5."""
    norm_bias: Fixed[bool] = True
    """Add a bias to each layer norm."""
    attention_bias: Fixed[bool] = False
    """Add biases to the four attention projections (fairseq, Marian and BERT do)."""
    feed_forward_bias: Fixed[bool] = True
    """Add biases to the feed-forward layers (equation 2)."""
    activation: Fixed[Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"]] = "relu"
    """Activation of the feed-forward layers. gelu is exact (erf); gelu_tanh approximates it. swiglu
    (SiLU) and geglu (gelu_tanh, as in T5 1.1) add a third matrix, the gate; reduce d_ff by a third
    to keep the same number of parameters."""
    positions: Fixed[Literal["interleaved", "tensor2tensor", "learned", "relative"]] = "interleaved"
    """Sinusoids with sine and cosine interleaved (the paper); sinusoids as in tensor2tensor and
    fairseq (all sines first, slightly different wavelengths); learned embeddings (Table 3, row E);
    or no embeddings but a relative position bias in self-attention, as in T5."""
    max_positions: Fixed[PositiveInt] = 1024
    """Number of learned positions. Other positions have no limit."""
    position_offset: Fixed[Literal[0] | Size] = 0
    """Position of the first token in the table of sinusoids or learned positions (2 in fairseq)."""
    relative_buckets: Fixed[SmallCount] = 32
    """relative: number of distance buckets, each with one bias per head."""
    relative_distance: Fixed[Size] = 128
    """relative: distances from this value on share one bucket."""
    relative_bias: Fixed[Literal["shared", "layer"]] = "shared"
    """relative: one bias for all layers of the encoder and one for the decoder (T5), or one for
    each layer (UMT5)."""
    attention_scale: Fixed[bool] = True
    """Divide the dot products of queries and keys by sqrt(d_k) (equation 1). T5 does not."""
    embedding_scale: Fixed[Literal["all", "tokens", "none"]] = "all"
    """Embeddings to multiply by sqrt(d_model): tokens and learned positions, only tokens (section
    3.4; mBART), or none (BART, T5)."""
    embedding_norm: Fixed[bool] = False
    """Normalize the sum of token and position embeddings (BART)."""
    share_positions: Fixed[bool] = True
    """If source and target share token embeddings, also share learned positions and the embedding
    norm. False in BART."""
    tie_embeddings: Fixed[Literal["all", "embeddings", "target", "none"]] = "all"
    """Weight tying. all: one matrix for source embedding, target embedding and softmax (the paper).
    embeddings: one matrix for both embeddings. target: one matrix for target embedding and softmax.
    none: separate matrices."""
    output_scale: Fixed[bool] = False
    """Divide the decoder's output by sqrt(d_model), as T5 1.0 does before its tied softmax."""
    softmax_bias: Fixed[bool] = False
    """Add a bias to the logits (Marian does)."""
    pad_id: Free[Count] = 0
    """Token id of padding. Training sets it and eos_id from the tokenizer."""
    eos_id: Free[Count] = 2
    """Token id of EOS, which ends each source and each target."""
    decoder_start_id: Fixed[Count] = 1
    """Token id of the decoder's first input: BOS, or EOS in fairseq's models, or PAD in T5."""
    train_decoder_start: Fixed[bool] = True
    """Train the embedding of the decoder's first input by its lookup. False in Marian and Pegasus,
    where transformers trains it only as a part of the softmax."""
    zero_decoder_start: Fixed[bool] = False
    """The decoder's first input is a zero vector instead of an embedding, as in Marian itself. Then
    model.decoder_start_id is model.pad_id."""
    dtype: Changeable[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Dtype of matmuls and, on GPU and TPU, of activations between layers (mixed precision). auto:
    bfloat16 on GPU, TPU and CPUs with avx512_bf16, float32 on other CPUs. Parameters, softmax,
    norm statistics and the loss are always float32."""
    alignment_layer: Changeable[int | None] = None
    """Decoder layer whose first cross-attention head gives word alignments, and learns them with
    training.guided_alignment: 0 is the first layer, -1 the last. None: the mean over all heads of
    the last layer."""
    remat: Changeable[bool] = False
    """Activation checkpointing: recompute each layer's activations in the backward pass. Saves
    memory at the cost of about a third more computation."""

    def rules(self) -> Iterator[Rule]:
        yield (
            "d_model",
            self.d_model % 2 == 0 or self.positions in ("learned", "relative"),
            "an even number, because sinusoidal positions pair each sine with a cosine",
        )
        yield (
            "d_model",
            self.d_model % self.num_heads == 0 or None not in (self.d_k, self.d_v),
            f"a multiple of model.num_heads = {self.num_heads}, or explicit model.d_k and "
            "model.d_v",
        )
        yield (
            "tie_embeddings",
            self.source_vocab_size is None or not self.shares_embeddings,
            "'target' or 'none' when source and target have separate vocabularies",
        )
        smallest = min(self.vocab_size, self.source_vocab_size or self.vocab_size)
        yield "pad_id", self.pad_id < smallest, f"an id below the vocabulary's size, {smallest}"
        yield (
            "eos_id",
            self.eos_id < smallest and self.eos_id != self.pad_id,
            f"an id below the vocabulary's size, {smallest}, other than model.pad_id",
        )
        yield (
            "decoder_start_id",
            self.decoder_start_id < self.vocab_size,
            f"an id below model.vocab_size, {self.vocab_size}",
        )
        yield (
            "zero_decoder_start",
            not self.zero_decoder_start or self.decoder_start_id == self.pad_id,
            "False, because model.decoder_start_id is not model.pad_id",
        )
        layer = self.alignment_layer or 0
        layers = self.decoder_layers
        yield "alignment_layer", -layers <= layer < layers, f"-{layers} to {layers - 1}, or None"
        relative = self.positions == "relative"
        half = self.relative_buckets // 2
        yield "relative_buckets", not relative or half >= 2, "at least 4"
        yield (
            "relative_distance",
            not relative or self.relative_distance > half,
            f"more than {half}, half of model.relative_buckets",
        )

    @property
    def head_width_k(self) -> int:
        """Width of queries and keys per head, with the default resolved."""
        return self.d_k or self.d_model // self.num_heads

    @property
    def head_width_v(self) -> int:
        """Width of values per head, with the default resolved."""
        return self.d_v or self.d_model // self.num_heads

    @property
    def decoder_layers(self) -> int:
        """Number of decoder layers, with the default resolved."""
        return self.num_decoder_layers or self.num_layers

    @property
    def shares_embeddings(self) -> bool:
        """True if source and target tokens share one embedding matrix."""
        return self.tie_embeddings in ("all", "embeddings")

    @property
    def ties_softmax(self) -> bool:
        """True if the softmax uses the target embedding matrix."""
        return self.tie_embeddings in ("all", "target")

    @property
    def has_final_norm(self) -> bool:
        """True if the encoder and the decoder end with a norm."""
        return self.norm == "pre" if self.final_norm is None else self.final_norm

    @property
    def is_gated(self) -> bool:
        """True if the feed-forward layers have a gate: a GLU variant, such as swiglu."""
        return self.activation.endswith("glu")

    @property
    def position_limit(self) -> int:
        """Maximum number of tokens in a sentence. Only learned positions have a limit."""
        return self.max_positions if self.positions == "learned" else sys.maxsize


@dataclass(frozen=True)
class TokenizerConfig(Section, prefix="tokenizer."):
    """SentencePiece tokenizer and its training."""

    vocab_size: Fixed[PositiveInt] = 37_000
    """Number of tokens per vocabulary, including the four special tokens."""
    algorithm: Fixed[Literal["bpe", "unigram"]] = "bpe"
    """Byte-pair encoding (the paper) or a unigram language model."""
    joint: Fixed[bool] = True
    """Share one vocabulary between both languages (the paper) instead of learning one for each."""
    character_coverage: Fixed[CharacterCoverage] = 1.0
    """Fraction of the characters in the text that the vocabulary covers. The rarest characters
    become unknown tokens (or bytes)."""
    byte_fallback: Fixed[bool] = False
    """Encode unknown characters as UTF-8 bytes, so no token is unknown."""
    normalization: Fixed[Normalization] = "nmt_nfkc"
    """Unicode normalization before segmentation. The _cf variants also fold case; identity leaves
    the text unchanged. The nmt_ variants turn the zero-width non-joiner into a space; Persian needs
    it, so use nfkc."""
    source_language: FixedOnResume[str] = ""
    """Fine-tuning of a many-to-many model (training.start_from): language code of the source; '':
    that of the model."""
    target_language: FixedOnResume[str] = ""
    """Fine-tuning of a many-to-many model: language code of the target; '': that of the model."""
    user_defined_symbols: FixedOnResume[tuple[str, ...]] = ()
    """Tokens that are never split, such as tags (<2de>) or placeholders. They do not have to occur
    in the training text. If a long line is translated in segments, each segment repeats the symbols
    at the start of the line. Symbols missing from an existing vocabulary (tokenizer.model,
    training.start_from) are added to it."""
    new_languages: FixedOnResume[tuple[str, ...]] = ()
    """Languages to add to the model. Fine-tuning: CODE:RELATIVE, such as mic_Latn:fra_Latn; the row
    of the new language in the embedding matrix starts as a copy of its relative's, and is trained
    even if the matrix is frozen. A model trained from scratch: CODE, the language of a target,
    whose tag <2CODE> stands in front of the source."""
    new_pieces: FixedOnResume[str] = ""
    """Fine-tuning: subwords to add to the model, for a script or a language that its tokenizer does
    not know or splits into too many: a number to learn from the training text (in new_languages, if
    any), or a file with one on each line, where ▁ is a space. The row of a new subword in the
    embedding matrix starts from the mean of its old subwords' rows, and is trained even if the
    matrix is frozen. Text that has none of them is split as before. Requires a tokenizer with BPE
    or a unigram model. '': none."""
    max_training_sentences: Fixed[PositiveInt] = 5_000_000
    """Maximum number of sentences to train SentencePiece on, spread evenly over the text."""
    bpe_dropout: FixedOnResume[Fraction] = 0.0
    """BPE-dropout (Provilkov et al., 2020): probability of dropping a merge (usually 0.1); 0: off.
    Requires the bpe algorithm."""
    bpe_dropout_samples: FixedOnResume[SmallCount] = 8
    """With bpe_dropout: number of copies of each training pair in the corpus, each in a newly drawn
    segmentation. An epoch contains all of them."""
    model: Fixed[str] = ""
    """Existing SentencePiece model to use instead of training one (if not joint: the source model).
    Token ids are the model's; PAD is appended if it has none. Its size, algorithm and normalization
    are fixed; of the other tokenizer settings, only user_defined_symbols, bpe_dropout and
    bpe_dropout_samples apply."""
    target_model: Fixed[str] = ""
    """If not joint: existing SentencePiece model for the target language; requires tokenizer.model
    for the source language."""

    def rules(self) -> Iterator[Rule]:
        symbols = self.user_defined_symbols
        new = set(symbols) - {"<pad>", "<s>", "</s>", "<unk>"}
        yield (
            "user_defined_symbols",
            len(new) == len(symbols) and all(symbol.split() == [symbol] for symbol in symbols),
            "distinct words without whitespace, other than the built-in <pad>, <s>, </s>, <unk>",
        )
        codes = [entry.partition(":")[0] for entry in self.new_languages]
        form = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(:[A-Za-z0-9_-]+)?")
        yield (
            "new_languages",
            all(map(form.fullmatch, self.new_languages)) and len({*codes}) == len(codes),
            "different codes, each as CODE or CODE:RELATIVE, such as mic_Latn:fra_Latn",
        )
        yield (
            "new_pieces",
            not self.new_pieces.isdecimal() or int(self.new_pieces) > 0,
            "a positive number, a file or ''",
        )
        yield (
            "target_model",
            bool(self.target_model) == (bool(self.model) and not self.joint),
            "a file if tokenizer.model is set and tokenizer.joint is False, otherwise ''",
        )


@dataclass(frozen=True)
class PairsConfig(Section):
    """One dataset of sentence pairs."""

    kind: Fixed[Literal["text", "tsv", "jsonl", "parquet", "tfds", "none"]] = "text"
    """text: two parallel files. tsv: files of two or more columns, separated by tabs, without
    quoting. jsonl: one JSON object per line. parquet: Parquet files, as Hugging Face datasets have.
    tfds: a dataset from TensorFlow Datasets. none: no data. Files ending in .gz are decompressed as
    they are read."""
    source: Free[tuple[str, ...]] = ()
    """text: source-language files. tsv, jsonl, parquet: files with both sides. tfds: one dataset
    name, such as wmt14_translate/de-en. A file name can be a URL or a glob, such as train-*.en.gz
    or s3://bucket/train-*.en.gz. A glob expands to all matching files in sorted order; so does a
    folder of Parquet files. A file listed twice is read twice."""
    target: Free[tuple[str, ...]] = ()
    """text: target-language files, in the same order as the source files. For each glob in source,
    target needs a glob that matches the same number of files."""
    source_field: Free[str] = ""
    """Field with the source text (for example en). jsonl, parquet, tfds: name of a field or column,
    at the top level or inside the field translation. tsv: number of a column, counted from 1; '':
    1."""
    target_field: Free[str] = ""
    """Field with the target text (for example de), as for source_field. tsv: '' means 2."""
    split: Fixed[str] = "train"
    """tfds: split name."""
    limit: Fixed[PositiveInt | None] = None
    """Use only this many pairs, from the start; None: all. With tags, languages, weights or
    temperature: of each item of source."""
    tags: Fixed[tuple[str, ...]] = ()
    """Tag in front of each source line, such as <2de>: one for each item of source ('': no tag).
    Tags must be symbols of the tokenizer (tokenizer.user_defined_symbols)."""
    source_languages: Free[tuple[str, ...]] = ()
    """Models with languages: language code of the source, one for each item of source. '' and ():
    the default (tokenizer.source_language). A batch can contain several pairs of languages."""
    target_languages: Free[tuple[str, ...]] = ()
    """Models with languages: language code of the target, one for each item of source, as for
    source_languages."""
    source_language_field: Free[str] = ""
    """tsv, jsonl, parquet, tfds: field or column with the language code of the source, in place of
    source_languages."""
    target_language_field: Free[str] = ""
    """tsv, jsonl, parquet, tfds: field or column with the language code of the target, in place of
    target_languages."""
    alignments: Free[tuple[str, ...]] = ()
    """Training, text: files with the word alignments of each pair, one for each item of source, in
    Pharaoh format: a line such as 0-0 1-2 links words of the source and the target line. Words are
    separated by white space and counted from 0."""
    weights: Changeable[tuple[PositiveFloat, ...]] = ()
    """Training: mix of corpora, one weight for each item of source. The pairs of an item are this
    share, relative to the sum of the weights, of the pairs in every epoch."""
    temperature: Changeable[float] = 1.0
    """Training, without weights: the weight of each item of source is its number of pairs to the
    power of 1 / temperature. 1: the corpora as they are; larger values raise the share of small
    corpora (5 is typical)."""

    def rules(self) -> Iterator[Rule]:
        yield (
            "source",
            self.kind != "tfds" or len(self.source) == 1,
            "one dataset name for kind 'tfds'",
        )
        yield (
            "target",
            self.kind != "text" or len(self.source) == len(self.target),
            f"{len(self.source)} files, one for each in source",
        )
        yield (
            "target",
            self.kind in ("text", "none") or not self.target,
            f"no files, because for kind {self.kind!r} source contains both sides",
        )
        for name in ("source_field", "target_field"):
            yield (
                name,
                self.kind in ("text", "tsv", "none") or bool(getattr(self, name)),
                f"the name of a field for kind {self.kind!r}",
            )
        items = len(self.source)
        for name in ("tags", "weights", "alignments", "source_languages", "target_languages"):
            fits = len(getattr(self, name)) in (0, items)
            yield name, fits, f"one for each of the {items} items of source"
        for name in ("source_language", "target_language"):
            field_is_set = bool(getattr(self, f"{name}_field"))
            has_fields = self.kind not in ("text", "none")
            yield f"{name}_field", has_fields or not field_is_set, f"'' for kind {self.kind!r}"
            has_list = bool(getattr(self, f"{name}s"))
            yield f"{name}_field", not (field_is_set and has_list), f"'' with {name}s"
        yield "alignments", self.kind == "text" or not self.alignments, "no files, except for text"
        yield (
            "temperature",
            self.temperature == 1 or (self.temperature > 1 and not self.weights),
            "1 or more, and 1 with weights",
        )

    @property
    def is_given(self) -> bool:
        """True if the dataset is configured."""
        return self.kind != "none" and bool(self.source)

    @property
    def parts(self) -> list[PairsConfig]:
        """The items of source, if there are several and they are not simply one corpus."""
        lists = self.tags, self.source_languages, self.target_languages, self.weights
        is_mix = any(lists) or self.temperature != 1
        return self.items if is_mix and len(self.source) > 1 else []

    @property
    def language_pairs(self) -> list[tuple[str, str]]:
        """Codes of source and target of each item of source, without those in fields."""
        no_codes = ("",) * len(self.source)
        sources = self.source_languages or no_codes
        targets = self.target_languages or no_codes
        return list(zip(sources, targets))

    @property
    def items(self) -> list[PairsConfig]:
        """The items of source, as one corpus each."""
        lists = "source", "target", "tags", "alignments", "source_languages", "target_languages"
        return [
            replace(
                self,
                weights=(),
                temperature=1.0,
                **{name: getattr(self, name)[i : i + 1] for name in lists},
            )
            for i in range(len(self.source))
        ]


@dataclass(frozen=True)
class DataConfig(Section, prefix="data."):
    """Datasets of sentence pairs, and their tokenization into a corpus."""

    root: PerProcess[str] = ""
    """Base folder or URL for relative file names in train, dev and test; '': the current folder."""
    train: PairsConfig = PairsConfig()
    """Training set."""
    dev: Free[PairsConfig] = PairsConfig()
    """Dev set, for loss and BLEU during training and for selecting the best checkpoint."""
    test: Free[PairsConfig] = PairsConfig()
    """Test set, scored once at the end of training."""
    max_source_length: Fixed[PositiveInt] = 256
    """Maximum source length in tokens, including EOS. Longer pairs are excluded from the training
    set and the dev loss; the log reports how many pairs remain."""
    max_target_length: Fixed[PositiveInt] = 256
    """Maximum target length in tokens, including EOS. Longer pairs are excluded from the training
    set and the dev loss; the log reports how many pairs remain."""
    workers: PerProcess[Literal[0] | SmallCount] = 0
    """Number of processes for tokenization; 0: one per CPU core."""


@dataclass(frozen=True)
class BatchConfig(Section, prefix="batch."):
    """Batches of sentence pairs (section 5.1)."""

    layout: Literal["auto", "bucketed", "packed"] = "auto"
    """bucketed: one pair per row, grouped by length. packed: several pairs per row, separated by
    segment ids. auto: packed on TPUs, where compiling a shape takes minutes; bucketed elsewhere.
    The run's config.json records the choice."""
    tokens: PositiveInt = 25_000
    """Global batch size: number of source tokens and of target tokens per step, including padding
    (25,000 each in the paper)."""
    buckets: SmallCount = 8
    """bucketed: number of buckets, each padded to one (source length, target length). More buckets
    mean less padding, but each is compiled separately."""
    row_length: Size = 256
    """packed: number of tokens per row on the side (source or target) with more tokens in the
    corpus. The other side's rows are shorter in proportion."""
    row_multiple: Size = 8
    """The number of rows in every batch is a multiple of this value, which must be a multiple of
    mesh.data x mesh.fsdp x optimizer.accumulate_steps."""


@dataclass(frozen=True)
class OptimizerConfig(Section, prefix="optimizer."):
    """Optimizer and its learning-rate schedule (section 5.3)."""

    name: Fixed[Literal["adam", "adafactor", "muon"]] = "adam"
    """Adam (the paper); Adafactor (T5), whose state is small and whose learning rate is relative to
    each parameter's RMS: set peak_learning_rate to 0.01 as for T5, or to 0.001 to fine-tune; or
    Muon for the matrices of layers, with Adam's learning rates, and Adam for the rest."""
    warmup_steps: Changeable[PositiveInt] = 4000
    """Number of linear warm-up steps."""
    decay: Changeable[Literal["inverse_sqrt", "constant", "linear", "cosine"]] = "inverse_sqrt"
    """Learning-rate schedule after warm-up: inverse square root of the step (the paper), constant,
    or linear or cosine decay to zero at training.steps."""
    peak_learning_rate: Changeable[PositiveFloat | None] = None
    """Learning rate at the end of warm-up; None: the paper's d_model^-0.5 * warmup_steps^-0.5."""
    beta1: Changeable[Fraction] = 0.9
    """adam, muon: decay rate for Adam's first moment."""
    beta2: Changeable[Fraction] = 0.98
    """adam, muon: decay rate for Adam's second moment."""
    epsilon: Changeable[PositiveFloat] = 1e-9
    """adam, muon: epsilon."""
    weight_decay: Changeable[NonNegative] = 0.0
    """Decoupled weight decay on matrices (AdamW); 0: off."""
    clip_norm: Changeable[NonNegative] = 0.0
    """Clip gradients to this global norm; 0: off."""
    accumulate_steps: Changeable[PositiveInt] = 1
    """Gradient accumulation: split each batch into this many microbatches with equal numbers of
    rows. Saves memory and gives the same result, except for dropout masks."""
    ema_decay: Fixed[Fraction] = 0.0
    """Evaluate and decode with an exponential moving average of the parameters; 0: off. At step t,
    the decay is at most (1 + t) / (10 + t)."""

    @property
    def decays_to_end(self) -> bool:
        """True if the learning rates depend on training.steps, the end of the decay."""
        return self.decay not in ("inverse_sqrt", "constant")


@dataclass(frozen=True)
class LossSettings(Section, prefix="training."):
    """Settings of the training objective."""

    label_smoothing: Changeable[Fraction] = 0.1
    """Label smoothing (epsilon_ls in section 5.4)."""
    r_drop: Changeable[NonNegative] = 0.0
    """Weight alpha of R-Drop (Liang et al., 2021): each pair passes through the model twice, with
    different dropout masks, and the loss penalizes differences between the two predictions. Doubles
    the cost of a step. 5 is typical for small corpora; 0: off."""
    simcut: Changeable[NonNegative] = 0.0
    """Weight alpha of SimCut (Gao et al., 2022): each pair passes through the model again with some
    tokens' embeddings replaced by zeros, and the loss includes the KL divergence between the first
    prediction and this one. Doubles the cost of a step, or more. 3 is the paper's value; 0: off."""
    simcut_rate: Changeable[Fraction] = 0.05
    """SimCut: probability that a token's embedding is replaced by zeros."""
    guided_alignment: Changeable[NonNegative] = 0.0
    """Guided alignment: weight of the cross-entropy between the word alignments in
    data.train.alignments and the attention of one head (model.alignment_layer); 0: off."""

    def rules(self) -> Iterator[Rule]:
        yield (
            "simcut",
            not self.simcut or not self.r_drop,
            "0, because training.r_drop is above 0",
        )


@dataclass(frozen=True)
class TrainingConfig(LossSettings, prefix="training."):
    """Training length, evaluation and checkpoints."""

    steps: Changeable[PositiveInt] = 100_000
    """Number of optimizer steps."""
    start_from: Changeable[str] = ""
    """Fine-tuning: a work directory, model folder or checkpoint folder that provides the tokenizer
    and initial parameters (of the model that decode.py uses); '': train from scratch."""
    freeze: Changeable[tuple[str, ...]] = ()
    """Fine-tuning: glob patterns of names of parameters that are not trained, such as 'encoder.*'
    or '*embedding.matrix'; * also matches dots."""
    log_every: Free[PositiveInt] = 50
    """Number of steps between entries in metrics.jsonl and TensorBoard."""
    eval_every: Free[PositiveInt] = 1000
    """Number of steps between evaluations on the dev set: loss, perplexity, accuracy, BLEU and
    chrF."""
    bleu_sentences: Free[Count] = 1000
    """Number of sentences to translate with beam search for BLEU and chrF, from the start of the
    dev set; 0: only the dev loss."""
    bleu_tokenize: Free[BleuTokenizer] = "13a"
    """sacreBLEU's tokenizer; none: the text is already tokenized and is scored as is."""
    checkpoint_every: Free[PositiveInt] = 1000
    """Number of steps between checkpoints."""
    keep_checkpoints: Free[PositiveInt] = 5
    """Checkpoint retention: number of newest checkpoints to keep. The best checkpoint on the dev
    set (select_by) is also kept, along with the checkpoints that can be averaged with it."""
    average: Free[Literal["auto"] | PositiveInt] = "auto"
    """Checkpoint averaging: number of checkpoints to average for the model, when training ends.
    These are the last checkpoints or, after early stopping, the best checkpoint on the dev set and
    the checkpoints before it; 1: a single checkpoint. auto: the average of 1 to keep_checkpoints
    checkpoints with the lowest dev loss or, without data.dev, only the last checkpoint."""
    select_by: Free[Literal["loss", "bleu", "chrf"]] = "loss"
    """Dev-set metric for selecting the best checkpoint and for early stopping."""
    patience: Free[Count] = 0
    """Early stopping after this many evaluations without improvement in select_by; 0: off."""
    max_bad_steps: Free[PositiveInt] = 10
    """Steps with a non-finite loss or gradient are skipped and counted. Training stops after this
    many in a row."""
    profile: Free[str] = ""
    """Profile of the steps START:STOP, counted from 0 and without STOP: write a trace for xprof and
    TensorBoard to profile/ in the work directory; '': no profile."""

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        span = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.profile or "0:1")
        yield (
            "profile",
            span is not None and int(span[1]) < min(int(span[2]), self.steps),
            f"'' or START:STOP with START < STOP and START < training.steps = {self.steps}",
        )
        yield (
            "average",
            self.average == "auto" or self.average <= self.keep_checkpoints,
            f"at most training.keep_checkpoints = {self.keep_checkpoints}",
        )
        yield (
            "select_by",
            self.select_by == "loss" or self.bleu_sentences > 0,
            "'loss', because training.bleu_sentences is 0",
        )


@dataclass(frozen=True, kw_only=True)
class SearchSettings(Section):
    """Settings of every search method. Hypotheses are ranked by log P / length penalty."""

    beam_size: SmallCount = 4
    """beam: number of hypotheses kept per sentence (1: greedy). sample: number of samples."""
    length_penalty: NonNegative = 0.6
    """Length penalty (length normalization): alpha in log P / ((c + length) / (c + 1))^alpha, where
    c is length_offset."""
    length_offset: NonNegative = 5.0
    """c in the length penalty: 5 in the paper; 0 in Marian, CTranslate2, fairseq and transformers,
    which divide by length^alpha."""


@dataclass(frozen=True, kw_only=True)
class BeamSettings(SearchSettings):
    """Settings of beam search."""

    patience: PositiveFloat | None = None
    """beam: stop once beam_size x patience translations of a sentence are finished, as CTranslate2
    does (1: as transformers does with early_stopping=True). Faster, but can miss better
    translations. None: stop when no unfinished translation can still win."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(SearchSettings):
    """Settings of sampling."""

    temperature: PositiveFloat = 1.0
    """sample: divide logits by this value. Values below 1 make likely tokens more likely."""
    top_k: Count = 0
    """sample: draw only from the k most likely tokens (Fan et al., 2018); 0: from all tokens."""
    top_p: PositiveFraction = 1.0
    """sample: draw only from the smallest set of most likely tokens whose total probability is at
    least p (Holtzman et al., 2020); 1: from all tokens."""
    seed: Count = 0
    """sample: random seed. The samples of a line do not depend on its batch."""


@dataclass(frozen=True, kw_only=True)
class ConstraintSettings(Section):
    """Rules for the next token of any search method."""

    min_length: Count = 0
    """Minimum number of tokens in a translation."""
    no_repeat_ngram: Count = 0
    """Block repeated n-grams of this size within a translation (Paulus et al., 2017); 0: off."""


EngineName: TypeAlias = Literal["jax", "ctranslate2", "auto"]
"""Programs that search. auto: ctranslate2 on a CPU, if it can do what is asked, otherwise jax."""


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(ConstraintSettings, SamplingSettings, BeamSettings, prefix="decoding."):
    """Beam search (section 6.1) or sampling."""

    method: Literal["beam", "sample"] = "beam"
    """Search for the most likely translation, or sample from the model's distribution."""
    max_extra_length: Size = 50
    """Maximum number of tokens by which a translation can exceed its source."""
    max_length: Size | None = None
    """Maximum number of tokens in a translation, including EOS and a target language, whatever the
    length of its source. None: only max_extra_length limits it."""
    suppress: tuple[str, ...] = ()
    """Target tokens that are never generated, written as in the vocabulary (`▁` is a space)."""
    max_source_length: LineLength = 256
    """Maximum source length in tokens, including EOS. Longer lines are translated in segments, with
    a warning."""
    batch_size: Size = 32
    """Number of sentences decoded at a time, across all devices. It is divided by 4 for sources
    longer than 128 tokens and by 16 for sources longer than 512 tokens."""
    weights: Literal["auto", "int8"] = "auto"
    """Matrices of the model: in model.dtype, or rounded to 8-bit integers, as are the inputs of
    their matmuls. int8 needs a CPU with avx512_vnni."""

    def max_target_length(self, source_length: int, positions: int) -> int:
        """Return the maximum length of a translation, EOS included, for a source of this length and
        a model with this many positions.
        """
        return min(source_length + self.max_extra_length, self.max_length or positions, positions)

    def rules(self) -> Iterator[Rule]:
        yield (
            "min_length",
            self.min_length <= self.max_extra_length,
            f"at most decoding.max_extra_length = {self.max_extra_length}, so that even the "
            "shortest source can reach it",
        )
        yield (
            "max_length",
            self.max_length is None or self.min_length < self.max_length,
            f"more than decoding.min_length = {self.min_length}, or None",
        )
        yield (
            "patience",
            self.patience is None or self.method == "beam",
            f"None, because decoding.method is {self.method!r}",
        )


@dataclass(frozen=True)
class MeshConfig(Section, prefix="mesh."):
    """Device mesh."""

    data: Literal[-1] | PositiveInt = -1
    """Data parallelism: number of devices that split the batch; -1: all remaining devices."""
    fsdp: PositiveInt = 1
    """FSDP: number of devices that split the batch, the parameters and the optimizer state."""
    tensor: PositiveInt = 1
    """Tensor parallelism: number of devices that split heads, d_ff and, if it divides evenly, the
    vocabulary."""
    slices: PositiveInt | None = None
    """Number of slices: groups of devices connected to each other only by a slow network. ``data``
    is split over slices first; ``fsdp`` and ``tensor`` stay within a slice. None: as reported by
    TPUs; 1 on other devices."""


@dataclass(frozen=True)
class Processes(Section, prefix="--"):
    """Communication between a run's processes. Not saved with the other settings."""

    distributed: bool = False
    """Join a multi-process run that JAX detects from the cluster environment (Slurm, Open MPI,
    Kubernetes, Cloud TPU)."""
    coordinator_address: str | None = None
    """Without such a cluster: HOST:PORT of process 0. Requires --num-processes and --process-id."""
    num_processes: PositiveInt | None = None
    """Number of processes."""
    process_id: Count | None = None
    """Index of this process, counting from 0."""
    start_timeout: PositiveInt = 300
    """Maximum number of seconds to wait at startup for all processes to connect."""


@dataclass(frozen=True)
class Config(Section):
    """All settings of a run."""

    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    batch: Changeable[BatchConfig] = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: Free[DecodingConfig] = DecodingConfig()
    mesh: Free[MeshConfig] = MeshConfig()
    seed: Fixed[Count] = 0
    """Random seed for parameter initialization, data order, and dropout."""

    def with_layout(self, platform: str) -> Config:
        """Return a copy with ``batch.layout`` for a run's devices. Batches then depend only on the
        config.
        """
        if self.batch.layout != "auto":
            return self
        layout: Literal["packed", "bucketed"] = "packed" if platform == "tpu" else "bucketed"
        return replace(self, batch=replace(self.batch, layout=layout))

    def training_rules(self) -> Iterator[Rule]:
        """Yield constraints between sections. Checked when training starts, because the flags that
        override a recipe can meet or break them.
        """
        model = self.model
        longest = max(self.data.max_source_length, self.data.max_target_length)
        yield (
            "model.max_positions",
            model.positions != "learned" or model.max_positions >= longest,
            f"at least {longest}, the larger of data.max_source_length and data.max_target_length",
        )
        aligned = bool(self.data.train.alignments)
        yield (
            "training.guided_alignment",
            aligned or not self.training.guided_alignment,
            "0 without data.train.alignments",
        )
        yield (
            "model.alignment_layer",
            not aligned or model.alignment_layer is not None,
            "a decoder layer to train with training.guided_alignment, such as -1",
        )
        has_relatives = any(":" in entry for entry in self.tokenizer.new_languages)
        yield (
            "tokenizer.new_languages",
            bool(self.training.start_from) or not has_relatives,
            "codes without a relative, unless training.start_from is a model that has it",
        )
        yield (
            "tokenizer.new_pieces",
            bool(self.training.start_from) or not self.tokenizer.new_pieces,
            "'', unless training.start_from is a model to add them to",
        )
        declared_tags = {"", *self.tokenizer.user_defined_symbols}
        for name in ("train", "dev", "test"):
            pairs = getattr(self.data, name)
            fits = declared_tags.issuperset(pairs.tags)
            yield f"data.{name}.tags", fits, "items from tokenizer.user_defined_symbols"
            for field in () if name == "train" else ("alignments", "weights", "temperature"):
                default = getattr(PairsConfig, field)
                fits = getattr(pairs, field) == default
                yield f"data.{name}.{field}", fits, f"{default}; only training uses it"
