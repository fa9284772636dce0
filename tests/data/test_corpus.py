"""Corpus: contents, filters, worker processes, crashes, concurrent builders, corruption."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from number_names import number_files

from transformer_jax.data import corpus as corpora
from transformer_jax.data import tokenize
from transformer_jax.data.corpus import Corpus, Sequences, build_corpus, open_corpus
from transformer_jax.data.sources import ParallelText, TextPair, read_pairs
from transformer_jax.devices.machine import num_cores
from transformer_jax.errors import UserError
from transformer_jax.settings.config import DataConfig, PairsConfig, TokenizerConfig
from transformer_jax.tokenization.special_ids import EOS_ID
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.subword_sampling import BpeDropout
from transformer_jax.tokenization.tokenizer import Tokenizer

NUMBERS = number_files(3000)
PAIRS = list(read_pairs(NUMBERS))
TOKENIZER = Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=80))
SIDES = ["source", "target"]
SAMPLED = {"sampling": BpeDropout(0.2, 3), "seed": 5}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Also, one process unless a test sets more."""
    monkeypatch.setattr(tokenize, "_CHUNK_PAIRS", 256)
    monkeypatch.setattr(tokenize, "num_cores", lambda: 1)


def sequences(corpus, side):
    """Token ids as N lists."""
    tokens, lengths = corpus.read(SIDES.index(side), np.arange(corpus.num_pairs))
    return [ids.tolist() for ids in np.split(tokens, np.cumsum(lengths))[:-1]]


def is_worker(process):
    return "tokenize import work" in " ".join(process.cmdline())


def contents(folder):
    """All files in a folder, with their bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def from_text(tmp_path, pairs, **settings):
    """Write pairs of str or bytes to text files; return their config and data config."""
    for i, name in enumerate(("source", "target")):
        lines = [
            side if isinstance(side, bytes) else side.encode()
            for side in (pair[i] for pair in pairs)
        ]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in lines))
    config = PairsConfig(kind="text", source=("source",), target=("target",))
    return config, DataConfig(root=str(tmp_path), train=config, **settings)


def test_corpus_holds_the_pairs_in_order(tmp_path):
    corpus = build_corpus(NUMBERS, TOKENIZER, DataConfig(), tmp_path)
    sources, targets = sequences(corpus, "source"), sequences(corpus, "target")
    assert sources == [
        [*ids, EOS_ID] for ids in TOKENIZER.source.encode([source for source, _ in PAIRS])
    ]
    assert targets == [
        [*ids, EOS_ID] for ids in TOKENIZER.target.encode([target for _, target in PAIRS])
    ]
    assert corpus.num_pairs == corpus.num_read == 3000
    tokens, offsets = corpus.sides[0]
    assert tokens.dtype == np.uint16 and isinstance(tokens, np.memmap)
    assert offsets.dtype == np.int64
    assert corpus.lengths()[1].dtype == np.int32 and corpus.lengths().shape == (2, 3000)
    assert corpus.lengths()[1].tolist() == list(map(len, targets))


def test_copies_of_a_pair_have_different_segmentations(tmp_path):
    corpus = build_corpus(NUMBERS, TOKENIZER, DataConfig(), tmp_path, **SAMPLED)
    assert corpus.num_pairs == corpus.num_read == 9000
    for side, decode in (("source", TOKENIZER.source.decode), ("target", TOKENIZER.target.decode)):
        found = sequences(corpus, side)
        versions = [found[v::3] for v in range(3)]
        texts = [pair[side == "target"] for pair in PAIRS]
        assert all([decode(ids) for ids in version] == texts for version in versions)
        assert all(ids[-1] == EOS_ID for version in versions for ids in version)
        assert versions[0] != versions[1] != versions[2] != versions[0]


def test_chunks_and_sides_of_a_text_draw_their_own_segmentations():
    job = tokenize.TokenizeJob(TOKENIZER, DataConfig(), sampling=BpeDropout(0.3))
    same = [TextPair("seventeen thousand", "seventeen thousand")] * 5
    drawn = [job.tokenize(number, same).sides for number in (0, 1, 1)]
    flat = [[tuple(tokens.tolist()) for tokens, _ in sides] for sides in drawn]
    assert flat[1] == flat[2] and len({*flat[0], *flat[1]}) == 4


def test_the_number_of_workers_does_not_matter(tmp_path):
    for workers in (1, 2):
        data = DataConfig(workers=workers)
        build_corpus(NUMBERS, TOKENIZER, data, tmp_path / str(workers), **SAMPLED)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") != {}


def test_settings_that_change_the_corpus(tmp_path):
    data = DataConfig()
    builds = [
        (NUMBERS, TOKENIZER, data, {}),
        (dataclasses.replace(NUMBERS, limit=2999), TOKENIZER, data, {}),
        (NUMBERS, Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=81)), data, {}),
        (NUMBERS, TOKENIZER, DataConfig(max_source_length=200), {}),
        (NUMBERS, TOKENIZER, DataConfig(max_target_length=200), {}),
        (NUMBERS, TOKENIZER, data, SAMPLED),
        (NUMBERS, TOKENIZER, data, SAMPLED | {"seed": 6}),
        (NUMBERS, TOKENIZER, data, SAMPLED | {"sampling": BpeDropout(0.2, 2)}),
        (NUMBERS, TOKENIZER, data, SAMPLED | {"sampling": BpeDropout(0.3, 3)}),
    ]
    for pairs, tokenizer, config, sampling in builds * 2:
        build_corpus(pairs, tokenizer, config, tmp_path, **sampling)
    assert len(list(tmp_path.glob("[!.]*"))) == len(builds)
    build_corpus(NUMBERS, TOKENIZER, DataConfig(workers=2), tmp_path, seed=3)
    assert len(list(tmp_path.glob("[!.]*"))) == len(builds)  # these settings do not


def test_corpora_sampled_by_an_earlier_version_are_not_used():
    """Until 2026-11, BPE-dropout was SentencePiece's; the other corpora are still valid."""
    text, data = ParallelText(NUMBERS, ""), DataConfig()

    def digest(sampled):
        fields = [(5, tokenize._CHUNK_PAIRS), text.fingerprint, TOKENIZER.fingerprint]
        fields += [(data.max_source_length, data.max_target_length), sampled]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    plain = tokenize.TokenizeJob(TOKENIZER, data)
    sampled = tokenize.TokenizeJob(TOKENIZER, data, BpeDropout(0.1, 8))
    assert plain.fingerprint(text) == digest((0.0, 1, 0))
    assert sampled.fingerprint(text) == digest((("Algorithm 1", 0.1), 8, 0))
    assert sampled.fingerprint(text) != digest((0.1, 8, 0))


def test_a_finished_corpus_is_not_rebuilt(tmp_path, monkeypatch):
    first = build_corpus(NUMBERS, TOKENIZER, DataConfig(), tmp_path)
    monkeypatch.setattr(corpora, "_write", None)
    again = build_corpus(NUMBERS, TOKENIZER, DataConfig(), tmp_path)
    assert again.fingerprint == first.fingerprint and again.num_read == first.num_read
    assert sequences(again, "target") == sequences(first, "target")


def test_a_new_run_reads_the_text_twice_and_a_resumed_run_once(tmp_path, monkeypatch):
    config, data = from_text(tmp_path, PAIRS[:300])
    opened, open_ = [], Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *a, **k: opened.append(self.name) or open_(self, *a, **k)
    )

    def reads(train):
        opened.clear()
        text = ParallelText(config, data.root)
        tokenizer = train(text.pairs()) if train else TOKENIZER
        build_corpus(text, tokenizer, data, tmp_path / "c")
        return [opened.count(side) for side in SIDES]

    train = lambda pairs: [*pairs] and TOKENIZER  # noqa: E731
    assert reads(train) == [2, 2]
    assert reads(None) == [1, 1]


def test_equal_lines_of_several_files_get_different_segmentations(tmp_path):
    config, data = from_text(tmp_path, PAIRS[:300])
    twice = dataclasses.replace(config, source=("source",) * 2, target=("target",) * 2)
    corpus = build_corpus(twice, TOKENIZER, data, tmp_path / "twice", sampling=BpeDropout(0.3))
    lengths = corpus.lengths()[0].reshape(2, -1)
    assert corpus.num_read == 600 and (lengths[0] != lengths[1]).any()
    from_text(tmp_path, PAIRS[:300] * 2)
    whole = build_corpus(config, TOKENIZER, data, tmp_path / "whole", sampling=BpeDropout(0.3))
    assert sequences(whole, "source") == sequences(corpus, "source")


# Filters


@pytest.mark.parametrize(("workers", "sampling"), [(1, {}), (2, SAMPLED)])
def test_filters(tmp_path, workers, sampling):
    long = "nine hundred and ninety " * 20
    pairs = [
        ("one", "eins"),
        ("", "zwei"),
        ("two", "  "),
        ("three", "\u200b"),  # normalization removes a zero-width space
        ("\u200b", "drei"),
        (long, "eins"),
        ("eins", long),
        ("six", "sechs"),
    ]
    config, data = from_text(
        tmp_path, pairs, max_source_length=60, max_target_length=60, workers=workers
    )
    corpus = build_corpus(config, TOKENIZER, data, tmp_path / "corpus", **sampling)
    copies = sampling["sampling"].num_samples if sampling else 1
    assert (corpus.num_read, corpus.num_pairs) == (8 * copies, 2 * copies)
    found = [TOKENIZER.source.decode(ids) for ids in sequences(corpus, "source")]
    assert found == ["one"] * copies + ["six"] * copies


LONGER, LONGER_TOKENS = (
    "seven thousand, two hundred",
    len(TOKENIZER.source.encode(["seven thousand, two hundred"])[0]),
)
SHORTER, SHORTER_TOKENS = "one", len(TOKENIZER.source.encode(["one"])[0])


def test_length_limits_are_exact(tmp_path):
    config, data = from_text(tmp_path, [(LONGER, SHORTER), (SHORTER, SHORTER)])
    for most, kept in ((LONGER_TOKENS + 1, 2), (LONGER_TOKENS, 1)):
        limited = dataclasses.replace(data, max_source_length=most)
        assert build_corpus(config, TOKENIZER, limited, tmp_path / "corpus").num_pairs == kept


def test_copies_are_removed_where_their_segmentation_is_too_long(tmp_path):
    corpus = build_corpus(NUMBERS, TOKENIZER, DataConfig(max_target_length=20), tmp_path, **SAMPLED)
    free = build_corpus(NUMBERS, TOKENIZER, DataConfig(), tmp_path, **SAMPLED)
    fits = free.lengths()[1] <= 20
    # for some pairs, it depends on the segmentation
    assert 0 < fits.reshape(-1, 3).all(1).sum() < fits.reshape(-1, 3).any(1).sum()
    assert (corpus.num_read, corpus.num_pairs) == (9000, fits.sum())
    kept = [ids for ids, fit in zip(sequences(free, "source"), fits, strict=True) if fit]
    assert sequences(corpus, "source") == kept


def test_no_pairs_remain(tmp_path):
    config, data = from_text(tmp_path, [("", "a"), ("b", "")])
    with pytest.raises(
        UserError,
        match=r"No sentence pairs remain .* 2 pairs in .*Check the text, or raise data.max",
    ):
        build_corpus(config, TOKENIZER, data, tmp_path / "corpus")
    config, data = from_text(tmp_path, [])
    with pytest.raises(UserError, match=r"No sentence pairs remain .* the 0 pairs in"):
        build_corpus(config, TOKENIZER, data, tmp_path / "corpus")
    assert list((tmp_path / "corpus").glob("[!.]*")) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_invalid_line_leaves_no_files_or_processes(tmp_path, workers):
    config, data = from_text(tmp_path, [("a", "b")] * 2000 + [("a", b"\xff")], workers=workers)
    with pytest.raises(UserError, match=r"target, line 2001: byte 1 is not valid UTF-8"):
        build_corpus(config, TOKENIZER, data, tmp_path / "corpus")
    assert list((tmp_path / "corpus").glob("[!.]*")) == []
    assert not [child for child in psutil.Process().children() if is_worker(child)]


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpora, "tokenize_chunks", full)
    with pytest.raises(OSError, match="No space left") as raised:
        build_corpus(NUMBERS, TOKENIZER, DataConfig(), tmp_path)
    assert raised.value.filename == str(tmp_path)
    assert list(tmp_path.glob("[!.]*")) == []


# Crashes and concurrent builders

BUILDER = """
import os, signal, sys
from transformer_jax.settings.config import DataConfig, PairsConfig
from transformer_jax.data import corpus as corpora, tokenize
from transformer_jax.data.corpus import build_corpus
from transformer_jax.tokenization.subword_model import SubwordModel
from transformer_jax.tokenization.tokenizer import Tokenizer

if __name__ == "__main__":
    folder, workers, chunks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tokenize._CHUNK_PAIRS = 256
    tokenized = corpora.tokenize_chunks

    def tokenized_or_killed(*arguments):
        for number, chunk in enumerate(tokenized(*arguments), 1):
            if number == chunks:
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk

    corpora.tokenize_chunks = tokenized_or_killed
    tokenizer = Tokenizer.load(os.path.dirname(folder))
    build_corpus(NUMBERS, tokenizer, DataConfig(workers=workers), folder)
    print("built")
""".replace("NUMBERS", repr(NUMBERS))


def builder(tmp_path, folder, workers, chunks, program=BUILDER, **options):
    file = tmp_path / "builder.py"
    if not file.exists():  # another builder may be reading it
        TOKENIZER.save(tmp_path)
        file.write_text(program)
    command = [sys.executable, str(file), str(folder), str(workers), str(chunks)]
    modules = [str(Path(corpora.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(modules), "TEST_MARK": str(folder)}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.parametrize(("workers", "chunks"), [(1, 1), (2, 5)])
def test_killed_while_building(tmp_path, finished, workers, chunks):
    folder = tmp_path / "corpus"
    process = builder(tmp_path, folder, workers, chunks)
    process.communicate()
    assert process.returncode == -9
    [left] = folder.glob("[!.]*")
    assert left.name.startswith("tmp-")
    wait_for_orphans(folder)
    corpus = build_corpus(NUMBERS, TOKENIZER, DataConfig(), folder)
    assert contents(folder / corpus.fingerprint) == contents(finished)


def wait_for_orphans(folder):
    """Wait up to a minute until all processes that a builder started have ended."""

    def orphans():
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and mark(p) == str(folder)]

    deadline = time.time() + 60
    while orphans() and time.time() < deadline:
        time.sleep(0.05)
    assert not orphans()


def mark(process):
    try:
        return process.environ().get("TEST_MARK")
    except psutil.Error:
        return None


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of a corpus of NUMBERS."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokenize, "_CHUNK_PAIRS", 256)
        corpus = build_corpus(NUMBERS, TOKENIZER, DataConfig(), folder)
    return folder / corpus.fingerprint


def test_concurrent_builders(tmp_path, finished):
    folder = tmp_path / "corpus"
    processes = [builder(tmp_path, folder, 1, 0) for _ in range(2)]
    for process in processes:
        output, errors = process.communicate()
        assert (process.returncode, output) == (0, "built\n"), errors
    [only] = folder.glob("[!.]*")
    assert contents(only) == contents(finished)


def test_builders_meet_at_the_end(tmp_path, monkeypatch):
    write, barrier, built = corpora._write, threading.Barrier(2), []

    def write_and_meet(*arguments, **options):
        write(*arguments, **options)
        barrier.wait()

    monkeypatch.setattr(corpora, "_write", write_and_meet)
    build = lambda: built.append(build_corpus(NUMBERS, TOKENIZER, DataConfig(), tmp_path))  # noqa: E731
    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sequences(built[0], "source") == sequences(built[1], "source")
    assert len(list(tmp_path.glob("[!.]*"))) == 1


def flip_a_bit(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 16
    file.write_bytes(content)


def overwrite_tokens(file):
    content = file.read_bytes()
    file.write_bytes(content[:1000] + b"\7\0" * 2000 + content[5000:])


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("source_tokens", lambda file: os.truncate(file, 100)),
        ("source_tokens", lambda file: os.truncate(file, 0)),
        ("source_tokens", overwrite_tokens),
        ("target_tokens", lambda file: flip_a_bit(file, 3000)),
        ("source_offsets", lambda file: flip_a_bit(file, 8 * 2000 + 5)),
        ("target_offsets", Path.unlink),
        ("manifest.json", lambda file: file.write_text("{")),
        ("manifest.json", Path.unlink),
    ],
)
def test_a_corrupt_corpus_is_rebuilt(tmp_path, caplog, finished, name, spoil):
    folder = tmp_path / finished.name
    shutil.copytree(finished, folder)
    before = contents(folder)
    spoil(folder / name)
    assert open_corpus(tmp_path, finished.name) is None
    assert not caplog.records
    build_corpus(NUMBERS, TOKENIZER, DataConfig(), tmp_path)
    [record] = [each for each in caplog.records if each.levelname == "WARNING"]
    assert record.levelname == "WARNING" and "is corrupt; rebuilding it" in record.message
    assert contents(folder) == before
    assert list(tmp_path.glob("[!.]*")) == [folder]


def test_a_copied_corpus_opens(tmp_path, finished):
    shutil.copytree(finished, tmp_path / finished.name)
    corpus, copy = (open_corpus(folder, finished.name) for folder in (finished.parent, tmp_path))
    assert sequences(copy, "source") == sequences(corpus, "source")
    assert open_corpus(tmp_path, "0" * 64) is None


def test_the_fingerprint_is_that_of_the_tokenized_text(tmp_path):
    config, data = from_text(tmp_path, PAIRS[:10])
    text = ParallelText(config, data.root)
    before = text.fingerprint
    from_text(tmp_path, PAIRS[10:20])
    corpus = build_corpus(text, TOKENIZER, data, tmp_path / "c")
    again = build_corpus(config, TOKENIZER, data, tmp_path / "d")
    assert text.fingerprint != before and corpus.fingerprint == again.fingerprint


def test_a_script_needs_no_main_guard(tmp_path, finished):
    unguarded = BUILDER.replace('if __name__ == "__main__":', "if True:")
    output, errors = builder(tmp_path, tmp_path / "corpus", 2, 0, program=unguarded).communicate()
    assert output == "built\n", errors
    assert contents(tmp_path / "corpus" / finished.name) == contents(finished)


def test_ctrl_c_ends_all_processes_with_one_traceback(tmp_path):
    interrupted = BUILDER.replace(
        "os.kill(os.getpid(), signal.SIGKILL)", "os.killpg(0, signal.SIGINT)"
    )
    folder = tmp_path / "corpus"
    process = builder(tmp_path, folder, 2, 5, program=interrupted, start_new_session=True)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGINT and errors.count("Traceback") == 1, errors
    assert list(folder.glob("[!.]*")) == []
    wait_for_orphans(folder)


@pytest.mark.parametrize("when", ["starting", "busy", "sending"])
def test_a_killed_worker_is_an_error(tmp_path, monkeypatch, when):
    chunks, killed, taken = tokenize._chunks, [], 0
    monkeypatch.setattr(tokenize, "_CHUNK_PAIRS", {"sending": 4096}.get(when, 256))

    def kill_workers(pairs):
        for chunk in chunks(pairs):
            nonlocal taken
            taken += 1
            if taken == 3 + (when != "starting"):
                time.sleep({"starting": 0, "busy": 0.5, "sending": 3}[when])
                for child in filter(is_worker, psutil.Process().children()):
                    killed.append(child.pid)
                    child.kill()
            yield chunk

    monkeypatch.setattr(tokenize, "_chunks", kill_workers)
    numbers = number_files(20_000)
    with pytest.raises(
        UserError,
        match=r"^A tokenization process died\. If it ran out of memory, lower data\.workers\.$",
    ):
        build_corpus(numbers, TOKENIZER, DataConfig(workers=2), tmp_path)
    assert len(killed) == 2 and list(tmp_path.glob("[!.]*")) == []


def test_an_exception_in_a_worker_is_raised_in_the_main_process(tmp_path, monkeypatch):
    config, data = from_text(tmp_path, [("a", "b")] * 600, workers=2)
    pairs = iter([TextPair("\ud800", "not encodable")] * 600)
    monkeypatch.setattr(ParallelText, "text_pairs", lambda *_, **__: pairs)
    with pytest.raises(TypeError) as raised:
        build_corpus(config, TOKENIZER, data, tmp_path / "corpus")
    assert "in tokenize" in raised.value.__notes__[0]  # the worker's traceback


# Large vocabularies, corpora in memory, imports


@given(pairs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=24), data=st.data())
def test_any_sequences_and_lengths_can_be_read(pairs, data):
    """``pairs`` are lengths of source and target."""
    lengths = np.array(pairs, np.int64).reshape(-1, 2).T
    N, counter, expected, sides = len(pairs), iter(range(2000, 60_000)), [], []
    for side in (0, 1):
        found = [[next(counter) for _ in range(length)] for length in lengths[side]]
        ends = [0, *np.cumsum([len(sequence) for sequence in found], dtype=np.int64)]
        sides.append(Sequences(np.array(list(chain(*found)), np.uint16), np.array(ends, np.int64)))
        expected.append(found)
    corpus = Corpus("", tuple(sides), N)
    found = corpus.lengths()
    assert found.dtype == np.int32 and corpus.num_pairs == N
    np.testing.assert_array_equal(found, lengths)
    some = data.draw(st.lists(st.integers(0, N - 1)) if N else st.just([]))
    for side in (0, 1):
        tokens, their_lengths = corpus.read(side, np.array(some, np.int32))
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == [token for i in some for token in expected[side][i]]
        assert their_lengths.tolist() == [len(expected[side][i]) for i in some]


def test_tokens_are_wide_enough(tmp_path):
    corpus = build_corpus(NUMBERS, TOKENIZER, DataConfig(), tmp_path / "16")
    assert corpus.sides[1].tokens.dtype == np.uint16
    own = TOKENIZER.target.vocabulary
    vocabulary = dataclasses.replace(own, tokens=(*own.tokens, *[""] * 2**16))
    wide = Tokenizer(TOKENIZER.source, SubwordModel(TOKENIZER.target.model, vocabulary))
    corpus = build_corpus(NUMBERS, wide, DataConfig(), tmp_path / "32")
    assert [side.tokens.dtype for side in corpus.sides] == [np.uint16, np.int32]


def test_corpus_from_lists():
    corpus = Corpus.from_lists([[4, 5], []], [[6], [7, 8, 9]])
    assert sequences(corpus, "source") == [[4, 5, EOS_ID], [EOS_ID]]
    assert corpus.lengths()[1].tolist() == [2, 4]
    assert corpus.num_read == corpus.num_pairs == 2
    assert Corpus.from_lists([], []).lengths().shape == (2, 0)


def test_workers_need_no_jax():
    unwanted = "jax", "tensorflow_datasets", "orbax", "fsspec"  # the last one is only slow
    found = f"[name for name in {unwanted} if name in sys.modules]"
    program = f"import sys, transformer_jax.data.tokenize; print({found})"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output == "[]\n"


def test_no_worker_loads_jax(tmp_path, monkeypatch):
    """Even if the process that starts them uses it."""
    tokenize_chunks, libraries = corpora.tokenize_chunks, []

    def looked_at(*arguments):
        for chunk in tokenize_chunks(*arguments):
            for child in filter(is_worker, psutil.Process().children()):
                libraries.extend(each.path for each in child.memory_maps())
            yield chunk

    monkeypatch.setattr(corpora, "tokenize_chunks", looked_at)
    build_corpus(NUMBERS, TOKENIZER, DataConfig(workers=2), tmp_path)
    assert any("sentencepiece" in path for path in libraries)
    assert not any("jaxlib" in path for path in libraries)


def test_number_of_cores(monkeypatch):
    assert num_cores() >= 1
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5}, raising=False)  # as under taskset
    assert num_cores() == 1
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert num_cores() == 3


def test_blank_lines_are_filtered_even_if_they_have_tokens(tmp_path):
    """Without normalization, spaces are tokens."""
    settings = TokenizerConfig(vocab_size=90, normalization="identity")
    tokenizer = Tokenizer.train([*PAIRS[:300], ("a   b", "a   b")], settings)
    assert tokenizer.source.encode(["   "])[0]
    config, data = from_text(tmp_path, [("one", "   "), ("   ", "eins"), ("two", "zwei")])
    corpus = build_corpus(config, tokenizer, data, tmp_path / "corpus")
    assert (corpus.num_read, corpus.num_pairs) == (3, 1)
