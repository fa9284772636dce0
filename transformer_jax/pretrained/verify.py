"""Comparison of pretrained models with transformers: token ids, logits and beam searches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.decoding.engine import Engine
from transformer_jax.decoding.search import Sentence
from transformer_jax.errors import UserError, needs_extra
from transformer_jax.model.transformer import Transformer, abstract_model
from transformer_jax.pretrained.hub import find_pretrained
from transformer_jax.pretrained.loading import import_huggingface
from transformer_jax.settings.config import Config
from transformer_jax.tokenization.tokenizer import Tokenizer

SENTENCES = (
    "The sun is shining.",
    "It is raining, and nobody has an umbrella.",
    "How much does this book cost?",
    "She has lived in Berlin since 2019.",
    "The train to Paris leaves at 7:45 from platform 12.",
    "We are looking for a small house near the sea.",
    "Please close the window before you go.",
    "The committee will publish its report next week.",
    "I have never seen so many people in one place.",
    "Water boils at 100 degrees Celsius.",
    "His brother works as a doctor in a large hospital.",
    "The new law protects the rights of workers.",
    "Can you tell me where the library is?",
    "They did not agree with the decision of the court.",
    "The price of oil rose by three percent on Monday.",
    "My grandmother makes the best apple pie.",
    "Scientists found a new species of frog in the forest.",
    "The meeting was postponed until further notice.",
    "He forgot his keys and had to wait outside.",
    "Thank you very much for your help!",
)
_BEAM_SIZE = 4
_MAX_TOKENS = 60


class Comparison(NamedTuple):
    """How a model compares with transformers."""

    name: str
    same_ids: int
    """Number of sentences with the same token ids."""
    logits_apart: float
    """Largest difference of a logit, relative to the largest logit."""
    same_outputs: int
    """Number of sentences with the same best output of a beam search."""
    ended: int
    """Number of sentences whose outputs end before the limit of length, where searches differ."""
    sentences: int

    @property
    def equal(self) -> bool:
        """True if ids and logits are equal, and outputs but for ties in rounding."""
        has_same_ids = self.same_ids == self.sentences
        return has_same_ids and self.logits_apart < 1e-4 and self.same_outputs >= self.ended - 1


def compare(
    name: str, *, languages: tuple[str, str] = ("", ""), allow_pickle: bool = False
) -> Comparison:
    """Compare a model on the Hugging Face Hub, or in a folder, with transformers in float32.

    Raises ``UserError`` if PyTorch or transformers is missing, or the import fails.
    """
    with needs_extra("pretrained"):
        import transformers  # noqa: F401
    try:
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    except ImportError:
        raise UserError(
            "The comparison requires PyTorch; install it (pip install torch)."
        ) from None
    folder = find_pretrained(name, allow_pickle=allow_pickle)
    config, model, tokenizer = import_huggingface(
        folder, allow_pickle=allow_pickle, languages=languages
    )
    model = _in_float32(config, model)
    theirs: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"src_lang": languages[0]} if languages[0] else {}
    their_tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
    affixes = tokenizer.affixes(*languages)
    texts = list(SENTENCES)
    if tokenizer.languages.layout == "tag" and affixes.before_source:
        tag = tokenizer.languages.token(languages[1], "target_language")
        texts = [f"{tag} {sentence}" for sentence in SENTENCES]
    sources = [_complete(affixes.source(ids), model) for ids in tokenizer.source.encode(SENTENCES)]
    expected = [their_tokenizer(text).input_ids for text in texts]
    same_ids = sum(source == ids for source, ids in zip(sources, expected))
    forced = affixes.before_target[: tokenizer.unscored_prefix_length]
    outputs = _search(config, model, tokenizer, sources, forced)
    same_outputs = 0
    ended = 0
    logits_apart = 0.0
    for source, output in zip(sources, outputs):
        labels = _complete(output, model)
        logits_apart = max(logits_apart, _logits_apart(model, theirs, source, labels))
        their_output = _their_output(model, theirs, source, forced)
        if model.config.eos_id in their_output and len(labels) < _MAX_TOKENS:
            ended += 1
            end = their_output.index(model.config.eos_id) + 1
            same_outputs += labels == their_output[:end]
    return Comparison(name, same_ids, logits_apart, same_outputs, ended, len(SENTENCES))


def _logits_apart(model: Transformer, theirs: Any, source: list[int], labels: list[int]) -> float:
    """Return the largest difference of a logit, relative to the largest logit."""
    import torch

    inputs = torch.tensor([[model.config.decoder_start_id, *labels[:-1]]])
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([source]), decoder_input_ids=inputs).logits.numpy()
    logits = np.asarray(model(jnp.array([source]), jnp.array([labels])))
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def _their_output(
    model: Transformer, theirs: Any, source: list[int], forced: list[int]
) -> list[int]:
    """Return the best output of transformers' beam search, without the decoder's first input."""
    import torch

    output = theirs.generate(
        torch.tensor([source]),
        num_beams=_BEAM_SIZE,
        do_sample=False,
        early_stopping=True,
        length_penalty=1.0,
        min_length=0,
        no_repeat_ngram_size=0,
        max_new_tokens=_MAX_TOKENS,
        forced_bos_token_id=forced[0] if forced else None,
        bad_words_ids=[[model.config.pad_id]],
    )
    return output[0, 1:].tolist()


def table(comparisons: Sequence[Comparison]) -> str:
    """Format comparisons as a Markdown table."""
    rows = [
        "| model | same token ids | logits apart | same beam searches |",
        "|---|---|---|---|",
    ]
    for each in comparisons:
        rows.append(
            f"| {each.name} | {each.same_ids} of {each.sentences} | {each.logits_apart:.1e} | "
            f"{each.same_outputs} of {each.ended} that end |"
        )
    return "\n".join(rows)


def _in_float32(config: Config, model: Transformer) -> Transformer:
    shape = dataclasses.replace(config.model, dtype="float32")
    return nnx.merge(abstract_model(shape).graph, nnx.state(model, nnx.Param))


def _search(
    config: Config,
    model: Transformer,
    tokenizer: Tokenizer,
    sources: Sequence[list[int]],
    forced: list[int],
) -> list[list[int]]:
    decoding = dataclasses.replace(
        config.decoding,
        beam_size=_BEAM_SIZE,
        length_penalty=1.0,
        length_offset=0.0,
        patience=1.0,
        min_length=0,
        no_repeat_ngram=0,
        suppress=(),
        max_length=_MAX_TOKENS,
        max_extra_length=_MAX_TOKENS,
    )
    engine = Engine(model, decoding, unscored_prefix_length=tokenizer.unscored_prefix_length)
    results = engine.search([Sentence(source, forced) for source in sources])
    return [hypotheses[0].tokens if hypotheses else [] for hypotheses in results]


def _complete(ids: list[int], model: Transformer) -> list[int]:
    return ids if model.config.eos_id in ids else [*ids, model.config.eos_id]
