"""Rules: which layers a scheme is for."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .policy_model import RuleEntry
from .policy_yaml import Source
from .words import hint

Block = tuple[int, int] | None
Named = Sequence[tuple[str, Block]]
_SPAN = re.compile(r"\s*(first|last)\s+(\d+(?:\.\d+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Span:
    """The first or last blocks of a model: a number of them, or a percentage."""

    end: str
    amount: Fraction
    percent: bool

    @staticmethod
    def parse(text: str) -> Span:
        """``first 2``, ``last 4``, ``last 16.6%``; ValueError says what is wrong."""
        found = _SPAN.fullmatch(text)
        if not found:
            near = hint(text.split(" ")[0], ("first", "last"))
            raise ValueError(
                f'{text!r} is none of "first N", "last N", "first P%", "last P%"{near}'
            )
        amount, percent = Fraction(found[2]), bool(found[3])
        if amount <= 0 or (percent and amount > 100):
            needed = "more than 0% and at most 100%" if percent else "1 or more blocks"
            raise ValueError(f"{text!r}: needs {needed}")
        if not percent and amount.denominator != 1:
            raise ValueError(f"{text!r}: a number of blocks is whole; write % for a percentage")
        return Span(found[1], amount, percent)

    def size(self, count: int) -> int:
        """How many of ``count`` blocks; a percentage is rounded to nearest, halves up."""
        wanted = self.amount * count / 100 if self.percent else self.amount
        return min(count, math.floor(wanted + Fraction(1, 2)))

    def holds(self, block: Block) -> bool:
        """True for a block (index, count) within the span."""
        if block is None:
            return False
        index, count = block
        size = self.size(count)
        return index < size if self.end == "first" else index >= count - size


@dataclass(frozen=True)
class Rule:
    """A scheme's name for the layers that every given selector holds for.

    ``where``: "policy.yaml:7", or "recipe NAME" for a recipe's own rule (``own``).
    """

    scheme: str
    where: str
    own: bool
    match: str | None = None
    pattern: re.Pattern[str] | None = None
    blocks: str | None = None
    span: Span | None = None
    chain: str | None = None

    @property
    def selectors(self) -> str:
        """The selectors as a person writes them."""
        words = [f'match "{self.match}"'] if self.match is not None else []
        words += [f"blocks {self.blocks}"] if self.blocks else []
        words += [f"chain {self.chain}"] if self.chain else []
        return ", ".join(words)

    def __str__(self) -> str:
        return f"{self.where}{':' if self.own else ''} {self.selectors}"

    def holds(self, names: Named) -> bool:
        """True where a layer's name and block fit (``names``: a tied module has several)."""
        return any(self._holds(name, block) for name, block in names)

    def _holds(self, name: str, block: Block) -> bool:
        if self.pattern is not None and not self.pattern.fullmatch(name):
            return False
        return self.span is None or self.span.holds(block)


def glob(text: str) -> re.Pattern[str]:
    """The regex of ``match:``; `re.error` for a wrong one.

    A glob on the whole name, where ``*`` crosses dots; after ``re:`` a regex for the whole name.
    """
    return re.compile(text[3:] if text.startswith("re:") else fnmatch.translate(text))


def rules_of(entries: list[RuleEntry], source: Source, label: str, own: bool) -> tuple[Rule, ...]:
    """The rules of a file."""
    return tuple(_rule(entry, source, i, label, own) for i, entry in enumerate(entries))


def _rule(entry: RuleEntry, source: Source, index: int, label: str, own: bool) -> Rule:
    path = ("layers", index)
    if entry.match is None and entry.blocks is None and entry.chain is None:
        raise source.error(path, "no selector (match, blocks or chain)")
    try:
        pattern = glob(entry.match) if entry.match is not None else None
    except re.error as exc:
        raise source.error((*path, "match"), f"bad regex {entry.match!r}: {exc}") from None
    try:
        span = Span.parse(entry.blocks) if entry.blocks is not None else None
    except ValueError as exc:
        raise source.error((*path, "blocks"), str(exc)) from None
    where = f"recipe {label}" if own else f"{label}:{source.line(path)}"
    return Rule(entry.scheme, where, own, entry.match, pattern, entry.blocks, span, entry.chain)
