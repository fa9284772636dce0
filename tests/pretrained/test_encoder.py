"""Encoders alone: the hidden states of transformers, types, sharded loading, an image model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from tests.pretrained import families
from transformer_jax import MeshConfig, TextEncoder, Translator, UserError, make_mesh
from transformer_jax.pretrained.__main__ import main
from transformer_jax.translation.__main__ import main as decode

CLASSES = {"t5": "T5EncoderModel", "t5 1.1": "T5EncoderModel", "umt5": "UMT5EncoderModel"}
TEXTS = ["w1 w2 w3 w4", "w5", "w6 w7 w8 w9 w10 w11 w12"]
IDS_BS = np.random.default_rng(0).integers(1, 27, (3, 17))
MASK_BS = np.arange(17) < np.array([[17], [9], [3]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Full models, and in ``encoder-NAME`` only their encoders, in bfloat16."""
    root = tmp_path_factory.mktemp("encoders")
    torch.manual_seed(0)
    for case, kind in CLASSES.items():
        config = families.write(case, root / case).config
        families.model_class(case)(config).save_pretrained(root / case)  # as at initialization
        encoder = getattr(transformers, kind).from_pretrained(root / case)
        encoder.to(torch.bfloat16).save_pretrained(root / f"encoder-{case}")
        for file in root.joinpath(case).glob("tokenizer*"):
            shutil.copy(file, root / f"encoder-{case}" / file.name)
    return root


def expected(folder: Path, kind: str, mask_BS: np.ndarray, dtype: Any = torch.float32) -> Any:
    """Hidden states of transformers."""
    model = getattr(transformers, kind).from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        output = model(input_ids=torch.tensor(IDS_BS), attention_mask=torch.tensor(mask_BS))
    return output.last_hidden_state.float().numpy()


def dtypes(encoder: TextEncoder) -> set[str]:
    return {str(x.dtype) for x in jax.tree.leaves(nnx.state(encoder.model))}


def difference(hidden_BSD: Any, expected_BSD: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    hidden_BSD = np.asarray(hidden_BSD, np.float32)
    return float(abs(hidden_BSD - expected_BSD).max() / abs(expected_BSD).max())


@pytest.mark.parametrize("case", CLASSES)
def test_hidden_states_are_those_of_transformers(case, folders) -> None:
    """With and without a mask, of a full model and of an encoder alone, also for padding."""
    for folder in (folders / case, folders / f"encoder-{case}"):
        encoder = TextEncoder.from_pretrained(folder, dtype="float32")
        for mask_BS in (MASK_BS, np.ones_like(MASK_BS)):
            hidden_BSD = encoder.encode(IDS_BS, mask_BS)
            assert difference(hidden_BSD, expected(folder, CLASSES[case], mask_BS)) < 2e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["m2m_100", "bart", "mbart", "pegasus", "marian"])
def test_other_families_have_encoders_too(case, tmp_path) -> None:
    """Where the mask is True: positions of padding differ."""
    model = families.write(case, tmp_path)
    pad_id = model.config.pad_token_id
    tokens_BS = np.where(np.equal(IDS_BS, pad_id), 7, IDS_BS)
    ids_BS = np.where(MASK_BS, tokens_BS, pad_id)
    with torch.no_grad():
        options = {"attention_mask": torch.tensor(MASK_BS)}
        output = model.get_encoder()(input_ids=torch.tensor(ids_BS), **options)
    expected_BSD = output.last_hidden_state.numpy()
    hidden_BSD = np.asarray(TextEncoder.from_pretrained(tmp_path, dtype="float32").encode(ids_BS))
    assert difference(hidden_BSD[MASK_BS], expected_BSD[MASK_BS]) < 2e-6


@pytest.mark.parametrize("case", CLASSES)
def test_weights_keep_their_type_if_asked(case, folders) -> None:
    folder = folders / f"encoder-{case}"
    options: dict[str, Any] = {"weights": "stored"}
    stored = TextEncoder.from_pretrained(folder, dtype="float32", **options)
    assert dtypes(stored) == {"bfloat16"}
    float32 = TextEncoder.from_pretrained(folder, dtype="float32")
    assert dtypes(float32) == {"float32"}
    exact_BSD = np.asarray(float32.encode(IDS_BS, MASK_BS))
    assert difference(stored.encode(IDS_BS, MASK_BS), exact_BSD) < 2e-6
    # bfloat16 matmuls: as far from float32 as those of transformers.
    mixed = TextEncoder.from_pretrained(folder, dtype="bfloat16", **options)
    theirs = expected(folder, CLASSES[case], MASK_BS, torch.bfloat16)
    assert difference(mixed.encode(IDS_BS, MASK_BS), exact_BSD) < 2 * difference(theirs, exact_BSD)


def test_texts_are_encoded_like_their_ids(folders) -> None:
    encoder = TextEncoder.from_pretrained(folders / "encoder-t5", dtype="float32")
    ids_BS, mask_BS = encoder.tokenize(TEXTS)
    reference = transformers.AutoTokenizer.from_pretrained(folders / "encoder-t5")
    found = reference(TEXTS, padding=True, return_tensors="np")
    np.testing.assert_array_equal(ids_BS, found.input_ids)
    np.testing.assert_array_equal(mask_BS, found.attention_mask)
    hidden_BSD = encoder.encode(TEXTS)
    np.testing.assert_array_equal(hidden_BSD, encoder.encode(ids_BS))
    cut_BS, mask_BS = encoder.tokenize(TEXTS, length=5)
    found = reference(TEXTS, padding="max_length", truncation=True, max_length=5)
    np.testing.assert_array_equal(cut_BS, found.input_ids)
    np.testing.assert_array_equal(mask_BS, found.attention_mask)
    with pytest.raises(UserError, match="expected a list of texts"):
        encoder.encode("w1")


@pytest.mark.devices(8)
def test_a_mesh_holds_one_shard_on_each_device(folders, tmp_path) -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2
    )
    transformers.T5EncoderModel(config).save_pretrained(tmp_path)
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    encoder = TextEncoder.from_pretrained(tmp_path, mesh=mesh, dtype="float32")
    single = TextEncoder.from_pretrained(tmp_path, dtype="float32")
    matrix = encoder.model.source_embedding.matrix[...]
    assert {shard.data.shape for shard in matrix.addressable_shards} == {(32, 4)}
    layer = encoder.model.encoder.layers[1]
    kernel = layer.self_attention.query.kernel[...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(4, 1, 4)}
    for sharded, whole in zip(
        jax.tree.leaves(nnx.state(encoder.model)), jax.tree.leaves(nnx.state(single.model))
    ):
        np.testing.assert_array_equal(sharded, whole)
    hidden_BSD = encoder.encode(IDS_BS, MASK_BS)
    assert difference(hidden_BSD, np.asarray(single.encode(IDS_BS, MASK_BS))) < 2e-6


def test_the_text_encoder_of_an_image_model(folders, tmp_path) -> None:
    """Folders as diffusers writes them."""
    image = tmp_path / "image"
    (image / "tokenizer_2").mkdir(parents=True)
    shutil.copytree(folders / "encoder-t5 1.1", image / "text_encoder_2")
    for file in (image / "text_encoder_2").glob("tokenizer*"):
        file.rename(image / "tokenizer_2" / file.name)
    index = {
        "_class_name": "FluxPipeline",
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
    }
    (image / "model_index.json").write_text(json.dumps(index))
    hidden_BSD = TextEncoder.from_pretrained(folders / "encoder-t5 1.1").encode(TEXTS)
    for options in ({}, {"subfolder": "text_encoder_2"}):
        encoder = TextEncoder.from_pretrained(image, **options)
        np.testing.assert_array_equal(encoder.encode(TEXTS), hidden_BSD)
    with pytest.raises(UserError, match="is an image model; expected a model that writes text"):
        Translator.from_pretrained(image)


def test_errors_name_the_file(folders, tmp_path, capsys) -> None:
    folder = folders / "encoder-t5"
    message = "has only an encoder (T5EncoderModel); expected a model that also has a decoder."
    with pytest.raises(UserError) as error:
        Translator.from_pretrained(folder)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert main(["import", "--input", str(folder), "--workdir", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert decode(["--workdir", str(folder)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "an encoder alone, ['T5EncoderModel']; expected a model that also has a decoder" in line
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    for file in bad.glob("tokenizer*"):
        file.unlink()
    encoder = TextEncoder.from_pretrained(bad)
    assert encoder.encode(IDS_BS).shape == (3, 17, 20)
    with pytest.raises(UserError, match="has no tokenizer.json"):
        encoder.encode(TEXTS)
    fields = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(fields | {"num_layers": 4}))
    with pytest.raises(UserError, match="no tensor for encoder.block.3"):
        TextEncoder.from_pretrained(bad)


def test_the_import_needs_no_other_packages_than_jax_and_flax() -> None:
    program = """
import sys
import jax, flax.nnx, sentencepiece.sentencepiece_model_pb2, safetensors, yaml
before = {name.partition(".")[0] for name in sys.modules}
from transformer_jax import TextEncoder
after = {name.partition(".")[0] for name in sys.modules}
print(*sorted(after - before - {*sys.stdlib_module_names}))
print(*sorted(x for x in sys.modules if x.startswith(("transformer_jax.tr", "transformer_jax.ru"))))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["lazy_loader transformer_jax", ""]
