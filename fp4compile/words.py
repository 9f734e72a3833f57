"""How error messages show values and name the nearest valid word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST = 60


def shown(value: object) -> str:
    """``value`` in at most one short line, in YAML's words."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def nearest(word: object, words: Iterable[object]) -> str | None:
    """The word of ``words`` that looks most like ``word``, or None where nothing is close."""
    texts = [str(w) for w in words]
    lower = {t.lower(): t for t in reversed(texts)}
    close = difflib.get_close_matches(str(word).lower(), list(lower), n=1, cutoff=0.5)
    return lower[close[0]] if close else None


def hint(word: object, words: Iterable[object]) -> str:
    """``; did you mean 'W'?`` where a word is close, else nothing."""
    near = nearest(word, words)
    return f"; did you mean {near!r}?" if near is not None else ""


def unknown(kind: str, word: object, words: Iterable[object]) -> str:
    """``unknown KIND 'WORD'; did you mean 'W'? (known: ...)``."""
    words = list(words)
    known = ", ".join(str(w) for w in words)
    return f"unknown {kind} {shown(word)}{hint(word, words)} (known: {known})"
