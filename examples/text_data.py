"""Text as bytes: Python's standard library or any file; windows of it as batches."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
HELD_OUT = 10  # every tenth file, or the last tenth of a single file


class DataError(ValueError):
    """A text that cannot be used; the message is one line."""


def standard_library() -> list[Path]:
    """The standard library's modules, sorted by name; its tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(name.as_posix() for name in found if not SKIPPED.intersection(name.parts[:-1]))
    return [root / name for name in names]


def split(files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Files to train on, and every tenth one, held out."""
    train = [path for i, path in enumerate(files) if i % HELD_OUT != HELD_OUT - 1]
    return train, files[HELD_OUT - 1 :: HELD_OUT]


def load(file: str | None, context: int) -> tuple[Tensor, Tensor]:
    """The text to train on and the held-out text, uint8 [bytes].

    Raises:
        DataError: where ``file`` cannot be read, or is too short for windows of ``context`` bytes.
    """
    if file is None:
        train, held = (b"".join(p.read_bytes() for p in part) for part in split(standard_library()))
        name = "the standard library's source"
    else:
        try:
            text = Path(file).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from None
        cut = len(text) - len(text) // HELD_OUT
        train, held, name = text[:cut], text[cut:], file
    if len(held) <= context:
        needed = HELD_OUT * (context + 1)
        raise DataError(f"{name} has {len(train) + len(held)} bytes, {needed} are needed")
    return as_tensor(train), as_tensor(held)


def as_tensor(text: bytes) -> Tensor:
    """uint8 [bytes]."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, context: int, device: str) -> tuple[Tensor, Tensor]:
    """The bytes after each start and the bytes that follow them, int64 [starts, context] both."""
    rows = text[starts[:, None] + torch.arange(context + 1)].long().to(device)
    return rows[:, :-1], rows[:, 1:]


def random_starts(text: Tensor, n: int, context: int, draw: torch.Generator) -> Tensor:
    """Starts of ``n`` windows drawn by ``draw``, int64 [n]."""
    return torch.randint(len(text) - context, (n,), generator=draw)


def spread_starts(text: Tensor, n: int, context: int) -> Tensor:
    """Starts of ``n`` windows at even distances over the whole text, int64 [n]."""
    return torch.arange(n) * (len(text) - context - 1) // max(n - 1, 1)


def batches(text: Tensor, starts: Tensor, size: int, context: int, device: str) -> Iterator:
    """`windows`, ``size`` at a time."""
    for some in starts.split(size):
        yield windows(text, some, context, device)
