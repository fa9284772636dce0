"""Every setting: frozen dataclasses whose fields declare their defaults and what values they allow.

The docstring under a field is its ``--help``. The defaults are the paper's base model; every
departure from the paper is a named field. ``config_io.py`` reads and writes config files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from transformer_jax.config_checks import (
    AtLeastOne,
    Count,
    Coverage,
    ExtraLength,
    Fraction,
    LineLength,
    NonNegative,
    PairLength,
    Positive,
    PositiveFloat,
    Probability,
    Rule,
    Section,
    Seed,
    TopP,
    VocabSize,
)


@dataclass(frozen=True)
class ModelConfig(Section, prefix="model."):
    """The Transformer's shape (paper sections 3 and 6.2; letters as in Table 3)."""

    vocab_size: Positive = 37_000
    """Number of target tokens V (and of source tokens where the vocabulary is shared). Training
    takes it from the tokenizer; set tokenizer.vocab_size instead."""
    source_vocab_size: Positive | None = None
    """Number of source tokens where the vocabularies are separate; None: one shared vocabulary.
    Training takes it from the tokenizer."""
    d_model: Positive = 512
    """Width of embeddings and sub-layer outputs."""
    d_ff: Positive = 2048
    """Inner width of the feed-forward layers."""
    num_heads: Positive = 8
    """Attention heads h."""
    d_k: Positive | None = None
    """Width of one head's queries and keys; None: d_model / num_heads."""
    d_v: Positive | None = None
    """Width of one head's values; None: d_model / num_heads."""
    num_layers: Positive = 6
    """Layers N in the encoder and in the decoder."""
    num_decoder_layers: Positive | None = None
    """Layers in the decoder if it has more or fewer than the encoder; None: num_layers."""
    dropout: Probability = 0.1
    """Dropout on embeddings and sub-layer outputs (section 5.4)."""
    attention_dropout: Probability = 0.0
    """Dropout on attention weights (not in the paper; tensor2tensor and fairseq have it)."""
    feed_forward_dropout: Probability = 0.0
    """Dropout after the activation of the feed-forward layer (not in the paper)."""
    norm: Literal["post", "pre"] = "post"
    """Layer norm after the residual sum (the paper), or before each sub-layer."""
    final_norm: bool | None = None
    """One more norm after the last layer of encoder and decoder; None: with model.norm pre only.
    PyTorch's nn.Transformer always has it."""
    norm_type: Literal["layer", "rms"] = "layer"
    """Layer norm, or RMS norm, which neither subtracts the mean nor adds a bias."""
    norm_epsilon: PositiveFloat = 1e-6
    """Added to the variance in a norm. PyTorch's default, and so that of most imported models, is
    1e-5."""
    norm_bias: bool = True
    """Add a bias in layer norm."""
    attention_bias: bool = False
    """Add biases to the four attention projections (fairseq, Marian and BERT do)."""
    feed_forward_bias: bool = True
    """Add biases in the feed-forward layers (equation 2)."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu"] = "relu"
    """Activation of the feed-forward layers: gelu is exact (by erf), gelu_tanh its approximation.
    swiglu gates silu by a third matrix: d_ff of 2/3 the size has as many parameters."""
    positions: Literal["interleaved", "split", "learned"] = "interleaved"
    """Sinusoids with sine and cosine in turn (the paper) or in two halves (tensor2tensor, Marian);
    or learned embeddings (Table 3 E)."""
    max_positions: Positive = 1024
    """Rows of the learned position table; the other positions have no limit."""
    encoder_window: Positive | None = None
    """Restricted self-attention (section 4, Table 1): each source token sees so many, itself in the
    middle; None: all."""
    tie_embeddings: Literal["all", "embeddings", "target", "none"] = "all"
    """One matrix for source embedding, target embedding and softmax (the paper), for the first two
    only, for the last two only, or for none."""
    softmax_bias: bool = False
    """Add a bias to each token's score before the softmax (Marian does)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of matrix products and of activations between layers; auto: float32 on CPU, bfloat16 on
    GPU and TPU. In Python jnp.float32 and jnp.bfloat16 also work. Parameters, softmax, sums inside
    norms, and the loss are always float32."""
    matmul_precision: Literal["default", "high", "highest"] = "default"
    """How exactly a GPU or TPU multiplies float32 matrices, in JAX's words. GPU: TF32, which rounds
    to 10 bits, unless it is highest. TPU: one pass in bfloat16, three or six. No matter for
    products in bfloat16 and on CPUs."""
    remat: bool = False
    """Recompute each layer's activations in the backward pass: less memory for about a third more
    computation."""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str):  # a type of JAX or NumPy
            object.__setattr__(self, "dtype", getattr(self.dtype, "__name__", str(self.dtype)))
        super().__post_init__()

    def rules(self) -> Iterator[Rule]:
        yield (
            "d_model",
            self.d_model % 2 == 0 or self.positions not in ("interleaved", "split"),
            "an even number: sinusoidal positions pair a sine with a cosine",
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
        yield (
            "encoder_window",
            self.encoder_window is None or self.encoder_window % 2 == 1,
            "an odd number: a token and as many on either side",
        )

    @property
    def head_width_k(self) -> int:
        """d_k, resolved."""
        return self.d_k or self.d_model // self.num_heads

    @property
    def head_width_v(self) -> int:
        """d_v, resolved."""
        return self.d_v or self.d_model // self.num_heads

    @property
    def decoder_layers(self) -> int:
        """Layers in the decoder, resolved."""
        return self.num_decoder_layers or self.num_layers

    @property
    def shares_embeddings(self) -> bool:
        """Whether source and target tokens have one embedding."""
        return self.tie_embeddings in ("all", "embeddings")

    @property
    def ties_softmax(self) -> bool:
        """Whether the softmax has the target embedding's matrix."""
        return self.tie_embeddings in ("all", "target")

    @property
    def has_final_norm(self) -> bool:
        """final_norm, resolved."""
        return self.norm == "pre" if self.final_norm is None else self.final_norm

    @property
    def position_limit(self) -> int:
        """Tokens that a sentence may have: learned positions end, sinusoids do not."""
        return self.max_positions if self.positions == "learned" else sys.maxsize


@dataclass(frozen=True)
class TokenizerConfig(Section, prefix="tokenizer."):
    """How SentencePiece is trained on the training text."""

    vocab_size: VocabSize = 37_000
    """Tokens in the vocabulary (in each of two separate ones), the four special ones included."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """Byte-pair encoding (the paper) or a unigram language model."""
    joint: bool = True
    """One vocabulary for both languages (the paper), or one for each."""
    character_coverage: Coverage = 1.0
    """Share of the text's characters that get a token; the rarest become unknown (or bytes)."""
    byte_fallback: bool = False
    """Spell unknown characters as UTF-8 bytes, so that no text is unknown."""
    normalization: Literal["nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"] = "nmt_nfkc"
    """Unicode normalisation before segmentation; `_cf` also folds case; identity changes
    nothing."""
    user_defined_symbols: tuple[str, ...] = ()
    """Tokens that are never split, in the training text or not: tags such as <2de>, placeholders.
    When a line is too long and is translated in segments, each segment repeats those that the line
    begins with. An existing vocabulary (tokenizer.model, training.start_from) is extended by those
    it lacks."""
    max_training_sentences: Positive = 5_000_000
    """Sentences that SentencePiece learns from, spread evenly over the text."""
    sampling: Fraction = 0.0
    """Subword regularisation: the merge dropout of BPE (usually 0.1; more is more random), or the
    smoothing alpha of unigram (usually 0.2 to 0.5; less is more random); 0: off."""
    sampled_epochs: Positive = 8
    """With sampling: number of different segmentations of the training text that are stored; epoch
    e reads number e modulo this."""
    model: str = ""
    """An existing SentencePiece model to use instead of training one; for the source if not joint.
    PAD, BOS, EOS and UNK must be its tokens 0 to 3. It brings its own size, algorithm and
    normalisation: of these settings only user_defined_symbols, sampling and sampled_epochs still
    apply."""
    target_model: str = ""
    """If not joint: the existing SentencePiece model for the target; tokenizer.model is the
    source's."""

    def rules(self) -> Iterator[Rule]:
        symbols = self.user_defined_symbols
        new = set(symbols) - {"<pad>", "<s>", "</s>", "<unk>"}
        yield (
            "user_defined_symbols",
            len(new) == len(symbols) and all(symbol.split() == [symbol] for symbol in symbols),
            "distinct words without white space, other than the built-in <pad>, <s>, </s>, <unk>",
        )
        yield (
            "target_model",
            not (self.joint and self.target_model),
            "'' unless tokenizer.joint is False",
        )
        yield (
            "target_model",
            self.joint or bool(self.target_model) == bool(self.model),
            f"{'a' if self.model else 'no'} SentencePiece model, as in tokenizer.model",
        )


@dataclass(frozen=True)
class PairsConfig(Section):
    """Where one set of sentence pairs comes from."""

    kind: Literal["text", "tfds", "numbers", "none"] = "text"
    """Parallel text files, a TensorFlow Datasets name, generated number names, or nothing. Files
    ending in .gz are unpacked as they are read."""
    source: tuple[str, ...] = ()
    """text: source-language files; tfds: one name such as wmt14_translate/de-en. A file name may be
    a URL, and a glob such as train-*.en.gz or s3://bucket/train-*.en.gz, which names all matching
    files in sorted order. A file that is named twice counts twice."""
    target: tuple[str, ...] = ()
    """text: target-language files in the order of the source files; for each glob in source a glob
    that matches as many files."""
    source_field: str = ""
    """tfds: field name (for example en)."""
    target_field: str = ""
    """tfds: field name (for example de)."""
    split: str = "train"
    """tfds: the split; numbers: train, dev or test, which do not overlap."""
    limit: Positive | None = None
    """Use only the first pairs, this many. numbers: how many to generate (None: 100,000 for train,
    all 10,000 for dev and test)."""

    def rules(self) -> Iterator[Rule]:
        of_kind = f"for kind {self.kind!r}"
        yield "source", self.kind != "tfds" or len(self.source) == 1, f"one builder {of_kind}"
        yield (
            "target",
            self.kind != "text" or len(self.source) == len(self.target),
            f"{len(self.source)} files, as many as source",
        )
        yield (
            "split",
            self.kind != "numbers" or self.split in ("train", "dev", "test"),
            f"train, dev or test {of_kind}",
        )

    @property
    def is_given(self) -> bool:
        """Whether there are any pairs: kind text has some only if files are named."""
        return self.kind == "numbers" or (self.kind != "none" and bool(self.source))


@dataclass(frozen=True)
class DataConfig(Section, prefix="data."):
    """The sentence pairs, and how they become a tokenised corpus."""

    root: str = ""
    """Folder or URL that relative file names of train, dev and test start from; '': the current
    folder."""
    train: PairsConfig = field(default_factory=PairsConfig)
    """Training set."""
    dev: PairsConfig = field(default_factory=PairsConfig)
    """Dev set: loss and BLEU during training, choice of the best checkpoint."""
    test: PairsConfig = field(default_factory=PairsConfig)
    """Test set: scored once, when training ends."""
    max_source_length: PairLength = 256
    """Longest source in tokens, end symbol included. Longer pairs are counted and left out of the
    training set and of dev loss."""
    max_target_length: PairLength = 256
    """Longest target in tokens, end symbol included. Longer pairs are counted and left out of the
    training set and of dev loss."""
    max_length_ratio: Literal[0] | AtLeastOne = 0.0
    """Also leave out pairs where one side has more than this many times the tokens of the other (5
    are added to both counts); 0: off."""
    invalid_utf8: Literal["error", "skip"] = "error"
    """At a line that is not UTF-8: stop, or skip the pair and count it."""
    cache: str = ""
    """Folder for tokenised corpora; '': `corpus` inside the work directory. Several runs may share
    one."""
    workers: Count = 0
    """Processes that tokenise; 0: one for each CPU core."""

    def rules(self) -> Iterator[Rule]:
        yield "cache", "://" not in self.cache, "a folder: corpora are mapped into memory"


@dataclass(frozen=True)
class BatchConfig(Section, prefix="batch."):
    """How pairs form batches (section 5.1)."""

    layout: Literal["bucketed", "packed"] = "bucketed"
    """One pair a row, grouped by length; or rows filled with several pairs, kept apart by segment
    ids."""
    tokens: Positive = 25_000
    """Token positions on each side of one step's global batch, padding included (25,000 + 25,000 in
    the paper)."""
    buckets: Positive = 8
    """bucketed: number of (source length, target length) shapes, each compiled once. More shapes
    mean less padding."""
    row_length: Positive = 256
    """packed: length of a row on the longer side; the other side is shorter in the ratio of the
    corpus."""
    row_multiple: Positive = 8
    """Every batch has a multiple of this many rows. It must itself be a multiple of mesh.data x
    mesh.fsdp x optimizer.accumulate_steps."""


@dataclass(frozen=True)
class OptimizerConfig(Section, prefix="optimizer."):
    """Adam and its learning-rate schedule (section 5.3)."""

    warmup_steps: Positive = 4000
    """Steps of linear warm-up."""
    decay: Literal["inverse_sqrt", "constant", "linear", "cosine"] = "inverse_sqrt"
    """The learning rate after warm-up: falling with the inverse square root of the step (the
    paper), constant, or falling to zero at training.steps linearly or as half a cosine."""
    peak_learning_rate: PositiveFloat | None = None
    """Learning rate at the end of warm-up; None: the paper's d_model^-0.5 * warmup_steps^-0.5."""
    beta1: Fraction = 0.9
    """Adam's decay of the first moment."""
    beta2: Fraction = 0.98
    """Adam's decay of the second moment."""
    epsilon: PositiveFloat = 1e-9
    """Adam's epsilon."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay on matrices (AdamW); 0: off."""
    clip_norm: NonNegative = 0.0
    """Scale gradients down to this global norm; 0: off."""
    accumulate_steps: Positive = 1
    """Split each batch into this many microbatches of equal row count: less memory, same result
    (except which elements dropout zeroes)."""
    ema_decay: Fraction = 0.0
    """Evaluate and decode with an exponential moving average of the parameters; 0: off. Early
    steps use a smaller decay: at step t at most (1 + t) / (10 + t)."""


@dataclass(frozen=True)
class TrainingConfig(Section, prefix="training."):
    """The training loop: how long, how often to evaluate and save, what to keep."""

    steps: Positive = 100_000
    """Optimizer steps."""
    start_from: str = ""
    """Fine-tune: start with the tokenizer and the parameters of this work directory (the mean of
    checkpoints that decode.py takes) or of this checkpoint's folder; '': start from scratch."""
    label_smoothing: Fraction = 0.1
    """epsilon_ls of section 5.4."""
    r_drop: NonNegative = 0.0
    """alpha of R-Drop (Liang et al., 2021): each pair passes through the model twice, and a loss
    term makes the two predictions, which differ by dropout, agree. Doubles the cost of a step. 5 is
    usual for small corpora; 0: off."""
    log_every: Positive = 50
    """Steps between entries in metrics.jsonl and TensorBoard."""
    eval_every: Positive = 1000
    """Steps between evaluations on the dev set: loss, perplexity, accuracy and (see bleu_every)
    BLEU."""
    bleu_every: Count = 1
    """At every n-th evaluation, also translate the dev set with beam search; 0: never."""
    bleu_sentences: Positive = 1000
    """Translate only this many sentences, from the start of the dev set."""
    bleu_tokenize: Literal["13a", "none", "intl", "char", "zh", "ja-mecab", "ko-mecab"] = "13a"
    """sacreBLEU's tokenisation; none: the text is already tokenised and scored as it is."""
    bleu_language: str = ""
    """The target language (de, fr, ...), for BLEU as the paper has it beside sacreBLEU's where
    translations of a test set are scored: Moses' tokens, compounds split; '': sacreBLEU's alone."""
    checkpoint_every: Positive = 1000
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 5
    """Number of newest checkpoints to keep. The best on the dev set (select_by) is kept too, with
    those that may be averaged with it."""
    average: Literal["auto"] | Positive = "auto"
    """Number of checkpoints whose mean is scored on the test set and used by decode.py: the last
    ones or, after early stopping, the best on the dev set and those before it; 1: one alone. auto:
    when training ends, the mean of 1 to 5 with the lowest dev loss; until then, or without
    data.dev, the last checkpoint alone."""
    select_by: Literal["loss", "bleu"] = "loss"
    """The dev-set figure that decides which checkpoint is best and when to stop early."""
    patience: Count = 0
    """Early stopping after this many evaluations without a better dev-set figure; 0: off."""
    max_bad_steps: Positive = 10
    """Steps with a non-finite loss or gradient are skipped and counted; after this many in a row
    the run stops."""

    def rules(self) -> Iterator[Rule]:
        yield (
            "bleu_every",
            self.bleu_every > 0 or self.select_by != "bleu",
            "a positive number where training.select_by is 'bleu'",
        )
        yield (
            "average",
            self.average == "auto" or self.average <= self.keep_checkpoints,
            f"at most training.keep_checkpoints = {self.keep_checkpoints}",
        )

    @property
    def most_averaged(self) -> int:
        """The most checkpoints whose mean the end of training may choose."""
        return 5 if self.average == "auto" else self.average


@dataclass(frozen=True)
class DecodingConfig(Section, prefix="decoding."):
    """Beam search (section 6.1), or sampling."""

    method: Literal["beam", "sample"] = "beam"
    """Search for the most likely translation, or sample from the model's distribution."""
    beam_size: Positive = 4
    """Hypotheses kept for a sentence (1: greedy); sample: number of samples."""
    length_penalty: NonNegative = 0.6
    """alpha in log P / ((c + length) / (c + 1))^alpha, where c is length_offset."""
    length_offset: NonNegative = 5.0
    """c of the length penalty: 5 in the paper; 0, which divides by length^alpha, in Marian,
    CTranslate2, fairseq and transformers."""
    max_extra_length: ExtraLength = 50
    """A translation has at most this many tokens more than its source."""
    min_length: Count = 0
    """A translation has at least this many tokens."""
    no_repeat_ngram: Count = 0
    """No n-gram of this many tokens occurs twice in a translation; 0: off."""
    suppress: tuple[str, ...] = ()
    """Target tokens that are never generated, written as in the vocabulary (`▁` where a word
    begins)."""
    temperature: PositiveFloat = 1.0
    """sample: logits are divided by this; below 1 favours likely tokens."""
    top_k: Count = 0
    """sample: draw only from the k most likely tokens; 0: from all."""
    top_p: TopP = 1.0
    """sample: draw only from the smallest set of likely tokens whose probability reaches p; 1: from
    all."""
    seed: Seed = 0
    """sample: random seed. A line gets the same samples in any batch."""
    max_source_length: LineLength = 256
    """Longer lines (in tokens, end symbol included) are translated in segments, with a warning."""
    batch_size: Positive = 32
    """Sentences searched at a time, by all devices together; a quarter as many where a source has
    over 128 tokens, a sixteenth over 512."""

    def rules(self) -> Iterator[Rule]:
        yield (
            "min_length",
            self.min_length <= self.max_extra_length,
            f"at most decoding.max_extra_length = {self.max_extra_length}, so that the shortest "
            "source allows it",
        )


@dataclass(frozen=True)
class MeshConfig(Section, prefix="mesh."):
    """How devices are arranged."""

    data: Literal[-1] | Positive = -1
    """Devices that the batch is split over; -1: all that the other axes leave."""
    fsdp: Positive = 1
    """Devices that the batch, the parameters and the optimizer state are split over."""
    tensor: Positive = 1
    """Devices that heads and d_ff are split over."""


@dataclass(frozen=True)
class Processes(Section, prefix="processes."):
    """How this process finds the others of its run (not saved with the settings)."""

    distributed: bool = False
    """This is one of several processes; the cluster (Slurm, Open MPI, Kubernetes, Cloud TPU) tells
    which."""
    coordinator_address: str | None = None
    """Without such a cluster: HOST:PORT of process 0, with --num-processes and --process-id."""
    num_processes: Positive | None = None
    """Number of processes."""
    process_id: Count | None = None
    """Number of this process, from 0."""


@dataclass(frozen=True)
class Config(Section):
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    seed: Seed = 0
    """Seed of initial parameters, order of the data, and dropout."""

    def rules(self) -> Iterator[Rule]:
        model, batch, optimizer = self.model, self.batch, self.optimizer
        longest = max(self.data.max_source_length, self.data.max_target_length)
        holds_longest = (
            f"at least {longest}, the larger of data.max_source_length and data.max_target_length"
        )
        row = longest if batch.layout == "bucketed" else batch.row_length
        yield (
            "training.patience",
            self.data.dev.is_given or not self.training.patience,
            "0 without data.dev, which early stopping looks at",
        )
        yield (
            "batch.tokens",
            batch.tokens >= row * batch.row_multiple,
            f"at least {row * batch.row_multiple}: batch.row_multiple = {batch.row_multiple} rows "
            f"of {row} tokens; raise it, or lower batch.row_multiple or data.max_source_length and "
            "data.max_target_length",
        )
        yield (
            "batch.row_length",
            batch.layout == "bucketed" or batch.row_length >= longest,
            holds_longest,
        )
        yield (
            "model.max_positions",
            model.positions != "learned" or model.max_positions >= longest,
            holds_longest,
        )
        yield (
            "model.tie_embeddings",
            self.tokenizer.joint or not model.shares_embeddings,
            "'target' or 'none' when tokenizer.joint is False",
        )
        yield (
            "training.steps",
            optimizer.decay in ("inverse_sqrt", "constant")
            or self.training.steps > optimizer.warmup_steps,
            f"more than optimizer.warmup_steps = {optimizer.warmup_steps}, as optimizer.decay is "
            f"{optimizer.decay!r}",
        )
        yield (
            "training.r_drop",
            not self.training.r_drop
            or max(model.dropout, model.attention_dropout, model.feed_forward_dropout) > 0,
            "0 as long as model.dropout is 0: without dropout both passes are the same",
        )
        yield (
            "batch.row_multiple",
            batch.row_multiple % optimizer.accumulate_steps == 0,
            f"a multiple of optimizer.accumulate_steps = {optimizer.accumulate_steps}",
        )
