"""Python blocks of docs/pretrained.md, and one of docs/python.md, run on small random models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers
from ctranslate2.converters import TransformersConverter
from safetensors.numpy import load_file

from tests.pretrained import families
from tests.test_library_examples import blocks
from transformer_jax.export.__main__ import main
from transformer_jax.pretrained.loading import import_into, load_model

[TRANSLATE] = [block for block in blocks("docs/python.md") if "nllb" in block.code]
STEP, ENCODER, CONVERTED = blocks("docs/pretrained.md")


@pytest.fixture(
    params=[
        "nllb",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("mbart", "bart", "t5")),
    ]
)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A pretrained model in ``theirs``; its import takes the place of a download."""
    families.write(request.param, tmp_path / "theirs")
    import_into(tmp_path / "theirs", tmp_path / "ours")
    for module in ("pretrained.loading", "translation.translator"):
        name = f"transformer_jax.{module}.pretrained_workdir"
        monkeypatch.setattr(name, lambda _: tmp_path / "ours")
    monkeypatch.chdir(tmp_path)
    return str(request.param)


def test_a_loaded_model_is_trained_saved_exported_and_converted(case: str) -> None:
    codes = families.languages(case)

    def adapted(code: str) -> str:
        for theirs, its in zip(("eng_Latn", "deu_Latn"), codes):
            code = code.replace(theirs, its)
        if not codes:
            code = code.replace("tokenizer = tokenizer.with_languages", "# ")
            prefix = '[["<s>"]]' if case == "bart" else "None"
            code = code.replace('[["deu_Latn"]]', prefix)
        # Of the stand-ins: a divisor of d_model, and fewer than their positions.
        return code.replace("jax.device_count()", "4").replace('length": 200', 'length": 60')

    if case == "nllb":
        TRANSLATE.run()
    STEP._replace(code=adapted(STEP.code)).run()
    (_, before, _), (_, after, tokenizer) = map(load_model, ("ours", "runs/own"))
    assert (before.softmax_bias is None) == (case not in ("bart", "mbart"))
    if before.softmax_bias is not None:
        np.testing.assert_array_equal(before.softmax_bias[...], after.softmax_bias[...])
    [its] = tokenizer.source.encode(["w1"])
    special = [after.config.eos_id, after.config.pad_id]
    assert tokenizer.source.ids(["w1", "</s>", "<pad>"]) == [its[-1], *special]
    flags = ["--workdir", "runs/own", "--format", "huggingface", "--output", "tuned-hf"]
    assert main([*flags]) == 0
    tensors, original = (load_file(f"{name}/model.safetensors") for name in ("tuned-hf", "theirs"))
    assert tensors.keys() == original.keys()
    shared = next(name for name in tensors if name.endswith("shared.weight"))
    assert (tensors[shared] != original[shared]).any()
    for name in ("config.json", "tokenizer.json"):
        assert Path("tuned-hf", name).read_bytes() == Path("theirs", name).read_bytes()
    # What the program ct2-transformers-converter does, without its imports.
    TransformersConverter("tuned-hf").convert("tuned-ct2")
    CONVERTED._replace(code=adapted(CONVERTED.code)).run()


def test_the_encoder_of_an_image_model_runs_in_another_program(tmp_path, monkeypatch) -> None:
    families.write("t5", tmp_path / "tokenizer_2")
    config = transformers.T5Config.from_pretrained(tmp_path / "tokenizer_2")
    transformers.T5EncoderModel(config).save_pretrained(tmp_path / "text_encoder_2")
    name = "transformer_jax.pretrained.encoder.find_pretrained"
    monkeypatch.setattr(name, lambda *_, **__: tmp_path)
    # A divisor of d_model in the stand-in.
    ENCODER._replace(code=ENCODER.code.replace("jax.device_count()", "4")).run()
