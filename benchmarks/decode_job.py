"""What ``decode_speed.py`` asks of every engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# As in transformer_jax.special_ids; engines other than ours do not import the package.
PAD_ID, EOS_ID = 0, 2
NAMES = ("ours", "ctranslate2", "ctranslate2_int8", "huggingface")


class Job(dict[str, Any]):
    """What every engine gets: ``source`` token ids without EOS, longest first; ``forced`` output
    lengths, or None.
    """

    @classmethod
    def read(cls, folder: Path) -> Job:
        """As ``decode_speed.py`` wrote it, together with the folder of the exported models."""
        return cls(json.loads((folder / "job.json").read_text()), folder=folder)

    def batches(self) -> list[slice]:
        """Neighbours of like length; in the forced setting each batch has one output length."""
        return [
            slice(i, i + self["batch_size"])
            for i in range(0, len(self["source"]), self["batch_size"])
        ]
