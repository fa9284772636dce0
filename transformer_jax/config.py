"""Every setting, as frozen dataclasses with defaults and validation; ``config_files.py`` reads and
writes them.

The docstring under each field is what ``--help`` prints.
The defaults are the paper's base model; each departure from the paper is a named field here.
"""

from __future__ import annotations

import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from transformer_jax.errors import UserError


def check_types(config: Any, prefix: str) -> None:
    """``UserError`` for a field whose value is not of the annotated type; each dataclass here
    starts with it.
    """
    for name, expected in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        problem = _type_problem(value, expected)
        if problem:
            raise UserError(f"{prefix}{name} is {value!r}; expected {problem}.")


def _type_problem(value: Any, expected: Any) -> str | None:
    """What was expected, if ``value`` is not that."""
    origin, parts = typing.get_origin(expected), typing.get_args(expected)
    if origin is tuple:
        fits = isinstance(value, tuple) and not any(_type_problem(v, parts[0]) for v in value)
        return None if fits else f"a tuple of {parts[0].__name__}"
    if origin is Literal:
        return None if value in parts else "one of " + ", ".join(map(repr, parts))
    kinds = parts if origin in (types.UnionType, typing.Union) else (expected,)
    if type(value) is float and float in kinds and not math.isfinite(value):
        return "a finite number"
    if type(value) in kinds or (float in kinds and type(value) is int):
        return None
    return " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise UserError(f"{name} is {value!r}; expected {expected}.")


@dataclass(frozen=True)
class ModelConfig:
    """The Transformer's shape (paper sections 3 and 6.2; letters as in Table 3)."""

    vocab_size: int = 37_000
    """Number of target tokens V (and of source tokens when shared). Training sets it from the
    tokenizer.
    """
    source_vocab_size: int | None = None
    """Number of source tokens when the vocabularies are separate; None: the same vocabulary as the
    target.
    """
    d_model: int = 512
    """Width of embeddings and sub-layer outputs."""
    d_ff: int = 2048
    """Inner width of the feed-forward layers."""
    num_heads: int = 8
    """Attention heads h."""
    d_k: int | None = None
    """Width of one head's queries and keys; None: d_model / num_heads."""
    d_v: int | None = None
    """Width of one head's values; None: d_model / num_heads."""
    num_layers: int = 6
    """Layers N in the encoder and in the decoder."""
    num_decoder_layers: int | None = None
    """Layers in the decoder where it differs from the encoder; None: num_layers."""
    dropout: float = 0.1
    """Dropout on embeddings and sub-layer outputs (section 5.4)."""
    attention_dropout: float = 0.0
    """Dropout on attention weights (not in the paper; tensor2tensor and fairseq use it)."""
    feed_forward_dropout: float = 0.0
    """Dropout inside the feed-forward layer, after its activation (not in the paper)."""
    norm: Literal["post", "pre"] = "post"
    """Layer norm after the residual sum (the paper), or before each sub-layer with a final norm."""
    norm_epsilon: float = 1e-6
    """What layer norm adds to the variance (PyTorch's default, and so that of models from
    elsewhere, is 1e-5).
    """
    attention_bias: bool = False
    """Add biases to the four attention projections (fairseq, Marian and BERT do)."""
    activation: Literal["relu", "gelu", "silu"] = "relu"
    """Activation of the feed-forward layers."""
    positions: Literal["interleaved", "split", "learned"] = "interleaved"
    """Sinusoids, sine and cosine in turn (the paper) or in two halves (tensor2tensor, Marian); or
    learned (Table 3 E).
    """
    max_positions: int = 1024
    """Rows of the learned position table; sinusoids have no limit."""
    tie_embeddings: Literal["all", "target", "none"] = "all"
    """Share one matrix between source embedding, target embedding and softmax (the paper), the last
    two only, or none.
    """
    softmax_bias: bool = False
    """Add a bias to each token's score before the softmax (Marian does)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of matrix products and of what passes from layer to layer; auto: float32 on CPU,
    bfloat16 on GPU and TPU. Parameters, softmax, the sums inside norms, and the loss stay
    float32.
    """
    remat: bool = False
    """Recompute each layer's activations in the backward pass: less memory, about a third more
    arithmetic.
    """

    def __post_init__(self) -> None:
        check_types(self, "model.")
        for name in ("vocab_size", "d_model", "d_ff", "num_heads", "num_layers", "max_positions"):
            _require(
                getattr(self, name) > 0, f"model.{name}", getattr(self, name), "a positive number"
            )
        for name in ("d_k", "d_v", "num_decoder_layers", "source_vocab_size"):
            value = getattr(self, name)
            _require(
                value is None or value > 0, f"model.{name}", value, "a positive number, or None"
            )
        for name in ("dropout", "attention_dropout", "feed_forward_dropout"):
            _require(
                0 <= getattr(self, name) < 1,
                f"model.{name}",
                getattr(self, name),
                "a probability in [0, 1)",
            )
        _require(
            self.norm_epsilon > 0, "model.norm_epsilon", self.norm_epsilon, "a positive number"
        )
        even = self.d_model % 2 == 0 or self.positions == "learned"
        _require(
            even,
            "model.d_model",
            self.d_model,
            "an even number: sinusoidal positions pair a sine with a cosine",
        )
        divides = self.d_model % self.num_heads == 0 or (
            self.d_k is not None and self.d_v is not None
        )
        _require(
            divides,
            "model.d_model",
            self.d_model,
            f"a multiple of model.num_heads = {self.num_heads}, or explicit model.d_k and model.d_v",
        )
        _require(
            self.source_vocab_size is None or self.tie_embeddings != "all",
            "model.tie_embeddings",
            "all",
            "'target' or 'none' when source and target have separate vocabularies",
        )

    @property
    def head_width_k(self) -> int:
        """d_k, resolved."""
        return self.d_k if self.d_k is not None else self.d_model // self.num_heads

    @property
    def head_width_v(self) -> int:
        """d_v, resolved."""
        return self.d_v if self.d_v is not None else self.d_model // self.num_heads

    @property
    def decoder_layers(self) -> int:
        """Layers in the decoder, resolved."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers


@dataclass(frozen=True)
class TokenizerConfig:
    """How SentencePiece is trained on the training text."""

    vocab_size: int = 37_000
    """Tokens in the vocabulary (in each of them when separate), the four special ones included."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """Byte-pair encoding (the paper) or a unigram language model."""
    joint: bool = True
    """One vocabulary for both languages (the paper), or one for each."""
    character_coverage: float = 1.0
    """Share of the text's characters that must get a token; rarer ones become unknown (or
    bytes).
    """
    byte_fallback: bool = False
    """Spell unknown characters as UTF-8 bytes, so that nothing is unknown."""
    normalization: Literal["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"] = "nmt_nfkc"
    """Unicode normalisation before segmentation; `_cf` also folds case; identity leaves text as it
    is.
    """
    user_defined_symbols: tuple[str, ...] = ()
    """Tokens that are never cut and need not occur in the training text: tags such as <2de>,
    placeholders. What a line begins with of them is repeated before each of its parts when it is
    too long and translated in parts. A vocabulary that is there already (tokenizer.model,
    training.start_from) grows by those that it lacks.
    """
    max_training_sentences: int = 5_000_000
    """Sentences (evenly spread over the text) that SentencePiece learns from."""
    sampling: float = 0.0
    """Subword regularisation: the merge dropout of BPE (0.1 is usual; more is more random), or the
    smoothing alpha of unigram (0.2 to 0.5 are usual; less is more random); 0: off.
    """
    sampled_epochs: int = 8
    """With sampling: how many different segmentations of the training text are stored; epoch e
    reads number e modulo this.
    """
    model: str = ""
    """An existing SentencePiece model to use instead of training one; not joint: for the source. It
    decides its own size, algorithm and normalisation: besides it only user_defined_symbols,
    sampling and sampled_epochs count.
    """
    target_model: str = ""
    """Not joint: the existing SentencePiece model for the target, beside tokenizer.model."""

    def __post_init__(self) -> None:
        check_types(self, "tokenizer.")
        _require(
            self.vocab_size > 4,
            "tokenizer.vocab_size",
            self.vocab_size,
            "more than the four special tokens",
        )
        coverage = self.character_coverage
        _require(
            0.98 <= coverage <= 1,
            "tokenizer.character_coverage",
            coverage,
            "a share from 0.98 to 1, as SentencePiece has it",
        )
        _require(0 <= self.sampling < 1, "tokenizer.sampling", self.sampling, "a value in [0, 1)")
        _require(
            self.sampled_epochs > 0,
            "tokenizer.sampled_epochs",
            self.sampled_epochs,
            "a positive number",
        )
        _require(
            self.max_training_sentences > 0,
            "tokenizer.max_training_sentences",
            self.max_training_sentences,
            "a positive number",
        )
        if self.joint:
            _require(
                not self.target_model,
                "tokenizer.target_model",
                self.target_model,
                "'' unless tokenizer.joint is False",
            )
        else:
            expected = f"{'a' if self.model else 'no'} SentencePiece model, as in tokenizer.model"
            _require(
                bool(self.target_model) == bool(self.model),
                "tokenizer.target_model",
                self.target_model,
                expected,
            )
        symbols = self.user_defined_symbols
        distinct = len(set(symbols)) == len(symbols) and all(
            symbol and not set(symbol) & set(" \t\n") for symbol in symbols
        )
        distinct &= not {"<pad>", "<s>", "</s>", "<unk>"} & set(symbols)
        expected = "distinct words without white space, and none of <pad>, <s>, </s>, <unk>, which are there already"
        _require(distinct, "tokenizer.user_defined_symbols", symbols, expected)


@dataclass(frozen=True)
class PairsConfig:
    """Where one set of sentence pairs comes from."""

    kind: Literal["text", "tsv", "jsonl", "tfds", "numbers", "none"] = "text"
    """Parallel text files, TSV or JSONL files, a TensorFlow Datasets name, generated number names,
    or nothing. Files ending in .gz are unpacked on the fly.
    """
    source: tuple[str, ...] = ()
    """text: source-language files; tsv, jsonl: the files; tfds: one name such as
    wmt14_translate/de-en. A file name may be a glob such as part-*.en.gz: all files that match,
    sorted; or a URL such as s3://bucket/part-*.en.gz. A file that is named twice counts twice.
    """
    target: tuple[str, ...] = ()
    """text: target-language files, in the order of the source files; a glob for each glob, matching
    as many files.
    """
    source_field: str = "0"
    """tsv: column number from 0; jsonl, tfds: field name (for example en)."""
    target_field: str = "1"
    """tsv: column number from 0; jsonl, tfds: field name (for example de)."""
    split: str = "train"
    """tfds: the split; numbers: train, dev or test (disjoint)."""
    limit: int | None = None
    """Use the first pairs only; numbers: how many to generate (None: 100,000 for train,
    all 10,000 for dev and test)."""

    def __post_init__(self) -> None:
        check_types(self, "")
        if self.kind in ("tsv", "jsonl", "tfds"):
            _require(
                bool(self.source),
                "source",
                self.source,
                f"at least one entry for kind {self.kind!r}",
            )
        if self.kind == "tfds":
            _require(len(self.source) == 1, "source", self.source, "one builder for kind 'tfds'")
        if self.kind == "text":
            _require(
                len(self.source) == len(self.target),
                "target",
                self.target,
                f"{len(self.source)} files, as many as source",
            )
        if self.kind == "numbers":
            _require(
                self.split in ("train", "dev", "test"),
                "split",
                self.split,
                "train, dev or test for kind 'numbers'",
            )
        _require(
            self.limit is None or self.limit > 0, "limit", self.limit, "a positive number, or None"
        )

    @property
    def is_given(self) -> bool:
        """Whether there are any pairs: of kind text only where files are named."""
        return self.kind == "numbers" or (self.kind != "none" and bool(self.source))


@dataclass(frozen=True)
class DataConfig:
    """Text in, tokenised corpus out."""

    root: str = ""
    """Folder or URL that relative file names of train, dev and test start from; '': the current
    folder.
    """
    train: PairsConfig = field(default_factory=PairsConfig)
    """Training pairs."""
    dev: PairsConfig = field(default_factory=PairsConfig)
    """Development pairs: loss, BLEU, choice of the best checkpoint."""
    test: PairsConfig = field(default_factory=PairsConfig)
    """Test pairs: scored once, when training ends."""
    max_source_length: int = 256
    """Longest source in tokens, end symbol included; longer pairs are left out of training and of
    dev loss, and counted.
    """
    max_target_length: int = 256
    """Longest target in tokens, end symbol included; longer pairs are left out of training and of
    dev loss, and counted.
    """
    max_length_ratio: float = 0.0
    """Leave out pairs (as above) whose token counts differ by more than this factor (on counts +
    5); 0: off.
    """
    invalid_utf8: Literal["error", "skip"] = "error"
    """Stop at a line that is not UTF-8, or leave the pair out and count it."""
    cache: str = ""
    """Folder for tokenised corpora; '': `corpus` inside the work directory. Shared folders are
    safe.
    """
    workers: int = 0
    """Processes that tokenise; 0: one for each CPU core."""
    shards: int = 1
    """Shards of the training text that `python -m transformer_jax.training.tokenize_ahead` made; 1:
    training tokenises the text itself.
    """

    def __post_init__(self) -> None:
        check_types(self, "data.")
        for name in ("max_source_length", "max_target_length"):
            _require(
                getattr(self, name) > 1,
                f"data.{name}",
                getattr(self, name),
                "at least 2: one token and the end symbol",
            )
        ratio_ok = self.max_length_ratio == 0 or self.max_length_ratio >= 1
        _require(ratio_ok, "data.max_length_ratio", self.max_length_ratio, "0 (off) or at least 1")
        _require(self.workers >= 0, "data.workers", self.workers, "0 or more")
        _require(self.shards > 0, "data.shards", self.shards, "a positive number")
        _require(
            "://" not in self.cache,
            "data.cache",
            self.cache,
            "a folder: corpora are mapped into memory",
        )
        if self.shards > 1:
            in_files = self.train.kind in ("text", "tsv", "jsonl") and self.train.limit is None
            _require(
                in_files,
                "data.shards",
                self.shards,
                "1 unless data.train is text, tsv or jsonl files without a limit",
            )


@dataclass(frozen=True)
class BatchConfig:
    """How pairs form batches (section 5.1)."""

    layout: Literal["bucketed", "packed"] = "bucketed"
    """One pair a row, grouped by length; or rows filled with several pairs, kept apart by segment
    ids.
    """
    tokens: int = 25_000
    """Token positions on each side of one step's global batch, padding included (25,000 + 25,000 in
    the paper).
    """
    buckets: int = 12
    """bucketed: how many (source length, target length) shapes; each is compiled once. More: less
    padding.
    """
    row_length: int = 256
    """packed: length of a row on the longer side; the other side is shorter in the corpus' own
    ratio.
    """
    row_multiple: int = 8
    """Rows of every batch are a multiple of this, which must be one of mesh.data x mesh.fsdp x
    optimizer.accumulate_steps.
    """
    window: int = 2**24
    """Larger corpora are cut into windows of at most so many pairs, each with its share of every
    file, used one after another in random order: it bounds the plan's memory, at some 30 bytes a
    pair (packed: 65). Only a window's pairs share batches.
    """

    def __post_init__(self) -> None:
        check_types(self, "batch.")
        for name in ("tokens", "buckets", "row_length", "row_multiple"):
            _require(
                getattr(self, name) > 0, f"batch.{name}", getattr(self, name), "a positive number"
            )
        _require(
            0 < self.window < 2**31, "batch.window", self.window, "a positive number below 2^31"
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its learning-rate schedule (section 5.3)."""

    warmup_steps: int = 4000
    """Steps of linear warm-up."""
    decay: Literal["inverse_sqrt", "constant", "linear", "cosine"] = "inverse_sqrt"
    """The rate after the warm-up: falling with the inverse square root of the step (the paper), the
    same, or falling to zero at training.steps along a line or half a cosine.
    """
    peak_learning_rate: float | None = None
    """Rate at the end of the warm-up; None: the paper's d_model^-0.5 * warmup_steps^-0.5."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.98
    """Adam's decay of the second moment."""
    epsilon: float = 1e-9
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay on matrices (AdamW); 0: off."""
    clip_norm: float = 0.0
    """Scale gradients down to this global norm; 0: off."""
    accumulate_steps: int = 1
    """Each step's batch is worked through in this many parts of equal row count: less memory, same
    result (but for which elements dropout takes).
    """
    ema_decay: float = 0.0
    """Keep an exponential moving average of the parameters, used for evaluation and decoding; 0:
    off. It begins with less: step t keeps (1 + t) / (10 + t) of the average at most.
    """

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        _require(
            self.warmup_steps > 0, "optimizer.warmup_steps", self.warmup_steps, "a positive number"
        )
        peak_ok = self.peak_learning_rate is None or self.peak_learning_rate > 0
        _require(
            peak_ok,
            "optimizer.peak_learning_rate",
            self.peak_learning_rate,
            "a positive number, or None",
        )
        for name in ("beta1", "beta2", "ema_decay"):
            _require(
                0 <= getattr(self, name) < 1,
                f"optimizer.{name}",
                getattr(self, name),
                "a value in [0, 1)",
            )
        _require(self.epsilon > 0, "optimizer.epsilon", self.epsilon, "a positive number")
        for name in ("weight_decay", "clip_norm"):
            _require(
                getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "0 or more"
            )
        _require(
            self.accumulate_steps > 0,
            "optimizer.accumulate_steps",
            self.accumulate_steps,
            "a positive number",
        )


@dataclass(frozen=True)
class TrainingConfig:
    """The loop: how long, how often to look, what to keep."""

    steps: int = 100_000
    """Optimizer steps."""
    start_from: str = ""
    """Begin with the tokenizer and the model (the mean of checkpoints that decode.py takes) of this
    work directory, or of one checkpoint's folder, for fine-tuning; '': anew.
    """
    label_smoothing: float = 0.1
    """epsilon_ls of section 5.4."""
    r_drop: float = 0.0
    """alpha of R-Drop (Liang et al. 2021): each pair passes twice, and two draws of dropout are to
    predict alike, for twice the cost of a step. 5 is usual for small corpora; 0: off.
    """
    log_every: int = 50
    """Steps between entries in metrics.jsonl and TensorBoard."""
    eval_every: int = 1000
    """Steps between evaluations on dev: loss, perplexity, accuracy and (see bleu_every) BLEU."""
    bleu_every: int = 1
    """Every how many evaluations dev is also translated by beam search; 0: never."""
    bleu_sentences: int = 1000
    """Translate the first sentences of dev only."""
    bleu_tokenize: Literal["13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab"] = "13a"
    """sacreBLEU's tokenisation; none: the text is already tokenised and scored as it is."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    keep_checkpoints: int = 5
    """Newest checkpoints kept, of those that checkpoint_every makes; the best on dev (select_by) is
    kept besides.
    """
    average: int = 5
    """Checkpoints whose mean is evaluated on test when training ends, and used by decode.py; 1: the
    last one alone. After early stopping the best on dev is evaluated.
    """
    select_by: Literal["loss", "bleu"] = "loss"
    """What makes a checkpoint the best on dev, and what early stopping watches."""
    patience: int = 0
    """Stop after this many evaluations without a better dev value; 0: never."""
    max_bad_steps: int = 10
    """A step with a non-finite loss or gradient changes nothing and is counted; so many in a row
    stop the run.
    """
    compilation_cache: str = "~/.cache/transformer_jax"
    """Folder where compiled programs are kept between runs; '': off."""

    def __post_init__(self) -> None:
        check_types(self, "training.")
        for name in (
            "steps",
            "log_every",
            "eval_every",
            "checkpoint_every",
            "keep_checkpoints",
            "average",
            "max_bad_steps",
        ):
            _require(
                getattr(self, name) > 0,
                f"training.{name}",
                getattr(self, name),
                "a positive number",
            )
        for name in ("bleu_every", "patience"):
            _require(getattr(self, name) >= 0, f"training.{name}", getattr(self, name), "0 or more")
        _require(
            self.bleu_sentences > 0,
            "training.bleu_sentences",
            self.bleu_sentences,
            "a positive number",
        )
        _require(
            self.bleu_every > 0 or self.select_by != "bleu",
            "training.bleu_every",
            self.bleu_every,
            "a positive number where training.select_by is 'bleu'",
        )
        _require(self.r_drop >= 0, "training.r_drop", self.r_drop, "0 (off) or more")
        _require(
            0 <= self.label_smoothing < 1,
            "training.label_smoothing",
            self.label_smoothing,
            "a value in [0, 1)",
        )
        _require(
            self.average <= self.keep_checkpoints,
            "training.average",
            self.average,
            f"at most training.keep_checkpoints = {self.keep_checkpoints}",
        )


@dataclass(frozen=True)
class DecodingConfig:
    """Beam search (section 6.1), or sampling."""

    method: Literal["beam", "sample"] = "beam"
    """Search for the likeliest translation, or draw from the model's distribution."""
    beam_size: int = 4
    """Hypotheses kept for a sentence (1: greedy); with method sample: samples drawn."""
    length_penalty: float = 0.6
    """alpha in log P / ((c + length) / (c + 1))^alpha, c being length_offset."""
    length_offset: float = 5.0
    """c in it: 5 in the paper; 0, which divides by length^alpha, in Marian, CTranslate2, fairseq
    and transformers.
    """
    coverage_penalty: float = 0.0
    """beta of the coverage penalty (Wu et al., 2016, equation 14): scores down what leaves source
    tokens unread; 0: off.
    """
    max_extra_length: int = 50
    """A translation has at most this many tokens more than its source."""
    min_length: int = 0
    """A translation has at least this many tokens."""
    no_repeat_ngram: int = 0
    """No n tokens in a row occur twice in a translation; 0: off."""
    repetition_penalty: float = 1.0
    """A token that the translation already has is ranked by this times its log-probability; 1:
    off.
    """
    suppress: tuple[str, ...] = ()
    """Target tokens that are never generated, written as in the vocabulary (`▁` where a word
    begins).
    """
    shortlist: str = ""
    """File of `python -m transformer_jax.decoding.learn_shortlist`: each sentence chooses from the
    tokens that go with its source tokens, and probabilities are over these alone; '': from all.
    Training's own BLEU is without it.
    """
    temperature: float = 1.0
    """sample: logits are divided by it; below 1 likely tokens gain."""
    top_k: int = 0
    """sample: draw from the likeliest k tokens only; 0: from all."""
    top_p: float = 1.0
    """sample: draw from the fewest likeliest tokens whose probability reaches p; 1: from all."""
    seed: int = 0
    """sample: another seed, other samples. The same line gets the same samples in any batch."""
    max_source_length: int = 256
    """Longer input lines (in tokens, the end symbol included) are translated in parts, with a
    warning.
    """
    batch_size: int = 32
    """Sentences searched at a time, by all devices together; a quarter as many where a source has
    over 128 tokens, a sixteenth over 512.
    """

    def __post_init__(self) -> None:
        check_types(self, "decoding.")
        for name in ("beam_size", "batch_size", "max_extra_length"):
            _require(
                getattr(self, name) > 0,
                f"decoding.{name}",
                getattr(self, name),
                "a positive number",
            )
        _require(
            self.max_source_length > 2,
            "decoding.max_source_length",
            self.max_source_length,
            "at least 3",
        )
        for name in (
            "length_penalty",
            "length_offset",
            "coverage_penalty",
            "min_length",
            "no_repeat_ngram",
            "top_k",
        ):
            _require(getattr(self, name) >= 0, f"decoding.{name}", getattr(self, name), "0 or more")
        _require(
            self.min_length <= self.max_extra_length,
            "decoding.min_length",
            self.min_length,
            f"at most decoding.max_extra_length = {self.max_extra_length}, so that the shortest source leaves room for it",
        )
        _require(
            self.repetition_penalty >= 1,
            "decoding.repetition_penalty",
            self.repetition_penalty,
            "1 (off) or more",
        )
        beam_only = self.coverage_penalty == 0 or self.method == "beam"
        _require(
            beam_only,
            "decoding.coverage_penalty",
            self.coverage_penalty,
            "0 with decoding.method sample",
        )
        _require(0 <= self.seed < 2**32, "decoding.seed", self.seed, "a number from 0 to 2^32 - 1")
        _require(self.temperature > 0, "decoding.temperature", self.temperature, "a number above 0")
        _require(0 < self.top_p <= 1, "decoding.top_p", self.top_p, "a probability in (0, 1]")


@dataclass(frozen=True)
class MeshConfig:
    """How devices are arranged."""

    data: int = -1
    """Devices over which the batch is split; -1: all that the other axes leave."""
    fsdp: int = 1
    """Devices over which parameters and optimizer state are split, besides the batch."""
    tensor: int = 1
    """Devices over which heads and d_ff are split."""

    def __post_init__(self) -> None:
        check_types(self, "mesh.")
        _require(
            self.data == -1 or self.data > 0,
            "mesh.data",
            self.data,
            "a positive number, or -1 for all that is left",
        )
        for name in ("fsdp", "tensor"):
            _require(
                getattr(self, name) > 0, f"mesh.{name}", getattr(self, name), "a positive number"
            )


@dataclass(frozen=True)
class Processes:
    """How this process finds the others of its run; no part of the config. Without any of these
    there are none.
    """

    distributed: bool = False
    """This is one of several processes, and the cluster tells which: Slurm, Open MPI, Kubernetes,
    Cloud TPU.
    """
    coordinator_address: str | None = None
    """HOST:PORT of process 0, where no cluster tells; with --num-processes and --process-id."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Which of them this is, from 0."""


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    seed: int = 0
    """Seed of initial parameters, order of the data, and dropout."""

    def __post_init__(self) -> None:
        check_types(self, "")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "a number from 0 to 2^32 - 1")
        _require(
            self.data.dev.is_given or not self.training.patience,
            "training.patience",
            self.training.patience,
            "0 without data.dev, on which it looks",
        )
        longest = max(self.data.max_source_length, self.data.max_target_length)
        row = longest if self.batch.layout == "bucketed" else self.batch.row_length
        _require(
            self.batch.tokens >= row * self.batch.row_multiple,
            "batch.tokens",
            self.batch.tokens,
            f"at least {row * self.batch.row_multiple}: batch.row_multiple = {self.batch.row_multiple} rows of {row}; "
            "raise it, or lower batch.row_multiple or data.max_source_length and data.max_target_length",
        )
        if self.batch.layout == "packed":
            _require(
                longest <= self.batch.row_length,
                "batch.row_length",
                self.batch.row_length,
                f"at least the longest sentence, data.max_source_length / max_target_length = {longest}",
            )
        if self.model.positions == "learned":
            _require(
                longest <= self.model.max_positions,
                "model.max_positions",
                self.model.max_positions,
                f"at least the longest sentence, data.max_source_length / max_target_length = {longest}",
            )
        _require(
            self.tokenizer.joint or self.model.tie_embeddings != "all",
            "model.tie_embeddings",
            self.model.tie_embeddings,
            "'target' or 'none' when tokenizer.joint is False",
        )
        _require(
            self.optimizer.decay in ("inverse_sqrt", "constant")
            or self.training.steps > self.optimizer.warmup_steps,
            "training.steps",
            self.training.steps,
            f"more than optimizer.warmup_steps = {self.optimizer.warmup_steps}, as optimizer.decay is {self.optimizer.decay!r}",
        )
        dropped = (
            max(self.model.dropout, self.model.attention_dropout, self.model.feed_forward_dropout)
            > 0
        )
        _require(
            dropped or not self.training.r_drop,
            "training.r_drop",
            self.training.r_drop,
            "0 as long as model.dropout is 0: nothing is dropped",
        )
        parts = self.batch.row_multiple % self.optimizer.accumulate_steps == 0
        _require(
            parts,
            "batch.row_multiple",
            self.batch.row_multiple,
            f"a multiple of optimizer.accumulate_steps = {self.optimizer.accumulate_steps}",
        )
