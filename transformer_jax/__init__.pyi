"""Public names of the package, for ``__init__.py``, type checkers and editors."""

from .cli import flag_values, parse_flags, run_program
from .data.batching import Batch, BatchPlan
from .data.corpus import Corpus, build_corpus
from .data.loader import load_batches
from .data.sources import read_pairs
from .data.text_files import read_lines
from .decoding.beam_search import BeamSearch
from .decoding.constraints import Constraints
from .decoding.devices import devices_for_rows
from .decoding.engine import Engine
from .decoding.ensemble import Ensemble
from .decoding.length_buckets import Bucket
from .decoding.sampling import Sampling
from .decoding.scheduler import SearchFailed
from .decoding.search import (
    Hypothesis,
    SearchResult,
    Sentence,
    gather_beams,
    search,
)
from .devices.sharding import batch_sharding, make_mesh, state_shardings
from .errors import UserError
from .evaluation import bleu, chrf
from .model.attention import MultiHeadAttention, attention_mask, dot_product_attention
from .model.kv_cache import DecoderCache
from .model.layers import Decoder, DecoderLayer, Embedding, Encoder, EncoderLayer, FeedForward
from .model.positions import sinusoidal_positions
from .model.transformer import Transformer, model_from_arrays, parameter_shapes
from .pretrained.encoder import TextEncoder
from .pretrained.loading import load_model, local_workdir
from .runs.model_folder import save_model
from .settings.config import (
    BatchConfig,
    Config,
    DataConfig,
    DecodingConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)
from .settings.config_files import load_config_file
from .tokenization.languages import Affixes, Languages
from .tokenization.special_ids import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from .tokenization.subword_model import SubwordModel
from .tokenization.tokenizer import Tokenizer
from .tokenization.vocabulary import Vocabulary
from .training.loop import train
from .training.loss import TwoPasses, smoothed_cross_entropy
from .training.optimizer import learning_rate_schedule, make_optimizer
from .translation.async_translator import AsyncTranslator
from .translation.requests import Request, Translation
from .translation.scoring import Scorer
from .translation.translator import Translator

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "PAD_ID",
    "UNK_ID",
    "Affixes",
    "AsyncTranslator",
    "Batch",
    "BatchConfig",
    "BatchPlan",
    "BeamSearch",
    "Bucket",
    "Config",
    "Constraints",
    "Corpus",
    "DataConfig",
    "Decoder",
    "DecoderCache",
    "DecoderLayer",
    "DecodingConfig",
    "Embedding",
    "Encoder",
    "EncoderLayer",
    "Engine",
    "Ensemble",
    "FeedForward",
    "Hypothesis",
    "Languages",
    "MeshConfig",
    "ModelConfig",
    "MultiHeadAttention",
    "OptimizerConfig",
    "PairsConfig",
    "Request",
    "Sampling",
    "Scorer",
    "SearchFailed",
    "SearchResult",
    "Sentence",
    "SubwordModel",
    "TextEncoder",
    "Tokenizer",
    "TokenizerConfig",
    "TrainingConfig",
    "Transformer",
    "Translation",
    "Translator",
    "TwoPasses",
    "UserError",
    "Vocabulary",
    "attention_mask",
    "batch_sharding",
    "bleu",
    "build_corpus",
    "chrf",
    "devices_for_rows",
    "dot_product_attention",
    "flag_values",
    "gather_beams",
    "learning_rate_schedule",
    "load_batches",
    "load_config_file",
    "load_model",
    "local_workdir",
    "make_mesh",
    "make_optimizer",
    "model_from_arrays",
    "parameter_shapes",
    "parse_flags",
    "read_lines",
    "read_pairs",
    "run_program",
    "save_model",
    "search",
    "sinusoidal_positions",
    "smoothed_cross_entropy",
    "state_shardings",
    "train",
]
