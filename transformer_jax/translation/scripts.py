"""Scripts that are written without spaces, as ranges for regular expressions."""

CHINESE_JAPANESE = r"\u3001-\u30ff\u3400-\u9fff\uff00-\uffef\U00020000-\U0003ffff"
"""Chinese and Japanese, with their punctuation: no spaces between words or sentences."""

UNSPACED = rf"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff{CHINESE_JAPANESE}"
"""Also Thai, Lao, Burmese and Khmer: no spaces between words, but between sentences."""
