"""The parsing program: treebank to text to F1, and errors for invalid input."""

import gzip
from pathlib import Path

import pytest

from transformer_jax.parsing.__main__ import main

TREES = [
    "( (S (NP-SBJ (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .)))",
    "( (S (NP-SBJ (PRP It)) (VP (VBZ barks)) (. .)))",
    "( (FRAG (ADVP (RB Not) (NN today)) (. .)))",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a treebank in two files, one of them compressed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.mrg").write_text(f"{TREES[1]}\n\n{TREES[2]}\n")
    with gzip.open("a.mrg.gz", "wt") as file:
        file.write(TREES[0].replace(" (VP", "\n   (VP"))
    return tmp_path


def run(command: str) -> int:
    return main(command.split())


@pytest.mark.parametrize("output", ["b", "linked"])
def test_cleaned_trees_do_not_overwrite_a_treebank(
    folder: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    (folder / "linked.mrg").hardlink_to(folder / "b.mrg")
    before = (folder / "b.mrg").read_text()
    assert run(f"prepare --trees a.mrg.gz b.mrg --output {output}") == 2
    assert f"{output}.mrg' is also an input; expected another file" in capsys.readouterr().err
    assert (folder / "b.mrg").read_text() == before


def test_round_trip_from_trees_to_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prepare --trees a.mrg.gz b.mrg --output made/all") == 0
    assert "3 trees with 11 words" in capsys.readouterr().err
    words, sequences, trees = (
        (folder / f"made/all.{ending}").read_text().splitlines()
        for ending in ("words", "sequences", "mrg")
    )
    assert words == ["John has a dog .", "It barks .", "Not today ."]
    assert sequences[2] == "(FRAG (ADVP XX XX )ADVP XX )FRAG"
    assert trees == [tree.replace("-SBJ", "") for tree in TREES]
    files = "--words made/all.words --sequences made/all.sequences"
    assert run(f"restore {files} --output back.mrg") == 0
    assert "3 trees, 0 from malformed" in capsys.readouterr().err
    assert run("score --gold made/all.mrg --parses back.mrg") == 0
    assert capsys.readouterr().out.startswith(
        "labeled bracket F1 = 100.00 (precision 100.00, recall 100.00, exact match 100.00%, 3"
    )


def test_malformed_sequences_are_restored_and_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "words").write_text("It barks .\n\nNot today :)\n")
    (folder / "sequences").write_text("(S (NP XX )NP (VP XX )VP\n\n(FRAG XX XX XX )FRAG\n")
    assert run("restore --words words --sequences sequences") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "( (S (NP (XX It)) (VP (XX barks)) (XX .)))",
        "( )",
        "( (FRAG (XX Not) (XX today) (XX :-RRB-)))",
    ]
    assert "3 trees, 1 from malformed" in err
    (folder / "restored.mrg").write_text(out)  # can be scored, including the empty tree
    assert run("score --gold restored.mrg --parses restored.mrg") == 0
    assert "3 sentences" in capsys.readouterr().out


def test_restore_writes_its_output_atomically(folder: Path) -> None:
    words, sequences = folder / "words", folder / "sequences"
    words.write_text("It barks .\nNot today .\n")
    sequences.write_text("(S XX XX XX )S\n")
    restore = "restore --words words --sequences sequences --output"
    assert run(f"{restore} out") == 2
    assert run(f"{restore} words") == 2  # over its own input
    assert words.read_text() == "It barks .\nNot today .\n" and not (folder / "out").exists()
    sequences.write_text("(S XX XX XX )S\n(S XX XX XX )S\n")
    assert run(f"{restore} words") == 0
    assert words.read_text().startswith("( (S (XX It)") and not list(folder.glob("tmp*"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("prepare --trees none.mrg --output x", "none.mrg"),
        (
            "prepare --trees words --output x",
            "words, line 1: 'It' outside all brackets; expected trees such as",
        ),
        (
            "restore --words words --sequences b.mrg",
            "words ends after 2 lines; expected the same number",
        ),
        ("score --gold b.mrg --parses a.mrg.gz", "Tree 1: the words are 'John has a dog .'"),
        (
            "prepare --trees empty.mrg --output x",
            "No trees found in empty.mrg; expected trees in Penn format",
        ),
    ],
)
def test_invalid_input_is_an_error(
    command: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "words").write_text("It barks .\nNot today .\n")
    (folder / "empty.mrg").touch()
    assert run(command) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not list(folder.glob("x.*")), "a failed command left output files"
