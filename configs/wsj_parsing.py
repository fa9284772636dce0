r"""English constituency parsing, Wall Street Journal (section 6.3). Not yet run at full length.

Prepare the text from the Penn Treebank (LDC99T42; train on sections 2 to 21, dev on 22):

    python -m transformer_jax.parsing prepare --output data/wsj/train \
        --trees wsj/0[2-9]/*.mrg wsj/1?/*.mrg wsj/2[01]/*.mrg
    python -m transformer_jax.parsing prepare --output data/wsj/dev --trees wsj/22/*.mrg

docs/parsing.md describes the remaining steps, up to F1. To also train on trees from another parser,
add their files to --data.train.source and --data.train.target.
"""

from transformer_jax.parsing.trees import bracket_symbols
from transformer_jax.settings.config import (
    BatchConfig,
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    OptimizerConfig,
    PairsConfig,
    TokenizerConfig,
    TrainingConfig,
)

LABELS = (
    "ADJP ADVP CONJP FRAG INTJ LST NAC NP NX PP PRN PRT QP RRC S SBAR SBARQ SINV SQ UCP VP WHADJP "
    "WHADVP WHNP WHPP X"
)


def _pairs(split: str) -> PairsConfig:
    return PairsConfig("text", (f"{split}.words",), (f"{split}.sequences",))


def get_config() -> Config:
    """4+4 layers of width 1,024, 16,000 tokens, beam 21, length penalty 0.3.

    A tree may have up to 300 more tokens than its sentence. The paper does not give the number of
    steps or the dropout rate, which was chosen on section 22. The rate of 0.2, also for attention
    weights, is tensor2tensor's.
    """
    return Config(
        model=ModelConfig(
            d_model=1024, d_ff=2048, num_heads=8, num_layers=4, dropout=0.2, attention_dropout=0.2
        ),
        tokenizer=TokenizerConfig(
            vocab_size=16_000,
            normalization="identity",
            user_defined_symbols=bracket_symbols(LABELS),
        ),
        data=DataConfig(
            root="data/wsj",
            train=_pairs("train"),
            dev=_pairs("dev"),
            max_source_length=256,
            max_target_length=512,
        ),
        batch=BatchConfig(tokens=25_000, buckets=24),
        optimizer=OptimizerConfig(warmup_steps=4000),
        training=TrainingConfig(
            steps=20_000,
            eval_every=500,
            checkpoint_every=500,
            bleu_sentences=0,  # parsing is scored by F1
            patience=10,
        ),
        decoding=DecodingConfig(
            beam_size=21, length_penalty=0.3, max_extra_length=300, batch_size=16
        ),
    )
