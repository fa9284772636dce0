"""Number names of examples/number_names.py: correct, disjoint splits, reproducible."""

from collections import Counter

import pytest
from num2words import num2words
from number_names import number_names


def plain(name):
    return name.lower().removesuffix(".")


def style(name):
    """Whether a name starts with a capital letter, and whether it ends with a period."""
    return name[0].isupper(), name.endswith(".")


def test_names_are_num2words_and_in_one_split():
    train, dev, test = (list(number_names(split, 20_000)) for split in ("train", "dev", "test"))
    assert list(map(len, (train, dev, test))) == [20_000, 10_000, 10_000]
    splits = [{plain(source) for source, _ in pairs} for pairs in (train, dev, test)]
    assert len(set.union(*splits)) == sum(map(len, splits))
    names = {plain(source): plain(target) for source, target in train + dev + test}
    known = [n for n in [*range(1102), *range(1000, 1_000_000, 997)] if num2words(n) in names]
    assert len(known) > 1000
    for n in known:
        assert names[num2words(n)] == num2words(n, lang="de")


@pytest.mark.exhaustive
def test_a_million_numbers_are_num2words_and_splits_are_disjoint():
    train, dev, test = (list(number_names(split, 10**6)) for split in ("train", "dev", "test"))
    assert (len(train), len(dev), len(test)) == (994_834, 10_000, 10_000)
    everything = {plain(source): plain(target) for source, target in train + dev + test}
    splits = [{plain(source) for source, _ in pairs} for pairs in (train, dev, test)]
    assert list(map(len, splits)) == [980_000, 10_000, 10_000]
    assert len(everything) == 1_000_000  # so no number is in two splits
    assert everything["forty-two"] == "zweiundvierzig"
    for n in [*range(0, 1102), *range(1000, 1_000_000, 9973), 100_000, 101_000, 100_001, 999_999]:
        assert everything[num2words(n)] == num2words(n, lang="de")


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_half_of_the_numbers_are_capitalized_and_half_end_with_a_period(split):
    pairs = list(number_names(split, 100_000))
    styles = Counter(style(source) for source, _ in pairs)
    assert len(styles) == 4 and min(styles.values()) > 0.24 * len(pairs)
    assert all(style(source) == style(target) for source, target in pairs)


def test_train_has_small_numbers_in_all_styles_and_the_smallest_more_often():
    train, dev, test = (
        Counter(source for source, _ in number_names(split, 100_000))
        for split in ("train", "dev", "test")
    )
    assert {*dev.values(), *test.values()} == {1}
    held_out = {plain(source) for source in [*dev, *test]}
    for n in range(2000):
        name = num2words(n)
        counts = {train[styled] for styled in (name, name.capitalize(), f"{name}.")}
        counts |= {train[f"{name.capitalize()}."]}
        assert counts == {0 if name in held_out else 1 + (600 if n < 10 else 200) // (n + 1)}, n
    assert train["zero"] == 601 and train["two hundred"] == train["one thousand and one"] == 1


def test_numbers_are_reproducible():
    few = list(number_names("train", 50))
    # Another order would put different numbers into dev and test.
    assert few[0] == ("one hundred and seventy-five", "einhundertfünfundsiebzig")
    assert few[3] == ("One hundred and seventy-five.", "Einhundertfünfundsiebzig.")
    test = list(number_names("test", 3))
    assert test[2][0] == "Six hundred and eighty-eight thousand, six hundred and ninety-four"
