"""What decode.py does, from files to files: check, translate or score, write, compare with
references.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, tee
from pathlib import Path
from typing import Any

import jax

from transformer_jax.cli import check_output
from transformer_jax.config import Config
from transformer_jax.config_io import load_config_file
from transformer_jax.data.sources import read_lines
from transformer_jax.decoding.alignment import aligned
from transformer_jax.decoding.flags import Arguments, Results
from transformer_jax.decoding.output import Output
from transformer_jax.decoding.parts import join_parts, parse_part, part_path
from transformer_jax.decoding.records import Record, UntilFault, open_records, paired
from transformer_jax.decoding.resuming import ResumableFile, Stream, fingerprint
from transformer_jax.decoding.scoring import Scorer
from transformer_jax.decoding.translator import Request, Translation, Translator
from transformer_jax.errors import UserError
from transformer_jax.evaluation import bleu, check_pairs, chrf
from transformer_jax.remote_workdir import local_workdir
from transformer_jax.sharding import devices_for_rows

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_REPORTS = 60


def run_job(a: Arguments) -> None:
    """Do what the flags ask for; ``UserError`` where they, the model or the input do not allow
    it.
    """
    _check_flags(a)
    if a.files.join:
        logger.info("%d sentences joined.", join_parts(str(a.files.output)))
        return
    # What lies at a URL is copied once.
    a = dataclasses.replace(a, workdir=tuple(str(local_workdir(each)) for each in a.workdir))
    config = _config(a.workdir)
    part = parse_part(a.files.part) if a.files.part else (0, 1)
    path = part_path(str(a.files.output), part) if a.files.part else a.files.output
    scoring = a.evaluation.score is not None
    token_scores = a.results.token_scores or (scoring and a.files.format == "jsonl")
    shape = Output(a.files.format, a.results.nbest, scoring, token_scores, a.results.alignments)
    read = open_records(
        a.files.input or sys.stdin.buffer,
        format=a.files.format,
        text_field=a.files.text_field,
        part=part,
        targets=a.evaluation.score,
        hold=a.evaluation.reference is not None,
    )
    references = (
        None if a.evaluation.reference is None else list(read_lines(a.evaluation.reference))
    )
    tokenize = a.evaluation.bleu_tokenize or config.training.bleu_tokenize
    if references is not None:  # before the work, not after it
        check_pairs([record.text for record in read()], references)
        bleu(references[:1], references[:1], tokenize=tokenize)
    models = _Models.load(a, config)
    _check_against_model(a, models, read)
    start = time.perf_counter()
    with _open(path, a, models, group_size=shape.group_size) as output:
        if output.kept:
            logger.info("%d sentences were there already.", output.kept)
        records = iter(read())
        if (passed := sum(1 for _ in islice(records, output.kept))) < output.kept:
            raise UserError(
                f"{path} has {output.kept} sentences already, the input only {passed}; expected the same input again."
            )
        written = _written(records, output, shape, models)
        best = [text for text in written if references is not None]
    models.report()
    logger.info("%.1f s; %d programs compiled.", time.perf_counter() - start, models.num_compiled)
    if references is not None:
        print(bleu(best, references, tokenize=tokenize), file=sys.stderr)
        print(chrf(best, references), file=sys.stderr)
        if models.translator is not None and models.translator.config.shortlist:
            requests = [record.request() for record in read()]
            _compare(
                models.translator,
                requests,
                references,
                tokenize,
                nbest=a.results.nbest,
                devices=models.devices,
            )


@dataclasses.dataclass(frozen=True)
class _Models:
    """What translates, if given targets are not scored, and what scores and aligns, if anything is
    to be.
    """

    translator: Translator | None
    scorer: Scorer | None
    devices: Sequence[jax.Device]
    results: Results
    window: int | None
    """Records read before the first of them is answered; None: what suits the batch."""

    @classmethod
    def load(cls, a: Arguments, config: Config) -> _Models:
        at_terminal = a.files.input is None and sys.stdin.isatty()
        window = a.files.window or (1 if at_terminal else None)
        search = {
            name: value for name, value in dataclasses.asdict(a.search).items() if value is not None
        }
        if window == 1:
            search.setdefault("batch_size", 1)
        # whose beam_size says nothing of samples
        if a.search.method == "sample" and config.decoding.method == "beam":
            search.setdefault("beam_size", a.results.nbest)
        devices = devices_for_rows(search.get("batch_size", config.decoding.batch_size))
        which: dict[str, Any] = {
            "checkpoint": a.checkpoint,
            "average": a.average,
            "devices": devices,
        }
        translator = scorer = None
        # nothing is searched: the run's shortlist need not be there
        if a.evaluation.score is not None:
            scorer = Scorer.from_workdir(a.workdir, **which, **search, shortlist="")
        else:
            translator = Translator.from_workdir(a.workdir, **which, **search)
            if a.results.alignments:
                scorer = Scorer(
                    translator.models, translator.tokenizer, translator.config, devices=devices
                )
        return cls(translator, scorer, devices, a.results, window)

    @property
    def loaded(self) -> Translator | Scorer:
        """One of them, for what both know: config, parameters, tokenizer."""
        found = self.translator or self.scorer
        assert found is not None
        return found

    def answers(self, records: Iterable[Record]) -> Iterable[list[Translation]]:
        """For each record its translations, best first; or its target, scored."""
        if self.translator is not None:
            requests = (record.request() for record in records)
            return self.translator.stream(
                requests, num_hypotheses=self.results.nbest, window=self.window
            )
        assert self.scorer is not None
        pairs, numbers = tee(records)
        found = self.scorer.score(
            ((r.text, r.target) for r in pairs),
            numbers=(r.number + 1 for r in numbers),
            window=self.window,
        )
        return ([scored] for scored in found)

    def checked(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records; ``UserError`` at one whose prefix cannot be forced."""
        for record in records:
            if record.prefix and self.translator is not None:
                self.translator.prefix_tokens(record.request())
            yield record

    @property
    def num_compiled(self) -> int:
        of_translator = 0 if self.translator is None else self.translator.engine.num_compiled
        return of_translator + (0 if self.scorer is None else self.scorer.num_compiled)

    def report(self) -> None:
        """Log what did not go as it should."""
        if self.translator is not None and self.translator.num_failed:
            logger.warning(
                "%d lines could not be translated; their output is empty.",
                self.translator.num_failed,
            )
        if self.scorer is not None and self.scorer.num_failed:
            logger.warning(
                "%d lines were too long to be scored; their figure is nan.", self.scorer.num_failed
            )
        if self.translator is not None and self.translator.num_split:
            logger.warning("%d lines were translated in parts.", self.translator.num_split)


def _written(
    records: Iterable[Record], output: ResumableFile | Stream, shape: Output, models: _Models
) -> Iterator[str]:
    """Answers the records, writes the answers as they come, and gives the text of the best of each
    that is written.
    """
    start = said = time.perf_counter()
    sound = UntilFault(models.checked(records))
    results = paired(sound, models.answers)
    aligner = models.scorer if models.results.alignments else None
    layer = models.results.alignment_layer
    answers = aligned(results, aligner, layer=layer, window=models.window)
    for done, (record, translations, alignments) in enumerate(answers, 1):
        output.write(shape.lines(record, translations, alignments))
        yield translations[0].text
        now = time.perf_counter()
        if now - said > _SECONDS_BETWEEN_REPORTS:
            said = now
            logger.info("%d lines in %.0f s.", done, now - start)
    if sound.fault is not None:
        raise sound.fault  # what came before it is written


def _compare(
    translator: Translator,
    requests: list[Request],
    references: list[str],
    tokenize: str,
    *,
    nbest: int,
    devices: Sequence[jax.Device],
) -> None:
    """Say what the shortlist costs in BLEU and what it saves. Its own shapes are compiled
    already.
    """

    def best(of: Translator) -> list[str]:
        return [translations[0].text for translations in of.stream(requests, num_hypotheses=nbest)]

    everything = dataclasses.replace(translator.config, shortlist="")
    whole = Translator(translator.models, translator.tokenizer, everything, devices=devices)
    best(whole)  # compiles
    lines, seconds = [], []
    for each in (translator, whole):
        start = time.perf_counter()
        lines.append(best(each))
        seconds.append(time.perf_counter() - start)
    print(
        f"without the shortlist: {bleu(lines[1], references, tokenize=tokenize)}", file=sys.stderr
    )
    differ = sum(one != other for one, other in zip(*lines, strict=True))
    print(
        f"The shortlist changes {differ} of {len(requests)} lines ({differ / len(requests):.1%}) and takes {seconds[0]:.2f} s "
        f"instead of {seconds[1]:.2f} s, compiling apart.",
        file=sys.stderr,
    )


def _check_flags(a: Arguments) -> None:
    """Refuse what cannot be meant, before anything is read."""
    files, evaluation = a.files, a.evaluation
    if not a.workdir and not files.join:
        raise UserError("--workdir is missing; expected a work directory written by train.py.")
    for name in ("resume", "part", "join"):
        if getattr(files, name) and files.output is None:
            raise UserError(
                f"--{name} is given without --output; expected the file that it is about."
            )
    if files.window is not None and files.window < 1:
        raise UserError(f"window is {files.window}; expected 1 or more.")
    if evaluation.score is not None and (a.results.nbest > 1 or evaluation.reference):
        raise UserError(
            "--score has one given target a line; expected neither --nbest nor --reference with it."
        )
    _check_for_purpose(a)
    if evaluation.reference and (files.resume or files.part):
        raise UserError(
            "--reference needs the whole output of one run; score the finished file with sacrebleu instead."
        )
    for name, path in (
        ("input", files.input),
        ("reference", evaluation.reference),
        ("score", evaluation.score),
    ):
        if path is not None and not Path(path).is_file():
            what = "is no regular file" if Path(path).exists() else "does not exist"
            raise UserError(
                f"{name} is {path!r}, which {what}; expected a text file{' or stdin' * (name == 'input')}."
            )
        if (
            path is not None
            and files.output is not None
            and Path(path).resolve() == Path(files.output).resolve()
        ):
            raise UserError(
                f"output and {name} are both {path!r}; expected another file for the output."
            )
    if files.output is not None:
        check_output(files.output)
    # which is read as what its name says
    if files.output is not None and files.output.endswith(".gz"):
        raise UserError(
            f"output is {files.output!r}, but what is written is not compressed; expected a name without .gz."
        )


def _check_for_purpose(a: Arguments) -> None:
    """Refuse flags that would change nothing."""
    results, evaluation, files = a.results, a.evaluation, a.files
    for name, is_given, other, is_there in (
        (
            "--alignment-layer",
            results.alignment_layer != -1,
            "--alignments",
            results.alignments is not None,
        ),
        (
            "--bleu-tokenize",
            evaluation.bleu_tokenize is not None,
            "--reference",
            evaluation.reference is not None,
        ),
        ("--text-field", files.text_field != "text", "--format jsonl", files.format == "jsonl"),
    ):
        if is_given and not is_there:
            raise UserError(
                f"{name} is given without {other}, which it is about; expected both or neither."
            )
    of_scores = ("length_penalty", "length_offset", "batch_size")
    for name, value in dataclasses.asdict(a.search).items():
        if evaluation.score is not None and value is not None and name not in of_scores:
            raise UserError(
                f"--{name.replace('_', '-')} is given with --score, which searches nothing; leave it out."
            )


def _check_against_model(
    a: Arguments, models: _Models, read: Callable[[], Iterable[Record]]
) -> None:
    """Refuse what this model cannot do, before the output file is touched."""
    config = models.loaded.config
    if a.results.nbest > config.beam_size:
        raise UserError(
            f"num_hypotheses is {a.results.nbest}; expected 1 to decoding.beam_size = {config.beam_size}."
        )
    if config.method != "sample":
        for name in ("temperature", "top_k", "top_p", "seed"):
            if (value := getattr(a.search, name)) is not None:
                raise UserError(
                    f"{name} is {value} without sampling; expected --method sample with it."
                )
    if models.scorer is not None and a.results.alignments:
        models.scorer.align_tokens([], layer=a.results.alignment_layer)  # is there such a layer?
    if a.files.input is not None and a.files.format == "jsonl":
        for _ in models.checked(read()):
            pass


def _config(workdirs: tuple[str, ...]) -> Config:
    """The first run's; every run must be there."""
    for workdir in workdirs:
        if not (Path(workdir) / "config.json").is_file():
            raise UserError(
                f"workdir is {workdir!r}, which has no config.json; expected a work directory written by train.py."
            )
    config = load_config_file(Path(workdirs[0]) / "config.json")
    if config.training.compilation_cache:
        jax.config.update(
            "jax_compilation_cache_dir", os.path.expanduser(config.training.compilation_cache)
        )
    return config


def _open(
    path: str | Path | None, a: Arguments, models: _Models, *, group_size: int
) -> ResumableFile | Stream:
    if path is None:
        return Stream(sys.stdout.buffer)
    if Path(path).exists() and not Path(path).is_file():
        return Stream(open(path, "wb"))  # a device or a named pipe
    model = models.loaded
    settings: dict[str, Any] = {"task": "translate" if a.evaluation.score is None else "score"}
    contents = {
        "input": a.files.input,
        "targets": a.evaluation.score,
        "shortlist": model.config.shortlist,
    }
    settings |= dataclasses.asdict(model.config)
    for name, file_name in contents.items():
        if file_name:
            with open(file_name, "rb") as file:
                settings[name] = hashlib.file_digest(file, "sha256").hexdigest()
    settings |= {"parts": int(a.files.part.partition("/")[2]) if a.files.part else 1}
    settings |= {"format": a.files.format, "text_field": a.files.text_field} | dataclasses.asdict(
        a.results
    )
    settings |= {"model": fingerprint(model.parameters), "tokenizer": model.tokenizer.fingerprint}
    keep_progress = a.files.part is not None or a.files.resume
    return ResumableFile(
        path, settings, nbest=group_size, resume=a.files.resume, keep_progress=keep_progress
    )
