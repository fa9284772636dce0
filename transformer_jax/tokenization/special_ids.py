"""Ids of the special tokens in vocabularies that are trained here, and defaults of ``ModelConfig``.

Other vocabularies have their own ids (``SubwordModel.pad_id``, ``ModelConfig.pad_id``).
"""

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
UNK_ID = 3
