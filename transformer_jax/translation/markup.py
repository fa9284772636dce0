"""HTML and XML documents: lines of plain text to translate, and tags around translated words.

A document is read as tokens, then as items: text, inline tags, atoms, and borders between lines.
The model sees the text of a line without tags. Its translation is written between the same tags and
atoms, placed by the alignment. Everything but the text of lines stays byte for byte, and a line
whose translation is the same text stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from transformer_jax.tokenization.tokenizer import Tokenizer
from transformer_jax.translation.documents.formats import FORMATS, FormatName
from transformer_jax.translation.documents.items import document_items, lines_of_items
from transformer_jax.translation.documents.line import DocumentLine
from transformer_jax.translation.documents.placeholders import PLACEHOLDERS
from transformer_jax.translation.documents.placing import TargetLine, TargetWriter
from transformer_jax.translation.requests import Translation


class Document:
    """A document.

    Attributes:
      lines: the lines to translate, in order. A line that has ``marks`` needs an alignment.
    """

    def __init__(
        self,
        text: str,
        format: FormatName,
        tokenizer: Tokenizer,
        *,
        protect: Sequence[str] = PLACEHOLDERS,
        name: str = "The document",
    ):
        """Read a document.

        Args:
          format: a name in ``FORMATS``.
          protect: regular expressions of placeholders, which match the text without character
            references.
          name: stands in messages.

        Raises:
          UserError: XML is not well-formed, or a file of strings, such as XLIFF.
        """
        self._text = text
        self._tokenizer = tokenizer
        self._format = FORMATS[format]
        self._protect = tuple(protect)

        @cache
        def can_copy(placeholder: str) -> bool:
            [ids] = tokenizer.source.encode([placeholder])
            return tokenizer.source.unk_id not in ids

        self.lines = list[DocumentLine]()
        for items in lines_of_items(document_items(text, self._format, name)):
            line = DocumentLine(text, items, can_copy, protect)
            if line.has_letters:
                self.lines.append(line)

    def join(self, translations: Iterable[Translation]) -> str:
        """Return the document with a translation of each line. Marks follow its alignment or, if it
        has none, keep their relative positions.
        """
        parts = list[str]()
        end = 0
        for line, translation in zip(self.lines, translations):
            target = TargetLine(line, translation, self._tokenizer, self._protect)
            parts.append(self._text[end : line.start])
            parts.append(TargetWriter(line, target, self._format.escape).write())
            end = line.end
        return "".join([*parts, self._text[end:]])
