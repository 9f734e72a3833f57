"""Tables in plain text that fit a terminal, with notes that are written once below them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

NARROWEST = 12  # characters that a column keeps when it is wrapped


def terminal_width() -> int:
    """Columns of the terminal: COLUMNS, else its size; 80 where there is none."""
    return max(shutil.get_terminal_size((80, 24)).columns, 40)


class Notes:
    """Texts numbered from 1 in the order in which they are first asked for."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def refer(self, texts: Iterable[str]) -> str:
        """The numbers of ``texts``, each once, empty ones left out: "1" or "1, 3"."""
        once = dict.fromkeys(text for text in texts if text)
        numbers = [self._numbers.setdefault(text, len(self._numbers) + 1) for text in once]
        return ", ".join(map(str, numbers))

    def lines(self, width: int) -> list[str]:
        """The numbered list, wrapped."""
        digits = len(str(len(self._numbers)))
        return [
            line
            for text, n in self._numbers.items()
            for line in paragraph(f"{n:>{digits}}  ", text, width)
        ]


def paragraph(mark: str, text: str, width: int) -> list[str]:
    """``mark`` and ``text``, whose further lines are indented as far; long words stay whole."""
    wrapped = textwrap.wrap(
        text, max(width - len(mark), NARROWEST), break_long_words=False, break_on_hyphens=False
    )
    indent = " " * len(mark)
    return [(indent if i else mark) + line for i, line in enumerate(wrapped or [""])]


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, flexible: Sequence[str]
) -> list[str]:
    """Lines of a table at most ``width`` wide, if wrapping the ``flexible`` columns makes it so.

    Columns without any text are left out. Names are wrapped after their dots.
    """
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)] or [0]
    rows = [[row[i] for i in used] for row in rows]
    heads = [columns[i] for i in used]
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    gap = 2 if sum(widths) + 2 * (len(used) - 1) <= width else 1
    for name in flexible:
        excess = sum(widths) + gap * (len(used) - 1) - width
        if name in heads and excess > 0:
            at = heads.index(name)
            widths[at] = max(widths[at] - excess, min(NARROWEST, widths[at]))
    return [
        line
        for row in (heads, ["-" * w for w in widths], *rows)
        for line in _lines(row, widths, " " * gap)
    ]


def _lines(row: Sequence[str], widths: list[int], gap: str) -> list[str]:
    """A row as one line, or as many as its longest wrapped cell needs."""
    cells = [_fold(text, width) for text, width in zip(row, widths)]
    height = max(map(len, cells))
    filled = [cell + [""] * (height - len(cell)) for cell in cells]
    return [
        gap.join(part.ljust(width) for part, width in zip(parts, widths)).rstrip()
        for parts in zip(*filled)
    ]


def _fold(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width``, broken at spaces and after dots where possible."""
    if len(text) <= width:
        return [text]
    lines = [""]
    for piece in text.replace(".", ".\0").replace(" ", " \0").split("\0"):
        if len(lines[-1] + piece.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]
