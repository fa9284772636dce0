"""Scripts that are written without spaces, as ranges for regular expressions."""

_SOUTHEAST_ASIAN = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer

CHINESE_JAPANESE = r"\u3001-\u30ff\u3400-\u9fff\uff00-\uffef\U00020000-\U0003ffff"
"""Chinese and Japanese, with their punctuation: no spaces between words or sentences."""

UNSPACED = _SOUTHEAST_ASIAN + CHINESE_JAPANESE
"""Also Thai, Lao, Burmese and Khmer: no spaces between words, but between sentences."""

UNSPACED_LETTERS = (
    rf"{_SOUTHEAST_ASIAN}\u3005-\u3007\u3031-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
)
"""The same without punctuation."""
