"""Fine-tune T5, Flan-T5, mT5 or UMT5 on any text-to-text task. Not yet run with real weights.

    python train.py --config finetune_t5:runs/t5 --workdir runs/summaries \
        --data.train.kind jsonl --data.train.source train.jsonl \
        --data.train.source-field text --data.train.target-field summary

The argument is an imported model (docs/tutorials/t5.md), a run, or a name on the Hugging Face Hub
such as hf://google/flan-t5-base. Pass any kind of data as flags. Each source begins with the prefix
of its task, such as "summarize: "; files can mix tasks.
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


def get_config(model: str = "hf://google/flan-t5-base") -> Config:
    """Adafactor at a constant 1e-3 without label smoothing, as T5 was fine-tuned (Raffel et al.,
    2020, section 3.1.2); at most 5,000 steps of 32,768 tokens, half of T5's batch; early stopping.

    Longer pairs are excluded, so raise data.max_source_length for long documents.
    """
    pretrained = load_config_file(local_workdir(model))
    return replace(
        pretrained,
        data=DataConfig(max_source_length=512, max_target_length=256),
        batch=BatchConfig(tokens=32_768, buckets=4),
        optimizer=OptimizerConfig(
            name="adafactor", peak_learning_rate=1e-3, decay="constant", warmup_steps=100
        ),
        training=TrainingConfig(
            start_from=model,
            freeze=pretrained.training.freeze,
            label_smoothing=0.0,
            steps=5000,
            eval_every=250,
            checkpoint_every=250,
            bleu_sentences=200,
            patience=5,
        ),
    )
