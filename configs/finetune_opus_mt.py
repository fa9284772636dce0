"""Fine-tune an OPUS-MT model (Marian) on text pairs, on one GPU. Not yet run with real weights.

    python train.py --config finetune_opus_mt:runs/opus --workdir runs/tuned \
        --data.train.source train.en --data.train.target train.de

The argument is an imported model (docs/tutorials/opus_mt.md), a run, or a name on the Hugging Face
Hub such as hf://Helsinki-NLP/opus-mt-en-de. Pass any kind of data as flags. Sources of a model with
several target languages begin with a tag, such as ">>deu<< ".
"""

from dataclasses import replace

from transformer_jax.pretrained.loading import local_workdir
from transformer_jax.settings.config import (
    BatchConfig,
    Config,
    DataConfig,
    OptimizerConfig,
    TrainingConfig,
)
from transformer_jax.settings.config_files import load_config_file


def get_config(model: str = "hf://Helsinki-NLP/opus-mt-en-de") -> Config:
    """Adam at 5e-5, at most 5,000 steps, early stopping.

    For a new domain on small data, freeze the encoder: --training.freeze 'encoder.*' softmax_bias.
    """
    pretrained = load_config_file(local_workdir(model))
    return replace(
        pretrained,
        data=DataConfig(max_source_length=128, max_target_length=128),
        batch=BatchConfig(tokens=8192, buckets=4),
        optimizer=OptimizerConfig(peak_learning_rate=5e-5, warmup_steps=100, clip_norm=1.0),
        training=TrainingConfig(
            start_from=model,
            freeze=pretrained.training.freeze,
            steps=5000,
            eval_every=200,
            checkpoint_every=200,
            patience=5,
        ),
    )
