"""transformer_jax: the encoder-decoder Transformer of "Attention Is All You Need", in JAX and Flax."""

from transformer_jax.config import (
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
from transformer_jax.config_files import load_config_file
from transformer_jax.data.batching import Batch, BatchPlan
from transformer_jax.data.corpus import Corpus, build_corpus
from transformer_jax.data.loader import load
from transformer_jax.decoding.beam_search import beam_search
from transformer_jax.decoding.constraints import Constraints
from transformer_jax.decoding.engine import Engine, Hypothesis, Sentence
from transformer_jax.decoding.sampling import sample
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.search import SearchResult, gather_beams
from transformer_jax.decoding.translator import Request, Translation, Translator
from transformer_jax.errors import UserError
from transformer_jax.evaluation import bleu, chrf
from transformer_jax.model.attention import MultiHeadAttention, attention_mask, dot_product_attention
from transformer_jax.model.cache import DecoderCache
from transformer_jax.model.layers import DecoderLayer, EncoderLayer, FeedForward, sinusoidal_positions
from transformer_jax.model.transformer import Decoder, Embedding, Encoder, Transformer
from transformer_jax.saved_model import load_model
from transformer_jax.sharding import batch_sharding, make_mesh, state_shardings
from transformer_jax.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer
from transformer_jax.training.loop import train
from transformer_jax.training.loss import smoothed_cross_entropy
from transformer_jax.training.optimizer import learning_rate_schedule, make_optimizer

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "PAD_ID",
    "UNK_ID",
    "Batch",
    "BatchConfig",
    "BatchPlan",
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
    "FeedForward",
    "Hypothesis",
    "MeshConfig",
    "ModelConfig",
    "MultiHeadAttention",
    "OptimizerConfig",
    "PairsConfig",
    "Request",
    "Scorer",
    "SearchResult",
    "Sentence",
    "Tokenizer",
    "TokenizerConfig",
    "TrainingConfig",
    "Transformer",
    "Translation",
    "Translator",
    "UserError",
    "attention_mask",
    "batch_sharding",
    "beam_search",
    "bleu",
    "build_corpus",
    "chrf",
    "dot_product_attention",
    "gather_beams",
    "learning_rate_schedule",
    "load",
    "load_config_file",
    "load_model",
    "make_mesh",
    "make_optimizer",
    "sample",
    "sinusoidal_positions",
    "smoothed_cross_entropy",
    "state_shardings",
    "train",
]
