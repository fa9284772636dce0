"""Multi30k English-German with pre-norm, RMS norm, SwiGLU and Muon, in two runs.

    python train.py --config multi30k_modern:both --workdir runs/both
    python train.py --config multi30k_modern --workdir runs/modern --training.start-from runs/both

The first run learns both directions of the same pairs, without tags (bidirectional pretraining,
Ding et al., 2021); the second one English to German. Together, they have as many updates as
configs/multi30k_cpu.py, of which both take data and size.
"""

from dataclasses import replace
from pathlib import Path

from transformer_jax.errors import UserError, short_repr
from transformer_jax.settings.config import Config, PairsConfig
from transformer_jax.settings.config_files import load_config_file


def get_config(run: str = "") -> Config:
    """4,000 updates of English to German, or 2,000 of both directions (multi30k_modern:both)."""
    if run not in ("", "both"):
        raise UserError(
            f"The argument of multi30k_modern is {short_repr(run)}; expected both or none."
        )
    base = load_config_file(Path(__file__).with_name("multi30k_cpu.py"))
    modern = {"norm": "pre", "norm_type": "rms", "activation": "swiglu", "d_ff": 168}
    config = replace(
        base,
        model=replace(base.model, **modern, dropout=0.3),
        optimizer=replace(base.optimizer, name="muon", decay="cosine"),
        training=replace(base.training, steps=4000),
        decoding=replace(base.decoding, length_penalty=1.3),
    )
    if not run:
        return config
    english, german = config.data.train.source, config.data.train.target
    return replace(
        config,
        model=replace(config.model, dropout=0.2),
        data=replace(
            config.data,
            train=PairsConfig("text", english + german, german + english),
            test=PairsConfig("none"),
        ),
        optimizer=replace(config.optimizer, decay="inverse_sqrt"),
        training=replace(
            config.training, steps=2000, average=1, bleu_sentences=0, select_by="loss"
        ),
    )
