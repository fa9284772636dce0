"""Ids of the four special tokens, which come first in every vocabulary."""

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3

SPECIAL_IDS = {"pad": PAD_ID, "bos": BOS_ID, "eos": EOS_ID, "unk": UNK_ID}
"""Ids by the names in ``ModelConfig.decoder_start``."""
