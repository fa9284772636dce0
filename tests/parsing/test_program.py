"""The parsing program: treebank to text to F1, and errors for invalid input."""

import gzip
from pathlib import Path

import pytest

from transformer_jax.parsing.__main__ import main
from transformer_jax.parsing.trees import bracket_symbols

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


@pytest.mark.parametrize("ending", ["words", "sequences", "mrg"])
@pytest.mark.parametrize("output", ["b", "linked", "symlink"])
def test_cleaned_trees_do_not_overwrite_a_treebank(
    folder: Path, capsys: pytest.CaptureFixture[str], output: str, ending: str
) -> None:
    """A failed command writes none of its three files."""
    given = (folder / "b.mrg").rename(folder / f"b.{ending}")
    (folder / f"linked.{ending}").hardlink_to(given)
    (folder / f"symlink.{ending}").symlink_to(given)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run(f"prepare --trees a.mrg.gz {given.name} --output {output}") == 2
    assert f"{output}.{ending}' is also an input; expected another" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


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


def test_each_kind_of_malformed_sequence_counts_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    malformed = [
        *("", "XX", "XX XX XX", "(S XX XX", "XX XX )S", "(S XX XX )NP", "(S XX XX )S )S"),
        *("( XX XX )", "(S (NP )NP XX XX )S", "(S (NP XX )S XX )NP", "XX XX (S )S", "() XX XX"),
        *("((S XX XX )S", "(S) XX XX", "#0 NNP", "(S #0 NNP #1 NNP", "(S (NP )NP #0 A #1 B )S"),
    ]
    right = ["XX XX", "(S XX XX )S", "(S (NP XX )NP (NP XX )NP )S", "(S #0 NNP #1 NNP )S"]
    lines = [*malformed, *right]
    (folder / "words").write_text("It barks\n" * len(lines))
    (folder / "sequences").write_text("".join(f"{line}\n" for line in lines))
    assert run("restore --words words --sequences sequences --output restored") == 0
    err = capsys.readouterr().err
    assert err == f"{len(lines)} trees, {len(malformed)} from malformed sequences.\n"
    assert (folder / "restored").read_text().count("\n") == len(lines)


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


def test_numbered_words_and_tags(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file has one line per tree, in the order of the files; missing folders are created."""
    assert run("prepare --numbered --trees b.mrg a.mrg.gz --output new/folder/it") == 0
    said = "new/folder/it.words, .sequences and .mrg: 3 trees with 11 words.\n"
    assert capsys.readouterr().err == said
    names = sorted(path.name for path in (folder / "new" / "folder").iterdir())
    assert names == ["it.mrg", "it.sequences", "it.words"]
    words, sequences = (
        (folder / f"new/folder/it.{ending}").read_text() for ending in ("words", "sequences")
    )
    assert words == ("#0 It #1 barks #2 .\n#0 Not #1 today #2 .\n#0 John #1 has #2 a #3 dog #4 .\n")
    assert sequences.splitlines()[:2] == [
        "(S (NP #0 PRP )NP (VP #1 VBZ )VP #2 . )S",
        "(FRAG (ADVP #0 RB #1 NN )ADVP #2 . )FRAG",
    ]
    files = "--words new/folder/it.words --sequences new/folder/it.sequences"
    assert run(f"restore {files} --output other/folder/back.mrg") == 0
    assert capsys.readouterr().err == "3 trees, 0 from malformed sequences.\n"
    restored = (folder / "other/folder/back.mrg").read_text().splitlines()
    assert restored[0] == "( (S (NP (XX It)) (VP (XX barks)) (XX .)))"
    assert run("score --gold new/folder/it.mrg --parses other/folder/back.mrg") == 0
    assert capsys.readouterr().out == (
        "labeled bracket F1 = 100.00 (precision 100.00, recall 100.00, exact match 100.00%, "
        "3 sentences)\n"
    )


def test_precision_is_of_the_parses_and_recall_of_the_gold_trees(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "gold").write_text(f"{TREES[1]}\n{TREES[2]}\n")
    (folder / "parses").write_text("( (S (PRP It) (VBZ barks) (. .)))\n" + TREES[2] + "\n")
    assert run("score --gold gold --parses parses") == 0
    assert capsys.readouterr().out == (
        "labeled bracket F1 = 75.00 (precision 100.00, recall 60.00, exact match 50.00%, "
        "2 sentences)\n"
    )
    assert run("score --gold parses --parses gold") == 0
    assert "(precision 60.00, recall 100.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("(TOP (S (NN a)))", "( (S (NN a)))"),
        ("(ROOT (S (NN a)))", "( (S (NN a)))"),
        ("( (S (NN a)))", "( (S (NN a)))"),
        ("(S (NN a))", "( (S (NN a)))"),
        (
            "(S (NP-SBJ-1 (NN a)) (PP=2 (IN b)) (PRT|ADVP (RP c)))",
            "( (S (NP (NN a)) (PP (IN b)) (PRT (RP c))))",
        ),
        # only labels have suffixes; a bracket's tag is whole
        ("(S (-LRB- -LRB-) (NN a-b) (-RRB- -RRB-))", "( (S (-LRB- -LRB-) (NN a-b) (-RRB- -RRB-)))"),
        ("(S (NP (-NONE- *T*)) (VP (VB go) (NP (SBAR (-NONE- 0)))))", "( (S (VP (VB go))))"),
    ],
)
def test_cleaning_of_trees(
    given: str, cleaned: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "one.mrg").write_text(given)
    assert run("prepare --trees one.mrg --output out") == 0
    assert (folder / "out.mrg").read_text() == f"{cleaned}\n"


@pytest.mark.parametrize("short", ["words", "sequences"])
def test_restore_names_the_file_that_ends_early(
    short: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "words").write_text("It barks .\n" * (2 if short == "words" else 3))
    (folder / "sequences").write_text("(S XX XX XX )S\n" * (2 if short == "sequences" else 3))
    assert run("restore --words words --sequences sequences") == 2
    out, err = capsys.readouterr()
    assert not out and err == (
        f"error: {short} ends after 2 lines; expected the same number of lines in words and "
        "sequences.\n"
    )


def test_symbols_that_keep_brackets_whole() -> None:
    assert bracket_symbols("S NP") == ("▁(S", "▁)S", "▁(NP", "▁)NP")
