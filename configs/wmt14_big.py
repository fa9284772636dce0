"""WMT 2014 English-German, the paper's big model (section 6.1). Not yet run at full length.

Data as in configs/wmt14_base.py.
"""

import dataclasses
from pathlib import Path

from transformer_jax.settings.config import Config
from transformer_jax.settings.config_files import load_config_file


def get_config() -> Config:
    """Wider than base, dropout 0.3, 300,000 steps, average of the last 20 checkpoints.

    At about 1.0 second per step (section 5.2), a checkpoint every 10 minutes is one every 600
    steps. The 20 checkpoints need 50 GB.
    """
    base = load_config_file(Path(__file__).with_name("wmt14_base.py"))
    replace = dataclasses.replace
    return replace(
        base,
        model=replace(base.model, d_model=1024, d_ff=4096, num_heads=16, dropout=0.3),
        training=replace(
            base.training,
            steps=300_000,
            eval_every=3000,
            checkpoint_every=600,
            keep_checkpoints=20,
            average=20,
        ),
    )
