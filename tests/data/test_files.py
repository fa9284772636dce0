"""Input files: globs, and text identified by its content."""

import gzip
import os
from pathlib import Path

import pytest

from transformer_jax.data.files import expanded
from transformer_jax.data.sources import ParallelText, read_pairs
from transformer_jax.errors import UserError
from transformer_jax.settings.config import PairsConfig
from transformer_jax.storage.files import to_path

SOURCES, TARGETS = ("part-*.en", "extra.en"), ("part-*.de", "extra.de")


@pytest.fixture
def folder(tmp_path):
    """Three parts and one more file, two lines each, created in no particular order."""
    for name in ("part-b", "extra", "part-c", "part-a"):
        for language in ("en", "de"):
            (tmp_path / f"{name}.{language}").write_text(
                f"{name} {language} 1\n{name} {language} 2\n"
            )
    return tmp_path


def test_globs_expand_to_sorted_files(folder):
    names = ["part-a", "part-b", "part-c", "extra"]
    globs = PairsConfig("text", SOURCES, TARGETS)
    listed = PairsConfig(
        "text", tuple(f"{name}.en" for name in names), tuple(f"{name}.de" for name in names)
    )
    expected = [(f"{name} en {i}", f"{name} de {i}") for name in names for i in (1, 2)]
    assert list(read_pairs(globs, str(folder))) == expected
    assert (
        ParallelText(globs, str(folder)).fingerprint
        == ParallelText(listed, str(folder)).fingerprint
    )
    absolute = PairsConfig("text", (str(folder / "part-*.en"),), (str(folder / "part-[abc].de"),))
    assert list(read_pairs(absolute, "elsewhere")) == expected[:6]
    before = ParallelText(globs, str(folder)).fingerprint
    for language in ("en", "de"):
        (folder / f"part-d.{language}").write_text("new\n")
    assert ParallelText(globs, str(folder)).fingerprint != before


def test_a_glob_does_not_match_a_file_and_its_compressed_copy(folder):
    """As after ``gunzip --keep``: training would read every pair twice."""
    with gzip.open(folder / "part-b.en.gz", "w") as file:
        file.write(b"part-b en 1\n")
    config = PairsConfig("text", ("part-b.en*",), ("part-b.de",))
    with pytest.raises(UserError, match=r"matches both '.*part-b.en' and its compressed copy"):
        ParallelText(config, str(folder))
    (folder / "part-b.en").unlink()
    with pytest.raises(UserError, match=r"different numbers of lines \(1 and 2\)"):
        list(read_pairs(config, str(folder)))


def test_a_file_whose_name_looks_like_a_glob(folder):
    for language in ("en", "de"):
        (folder / f"a[1]*.{language}").write_text("literally\n")
    config = PairsConfig("text", ("a[1]*.en",), ("a[1]*.de",))
    assert list(read_pairs(config, str(folder))) == [("literally", "literally")]
    with pytest.raises(UserError, match="does not match any files"):
        ParallelText(PairsConfig("text", *[("a[1].en",)] * 2), str(folder))


@pytest.mark.parametrize("name", ["wmt[14]", "wmt*", "wmt?", "[!x]mt1", "**", "{wmt1,wmt4}", "a[b"])
@pytest.mark.parametrize("remote", [False, True])
def test_a_root_whose_name_looks_like_a_glob(name, remote, tmp_path):
    """Only names, not the folder or URL from which they start, are globs."""
    base = to_path(f"memory:/{tmp_path}") if remote else tmp_path
    for folder in (name, f"{name}/more", "wmt1", "wmt4", "ab"):
        (base / folder).mkdir(parents=True, exist_ok=True)
        for part in ("part-1.en", "part-2.en", "part-[3].en", "x.en"):
            (base / folder / part).write_text(f"{folder}/{part}\n")
    root = str(base / name)
    for given, expected in (
        ("part-?.en", ["part-1.en", "part-2.en"]),
        ("part-[12].en", ["part-1.en", "part-2.en"]),
        ("part-*.en", ["part-1.en", "part-2.en", "part-[3].en"]),
        ("part-[3].en", ["part-[3].en"]),  # an existing file
        ("more/x*", ["more/x.en"]),
        ("*/x.en", ["more/x.en"]),
        ("**/x.en", ["more/x.en", "x.en"]),
    ):
        for files in (expanded(given, root), expanded(given, f"{root}/")):
            found = [file.read_text().removesuffix("\n") for file in files]
            assert found == [f"{name}/{each}" for each in expected], given
    with pytest.raises(UserError, match="does not match any files"):
        expanded("none*", root)


def test_globs_that_match_nothing_or_different_numbers_of_files(folder):
    with pytest.raises(UserError, match=r"'none-\*.en' does not match any files"):
        ParallelText(PairsConfig("text", ("none-*.en",), ("part-*.de",)), str(folder))
    (folder / "part-c.de").unlink()
    message = r"'part-\*.en' matches 3 file\(s\) and target 'part-\*.de' matches 2 file"
    with pytest.raises(UserError, match=message):
        read_pairs(PairsConfig("text", SOURCES, TARGETS), str(folder))
    with pytest.raises(UserError, match="matches 3 file.* matches 1 file.*; expected"):
        ParallelText(PairsConfig("text", ("part-*.en",), ("extra.de",)), str(folder))


def test_the_fingerprint_depends_on_the_content(folder):
    config, file = PairsConfig("text", SOURCES, TARGETS), folder / "extra.en"
    before, state = ParallelText(config, str(folder)).fingerprint, file.stat()
    file.write_text("extra en 1\nextra en 3\n")  # of the same size, with the same time stamps below
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert ParallelText(config, str(folder)).fingerprint != before
    file.write_text("extra en 1\nextra en 2\n")
    assert ParallelText(config, str(folder)).fingerprint == before


@pytest.fixture
def opened(monkeypatch):
    """Names of files opened for reading."""
    names, open_ = [], Path.open

    def note(self, mode="r", *args, **kwargs):
        if "r" in mode:
            names.append(self.name)
        return open_(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", note)
    return names


@pytest.mark.parametrize("limit", [None, 3])
def test_a_text_is_hashed_as_it_is_read(folder, limit, opened):
    config = PairsConfig("text", SOURCES, TARGETS, limit=limit)
    fresh = ParallelText(config, str(folder)).fingerprint
    opened.clear()
    text = ParallelText(config, str(folder))
    assert opened == []
    list(text.pairs())
    assert text.fingerprint == fresh
    if limit is None:
        assert len(opened) == len(set(opened)) == 8  # each file once
        (folder / "extra.de").write_text("changed\n" * 2)
        list(text.pairs())
        assert text.fingerprint != fresh


def test_paths_that_are_not_regular_files(folder):
    for name in ("none.en", ".", "/dev/null"):
        config = PairsConfig("text", (name,), ("extra.de",))
        for function in (ParallelText, read_pairs):  # before a line is read
            with pytest.raises(UserError, match="'.*' is not a file; expected a text file"):
                function(config, str(folder))
