"""Settings, flags and modules that version 0.1 removed, each with what to use instead.

Until 0.2 their names are answered with that advice in place of "unknown".
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from typing import Any

SETTINGS: dict[str, tuple[Any, str]] = {
    "batch.window": (
        2**24,
        "batches are planned over the whole corpus, in about 30 bytes of memory a pair.",
    ),
    "decoding.coverage_penalty": (
        0.0,
        "raise decoding.length_penalty where translations leave out parts of the source.",
    ),
    "decoding.repetition_penalty": (
        1.0,
        "use decoding.no_repeat_ngram where translations repeat themselves.",
    ),
    "decoding.shortlist": (
        "",
        "export to CTranslate2 with int8 where the softmax is too slow (docs/interop.md).",
    ),
    "data.shards": (1, "train.py tokenizes the text itself, on all cores of its machine."),
    "model.distinct_layers": (
        None,
        "lower model.num_layers where the model has too many parameters.",
    ),
    "training.compilation_cache": (
        "auto",
        "use the flag --compilation-cache of train.py and decode.py.",
    ),
}
"""Field of ``Config``: its old default and the advice. A config.json loads with the default."""

FLAGS: dict[str, str] = {
    "query": "use --only with numbers of tokens, from 1.",
    "source-tokens": "draw slices of the arrays with transformer_jax.figures.attention_maps.",
    "target-tokens": "draw slices of the arrays with transformer_jax.figures.attention_maps.",
    "api-keys": "let a reverse proxy check keys, as docs/serving.md shows.",
    "requests-per-minute": "let a reverse proxy limit rates, as docs/serving.md shows.",
    "join": "join the outputs of --shard with `paste -d '\\n'` (docs/decoding.md, Long jobs).",
    "strict": "leave it out; a corrupt checkpoint is always an error, so choose another with "
    "--checkpoint.",
    "sampling": "use decode.py --method sample; the service answers with beam search.",
}
"""Flag of a program, without the dashes: the advice. Flags of ``SETTINGS`` need no entry."""

MODULES: dict[str, str] = {
    "serving.workers": "use AsyncTranslator of transformer_jax.",
    "decoding.length_penalty": "import length_divisor from transformer_jax.decoding.search.",
    "training.watchdog": "use faulthandler.dump_traceback_later of Python.",
    "training.tokenize_ahead": (
        "train.py tokenizes the text itself; --tokenizer.model names a trained tokenizer."
    ),
    "table3": (
        "train the rows by train.py --config table3:ROW and collect them by examples/table3.py."
    ),
    "attention": "use `python -m transformer_jax.figures attention` and sentence_attention.",
    "pictures": "use `python -m transformer_jax.figures` and transformer_jax.figures.",
    "interop.marian": "use interop.ctranslate2 or interop.huggingface.",
    "decoding.learn_shortlist": "export to CTranslate2 with int8 where the softmax is too slow.",
}
"""Module below ``transformer_jax``: the advice."""


def advice_for_flag(flag: str) -> str | None:
    """The advice for a removed flag such as ``model.d-ff``; None for any other."""
    for setting, (_, advice) in SETTINGS.items():
        name = setting.replace("_", "-")
        if flag in (name, name.removeprefix("decoding.")):  # decode.py has no prefix
            return advice
    return FLAGS.get(flag)


class RemovedModules:
    """Raises ``ModuleNotFoundError`` with the advice when a removed module is imported or run."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package == "transformer_jax" and module in MODULES:
            raise ModuleNotFoundError(f"{name} was removed: {MODULES[module]}", name=name)
        return None
