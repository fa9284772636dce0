"""One engine of ``decode_speed.py`` in a process of its own (in_turn.py); not for use by hand."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.decode_job import EOS_ID, PAD_ID, Job
from benchmarks.in_turn import Runner, Skipped, answer_once, serve


class CTranslate2:
    """``ctranslate2.Translator``: one call, which sorts and cuts by itself; forced lengths need a
    call a batch.
    """

    def __init__(self, job: Job, *, int8: bool):
        import ctranslate2

        on_gpu = job["device"] == "gpu"
        if on_gpu and not ctranslate2.get_cuda_device_count():
            raise Skipped("this build of ctranslate2 sees no GPU")
        precision = (
            ("int8_bfloat16" if int8 else "bfloat16") if on_gpu else ("int8" if int8 else "float32")
        )
        self.about = {"precision": precision}
        self._translator = ctranslate2.Translator(
            str(job["folder"] / "ctranslate2"),
            device="cuda" if on_gpu else "cpu",
            compute_type=precision,
            inter_threads=1,
            intra_threads=job["threads"],
        )
        tokens = json.loads((job["folder"] / "tokens.json").read_text())
        self._source = [[tokens["source"][i] for i in ids] for ids in job["source"]]
        self._ids = {token: i for i, token in enumerate(tokens["target"])}
        # PAD and EOS are their own special tokens there; our search never writes PAD.
        self._settings = {
            "beam_size": job["beam_size"],
            "length_penalty": job["length_penalty"],
            "max_batch_size": job["batch_size"],
            "max_input_length": 0,
            "suppress_sequences": [[tokens["target"][PAD_ID]]],
        }
        self._job = job

    def __call__(self) -> list[list[int]]:
        """The best output of each sentence, all positions decoded but a final EOS."""
        forced, translate = self._job["forced"], self._translator.translate_batch
        results = []
        if forced:
            for batch in self._job.batches():
                length = forced[batch.start]
                limits = {"min_decoding_length": length, "max_decoding_length": length}
                results += translate(self._source[batch], **self._settings, **limits)
        else:
            longest = 1 + len(self._source[0]) + self._job["max_extra_length"]
            results = translate(self._source, **self._settings, max_decoding_length=longest)
        return [[self._ids[token] for token in result.hypotheses[0]] for result in results]

    def extras(self) -> dict[str, Any]:
        return {}


class HuggingFace:
    """``MarianMTModel.generate``, a call a batch of sentences of like length."""

    def __init__(self, job: Job):
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        import transformers

        on_gpu = job["device"] == "gpu"
        if on_gpu and not torch.cuda.is_available():
            raise Skipped("this build of torch sees no GPU")
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(job["threads"])
        self._torch, self._device = torch, "cuda" if on_gpu else "cpu"
        precision = "bfloat16" if on_gpu else "float32"
        self.about = {"precision": precision}
        model = transformers.MarianMTModel.from_pretrained(
            job["folder"] / "huggingface", dtype=getattr(torch, precision)
        )
        # as in CTranslate2, an output may be cut at the longest length
        model.generation_config.forced_eos_token_id = None
        self._model, self._job = model.eval().to(self._device), job

    def __call__(self) -> list[list[int]]:
        """The best output of each sentence, all positions decoded but a final EOS."""
        torch, job, results = self._torch, self._job, []
        for batch in job.batches():
            source = job["source"][batch]
            longest = 1 + max(map(len, source))
            rows = [[*ids, EOS_ID] + [PAD_ID] * (longest - 1 - len(ids)) for ids in source]
            input_ids = torch.tensor(rows, device=self._device)
            if job["forced"]:
                length = job["forced"][batch.start]
                limits = {"min_new_tokens": length, "max_new_tokens": length}
            else:
                limits = {"max_new_tokens": longest + job["max_extra_length"]}
            with torch.inference_mode():
                found = self._model.generate(
                    input_ids=input_ids,
                    attention_mask=(input_ids != PAD_ID).long(),
                    num_beams=job["beam_size"],
                    length_penalty=job["length_penalty"],
                    do_sample=False,
                    **limits,
                )
            for row in found[:, 1:].tolist():
                results.append(
                    [
                        token
                        for token in row[: row.index(EOS_ID) if EOS_ID in row else None]
                        if token != PAD_ID
                    ]
                )
        return results

    def extras(self) -> dict[str, Any]:
        if self._device == "cpu":
            return {}
        return {"peak_device_gb": round(self._torch.cuda.max_memory_allocated() / 1e9, 3)}


def start(name: str, job: Job) -> Runner:
    """The engine of that name, ready to run; ``Skipped`` where it cannot."""
    if name == "ours":
        from benchmarks.decode_ours import Ours

        return Ours(job)
    try:
        importlib.import_module(
            name.removesuffix("_int8") if "ctranslate2" in name else "transformers"
        )
        return (
            CTranslate2(job, int8=name.endswith("int8"))
            if "ctranslate2" in name
            else HuggingFace(job)
        )
    except ImportError as error:
        raise Skipped(f"not installed: {error}") from None


def main() -> None:
    """``python -m benchmarks.decode_engines NAME FOLDER``; ``prepare`` writes what the engines
    need.
    """
    name, job = sys.argv[1], Job.read(Path(sys.argv[2]))
    if name == "prepare":
        from benchmarks.decode_ours import prepare

        answer_once(lambda: prepare(job))
    else:
        serve(lambda: start(name, job))


if __name__ == "__main__":
    main()
