"""A work directory's corpora; that of the training text may be prepared in parts, by many processes
or machines.

Of F files in the text, part k of n (both from 0) is files floor(k F / n) <= f < floor((k + 1) F /
n). It is a corpus of its own, named after a hash of its files and the settings. The parts in order,
opened as one, are the corpus that a single process would have built: same pairs, same order, same
segmentations, same fingerprint.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config, PairsConfig
from transformer_jax.data.corpus import Corpus, build, locate, open_corpus, require_pairs
from transformer_jax.data.files import one_file_each
from transformer_jax.data.joined import Joined
from transformer_jax.data.tokenize import TokeniseJob
from transformer_jax.errors import UserError
from transformer_jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def prepare_corpus(workdir: Path, config: Config, tokenizer: Tokenizer, name: str) -> Corpus:
    """The tokenised pairs of ``config.data.<name>`` (train, dev), built if need be; only train is
    segmented at random.

    With ``data.shards`` above 1 those of train are opened; ``UserError`` if one is missing.
    """
    pairs: PairsConfig = getattr(config.data, name)
    if name == "train" and config.data.shards > 1:
        corpus = _open_parts(workdir, config, tokenizer)
        require_pairs(corpus.statistics, pairs)
    else:
        corpus = build(_job(config, tokenizer, name), pairs, _directory(workdir, config))
    _log_statistics(name, corpus)
    return corpus


def prepare_shard(workdir: Path, config: Config, tokenizer: Tokenizer, shard: int) -> Corpus:
    """Shard ``shard`` (from 0) of the ``config.data.shards`` shards of the training text, built if need
    be; it may be empty.
    """
    pairs, first_file = _shares(config)[shard]
    job = dataclasses.replace(_job(config, tokenizer, "train"), first_file=first_file)
    corpus = build(job, pairs, _directory(workdir, config), may_be_empty=config.data.shards > 1)
    _log_statistics(f"shard {shard}/{config.data.shards}", corpus)
    return corpus


def join(parts: Sequence[Corpus], fingerprint: str) -> Corpus:
    """The corpora in this order as one; their arrays stay where they are."""
    K, lengths = parts[0].num_samples, [part.num_pairs for part in parts]
    arrays: dict[str, Any] = {}
    for side in ("source", "target"):
        tokens, offsets, shifts, total = [], [], [], 0
        for v in range(K):
            for part, N in zip(parts, lengths, strict=True):
                part_tokens, part_offsets = (
                    getattr(part, f"{side}_tokens"),
                    getattr(part, f"{side}_offsets"),
                )
                begin, end = int(part_offsets[v * N]), int(part_offsets[(v + 1) * N])
                tokens.append(part_tokens[begin:end])
                offsets.append(part_offsets[v * N : (v + 1) * N])
                shifts.append(total - begin)
                total += end - begin
        arrays |= {
            f"{side}_tokens": Joined(tokens),
            f"{side}_offsets": Joined([*offsets, np.array([total])], [*shifts, 0]),
        }
    statistics = {
        name: sum(part.statistics[name] for part in parts) for name in parts[0].statistics
    }
    return Corpus(
        fingerprint, sum(lengths), K, **arrays, statistics=statistics, directory=parts[0].directory
    )


def _open_parts(workdir: Path, config: Config, tokenizer: Tokenizer) -> Corpus:
    directory, job = _directory(workdir, config), _job(config, tokenizer, "train")
    parts = []
    for k, (pairs, first_file) in enumerate(_shares(config)):
        folder, fingerprint = locate(
            dataclasses.replace(job, first_file=first_file), pairs, directory
        )
        corpus = open_corpus(folder, fingerprint)
        if corpus is None:
            shard, path = f"{k}/{config.data.shards}", workdir / "config.json"
            raise UserError(
                f"Shard {shard} of the training text is {'damaged' if folder.exists() else 'missing'}: {folder}; expected "
                "what this command makes of the text and settings as they are now:\n"
                f"  python -m transformer_jax.training.tokenize_ahead --config {path} --workdir {workdir} --shard {shard}"
            )
        parts.append(corpus)
    _, fingerprint = locate(job, config.data.train, directory)
    return join(parts, fingerprint)


def _shares(config: Config) -> list[tuple[PairsConfig, int]]:
    """The files of each part, and how many stand before them."""
    files, count = one_file_each(config.data.train, config.data.root), config.data.shards
    if count > len(files):
        raise UserError(
            f"data.shards is {count}; expected at most {len(files)}, the files of data.train: a shard is whole files. Cut large "
            "ones, on both sides at the same lines (split -l 1000000), and name them by a glob."
        )
    bounds = [k * len(files) // count for k in range(count + 1)]
    shares = []
    for first, end in pairwise(bounds):
        source = tuple(chain.from_iterable(file.source for file in files[first:end]))
        target = tuple(chain.from_iterable(file.target for file in files[first:end]))
        shares.append((dataclasses.replace(config.data.train, source=source, target=target), first))
    return shares


def _job(config: Config, tokenizer: Tokenizer, name: str) -> TokeniseJob:
    if name != "train" or not config.tokenizer.sampling:
        return TokeniseJob(tokenizer, config.data, 0.0, 1, 0)
    return TokeniseJob(
        tokenizer,
        config.data,
        config.tokenizer.sampling,
        config.tokenizer.sampled_epochs,
        config.seed,
    )


def _directory(workdir: Path, config: Config) -> Path:
    return Path(config.data.cache).expanduser() if config.data.cache else workdir / "corpus"


def digests_folder(workdir: Path, config: Config) -> Path:
    """Where the hashes of the text's files are remembered."""
    return _directory(workdir, config) / "digests"


def _log_statistics(name: str, corpus: Corpus) -> None:
    _log.info(
        "%s pairs: %s",
        name,
        ", ".join(f"{count:,} {what}" for what, count in corpus.statistics.items()),
    )
