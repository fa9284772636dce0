"""Model folders: damage, interrupted writes, older work directories."""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import pytest
from flax import nnx
from runs import ONE, changed, no_evaluation, tiny

from transformer_jax.devices.sharding import parameters_by_name
from transformer_jax.errors import UserError
from transformer_jax.pretrained.loading import load_model
from transformer_jax.runs import model_folder
from transformer_jax.runs.model_folder import save_model
from transformer_jax.settings.config_files import from_json, to_json
from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.training.loop import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose model averages the checkpoints of steps 1 and 2."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    train(no_evaluation(tiny(steps=2, checkpoint_every=1)), workdir, devices=ONE)
    return workdir


@pytest.fixture
def saved(finished: Path, tmp_path: Path) -> Path:
    save_model(tmp_path / "saved", *load_model(finished))
    return tmp_path / "saved"


def test_a_model_folder_can_be_moved(saved: Path, finished: Path) -> None:
    before = nnx.to_pure_dict(nnx.state(load_model(saved)[1], nnx.Param))
    moved = saved.rename(saved.with_name("checkpoints"))  # any name
    config, model, loaded = load_model(moved)
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(model, nnx.Param)), before)
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(before))
    assert loaded.fingerprint == Tokenizer.load(finished).fingerprint
    assert config == load_model(finished)[0] and config.model == model.config


def test_a_checkpoint_outside_of_its_work_directory_is_an_error(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "checkpoints/00000002", tmp_path / "00000002")
    with pytest.raises(UserError, match="expected a work directory .* or a model folder"):
        load_model(tmp_path / "00000002")


def _craft(manifest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, with the right checksum."""
    content = json.loads(manifest.read_text())
    del content["checksum"]
    change(content)
    content = {"checksum": zlib.crc32(json.dumps(content).encode()), **content}
    manifest.write_text(json.dumps(content))


CRAFTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no files": lambda content: content.pop("files"),
    "files null": lambda content: content.update(files=None),
    "files empty": lambda content: content.update(files={}),
    "files a list": lambda content: content.update(files=["config.json"]),
    "a folder": lambda content: content["files"].update({".": 0}),
    "a file as folder": lambda content: content["files"].update({"manifest.json/x": 0}),
    "a NUL": lambda content: content["files"].update({"a\0b": 0}),
    "checksum null": lambda content: content["files"].update(dict.fromkeys(content["files"])),
    "no config": lambda content: content.pop("config"),
    "config null": lambda content: content.update(config=None),
    "config a list": lambda content: content.update(config=[]),
    "section null": lambda content: content["config"].update(model=None),
    "wider": lambda content: content["config"]["model"].update(d_model=32, d_k=8, d_v=8),
    "deeper": lambda content: content["config"]["model"].update(num_layers=2),
    "no format": lambda content: content.update(format=None),
}


@pytest.mark.parametrize("change", CRAFTED.values(), ids=CRAFTED)
@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_a_manifest_that_says_something_else_is_an_error(
    kind: str, change: Callable[[dict[str, Any]], Any], finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    folder = tmp_path / "run" / ("model" if kind == "model" else "checkpoints/00000002")
    _craft(folder / "manifest.json", change)
    with pytest.raises(UserError, match=f"{folder.name}.*(corrupt|format)"):
        load_model(folder)


@pytest.mark.parametrize("steps", [None, "12", [1, "2"], 3])
def test_averaged_steps_that_are_no_list_are_an_error(
    steps: Any, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "model", tmp_path / "model")
    _craft(tmp_path / "model" / "manifest.json", lambda content: content.update(steps=steps))
    with pytest.raises(UserError, match="manifest.json is corrupt: steps is .*; expected a list"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("progress", [None, [], "x"])
def test_progress_that_is_no_object_is_an_error(
    progress: Any, finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    manifest = run / "checkpoints/00000002/manifest.json"
    _craft(manifest, lambda content: content.update(progress=progress))
    config = no_evaluation(tiny(steps=3, checkpoint_every=1))
    with pytest.raises(UserError, match="manifest.json: progress is .*; expected a JSON object"):
        train(config, run, devices=ONE)


@pytest.mark.parametrize("name", ["model", "checkpoints", "config.json"])
def test_a_dangling_link_is_not_taken_for_a_missing_file(
    name: str, finished: Path, tmp_path: Path
) -> None:
    """For example of a disk that is not mounted."""
    run = shutil.copytree(finished, tmp_path / "run")
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "nowhere")
    before = sorted(run.rglob("*"))
    if name == "model":
        with pytest.raises(UserError, match="model' is a link to .*nowhere', which does not exist"):
            load_model(run)
    longer = no_evaluation(tiny(steps=3, checkpoint_every=1))
    with pytest.raises(UserError, match=f"{name}' is a link to .*nowhere', which does not exist"):
        train(longer, run, devices=ONE)
    assert sorted(run.rglob("*")) == before


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _edit_manifest(folder: Path, **fields: object) -> None:
    content = json.loads((folder / "manifest.json").read_text()) | fields
    del content["checksum"]
    content = {"checksum": zlib.crc32(json.dumps(content).encode()), **content}
    (folder / "manifest.json").write_text(json.dumps(content))


def _swap_config(folder: Path) -> None:
    config = from_json((folder / "config.json").read_text())
    other = changed(config, model={"d_model": 2 * config.model.d_model})
    (folder / "config.json").write_text(to_json(other))


def _manifest(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "manifest.json").write_text(text)


DAMAGED = "Model .* is corrupt: manifest.json is missing or has changed"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: _flip(f / "model.safetensors"), "is corrupt: model.safetensors has changed"),
        (lambda f: (f / "model.safetensors").unlink(), "is corrupt: model.safetensors is missing"),
        (lambda f: (f / "tokenizer.model").unlink(), "is corrupt: tokenizer.model is missing"),
        (lambda f: _flip(f / "tokenizer.model"), "is corrupt: tokenizer.model has changed"),
        (
            lambda f: [
                shutil.copy(f / "tokenizer.model", f / f"tokenizer.{side}.model")
                for side in ("source", "target")
            ],
            "tokenizer in .* does not match",
        ),
        (_swap_config, "is corrupt: config.json has changed"),
        (lambda f: (f / "manifest.json").unlink(), DAMAGED),
        (lambda f: _flip(f / "manifest.json"), DAMAGED),
        *((_manifest(text), DAMAGED) for text in ("", "null", "[]", '"x"', "{}", "[" * 100_000)),
        (lambda f: _edit_manifest(f, format=2), "has format 2; this version .* reads format 1"),
    ],
)
def test_a_damaged_model_is_an_error_and_nothing_else_is_loaded(
    damage: Callable[[Path], object], message: str, finished: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    damage(workdir / "model")
    for path in (workdir, workdir / "model"):
        with pytest.raises(UserError, match=message) as error:
            load_model(path)
        assert len(str(error.value).splitlines()) == 1


def test_an_interrupted_write_keeps_the_earlier_model(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_model(saved)
    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "write_manifest", lambda *_: 1 / 0)
        parameters = parameters_by_name(nnx.to_pure_dict(nnx.state(before[1], nnx.Param)))
        for folder in (saved, saved.with_name("new")):
            with pytest.raises(ZeroDivisionError):
                model_folder.write_model(folder, before[0], parameters, before[2], [1])
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    assert load_model(saved)[0] == before[0]


def test_files_of_others_are_not_replaced(finished: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    shutil.rmtree(workdir / "model")
    (workdir / "model").mkdir()
    (workdir / "model" / "notes").write_text("mine")
    config = no_evaluation(tiny(steps=2, checkpoint_every=1))
    with pytest.raises(FileExistsError, match="model' is not empty"):
        train(config, workdir, devices=ONE)
    assert (workdir / "model" / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    "summary",
    [
        None,
        pytest.param("", marks=pytest.mark.exhaustive),
        "{}",
        pytest.param("[]", marks=pytest.mark.exhaustive),
        '{"steps": 2, "averaged_st',
    ],
)
def test_without_a_model_folder_the_newest_checkpoint_is_loaded_and_named(
    summary: str | None, finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a run that has not finished, or that an earlier version finished, whatever summary.json
    contains. The same train.py command writes the model of a finished run.
    """
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    shutil.rmtree(workdir / "model")
    (workdir / "summary.json").unlink()
    if summary is not None:
        (workdir / "summary.json").write_text(summary)
    caplog.set_level("INFO", logger="transformer_jax")

    def parameters(path: Path) -> object:
        return nnx.to_pure_dict(nnx.state(load_model(path)[1], nnx.Param))

    newest = parameters(workdir)
    assert f"{workdir}: no model/" in caplog.text and "so checkpoint 2." in caplog.text
    chex.assert_trees_all_equal(newest, parameters(finished / "checkpoints/00000002"))
    train(no_evaluation(tiny(steps=2, checkpoint_every=1)), workdir, devices=ONE)
    chex.assert_trees_all_equal(parameters(workdir), parameters(finished))
    assert f"{workdir}: average of 2 checkpoints, 1 to 2." in caplog.text
