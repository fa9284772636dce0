"""Downloads from a local server that speaks the protocol of the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import constants

from tests.pretrained import families
from transformer_jax import Translator, UserError
from transformer_jax.pretrained.__main__ import main as pretrained
from transformer_jax.pretrained.hub import find_pretrained
from transformer_jax.pretrained.loading import pretrained_workdir
from transformer_jax.translation.__main__ import main as decode

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class Hub(BaseHTTPRequestHandler):
    """Serves ``folders[NAME]``. Models named private/... need a token, gated/... a grant."""

    folders: ClassVar[dict[str, Path]] = {}
    requests: ClassVar[list[tuple[str, str | None]]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        token = self.headers.get("Authorization")
        Hub.requests.append((path, token))
        is_api = path.startswith("api/models/")
        owner, model, kind, revision, *rest = [
            *path.removeprefix("api/models/").split("/"),
            *"    ",
        ]
        folder = Hub.folders.get(f"{owner}/{model}")
        commit = next((c for name, c in COMMITS.items() if revision in (name, c)), None)
        if (owner == "private" and not token) or folder is None:
            return self.send(401 if owner == "private" else 404, {"X-Error-Code": "RepoNotFound"})
        if owner == "gated" and not is_api:
            return self.send(403, {"X-Error-Code": "GatedRepo"})
        if commit is None:
            return self.send(404, {"X-Error-Code": "RevisionNotFound"})
        files = {file.name: file for file in folder.iterdir()}
        if is_api and kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": "0"}
                for name, file in files.items()
            ]
            return self.send(200, {}, json.dumps(entries).encode())
        if is_api:
            siblings = [{"rfilename": name} for name in files]
            info = {"id": f"{owner}/{model}", "sha": commit, "siblings": siblings}
            return self.send(200, {}, json.dumps(info).encode())
        if (name := rest[0]) not in files:
            return self.send(404, {"X-Error-Code": "EntryNotFound"})
        content = files[name].read_bytes()
        tag = hashlib.sha256(content).hexdigest()
        return self.send(200, {"ETag": f'"{tag}"', "X-Repo-Commit": commit}, content)

    def send(self, status: int, headers: dict[str, str], content: bytes = b"{}") -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    families.write("nllb", folder / "nllb")
    families.write("t5", folder / "t5")
    (folder / "pickle").mkdir()
    for file in (folder / "t5").iterdir():
        (folder / "pickle" / file.name).write_bytes(file.read_bytes())
    (folder / "pickle" / "model.safetensors").rename(folder / "pickle" / "pytorch_model.bin")
    for name in ("toy/nllb", "toy/t5", "private/t5", "gated/t5", "toy/pickle"):
        Hub.folders[name] = folder / name.partition("/")[2]
    its = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=its.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{its.server_port}"
    its.shutdown()
    its.server_close()


@pytest.fixture
def hub(server, tmp_path, monkeypatch) -> list[tuple[str, str | None]]:
    """Connects huggingface_hub to the server, with empty caches. Returns the requests so far."""
    monkeypatch.setattr(constants, "ENDPOINT", server)
    template = server + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    Hub.requests.clear()
    return Hub.requests


def test_names_and_revisions_are_downloaded_once(hub, monkeypatch) -> None:
    first = Translator.from_pretrained("toy/nllb", target_language="deu_Latn")
    tagged = pretrained_workdir("toy/nllb@v1")
    assert any(path.startswith("toy/nllb/resolve/" + COMMITS["v1"]) for path, _ in hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.clear()
    again = Translator.from_pretrained("toy/nllb", target_language="deu_Latn")
    assert not hub
    assert first.translate(["w1 w2"]) == again.translate(["w1 w2"])
    assert pretrained_workdir("toy/nllb@v1") == tagged != pretrained_workdir("toy/nllb")


def test_the_token_is_sent(hub, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pretrained_workdir("private/t5")
    assert {token for _, token in hub} == {"Bearer hf_secret"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("private/t5", "HF_TOKEN"),
        ("gated/t5", "HF_TOKEN"),
        ("toy/missing", "cannot be downloaded .*hf download toy/missing --local-dir"),
        ("toy/t5@v9", "revision"),
        ("not a name", "is not a folder and .* Expected a folder"),
        (
            "toy/pickle",
            r"has no model.safetensors. Use a revision .*import --allow-pickle",
        ),
    ],
)
def test_errors_of_the_hub(name, message, hub) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match=message):
        pretrained_workdir(name)
    assert time.monotonic() - start < 10


def test_no_network(hub, monkeypatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    start = time.monotonic()
    with pytest.raises(UserError, match="cannot be downloaded"):
        pretrained_workdir("toy/t5")
    assert time.monotonic() - start < 10


def test_a_silent_hub(hub, monkeypatch) -> None:
    """It accepts connections and never answers. Models in the cache do not need it."""
    folder = pretrained_workdir("toy/t5")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(UserError, match=r"cannot be downloaded \(.*timed out"):
            pretrained_workdir("toy/nllb")
        assert pretrained_workdir("toy/t5") == folder
        assert time.monotonic() - start < 10


def test_an_interrupted_or_older_import_is_repeated(hub, monkeypatch) -> None:
    with monkeypatch.context() as patch:

        def stop(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("transformer_jax.pretrained.files.LazyArray.__array__", stop)
        with pytest.raises(KeyboardInterrupt):
            pretrained_workdir("toy/t5")
    folder = pretrained_workdir("toy/t5")
    assert Translator.from_workdir(folder).translate(["w1"])
    manifest = folder / "manifest.json"  # as another version of this package wrote it
    manifest.write_text(manifest.read_text().replace('"d_model"', '"another_name"'))
    assert pretrained_workdir("toy/t5") == folder
    assert Translator.from_workdir(folder).translate(["w1"])


def test_programs_take_names(hub, tmp_path, capsys) -> None:
    folder, file = str(tmp_path / "model"), tmp_path / "in.txt"
    file.write_text("w1 w2\nw3\n")
    flags = ["--target-language", "deu_Latn"]
    assert pretrained(["import", "--input", "toy/nllb", "--workdir", folder, *flags]) == 0
    outputs = []
    for workdir, more in ((folder, []), ("hf://toy/nllb", flags)):
        output = tmp_path / f"out{len(outputs)}.txt"
        assert (
            decode(["--workdir", workdir, "--input", str(file), "--output", str(output), *more])
            == 0
        )
        outputs.append(output.read_text())
    assert outputs[0] == outputs[1]
    missing = ["import", "--input", "toy/missing", "--workdir", str(tmp_path / "no")]
    assert pretrained(missing) == 2
    assert "toy/missing" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_replaced_zip_is_unpacked_again(tmp_path, monkeypatch) -> None:
    """An archive differs from another in its path, its size or its time, to the nanosecond."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = {}
    for name, content, nanoseconds in (
        ("a", "1", 0),
        ("a", "2", 1),
        ("a", "30", 1),
        ("b", "4", 1),
        ("b", "5", 10**9),
    ):
        archive = tmp_path / f"{name}.zip"
        with zipfile.ZipFile(archive, "w") as target:
            target.writestr("model.npz", content)
        os.utime(archive, ns=(0, nanoseconds))
        folders[content] = find_pretrained(str(archive))
        assert find_pretrained(str(archive)) == folders[content]
    for content, folder in folders.items():
        assert (folder / "model.npz").read_text() == content
