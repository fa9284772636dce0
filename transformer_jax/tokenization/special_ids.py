"""Ids of the four special tokens, which come first in every vocabulary."""

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
