"""Fine-tune NLLB-200 or M2M100 on text pairs, on one GPU. Not yet run with real weights.

    python train.py --config finetune_nllb:runs/nllb --workdir runs/tuned \
        --tokenizer.source-language eng_Latn --tokenizer.target-language deu_Latn \
        --data.train.source train.en --data.train.target train.de

The argument is an imported model (docs/tutorials/nllb.md), a run, or a name on the Hugging Face Hub
such as hf://facebook/nllb-200-distilled-600M@refs/pr/45. Pass any kind of data as flags; several
pairs of languages, with --data.train.source-languages and --data.train.target-languages. The tuned
model still has its other languages, and new ones (docs/tutorials/new_language.md).
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


def get_config(model: str = "hf://facebook/nllb-200-distilled-600M@refs/pr/45") -> Config:
    """Adam at 5e-5, at most 5,000 steps, early stopping; the embedding matrix stays as it is.

    The matrix has 256,000 rows, 40% of the parameters of the 600M model. Frozen, it needs no
    gradient, and the tokens of other languages keep their rows. Freeze more on small data:
    --training.freeze '*embedding*' 'encoder.*'.
    """
    pretrained = load_config_file(local_workdir(model))
    return replace(
        pretrained,
        data=DataConfig(max_source_length=128, max_target_length=128),
        batch=BatchConfig(tokens=8192, buckets=4),
        optimizer=OptimizerConfig(peak_learning_rate=5e-5, warmup_steps=500, clip_norm=1.0),
        training=TrainingConfig(
            start_from=model,
            freeze=("*embedding.matrix", *pretrained.training.freeze),
            steps=5000,
            eval_every=250,
            checkpoint_every=250,
            bleu_sentences=200,
            patience=5,
        ),
    )
