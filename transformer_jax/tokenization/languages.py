"""Languages of a model: the tokens that stand around a source and before a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from transformer_jax.errors import UserError, short_repr

Layout = Literal["both", "after", "start", "tag"]
Side = Literal["source", "target"]


class Places(NamedTuple):
    """The languages, source's or target's, whose tokens stand at each place around a line."""

    before_source: tuple[Side, ...] = ()
    after_source: tuple[Side, ...] = ()
    """After EOS."""
    before_target: tuple[Side, ...] = ()
    in_text: bool = False
    """True if the tokens are written in the text, so a line can also have its own."""


LAYOUTS: dict[Layout, Places] = {
    # NLLB, M2M100 and mBART-50
    "both": Places(before_source=("source",), before_target=("target",)),
    # NLLB with legacy_behaviour
    "after": Places(after_source=("source",), before_target=("target",)),
    # mBART's first version: the target's is the decoder's first input.
    "start": Places(after_source=("source",)),
    # MADLAD-400 (<2de>)
    "tag": Places(before_source=("target",), in_text=True),
}
"""Layouts: where models have the tokens of languages."""


class Languages(NamedTuple):
    """Languages of a many-to-many model, or fixed tokens around the lines of another model."""

    tokens: Mapping[str, str] = {}
    """Token of each language code."""
    source: str = ""
    """Token of every source line by default; '': none."""
    target: str = ""
    """Token of every target line by default; '': none."""
    layout: Layout = "both"
    """Name of their places in ``LAYOUTS``."""
    forced: bool = True
    """True if the search is forced to begin a target with its token, which then has no score."""

    def checked(self) -> Languages:
        """Return itself. Raises ``TypeError`` if a field has another type."""
        names = [*self.tokens, *self.tokens.values(), self.source, self.target]
        "".join(names)
        if self.layout not in LAYOUTS or type(self.forced) is not bool:
            raise TypeError(f"unknown layout {self.layout!r}")
        return self

    @property
    def places(self) -> Places:
        """Places of the tokens."""
        return LAYOUTS[self.layout]

    def token(self, language: str, field: str) -> str:
        """Return the token of a language code; "" gives the default. ``field`` is
        ``source_language`` or ``target_language``, after the name of a line.

        Raises ``UserError`` for an unknown language, and for "" if the model has languages but no
        default (except tags, which the text can have).
        """
        default = self.source if field.endswith("source_language") else self.target
        if not language and (default or not self.tokens or self.places.in_text):
            return default
        if language not in self.tokens:
            codes = ", ".join(self.tokens) or (
                "none, because the model has no language codes or was imported for one pair "
                "(a model that is trained from scratch needs tokenizer.new_languages)"
            )
            raise UserError(f"{field} is {short_repr(language)}; expected one of: {codes}.")
        return self.tokens[language]

    def with_defaults(self, source: str, target: str) -> Languages:
        """Return a copy with these languages by default ("": no change)."""
        languages = self
        if source:
            languages = languages._replace(source=self.token(source, "source_language"))
        if target:
            languages = languages._replace(target=self.token(target, "target_language"))
        return languages

    def with_new(self, entries: Sequence[str]) -> Languages:
        """Return a copy with the languages of ``tokenizer.new_languages``. Their tokens are written
        as the others are; those of a model without languages are tags.

        Raises ``UserError`` if a code exists, or a relative does not.
        """
        known = ", ".join(self.tokens) or "none"
        layout: Layout = "tag"
        form = "<2{}>"
        if self.tokens:
            code, token = next(iter(self.tokens.items()))
            layout = self.layout
            form = token.replace(code, "{}")
        tokens = dict(self.tokens)
        for entry in entries:
            code, _, relative = entry.partition(":")
            if code in tokens:
                raise UserError(
                    f"tokenizer.new_languages has {code!r}, which is a language of the model; "
                    f"expected a code that is not one of: {known}."
                )
            if relative and relative not in self.tokens:
                raise UserError(
                    f"tokenizer.new_languages has {entry!r}, but {relative!r} is not a language of "
                    f"the model; expected a relative that is one of: {known}."
                )
            tokens[code] = form.format(code)
        return self._replace(tokens=tokens, layout=layout)


class Affixes(NamedTuple):
    """Token ids around the text of a line. A source is ``before_source``, the text and EOS or, if
    they are not empty, the text and ``after_source``, which has EOS. A target is ``before_target``,
    the text and EOS.
    """

    before_source: list[int]
    after_source: list[int]
    before_target: list[int]

    def source(self, ids: list[int]) -> list[int]:
        """Return the ids of a source, without an EOS at the end."""
        return self.before_source + ids + self.after_source

    def target(self, ids: list[int]) -> list[int]:
        """Return the ids of a target, without EOS."""
        return self.before_target + ids


def format_languages(languages: tuple[str, str]) -> str:
    """Format the codes of source and target, such as eng_Latn-deu_Latn; "default" for ""."""
    return "-".join(code or "default" for code in languages)


NO_AFFIXES = Affixes([], [], [])
