"""Search settings as transformers has them in generation_config.json, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformer_jax import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    Config,
    DecodingConfig,
    Tokenizer,
    UserError,
)
from transformer_jax.interop.export import length_limits
from transformer_jax.interop.vocabulary import Arrangement

_DEFAULTS: dict[str, Any] = {  # of transformers
    "num_beams": 1,
    "length_penalty": 1.0,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
}
# Settings of transformers' search without a counterpart here, and values that switch them off.
_NO_COUNTERPART: dict[str, Any] = {
    "early_stopping": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "min_p": 0,
    "top_h": 1,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "renormalize_logits": False,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_decoder_ids": None,
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "force_words_ids": [],
    "constraints": [],
    "stop_strings": [],
    "max_time": None,
    "dola_layers": None,
    "watermarking_config": {},
}


def generation_config(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """Our search settings under their names."""
    decoding = config.decoding
    suppressed = tokenizer.require_target_ids(decoding.suppress, "decoding.suppress")
    return {
        "num_beams": decoding.beam_size,
        "length_penalty": decoding.length_penalty,
        "max_length": length_limits(config)[1] + 1,  # BOS counts there
        "min_new_tokens": decoding.min_length,
        "no_repeat_ngram_size": decoding.no_repeat_ngram,
        "bad_words_ids": [[token] for token in (PAD_ID, *suppressed)],
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": BOS_ID,
        "forced_eos_token_id": EOS_ID,
    }


def decoding_config(
    theirs: dict[str, Any], target: Arrangement, file: Path
) -> tuple[DecodingConfig, list[str]]:
    """Their search settings, read from ``file``, as ours, and where the search differs, a line
    each; ``UserError`` for what decoding refuses.
    """
    settings = _DEFAULTS | {name: value for name, value in theirs.items() if value is not None}
    token_of_row = dict(zip(target.rows_V.tolist(), target.tokens, strict=True))
    # Decoding from PAD there: its row is BOS here, so what forbids PAD there forbids BOS here.
    banned = [ids[0] for ids in settings["bad_words_ids"] if len(ids) == 1]
    banned += settings["suppress_tokens"]
    suppress = dict.fromkeys(token_of_row[i] for i in banned if i in token_of_row)
    suppress.pop(target.tokens[PAD_ID], None)
    sampling: dict[str, Any] = {}
    if settings["do_sample"]:
        sampling = {name: settings[name] for name in ("temperature", "top_k", "top_p")}
        sampling["method"] = "sample"
    # the start counts there
    min_length = settings.get("min_new_tokens", max(settings["min_length"] - 1, 0))
    try:
        decoding = DecodingConfig(
            beam_size=settings["num_beams"],
            length_penalty=float(max(settings["length_penalty"], 0)),
            length_offset=0.0,
            min_length=min_length,
            no_repeat_ngram=settings["no_repeat_ngram_size"],
            suppress=tuple(suppress),
            **sampling,
        )
    except UserError as error:
        raise UserError(
            f"{str(file)!r} asks for what decoding here refuses: {error} Change or remove it there."
        ) from None
    return decoding, _notes(settings, decoding)


def _notes(settings: dict[str, Any], decoding: DecodingConfig) -> list[str]:
    limits = [f"{n} {settings[n]}" for n in ("max_new_tokens", "max_length") if n in settings]
    notes = [
        f"{[*limits, 'no limit'][0]} there; here a translation has at most source length + "
        f"{decoding.max_extra_length} tokens (decoding.max_extra_length)."
    ]
    if any(len(ids) > 1 for ids in settings["bad_words_ids"]):
        notes.append("bad_words_ids of several tokens are left out.")
    if (penalty := settings["length_penalty"]) < 0:
        notes.append(
            f"length_penalty is {penalty:g} there, 0 here, where nothing makes short translations "
            "better."
        )
    sampling = decoding.method == "sample"
    if sampling and decoding.beam_size > 1:
        notes.append(
            f"num_beams {decoding.beam_size} with do_sample: here {decoding.beam_size} samples are "
            "drawn, each by itself."
        )
    left_out = [
        f"{name} {settings[name]}"
        for name, off in _NO_COUNTERPART.items()
        if settings.get(name, off) != off
    ]
    if left_out:
        notes.append(f"left out, since they have no counterpart here: {', '.join(left_out)}.")
    return notes
