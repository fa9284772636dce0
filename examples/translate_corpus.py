"""Translate one side of a corpus with a teacher on every device: distillation, back-translation.

    python examples/translate_corpus.py --workdir TEACHER --input train.en --output kd --processes 4

writes kd/source and kd/target: each line of --input and its translation, without pairs whose
translation is empty or as long as the length limit allows. For back-translation, --workdir is a
model of the opposite direction, and --swap makes the translation the source. Each process runs
decode.py --shard on its own device (--device cuda: one GPU each; cpu: one process per machine is
enough). The same command continues after it was stopped.
"""
