"""Pretrained families: the same numbers as transformers, in both directions."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import ctranslate2
import families
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers.models.t5.modeling_t5 import T5Attention

from transformer_jax.errors import UserError
from transformer_jax.export.__main__ import main as export
from transformer_jax.export.huggingface import export_huggingface
from transformer_jax.model.positions import RelativeBias
from transformer_jax.model.transformer import Transformer
from transformer_jax.pretrained.__main__ import main
from transformer_jax.pretrained.ctranslate2 import adds_source_eos, export_ctranslate2
from transformer_jax.pretrained.folder import Pretrained
from transformer_jax.pretrained.loading import import_huggingface, load_model
from transformer_jax.settings.config import Config, ModelConfig
from transformer_jax.tokenization.rows import with_eos
from transformer_jax.tokenization.segmenters import JsonSegmenter
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.loss import smoothed_cross_entropy
from transformer_jax.translation.ctranslate2_engine import CTranslate2Engine
from transformer_jax.translation.translator import Translator

CODES = {"m2m_100": ("en", "de")}
LIMIT = 30  # tokens of an output; the searches' own limits are higher
RNG = np.random.default_rng(0)
LINES = [" ".join(RNG.choice(families.WORDS, RNG.integers(2, 9))) for _ in range(250)]
RATES = {"b1": 0.9, "b2": 0.98, "eps": 1e-6, "weight_decay": 0.01}

pytestmark = pytest.mark.cpu("compares with PyTorch to within 1e-5")


@dataclasses.dataclass
class Family:
    """A pretrained model, and its import."""

    case: str
    folder: Path
    theirs: Any
    pretrained: Pretrained
    config: Config
    model: Transformer
    tokenizer: Tokenizer

    @property
    def codes(self) -> tuple[str, str]:
        """Codes of two languages, or two empty strings."""
        if self.language_last:  # fixed by the import
            return "", ""
        found = CODES.get(self.case) or families.languages(self.case)
        return tuple(found) if found else ("", "")  # type: ignore[return-value]

    @property
    def tags(self) -> tuple[str, str]:
        """Tokens before the source and the target."""
        if self.case == "bart":
            return "<s>", "<s>"
        if self.language_last:
            return "", ""
        return tuple(families.languages(self.case)) or ("", "")  # type: ignore[return-value]

    @property
    def language_last(self) -> bool:
        """True if the source's language follows EOS, and the target's is the decoder's start."""
        return self.case == "mbart, first version"

    @cached_property
    def source_ids(self) -> dict[str, int]:
        """Their ids of the source tokens."""
        return families.vocabularies(self.case)[0]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Their ids of the target tokens."""
        return families.vocabularies(self.case)[1]

    @cached_property
    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Source and target in their ids, with padding at the end."""
        rng = np.random.default_rng(1)
        words = [
            [i for token, i in ids.items() if token.strip("▁") in families.WORDS]
            for ids in (self.source_ids, self.ids)
        ]
        source, target = (rng.choice(ids, (4, length)) for ids, length in zip(words, (13, 9)))
        pad = self.theirs.config.pad_token_id
        source[1, 6:], source[2, 1:], target[1, 4:], target[3, 1:] = pad, pad, pad, pad
        return source, target

    @property
    def our_batch(self) -> list[np.ndarray]:
        """The same ids."""
        return [side.astype(np.int32) for side in self.batch]

    def their_logits(self) -> torch.Tensor:
        """Logits of the batch with teacher forcing."""
        source, target = self.batch
        start = self.theirs.config.decoder_start_token_id
        before = np.insert(target, 0, start, axis=1)[:, :-1]
        mask = source != self.theirs.config.pad_token_id
        return self.theirs(
            input_ids=torch.tensor(source),
            attention_mask=torch.tensor(mask.astype(int)),
            decoder_input_ids=torch.tensor(before),
        ).logits

    def translator(self, beam_size: int, patience: float | None = None) -> Translator:
        decoding = dataclasses.replace(
            self.config.decoding,
            beam_size=beam_size,
            patience=patience,
            length_penalty=1.0,
            length_offset=0.0,
            max_extra_length=LIMIT,
            batch_size=len(LINES),
        )
        tokenizer = self.tokenizer.with_languages(*self.codes)
        return Translator(self.model, tokenizer, decoding)

    def inputs(self, lines: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask of lines."""
        rows = [torch.tensor([self.source_ids[x] for x in self.tokens(line)]) for line in lines]
        pad = self.theirs.config.pad_token_id
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
        return ids, (ids != pad).long()

    def tokens(self, line: str) -> list[str]:
        """Source tokens of a line."""
        words = [word if word in self.source_ids else f"▁{word}" for word in line.split()]
        last = families.languages(self.case)[: self.language_last]
        return [*filter(None, [self.tags[0], *words, "</s>", *last])]


def read(case: str, folder: Path, theirs: Any, languages: tuple[str, str] = ("", "")) -> Family:
    config, model, tokenizer = import_huggingface(folder, languages=languages)
    shape = dataclasses.replace(config.model, dtype="float32")
    model = nnx.merge(nnx.split(Transformer(shape, rngs=nnx.Rngs(0)))[0], nnx.state(model))
    config = dataclasses.replace(config, model=shape)
    pretrained = Pretrained(folder, languages=languages)
    return Family(case, folder, theirs, pretrained, config, model, tokenizer)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=families.CASES)
def family(request: Any, tmp_path_factory: Any) -> Family:
    folder = tmp_path_factory.mktemp("pretrained")
    return read(request.param, folder, families.write(request.param, folder))


def representatives(*cases: str) -> Any:
    """The families of different code paths. `make test` runs a test with these alone."""
    every = [
        pytest.param(case, marks=[] if case in cases else pytest.mark.exhaustive)
        for case in families.CASES
    ]
    return pytest.mark.parametrize("family", every, indirect=True, scope="module")


def apart(ours: Any, theirs: Any) -> float:
    """Largest difference, relative to the largest value."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


# Numbers: outputs, gradients, training, decoding steps.


def test_logits_equal_theirs(family: Family, logits: Any) -> None:
    source, target = family.our_batch
    is_real = target != family.config.model.pad_id
    with torch.no_grad():
        theirs = family.their_logits().numpy()[is_real]
    ours = logits(family.model, source, target)[is_real]
    assert apart(ours, theirs) < 1e-5


@representatives("marian, two vocabularies", "t5 1.1")
def test_logits_gradients_and_five_steps_of_adamw_equal_theirs(family: Family) -> None:
    """The softmax bias is frozen, because it is a buffer in PyTorch."""
    source, target = family.our_batch
    graph, state = nnx.split(family.model, nnx.Param)
    parameters = nnx.to_pure_dict(state)
    adamw = optax.adamw(1e-3, **RATES)

    def mean_loss(parameters: Any) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, parameters)
        hidden_BTD = model.hidden(source, target)
        sums = smoothed_cross_entropy(
            *(hidden_BTD, model.output_matrix_VD, jnp.asarray(target)),
            bias_V=model.output_bias_V,
            label_smoothing=0.0,
            pad_id=model.config.pad_id,
        )
        return sums.loss / sums.tokens, model.logits(hidden_BTD)

    @jax.jit
    def step(parameters: Any, state: Any) -> tuple[Any, ...]:
        (loss, logits), gradients = jax.value_and_grad(mean_loss, has_aux=True)(parameters)
        updates, state = adamw.update(gradients, state, parameters)
        if "softmax_bias" in updates:
            updates["softmax_bias"] *= 0
        return optax.apply_updates(parameters, updates), state, loss, logits, gradients

    theirs = family.theirs
    start = {name: x.clone() for name, x in theirs.state_dict().items()}
    theirs_adamw = torch.optim.AdamW(
        theirs.parameters(),
        lr=1e-3,
        betas=(RATES["b1"], RATES["b2"]),
        eps=RATES["eps"],
        weight_decay=RATES["weight_decay"],
    )
    labels = torch.tensor(family.batch[1])
    pad = theirs.config.pad_token_id
    state = jax.jit(adamw.init)(parameters)
    for number in range(5):
        parameters, state, our_loss, ours, gradients = step(parameters, state)
        logits = family.their_logits()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=pad)
        theirs_adamw.zero_grad()
        loss.backward()
        assert apart(our_loss, loss.item()) < 1e-5
        if number == 0:
            is_real = family.batch[1] != pad
            assert apart(np.asarray(ours)[is_real], logits.detach().numpy()[is_real]) < 1e-5
            compare_gradients(family, nnx.merge(graph, gradients))
        theirs_adamw.step()
    theirs.load_state_dict(start)


def compare_gradients(family: Family, gradients: Transformer) -> None:
    ours = family.pretrained.to_tensors(gradients)
    theirs = {n: p.grad for n, p in family.theirs.named_parameters() if p.requires_grad}
    assert len(theirs) > 20
    for name, gradient in theirs.items():
        if name.endswith("k_proj.bias"):  # softmax ignores it; rounding errors remain
            assert max(np.abs(ours[name]).max(), gradient.abs().max()) < 1e-5
        else:
            assert apart(ours[name], gradient) < 1e-4, name


@representatives("bart", "pegasus", "umt5")
def test_cached_steps_equal_teacher_forcing(family: Family) -> None:
    source, target = family.our_batch
    pad_id = family.config.model.pad_id
    graph, state = nnx.split(family.model)

    @jax.jit
    def start(state: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, state)
        cache = model.start_cache(
            model.encode(source), jnp.asarray(source != pad_id), beam_size=1, max_length=9
        )
        return model(source, target), cache

    @jax.jit
    def all_steps(state: Any, cache: Any) -> jax.Array:
        model, inputs_BT = nnx.merge(graph, state), np.roll(target, 1, axis=1)
        inputs_BT[:, 0] = family.config.model.decoder_start_id

        def step(cache: Any, tokens_B: jax.Array) -> tuple[Any, jax.Array]:
            logits_BWV, cache = model.decode_step(tokens_B[:, None], cache)
            return cache, logits_BWV[:, 0]

        return jax.lax.scan(step, cache, inputs_BT.T)[1].swapaxes(0, 1)

    expected, cache = start(state)
    found, is_real = all_steps(state, cache), target != family.config.model.pad_id
    assert apart(np.asarray(found)[is_real], np.asarray(expected)[is_real]) < 1e-5


# Search.


def theirs_found(family: Family, lines: list[str], **settings: Any) -> list[tuple[Any, float]]:
    """The tokens and the score of the best output of each line."""
    ids, mask = family.inputs(lines)
    config, forced = family.theirs.config, family.tags[1]
    out = family.theirs.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        length_penalty=1.0,
        max_new_tokens=len(ids[0]) + LIMIT,
        forced_bos_token_id=family.ids[forced] if forced else None,
        bad_words_ids=[[config.pad_token_id]],
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **settings,
    )
    token_of = {i: token for token, i in family.ids.items()}
    found = []
    for row, its in enumerate(out.sequences[:, 1:].tolist()):
        length = its.index(config.eos_token_id) + 1 if config.eos_token_id in its else len(its)
        if settings["num_beams"] == 1:
            logits = torch.stack(out.logits)[:length, row].log_softmax(-1)
            its_log_probs = logits[range(length), its[:length]]
            score = float(its_log_probs[1 if forced else 0 :].sum()) / length
        else:
            score = float(out.sequences_scores[row])
        found.append((tuple(token_of.get(i, f"<unused_{i}>") for i in its[: length - 1]), score))
    return found


@representatives("m2m_100", "mbart, first version", "marian, two vocabularies", "t5")
@pytest.mark.parametrize(
    ("beam_size", "patience"), [pytest.param(1, None, marks=pytest.mark.exhaustive), (4, 1.0)]
)
def test_outputs_and_scores_equal_theirs(
    family: Family, beam_size: int, patience: float | None
) -> None:
    ours = list(family.translator(beam_size, patience).stream(LINES, num_hypotheses=beam_size))
    # Outputs whose search ended before the limit.
    ended = [i for i, its in enumerate(ours) if max(len(each.tokens) for each in its) < LIMIT][:40]
    assert len(ended) == 40
    assert len({ours[i][0].tokens for i in ended}) > 7
    settings = {"early_stopping": True} if beam_size > 1 else {}
    lines = [LINES[i] for i in ended]
    theirs = theirs_found(family, lines, num_beams=beam_size, **settings)
    for i, (tokens, score) in zip(ended, theirs, strict=True):
        assert ours[i][0].tokens == tokens
        np.testing.assert_allclose(ours[i][0].score, score, rtol=1e-5)


@pytest.mark.parametrize("case", ["bart", pytest.param("nllb", marks=pytest.mark.exhaustive)])
def test_the_exact_beam_search_equals_early_stopping_never(case: str, tmp_path: Path) -> None:
    """Except at the limit, where the log-probability of their forced EOS is 0."""
    family = read(case, tmp_path, families.write(case, tmp_path))
    lines = [line for line in LINES if line.count(" ") == 4]  # with the same limit
    ours = family.translator(4).stream(lines)
    theirs = theirs_found(
        *(family, lines),
        num_beams=4,
        early_stopping="never",
        forced_eos_token_id=family.theirs.config.eos_token_id,
    )
    pairs = [(its, *each) for [its], each in zip(ours, theirs, strict=True) if len(each[0]) < LIMIT]
    assert len(pairs) > 7
    for its, tokens, score in pairs:
        assert its.tokens == tokens
        np.testing.assert_allclose(its.score, score, rtol=1e-5)


@representatives("nllb")
def test_ctranslate2s_converter_reads_an_export(family: Family, tmp_path: Path) -> None:
    if family.case == "marian, two vocabularies":
        pytest.skip("CTranslate2's converter reads one vocabulary")
    export_huggingface(family.config, family.model, family.tokenizer, tmp_path / "exported")
    convert = ctranslate2.converters.TransformersConverter(str(tmp_path / "exported"))
    convert.convert(str(tmp_path / "converted"))
    names = json.loads((tmp_path / "converted" / "shared_vocabulary.json").read_text())
    # A list without Marian's PAD, which is last.
    token_of = {names[i]: token for token, i in family.ids.items() if i < len(names)}
    pad = names[family.theirs.config.pad_token_id :][:1]
    ours = list(family.translator(1).stream(LINES))
    ended = [i for i, [its] in enumerate(ours) if len(its.tokens) < LIMIT][:40]
    # With a language as the decoder's first input, CTranslate2 takes it as the prefix.
    tag = families.languages(family.case)[1] if family.language_last else family.tags[1]
    found = ctranslate2.Translator(str(tmp_path / "converted"), intra_threads=1).translate_batch(
        [family.tokens(LINES[i]) for i in ended],
        target_prefix=[[tag]] * len(ended) if tag else None,
        beam_size=1,
        min_decoding_length=0,
        max_decoding_length=LIMIT + 10,
        suppress_sequences=[pad] if pad else None,
    )
    theirs = [tuple(token_of.get(name, name) for name in its.hypotheses[0]) for its in found]
    unnamed = [tuple(t for t in ours[i][0].tokens if not t.startswith("<unused_")) for i in ended]
    assert [tuple(t for t in its if t in family.ids) for its in theirs] == unnamed


def test_our_export_to_ctranslate2_has_equal_scores(family: Family, tmp_path: Path) -> None:
    export_ctranslate2(family.config, family.model, family.tokenizer, tmp_path)
    is_json = isinstance(family.tokenizer.source.segmenter, JsonSegmenter)
    assert (tmp_path / "tokenizer.json").exists() is is_json
    assert (tmp_path / "source.spm").exists() is not is_json
    [source, *_], [target, *_] = family.our_batch
    source_ids = family.tokenizer.affixes(*family.codes).source([*source])
    if not adds_source_eos(family.tokenizer):
        source_ids = with_eos(source_ids, family.config.model.eos_id)
    [scores] = ctranslate2.Translator(str(tmp_path), intra_threads=1).score_batch(
        [family.tokenizer.source.tokens(source_ids)], [family.tokenizer.target.tokens(target)]
    )
    eos_id = family.config.model.eos_id
    rows = [with_eos(source_ids, eos_id)], [[*target, eos_id]]
    log_probs = jax.nn.log_softmax(family.model(*map(np.array, rows)))[0]
    expected = np.asarray(log_probs)[range(len(target) + 1), rows[1][0]]
    np.testing.assert_allclose(scores.log_probs, expected, atol=1e-4)


@representatives("nllb", "bart")
def test_ctranslate2_searches_as_we_do(family: Family, tmp_path: Path) -> None:
    """With the tokens around a line, and those that begin a target, which have no score. Users of
    the export give it the tokens of transformers' tokenizers, or of source.spm.
    """
    model = nnx.clone(family.model)
    has_bias = model.softmax_bias is not None
    if has_bias:  # otherwise, CTranslate2 renormalizes without PAD
        model.softmax_bias[...] = model.softmax_bias[...].at[model.config.pad_id].set(-30.0)
    family = dataclasses.replace(family, model=model)
    ours = family.translator(1)
    config = dataclasses.replace(family.config, decoding=ours.config)
    export_ctranslate2(config, model, ours.tokenizer, tmp_path)
    engine = CTranslate2Engine(tmp_path, config, ours.tokenizer)
    theirs = Translator(model, ours.tokenizer, ours.config, ctranslate2=engine)
    given = [family.tokens(line) for line in LINES]
    if adds_source_eos(ours.tokenizer):
        given = [tokens[:-1] for tokens in given]
    tag = family.tags[1]
    direct = ctranslate2.Translator(str(tmp_path), intra_threads=1).translate_batch(
        given, target_prefix=[[tag]] * len(given) if tag else None, **engine.search_settings
    )
    found = zip(ours.stream(LINES), theirs.stream(LINES), direct, strict=True)
    ended = [each for each in found if len(each[0][0].tokens) < LIMIT]
    assert len(ended) >= 40
    for [mine], [its], by_user in ended:
        assert its.tokens == tuple(by_user.hypotheses[0]) == mine.tokens
        if has_bias:
            np.testing.assert_allclose(its.score, mine.score, rtol=1e-5)


# Files.


def exported(family: Family, folder: Path) -> dict[str, np.ndarray]:
    """Tensors of an export."""
    folder.mkdir(exist_ok=True)
    export_huggingface(family.config, family.model, family.tokenizer, folder)
    return load_file(folder / "model.safetensors")


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == np.float32, name
        np.testing.assert_array_equal(found[name], tensor, err_msg=name, strict=True)


def loaded(case: str, folder: Path) -> Any:
    """Their model of an export. Checks that it has all tensors and no others."""
    model, info = families.model_class(case).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def test_an_import_is_exported_bit_for_bit(family: Family, tmp_path: Path) -> None:
    """By the program, through a model folder."""
    flags = ["import", "--input", str(family.folder), "--workdir", str(tmp_path / "run")]
    assert main(flags) == 0
    output = tmp_path / "exported"
    flags = ["--workdir", str(tmp_path / "run"), "--format", "huggingface"]
    assert export([*flags, "--output", str(output)]) == 0
    original = load_file(family.folder / "model.safetensors")
    assert_same(load_file(output / "model.safetensors"), original)
    for file in family.folder.glob("*.json"):
        assert (output / file.name).read_bytes() == file.read_bytes()
    theirs, family_too = loaded(family.case, output), dataclasses.replace(family)
    with torch.no_grad():
        expected, family_too.theirs = family.their_logits(), theirs
        torch.testing.assert_close(family_too.their_logits(), expected, rtol=0, atol=0)


def test_a_softmax_matrix_of_its_own(tmp_path: Path) -> None:
    """As in T5 1.1."""
    families.write("t5 1.1", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shape = tensors["shared.weight"].shape
    tensors["lm_head.weight"] = np.random.default_rng(0).standard_normal(shape, np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    family = read("t5 1.1", tmp_path, loaded("t5 1.1", tmp_path))
    assert family.config.model.tie_embeddings == "embeddings"
    source, target = family.our_batch
    ours = np.asarray(nnx.jit(lambda model: model(source, target))(family.model))
    is_real = target != family.config.model.pad_id
    theirs = family.their_logits().detach().numpy()[is_real]
    assert apart(ours[is_real], theirs) < 1e-5
    assert_same(exported(family, tmp_path / "exported"), tensors)


@pytest.mark.parametrize("case", ["t5", "m2m_100"])
def test_shards_and_copies_of_tied_matrices(case: str, tmp_path: Path) -> None:
    theirs = families.write(case, tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    family = read(case, tmp_path, theirs)
    assert_same(exported(family, tmp_path / "exported"), whole)
    [shared] = [name for name in whole if name.endswith("shared.weight")]
    copies = {"lm_head.weight": whole[shared]}
    copies[shared.replace("shared", "encoder.embed_tokens")] = whole[shared]
    save_file(whole | copies, tmp_path / "model.safetensors")
    assert_same(exported(read(case, tmp_path, theirs), tmp_path / "exported"), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_files(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = families.write("nllb", tmp_path)
    theirs.to(dtype).save_pretrained(tmp_path)
    expected = {name: x.float().numpy() for name, x in theirs.state_dict().items()}
    found = exported(read("nllb", tmp_path, theirs), tmp_path / "exported")
    assert_same(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("case", ["umt5", pytest.param("t5", marks=pytest.mark.exhaustive)])
def test_a_vocabulary_without_bos(case: str, tmp_path: Path) -> None:
    """No row is added."""
    family = read(case, tmp_path, families.write(case, tmp_path, spare=0))
    assert family.config.model.vocab_size == family.theirs.config.vocab_size
    assert family.tokenizer.target.bos_id is None
    source, target = family.our_batch
    ours = nnx.jit(lambda model: model(source, target))(family.model)
    log_probs = np.asarray(jax.nn.log_softmax(ours))
    theirs = family.their_logits().log_softmax(-1).detach().numpy()
    is_real = target != family.config.model.pad_id
    assert apart(log_probs[is_real], theirs[is_real]) < 1e-5
    whole = load_file(tmp_path / "model.safetensors")
    assert_same(exported(family, tmp_path / "exported"), whole)


def test_a_softmax_matrix_apart_from_shared_embeddings(tmp_path: Path) -> None:
    """transformers 5 writes the embeddings three times then, and trains them apart."""
    fields = {"share_encoder_decoder_embeddings": True}
    case = families.CASES["marian, untied"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.CASES, "marian, untied", (case[0], case[1] | fields))
        families.write("marian, untied", tmp_path)
        file, shared = tmp_path / "model.safetensors", "model.shared.weight"
        tensors = load_file(file)
        unexpected = "have shape .* for model.decoder.embed_tokens.weight; expected no tensor"
        with pytest.raises(UserError, match=unexpected):
            import_huggingface(tmp_path)
        for side in ("encoder", "decoder"):
            tensors[f"model.{side}.embed_tokens.weight"] = tensors[shared].copy()
        save_file(tensors, file, metadata={"format": "pt"})
        family = read("marian, untied", tmp_path, loaded("marian, untied", tmp_path))
        assert family.config.model.tie_embeddings == "embeddings"
        assert_same(exported(family, tmp_path / "exported"), tensors)


# Relative position bias.


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("buckets", "longest"), [(32, 128), (8, 12), (31, 128), (9, 20), (5, 3), (4, 1000), (64, 33)]
)
def test_relative_buckets_equal_theirs(buckets: int, longest: int, bidirectional: bool) -> None:
    """For all distances up to 1000, in rows and in decoding steps."""
    config = ModelConfig(
        **{"d_model": 4, "num_heads": 1, "positions": "relative"},
        relative_buckets=buckets,
        relative_distance=longest,
    )
    bias = RelativeBias(config, bidirectional=bidirectional, rngs=nnx.Rngs(0))
    bias.table.set_value(jnp.arange(buckets, dtype=jnp.float32)[:, None])
    distances = torch.arange(-1000, 1001)
    theirs = T5Attention._relative_position_bucket(distances, bidirectional, buckets, longest)
    square = np.asarray(bias.between_all(1001))[0, 0]
    np.testing.assert_array_equal(square[1000], theirs[:1001])
    np.testing.assert_array_equal(square[0], theirs[1000:])
    step = np.asarray(bias.at_positions(jnp.array([1000, 400]), 1001))[:, 0]
    np.testing.assert_array_equal(step[0], theirs[:1001])
    np.testing.assert_array_equal(step[1, :401], theirs[600:1001])


# Invalid folders.


def changed_json(folder: Path, name: str = "config.json", **fields: Any) -> None:
    """Set fields of a JSON file; None deletes a field."""
    content = json.loads((folder / name).read_text()) | fields
    content = {key: value for key, value in content.items() if value is not None}
    (folder / name).write_text(json.dumps(content))


def changed_tensors(folder: Path, **tensors: Any) -> None:
    """Set tensors by name, with __ for a dot; None deletes a tensor."""
    file = folder / "model.safetensors"
    content = load_file(file) | {name.replace("__", "."): x for name, x in tensors.items()}
    save_file({name: x for name, x in content.items() if x is not None}, file)


def sharded(folder: Path, name: str) -> None:
    """Name a shard in the index."""
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"model.shared.weight": "model-1.safetensors", "x": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def linked(folder: Path) -> None:
    target = folder.parent / "elsewhere.safetensors"
    (folder / "model.safetensors").rename(target)
    (folder / "model.safetensors").symlink_to(target)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def pickled_in_parts(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model-00001-of-00001.bin")


class Call:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit",)


def pickled_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Call()}))


def larger_vocabulary(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["extra"] = 99
    file.write_text(json.dumps(content))


INVALID = {
    "class": (lambda f: changed_json(f, model_type="gpt2"), "model_type .* is 'gpt2'; expected"),
    "no class": (lambda f: changed_json(f, model_type=None), "model_type .* is None; expected"),
    "no vocab_size": (
        lambda f: changed_json(f, vocab_size=None),
        "for model.shared.weight; expected shape .128112, 20.",
    ),
    "huge": (lambda f: changed_json(f, vocab_size=10**8), "vocab_size in .* is 100000000;"),
    "large": (lambda f: changed_json(f, vocab_size=2**20 + 1), "vocab_size in .* is 1048577;"),
    "no width": (
        lambda f: changed_json(f, d_model=None),  # the class's default is 1024
        "have shape .20,. for .*expected shape .1024,.",
    ),
    "width": (lambda f: changed_json(f, d_model="wide"), "d_model is 'wide'"),
    "PAD is EOS": (lambda f: changed_json(f, pad_token_id=2), "different ids for pad_token_id"),
    "EOS": (lambda f: changed_json(f, eos_token_id=999), "Special tokens .* one id below"),
    "two EOS": (
        lambda f: changed_json(f, eos_token_id=[2, 3]),
        "Special tokens .* expected one id below",
    ),
    "negative PAD": (
        lambda f: changed_json(f, pad_token_id=-1),
        "Special tokens .* expected one id below",
    ),
    "start": (lambda f: changed_json(f, decoder_start_token_id="2"), "Special tokens"),
    "feed-forward": (
        lambda f: changed_json(f, decoder_ffn_dim=32),
        "decoder_ffn_dim in config.json is 32; expected 28",
    ),
    "heads": (
        lambda f: changed_json(f, decoder_attention_heads=4),
        "decoder_attention_heads in config.json is 4; expected 2",
    ),
    "activation": (
        lambda f: changed_json(f, activation_function="tanh"),
        "activation_function in config.json is 'tanh'; expected 'relu' or",
    ),
    "type of model_type": (lambda f: changed_json(f, model_type=["t5"]), "expected one of: marian"),
    "config": (lambda f: (f / "config.json").write_text("{"), "config.json.* not valid JSON"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json.* cannot be read"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "vocabulary": (larger_vocabulary, "and 1 tokens with ids outside .* 'extra'.*resize_tok"),
    "missing": (
        lambda f: changed_tensors(f, model__encoder__layers__0__fc1__bias=None),
        r"no tensor for model.encoder.layers.0.fc1.bias; expected shape \(28,\). Use weights and",
    ),
    "extra": (
        lambda f: changed_tensors(f, model__more=np.zeros(3, np.float32)),
        r"have shape \(3,\) for model.more; expected no tensor",
    ),
    "shape": (
        lambda f: changed_tensors(f, model__shared__weight=np.zeros((2, 2), np.float32)),
        r"shape \(2, 2\) for model.shared.weight; expected shape",
    ),
    "NaN": (
        lambda f: changed_tensors(
            f, model__encoder__layers__0__fc1__bias=np.full(28, np.nan, np.float32)
        ),
        "NaN or infinite values in .*fc1.bias; expected finite numbers",
    ),
    "shard": (lambda f: sharded(f, "model-2.safetensors"), "model-2.safetensors.* cannot be read"),
    "outside": (lambda f: sharded(f, "../x"), "leads out of the folder"),
    "link": (linked, "model.safetensors' leads out of the folder"),
    "link of another file": (
        lambda f: (f / "notes.txt").symlink_to(__file__),
        "notes.txt' leads out of the folder",
    ),
    "link to nothing": (
        lambda f: (f / "notes.txt").symlink_to(f / "nothing"),
        "notes.txt' leads out of the folder, or nowhere; .* remove it",
    ),
    "loop of links": (
        lambda f: (f / "notes.txt").symlink_to(f / "notes.txt"),
        "notes.txt' leads out of the folder, or nowhere",
    ),
    "quantized": (
        lambda f: changed_tensors(f, model__shared__weight=np.zeros((2, 2), np.int8)),
        "model.safetensors' has values of type I8 in model.shared.weight; .* is quantized",
    ),
    "pickle": (pickled, r"has no model.safetensors. Use a revision .*import --allow-pickle"),
    "corrupt": (
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 99),
        "model.safetensors.* cannot be read",
    ),
}


@pytest.fixture(scope="module")
def nllb(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("nllb")
    families.write("nllb", folder)
    return folder


@pytest.mark.parametrize(("change", "message"), INVALID.values(), ids=INVALID)
def test_invalid_folders(
    change: Any, message: str, nllb: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(nllb, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(UserError, match=f"(?s){message}"):
        import_huggingface(tmp_path / "model")
    capsys.readouterr()
    flags = ["import", "--input", str(tmp_path / "model"), "--workdir", str(tmp_path / "run")]
    assert main(flags) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pickled_in_parts, "no model.safetensors and no pytorch_model.bin; .*save_pretrained"),
        (pickled_code, r"pytorch_model.bin' cannot be read \(it has objects that are not tensors"),
    ],
)
def test_pickles_that_cannot_be_read(
    change: Any, message: str, nllb: Path, tmp_path: Path, capfd: Any
) -> None:
    """Though they are allowed. The error is the only output."""
    shutil.copytree(nllb, tmp_path / "model")
    change(tmp_path / "model")
    flags = ["--input", str(tmp_path / "model"), "--workdir", str(tmp_path / "run")]
    assert main(["import", *flags, "--allow-pickle"]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert re.search(message, line)


def test_a_folder_has_no_revision(nllb: Path, tmp_path: Path, capfd: Any) -> None:
    flags = ["--input", str(nllb), "--workdir", str(tmp_path / "run"), "--revision", "v1"]
    assert main(["import", *flags]) == 2
    assert "is 'v1', but" in capfd.readouterr().err


def test_a_model_without_a_head(tmp_path: Path) -> None:
    """BartModel, such as facebook/bart-base: tied, and without a prefix. It exports with a head."""
    theirs = families.write("bart", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "model")
    theirs.model.save_pretrained(tmp_path / "model")
    assert "shared.weight" in load_file(tmp_path / "model" / "model.safetensors")
    config, model, tokenizer = import_huggingface(tmp_path / "model")
    tensors = exported(Family("bart", tmp_path, theirs, None, config, model, tokenizer), tmp_path)
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert not tensors.pop("final_logits_bias").any() and expected.pop("final_logits_bias").any()
    assert_same(tensors, expected)


def test_a_folder_of_transformers_is_no_model_folder(nllb: Path) -> None:
    with pytest.raises(UserError, match=r"from Hugging Face transformers, import the model"):
        load_model(nllb)


def test_languages(nllb: Path) -> None:
    """Either order is valid; other codes are errors."""
    _, _, tokenizer = import_huggingface(nllb)
    for codes in (["eng_Latn", "deu_Latn"], ["deu_Latn", "eng_Latn"]):
        languages = tokenizer.with_languages(*codes).languages
        assert [languages.source, languages.target] == codes
    for code in ("en", "eng", "fra_Latn", "__eng_Latn__"):
        for codes in ((code, ""), ("", code)):
            with pytest.raises(UserError, match=f"{code}'.* eng_Latn"):
                tokenizer.with_languages(*codes)


def test_a_translator_from_a_folder(nllb: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines, codes = LINES[:3], families.languages("nllb")
    for source, target in (codes, codes[::-1]):
        translator = Translator.from_pretrained(
            nllb, source_language=source, target_language=target, beam_size=2, batch_size=3
        )
        for [its] in translator.stream(lines):
            assert its.tokens[0] == target


def test_a_pair_of_languages_is_chosen_at_the_import(tmp_path: Path) -> None:
    """Of mBART's first version. The export keeps it."""
    case, codes = "mbart, first version", ("de_DE", "en_XX")
    theirs = families.write(case, tmp_path / "theirs")
    family = read(case, tmp_path / "theirs", theirs, codes)
    theirs.config.decoder_start_token_id = 28
    ours = nnx.jit(lambda model: model(*family.our_batch))(family.model)
    is_real = family.batch[1] != 1
    found = np.asarray(ours)[is_real]
    assert apart(found, family.their_logits().detach().numpy()[is_real]) < 1e-5
    flags = ["--source-language", codes[0], "--target-language", codes[1]]
    places = ["--input", str(tmp_path / "theirs"), "--workdir", str(tmp_path / "ours")]
    assert main(["import", *places, *flags]) == 0
    config, model, tokenizer = load_model(tmp_path / "ours")
    [ids] = tokenizer.source.encode(["w1"])
    assert tokenizer.source.tokens(tokenizer.affixes().source(ids)) == ["w1", "</s>", "de_DE"]
    assert tokenizer.target.encode(["w1"]) == [tokenizer.target.ids(["w1"])]
    export_huggingface(config, model, tokenizer, (output := tmp_path / "exported"))
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    assert_same(load_file(output / "model.safetensors"), expected)
    settings = json.loads((output / "tokenizer_config.json").read_text())
    assert (settings["src_lang"], settings["tgt_lang"]) == codes
    assert loaded(case, output).generation_config.decoder_start_token_id == 28
    assert import_huggingface(output)[2].fingerprint == tokenizer.fingerprint
    with pytest.raises(UserError, match="no language codes or was imported for one pair"):
        tokenizer.with_languages(*codes)
    (tmp_path / "theirs" / "tokenizer_config.json").unlink()
    tokenizer = Pretrained(tmp_path / "theirs", languages=codes).tokenizer()
    export_huggingface(config, model, tokenizer, (output := tmp_path / "another"))
    assert import_huggingface(output)[2].languages.source == codes[0]


@pytest.mark.exhaustive
def test_byt5(tmp_path: Path) -> None:
    """The bytes of any text are tokens, and there is no tokenizer file. A cached search finds what
    theirs finds, and the export has the same tensors.
    """
    folder, output = tmp_path / "byt5", tmp_path / "exported"
    torch.manual_seed(5)
    config = transformers.T5Config(
        **families.CASES["t5 1.1"][1] | {"vocab_size": 384, "decoder_start_token_id": 0}
    )
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
        families._end_sentences(theirs, config, 300)
    theirs.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    family = read("byt5", folder, theirs)
    seen, text = set[int](), ["A blåe\u0301 café", "42 €", "x", "🙂 und ß", *LINES[:40]]
    their_tokenizer = transformers.ByT5Tokenizer()
    target = family.tokenizer.target
    for beam_size in 1, 4:
        found = family.translator(beam_size, 1.0 if beam_size > 1 else None).stream(text)
        for line, [ours] in zip(text, found, strict=True):
            source = their_tokenizer(line, return_tensors="pt")
            out = theirs.generate(
                **source,
                num_beams=beam_size,
                do_sample=False,
                early_stopping=beam_size > 1,
                max_new_tokens=source.input_ids.shape[1] + LIMIT,
                bad_words_ids=[[0]],
            )
            ids = target.ids(ours.tokens)
            if len(ids) >= LIMIT:  # they treat outputs without an end in another way
                continue
            assert ids == [i for i in out[0, 1:].tolist() if i != 1][: len(ids)]
            seen |= {*ids}
    assert len(seen) > 10
    export_huggingface(family.config, family.model, family.tokenizer, output)
    assert_same(load_file(output / "model.safetensors"), load_file(folder / "model.safetensors"))
