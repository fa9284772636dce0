"""python -m transformer_jax.parsing: treebank to text to F1, and errors for invalid input."""

import gzip
from pathlib import Path

import pytest

from transformer_jax.parsing.__main__ import main

TREES = [
    "( (S (NP-SBJ (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .)))",
    "( (S (NP-SBJ (PRP It)) (VP (VBZ barks)) (. .)))",
    "( (FRAG (ADVP (RB Not) (NN today)) (. .)))",
]


@pytest.fixture
def treebank(tmp_path: Path) -> Path:
    (tmp_path / "b.mrg").write_text(f"{TREES[1]}\n\n{TREES[2]}\n")
    with gzip.open(tmp_path / "a.mrg.gz", "wt") as file:
        file.write(TREES[0].replace(" (VP", "\n   (VP"))
    return tmp_path


def test_trees_become_text_and_come_back(
    treebank: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = f"{treebank}/made/all"
    assert main(["prepare", "--trees", f"{treebank}/?.mrg*", "--output", made]) == 0
    assert "3 trees with 11 words" in capsys.readouterr().err
    assert Path(f"{made}.words").read_text().splitlines() == [
        "John has a dog .",
        "It barks .",
        "Not today .",
    ]
    assert (
        Path(f"{made}.sequences").read_text().splitlines()[2] == "(FRAG (ADVP XX XX )ADVP XX )FRAG"
    )
    assert Path(f"{made}.mrg").read_text().splitlines() == [
        tree.replace("-SBJ", "") for tree in TREES
    ]
    back = f"{treebank}/back.mrg"
    assert (
        main(
            [
                "restore",
                "--words",
                f"{made}.words",
                "--sequences",
                f"{made}.sequences",
                "--output",
                back,
            ]
        )
        == 0
    )
    assert "3 trees, 0 from malformed" in capsys.readouterr().err
    assert main(["score", "--gold", f"{made}.mrg", "--parses", back]) == 0
    assert capsys.readouterr().out.startswith(
        "labeled bracket F1 = 100.00 (precision 100.00, recall 100.00, exact match 100.00%, 3"
    )


def test_a_range_of_trees(treebank: Path) -> None:
    trees = [f"{treebank}/a.mrg.gz", f"{treebank}/b.mrg"]
    assert (
        main(
            [
                "prepare",
                "--trees",
                *trees,
                "--output",
                f"{treebank}/some",
                "--skip",
                "1",
                "--take",
                "1",
            ]
        )
        == 0
    )
    assert (treebank / "some.words").read_text() == "It barks .\n"


def test_what_a_model_wrote_is_counted_where_it_is_no_tree(
    treebank: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (treebank / "words").write_text("It barks .\n\nNot today :)\n")
    (treebank / "sequences").write_text("(S (NP XX )NP (VP XX )VP\n\n(FRAG XX XX XX )FRAG\n")
    assert (
        main(["restore", "--words", f"{treebank}/words", "--sequences", f"{treebank}/sequences"])
        == 0
    )
    out, err = capsys.readouterr()
    trees = [
        "( (S (NP (XX It)) (VP (XX barks)) (XX .)))",
        "( )",
        "( (FRAG (XX Not) (XX today) (XX :-RRB-)))",
    ]
    assert out.splitlines() == trees
    assert "3 trees, 1 from malformed" in err
    (treebank / "restored.mrg").write_text(out)  # with an empty line's tree it can be scored
    assert (
        main(
            ["score", "--gold", f"{treebank}/restored.mrg", "--parses", f"{treebank}/restored.mrg"]
        )
        == 0
    )
    assert "3 sentences" in capsys.readouterr().out


def test_a_restored_file_appears_whole_or_not_at_all(treebank: Path) -> None:
    words, sequences = treebank / "words", treebank / "sequences"
    words.write_text("It barks .\nNot today .\n")
    sequences.write_text("(S XX XX XX )S\n")
    task = ["restore", "--words", str(words), "--sequences", str(sequences), "--output"]
    assert main([*task, str(treebank / "out")]) == 2
    assert main([*task, str(words)]) == 2  # over its own input
    assert words.read_text() == "It barks .\nNot today .\n" and not (treebank / "out").exists()
    sequences.write_text("(S XX XX XX )S\n(S XX XX XX )S\n")
    assert main([*task, str(words)]) == 0
    assert words.read_text().startswith("( (S (XX It)") and sorted(treebank.glob("tmp*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "prepare --trees {0}/*.tree --output {0}/x",
            "matches no file; expected at least one file",
        ),
        ("prepare --trees {0}/none.mrg --output {0}/x", "none.mrg"),
        (
            "prepare --trees {0}/b.mrg --output {0}/x --skip 2",
            "b.mrg after the first 2; expected trees in Penn format",
        ),
        ("prepare --trees {0}/b.mrg --output {0}/x --take 0", "take is 0; expected 1 or more"),
        (
            "prepare --trees {0}/words --output {0}/x",
            "words, line 1: 'It' outside all brackets; expected trees such as",
        ),
        (
            "restore --words {0}/words --sequences {0}/b.mrg",
            "words ends after 2 lines; expected the same number",
        ),
        (
            "score --gold {0}/b.mrg --parses {0}/a.mrg.gz",
            "Tree 1: the words are 'John has a dog .'",
        ),
    ],
)
def test_wrong_input_is_named(
    treebank: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (treebank / "words").write_text("It barks .\nNot today .\n")
    assert main(arguments.format(treebank).split()) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not list(treebank.glob("x.*")), "half a text is left"
