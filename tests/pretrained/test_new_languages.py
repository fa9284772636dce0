"""New languages of pretrained models: trained, chosen, exported, and read by other libraries."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ctranslate2
import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from tests.pretrained import families
from tests.pretrained.test_family_tokenizers import CASES, WORDS, original
from transformer_jax import Request, Tokenizer, Translator, UserError, load_model, train
from transformer_jax.data.sources import ParallelText
from transformer_jax.devices.sharding import parameters_by_name
from transformer_jax.export.huggingface import export_huggingface
from transformer_jax.model.transformer import abstract_model
from transformer_jax.pretrained.folder import Pretrained
from transformer_jax.pretrained.loading import import_huggingface, import_into
from transformer_jax.settings.config import BatchConfig, Config, DataConfig, PairsConfig
from transformer_jax.settings.config_files import load_config_file
from transformer_jax.training.start_model import StartModel

pytestmark = pytest.mark.cpu("compares with PyTorch to within 1e-4")

ONE = jax.devices()[:1]
LINES = ["the quick fox", "hello world", "lazy dog jumps", "ᏣᎳᎩ ᎣᏏᏲ"]
# Old language, new one, and its token.
CODES = {
    "nllb": ("deu_Latn", "mic_Latn", "mic_Latn"),
    "m2m_100": ("de", "mic", "__mic__"),
    "mbart": ("de_DE", "mic_CA", "mic_CA"),
    "madlad": ("de", "mic", "<2mic>"),
}
# The text of a new language whose script the tokenizer does not know, and some of its pieces.
CHEROKEE = ["ᎣᏏᏲ", "ᏣᎳᎩ", "ᎦᏬᏂᎯᏍᏗ", "ᏙᎯᏧ", "ᎤᏍᏗ", "ᏩᎶᏏ", "ᏣᎳᎩᎯ", "ᏗᎦᏬᏂᎯ", "ᎣᏍᏓ"]
PIECES = ["Ꮳ", "Ꮃ", "Ꭹ", "Ꭳ", "Ꮟ", "Ᏺ", "▁Ꮳ", "▁ᏣᎳ", "▁ᏣᎳᎩ", "ᏏᏲ"]
# With these seeds, many outputs end before the limit, and differ.
_SEEDS = {"nllb": 5, "m2m_100": 2, "mbart": 3, "madlad": 1}
ENGLISH = {"nllb": "eng_Latn", "m2m_100": "en", "mbart": "en_XX", "madlad": "en"}


def write_model(case: str, folder: Path, *, resaved: bool) -> Path:
    """Write a stand-in with the tokenizer files of the hub, or those that transformers saves."""
    tokenizer = original(case, folder / "original")
    if resaved:
        tokenizer.save_pretrained(folder / "saved")
    folder = folder / ("saved" if resaved else "original")
    ids = tokenizer.get_vocab()
    spare = 0 if case == "mbart" else 8  # rows without a token, as in published models
    fields: dict[str, Any] = {"vocab_size": max(ids.values()) + 1 + spare}
    if case == "madlad":
        fields |= {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
        fields |= {name: families._T5[name] for name in ("d_model", "d_kv", "d_ff", "num_heads")}
        fields |= {"num_layers": 1, "num_decoder_layers": 1}
    else:
        fields |= families._FAIRSEQ | {"encoder_layers": 1, "d_model": 16}
        fields |= {"normalize_before": True, "normalize_embedding": True}
        fields["tokenizer_class"] = CASES[case][1]  # CTranslate2 reads it here
        fields |= {"decoder_start_token_id": 2, "max_position_embeddings": 256}
    config = getattr(transformers, f"{CASES[case][0]}Config")(**fields)
    torch.manual_seed(_SEEDS[case])
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.3)
        families._end_sentences(model, config, fields["vocab_size"] - spare)
    model.save_pretrained(folder)
    return folder


class Tuned(NamedTuple):
    """A model before and after it was taught a language, and its export."""

    case: str
    start: Path
    run: Path
    exported: Path
    config: Config
    tokenizer: Tokenizer
    translations: list[list[int]]
    """Token ids of translations of LINES from English into the new language."""

    @property
    def new(self) -> str:
        return CODES[self.case][1]

    @property
    def new_id(self) -> int:
        return self.tokenizer.target.ids([CODES[self.case][2]])[0]

    def agrees(self, others: Iterable[Sequence[int]]) -> bool:
        """True if other translations begin in the same way; limits of length differ."""
        return all(
            list(ours[:4]) == list(theirs[:4])
            for ours, theirs in zip(self.translations, others, strict=True)
        )


def tuning(
    case: str, start: Path, folder: Path, *, new_pieces: str = "", **training: Any
) -> Config:
    """Settings of a run on English to German, and English to and from the new language."""
    old, new, _ = CODES[case]
    new_lines = CHEROKEE if new_pieces else WORDS[8::-1]
    for name, lines in (("english", WORDS[:9]), ("old", WORDS[8::-1]), ("new", new_lines)):
        (folder / name).write_text("".join(f"{line}\n" for line in [*lines, "the fox"] * 8))
    pairs = PairsConfig(
        "text",
        ("english", "english", "new"),
        ("old", "new", "english"),
        source_languages=(ENGLISH[case], ENGLISH[case], new),
        target_languages=(old, new, ENGLISH[case]),
    )
    config = load_config_file(start)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype="float32"),
        tokenizer=dataclasses.replace(
            config.tokenizer, new_languages=(f"{new}:{old}",), new_pieces=new_pieces
        ),
        data=DataConfig(root=str(folder), train=pairs, max_source_length=32, max_target_length=32),
        batch=BatchConfig(tokens=256, buckets=1),
        optimizer=dataclasses.replace(
            config.optimizer, peak_learning_rate=0.01, warmup_steps=1, weight_decay=0.1
        ),
        training=dataclasses.replace(
            config.training, **{"steps": 2, "start_from": str(start), "freeze": ("*",)} | training
        ),
    )


LAYOUTS = [
    ("nllb", True),
    ("m2m_100", False),
    ("mbart", False),
    ("madlad", True),
    pytest.param(("mbart", True), marks=pytest.mark.exhaustive),
]
BEAMS = [("m2m_100", False), ("mbart", False), ("madlad", True), ("mbart", True)]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: "{} {}".format(*layout))
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    case, resaved = request.param
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(case)
    pretrained = write_model(case, folder, resaved=resaved)
    start = folder / "start"
    start.mkdir()
    import_into(pretrained, start)
    (folder / "pieces").write_text("\n".join(PIECES) + "\n")
    # A tokenizer.json can have new pieces as well.
    new_pieces = {"nllb": "30"}.get(case, str(folder / "pieces")) if resaved else ""
    config = tuning(case, start, folder, new_pieces=new_pieces)
    train(config, folder / "run", devices=ONE)
    exported = folder / "exported"
    exported.mkdir()
    model = load_model(folder / "run")
    export_huggingface(*model, exported)
    translator = Translator.from_workdir(folder / "run", beam_size=1, max_extra_length=4)
    languages = {"source_language": ENGLISH[case], "target_language": CODES[case][1]}
    found = translator.stream([Request(line, **languages) for line in LINES])
    translations = [model[2].target.ids(best.tokens) for [best] in found]
    return Tuned(case, start, folder / "run", exported, config, model[2], translations)


def parameters(folder: Path) -> dict[str, np.ndarray]:
    model = load_model(folder)[1]
    named = parameters_by_name(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {name: np.asarray(x) for name, x in named.items()}


def test_only_new_rows_change_from_their_relatives(tuned: Tuned) -> None:
    before = parameters(tuned.start)
    after = parameters(tuned.run)
    assert before.keys() == after.keys()
    new_rows = dict(tuned.tokenizer.new_rows)
    [old_id] = tuned.tokenizer.target.ids([tuned.tokenizer.languages.tokens[CODES[tuned.case][0]]])
    assert new_rows[tuned.new_id] == [old_id]
    num_matrices = 0
    for name, x in after.items():
        if not (name.endswith("matrix") and "position" not in name) and name != "softmax_bias":
            np.testing.assert_array_equal(x, before[name])
            continue
        num_rows = len(before[name])
        is_old = ~np.isin(np.arange(num_rows), [*new_rows])
        np.testing.assert_array_equal(x[:num_rows][is_old], before[name][is_old])
        start = np.stack([before[name][ids].mean(0) for ids in new_rows.values()])
        difference = np.abs(x[[*new_rows]] - start)
        if x.ndim == 1:
            assert difference.max() < 1e-6
        else:
            assert difference.max(-1).min() > 0 and difference.max() < 0.1, name
            num_matrices += 1
    assert num_matrices


def test_the_language_is_recorded_and_chosen(tuned: Tuned) -> None:
    assert tuned.new in Tokenizer.load(tuned.run).languages.tokens
    assert len(set(map(tuple, tuned.translations))) > 1
    if tuned.case != "madlad":  # where a tag stands before the source
        assert {ids[0] for ids in tuned.translations} == {tuned.new_id}


def by_transformers(tuned: Tuned, lines: list[str], **settings: Any) -> list[list[int]]:
    """Token ids of each translation from English, without the decoder's first input."""
    reference: Any = transformers.AutoTokenizer.from_pretrained(tuned.exported)
    tokenizer = tuned.tokenizer
    texts = lines
    if tuned.case == "madlad":
        texts = [f"<2mic> {line}" for line in lines]
    else:
        reference.src_lang = ENGLISH[tuned.case]
    affixes = tokenizer.affixes(ENGLISH[tuned.case], tuned.new)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tuned.exported).eval()
    outputs = []
    for text, ids in zip(texts, tokenizer.source.encode(lines)):
        inputs = reference(text, return_tensors="pt")
        assert inputs.input_ids[0].tolist() == [*affixes.source(ids), tokenizer.source.eos_id]
        [output] = model.generate(
            **inputs,
            forced_bos_token_id=affixes.before_target[0] if affixes.before_target else None,
            bad_words_ids=[[model.config.pad_token_id]],
            **settings,
        )
        outputs.append(output[1:].tolist())
    return outputs


def test_transformers_translates_equally(tuned: Tuned) -> None:
    reference: Any = transformers.AutoTokenizer.from_pretrained(tuned.exported)
    assert reference.convert_tokens_to_ids(CODES[tuned.case][2]) == tuned.new_id
    decoded = reference.decode([tuned.new_id], skip_special_tokens=True).strip()
    assert decoded in ("", "<2mic>")
    eos_id = tuned.tokenizer.target.eos_id
    outputs = by_transformers(tuned, LINES, max_new_tokens=5)
    assert tuned.agrees([[i for i in output if i != eos_id] for output in outputs])


@pytest.mark.parametrize(
    "tuned",
    [LAYOUTS[0], *(pytest.param(x, marks=pytest.mark.exhaustive) for x in BEAMS)],
    ids=lambda layout: "{} {}".format(*layout),
    indirect=True,
)
def test_beam_searches_equal_those_of_transformers(tuned: Tuned) -> None:
    """Whole outputs, which end before the limit, where the searches differ."""
    limit = 24
    rng = random.Random(0)
    words = [*WORDS, "ᏣᎳᎩ", "ᎣᏏᏲ"]
    lines = [" ".join(rng.choices(words, k=rng.randrange(1, 6))) for _ in range(24)]
    translator = Translator.from_workdir(
        tuned.run,
        beam_size=4,
        patience=1.0,
        length_penalty=1.0,
        length_offset=0.0,
        max_length=limit,
        max_extra_length=limit,
    )
    languages = {"source_language": ENGLISH[tuned.case], "target_language": tuned.new}
    found = translator.stream([Request(line, **languages) for line in lines])
    eos_id = tuned.tokenizer.target.eos_id
    ours = [[*tuned.tokenizer.target.ids(best.tokens), eos_id] for [best] in found]
    expected = by_transformers(
        tuned, lines, num_beams=4, early_stopping=True, length_penalty=1.0, max_new_tokens=limit
    )
    ended = [i for i, output in enumerate(expected) if len(output) < limit]
    assert len({(*ours[i],) for i in ended}) > 4
    for i in ended:
        assert expected[i][: expected[i].index(eos_id) + 1] == ours[i]


def test_the_export_can_be_imported_again(tuned: Tuned) -> None:
    _, model, tokenizer = import_huggingface(tuned.exported)
    assert tokenizer.languages.tokens == tuned.tokenizer.languages.tokens
    assert tokenizer.target.vocabulary.tokens == tuned.tokenizer.target.vocabulary.tokens
    assert tokenizer.target.vocabulary.hidden_ids == tuned.tokenizer.target.vocabulary.hidden_ids
    exported = parameters_by_name(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    for name, x in parameters(tuned.run).items():
        np.testing.assert_array_equal(exported[name], x)


def test_transformers_has_the_new_language_as_a_source(tuned: Tuned) -> None:
    """M2M100's tokenizer there has a fixed list of codes, as has the constructor of mBART-50's."""
    reference: Any = transformers.AutoTokenizer.from_pretrained(tuned.exported)
    if tuned.case == "m2m_100":
        with pytest.raises(KeyError):
            reference.src_lang = tuned.new
        return
    text = "the quick fox"
    if tuned.case == "madlad":
        text = f"<2mic> {text}"
    else:
        reference.src_lang = tuned.new
    affixes = tuned.tokenizer.affixes(tuned.new, tuned.new)
    [ids] = tuned.tokenizer.source.encode(["the quick fox"])
    expected = [*affixes.source(ids), tuned.tokenizer.source.eos_id]
    assert reference(text).input_ids == expected


def test_ctranslate2_translates_equally(tuned: Tuned, tmp_path: Path) -> None:
    converter = ctranslate2.converters.TransformersConverter(str(tuned.exported))
    converter.convert(str(tmp_path / "converted"))
    settings = json.loads((tmp_path / "converted" / "config.json").read_text())
    if settings["bos_token"] is None:  # mBART-50's, tuned or not, with transformers 5
        settings["bos_token"] = "<s>"
        (tmp_path / "converted" / "config.json").write_text(json.dumps(settings))
    tokenizer = tuned.tokenizer
    affixes = tokenizer.affixes(ENGLISH[tuned.case], tuned.new)
    sources = [
        tokenizer.source.tokens([*affixes.source(ids), tokenizer.source.eos_id])
        for ids in tokenizer.source.encode(LINES)
    ]
    translator = ctranslate2.Translator(str(tmp_path / "converted"), intra_threads=1)
    results = translator.translate_batch(
        sources,
        target_prefix=[tokenizer.target.tokens(affixes.before_target)] * len(LINES),
        beam_size=1,
        max_decoding_length=8,
        min_decoding_length=0,
    )
    names = json.loads((tmp_path / "converted" / "shared_vocabulary.json").read_text())
    assert tuned.agrees([list(map(names.index, result.hypotheses[0])) for result in results])


def test_a_run_from_the_tuned_model_keeps_its_language(tuned: Tuned, tmp_path: Path) -> None:
    """A recipe based on its config has the setting of the first run."""
    if tuned.case != "nllb":
        return
    config = dataclasses.replace(
        tuned.config,
        training=dataclasses.replace(tuned.config.training, start_from=str(tuned.run), steps=1),
    )
    train(config, tmp_path / "again", devices=ONE)
    assert load_model(tmp_path / "again")[2].fingerprint == tuned.tokenizer.fingerprint


@pytest.mark.parametrize("more", [(), ("other:{0}",), ("other:{0}", "third")])
def test_a_run_from_the_tuned_model_keeps_its_rows(more: tuple[str, ...], tuned: Tuned) -> None:
    """With more languages, only their rows are new: each has the mean of its relatives' rows."""
    languages = [*tuned.config.tokenizer.new_languages, *(x.format(tuned.new) for x in more)]
    config = dataclasses.replace(
        tuned.config,
        tokenizer=dataclasses.replace(tuned.config.tokenizer, new_languages=tuple(languages)),
        training=dataclasses.replace(tuned.config.training, start_from=str(tuned.run)),
    )
    start = StartModel(config)
    tokenizer = start.tokenizer(ParallelText(config.data.train, config.data.root))
    shape = load_model(tuned.run)[0].model
    size = max(shape.vocab_size, tokenizer.target.vocab_size)
    abstract = abstract_model(dataclasses.replace(shape, vocab_size=size)).parameters
    found = parameters_by_name(start.parameters(abstract, tokenizer))
    old_rows = tuned.tokenizer.new_rows
    new_rows = {i: ids for i, ids in tokenizer.new_rows.items() if i not in old_rows}
    assert len(new_rows) == len(more)
    for name, before in parameters(tuned.run).items():
        expected = np.array(found[name])
        expected[: len(before)] = before
        if (name.endswith("matrix") and "position" not in name) or name == "softmax_bias":
            for i, ids in new_rows.items():
                expected[i] = before[[*ids]].mean(0, dtype=np.float64)
        np.testing.assert_array_equal(found[name], expected)


def test_a_resumed_run_trains_the_same_row(tuned: Tuned, tmp_path: Path) -> None:
    """It does not read the model that it started from."""
    if tuned.case != "nllb":
        return
    for steps in (1, 2):
        training = dataclasses.replace(tuned.config.training, steps=steps)
        config = dataclasses.replace(tuned.config, training=training)
        train(config, tmp_path / "resumed", devices=ONE)
    resumed = parameters(tmp_path / "resumed")
    for name, x in parameters(tuned.run).items():
        np.testing.assert_array_equal(resumed[name], x)


def test_bad_input(tuned: Tuned, tmp_path: Path) -> None:
    if tuned.case != "nllb":
        return
    for entry, message in (
        ("deu_Latn:eng_Latn", "has 'deu_Latn', which is a language of the model; expected a code"),
        (
            "mic_Latn:xxx_Latn",
            "'xxx_Latn' is not a language of the model; expected a relative that",
        ),
    ):
        settings = dataclasses.replace(tuned.config.tokenizer, new_languages=(entry,))
        config = dataclasses.replace(tuned.config, tokenizer=settings)
        with pytest.raises(UserError, match=message):
            train(config, tmp_path / "run", devices=ONE)
    for entries in (("mic_Latn", "mic_Latn:deu_Latn"), ("mic Latn",), (":deu_Latn",)):
        with pytest.raises(
            UserError, match="new_languages is .*; expected different codes, each as"
        ):
            dataclasses.replace(tuned.config.tokenizer, new_languages=entries)


@pytest.mark.parametrize("case", ["t5", "marian"])
def test_a_family_without_languages_is_an_error(case: str, tmp_path: Path) -> None:
    families.write(case, tmp_path)
    with pytest.raises(UserError, match=r"new_languages is \('mic:de',\), but .* has no languages"):
        Pretrained(tmp_path).tokenizer().with_new_languages(("mic:de",))


def test_madlad_needs_tokenizer_json(tmp_path: Path) -> None:
    pretrained = Pretrained(write_model("madlad", tmp_path, resaved=False))
    with pytest.raises(UserError, match="needs a tokenizer.json file .* transformers writes it"):
        pretrained.tokenizer().with_new_languages(("mic:de",))
