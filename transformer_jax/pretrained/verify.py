"""Comparison of pretrained models with transformers: token ids, logits and beam searches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.metadata import version
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
from transformer_jax.settings.config import DecodingConfig
from transformer_jax.tokenization.rows import with_eos
from transformer_jax.tokenization.tokenizer import Tokenizer

TEST_SENTENCES = (
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
    num_same_ids: int
    """Number of sentences with the same token ids."""
    logit_difference: float
    """Largest difference of a logit, relative to the largest logit."""
    num_same_outputs: int
    """Number of sentences with the same best output of a beam search."""
    num_ended: int
    """Number of sentences whose outputs end before the limit of length, where searches differ."""

    @property
    def is_equal(self) -> bool:
        """True if ids and logits are equal, and outputs but for ties in rounding."""
        has_same_ids = self.num_same_ids == len(TEST_SENTENCES)
        return (
            has_same_ids
            and self.logit_difference < 1e-4
            and self.num_same_outputs >= self.num_ended - 1
        )


def compare_with_transformers(
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
    float32_config = dataclasses.replace(config.model, dtype="float32")
    model = nnx.merge(abstract_model(float32_config).graph, nnx.state(model, nnx.Param))
    reference_model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"src_lang": languages[0]} if languages[0] else {}
    reference_tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
    affixes = tokenizer.affixes(*languages)
    texts = list(TEST_SENTENCES)
    if tokenizer.languages.places.in_text and affixes.before_source:
        tag = tokenizer.languages.token(languages[1], "target_language")
        texts = [f"{tag} {sentence}" for sentence in TEST_SENTENCES]
    eos_id = model.config.eos_id
    encoded = tokenizer.source.encode(TEST_SENTENCES)
    sources = [with_eos(affixes.source(ids), eos_id) for ids in encoded]
    expected = [reference_tokenizer(text).input_ids for text in texts]
    num_same_ids = sum(source == ids for source, ids in zip(sources, expected))
    prefix = affixes.before_target[: tokenizer.unscored_prefix_length]
    outputs = _search_sources(model, tokenizer, sources, prefix)
    num_same_outputs = 0
    num_ended = 0
    logit_difference = 0.0
    for source, output in zip(sources, outputs):
        labels = with_eos(output, eos_id)
        logit_difference = max(
            logit_difference, _logit_difference(model, reference_model, source, labels)
        )
        reference_output = _reference_output(model, reference_model, source, prefix)
        if eos_id in reference_output and len(labels) < _MAX_TOKENS:
            num_ended += 1
            end = reference_output.index(eos_id) + 1
            num_same_outputs += labels == reference_output[:end]
    return Comparison(name, num_same_ids, logit_difference, num_same_outputs, num_ended)


def _logit_difference(
    model: Transformer, reference_model: Any, source: list[int], labels: list[int]
) -> float:
    """Return the largest difference of a logit, relative to the largest logit."""
    import torch

    inputs = torch.tensor([[model.config.decoder_start_id, *labels[:-1]]])
    with torch.no_grad():
        expected = reference_model(
            input_ids=torch.tensor([source]), decoder_input_ids=inputs
        ).logits.numpy()
    logits = np.asarray(model(jnp.array([source]), jnp.array([labels])))
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def _reference_output(
    model: Transformer, reference_model: Any, source: list[int], prefix: list[int]
) -> list[int]:
    """Return the best output of transformers' beam search, without the decoder's first input."""
    import torch

    output = reference_model.generate(
        torch.tensor([source]),
        num_beams=_BEAM_SIZE,
        do_sample=False,
        early_stopping=True,
        length_penalty=1.0,
        min_length=0,
        no_repeat_ngram_size=0,
        max_new_tokens=_MAX_TOKENS,
        forced_bos_token_id=prefix[0] if prefix else None,
        bad_words_ids=[[model.config.pad_id]],
    )
    return output[0, 1:].tolist()


def table(comparisons: Sequence[Comparison]) -> str:
    """Format comparisons, and the versions of the libraries, as a Markdown table."""
    rows = [
        "| model | same token ids | logits apart | same beam searches |",
        "|---|---|---|---|",
    ]
    for comparison in comparisons:
        rows.append(
            f"| {comparison.name} | {comparison.num_same_ids} of {len(TEST_SENTENCES)} | "
            f"{comparison.logit_difference:.1e} | "
            f"{comparison.num_same_outputs} of {comparison.num_ended} that end |"
        )
    packages = ("transformer-jax", "jax", "transformers", "torch")
    versions = [f"{package} {version(package)}" for package in packages]
    return "\n".join([*rows, "", f"In float32 with {', '.join(versions)}."])


def _search_sources(
    model: Transformer, tokenizer: Tokenizer, sources: Sequence[list[int]], prefix: list[int]
) -> list[list[int]]:
    decoding = DecodingConfig(
        beam_size=_BEAM_SIZE,
        length_penalty=1.0,
        length_offset=0.0,
        patience=1.0,
        max_length=_MAX_TOKENS,
        max_extra_length=_MAX_TOKENS,
    )
    engine = Engine(model, decoding, unscored_prefix_length=tokenizer.unscored_prefix_length)
    results = engine.search([Sentence(source, prefix) for source in sources])
    return [hypotheses[0].tokens if hypotheses else [] for hypotheses in results]
