"""Where built kernels are kept, shared by many processes: content-keyed files with a checksum.

The directory is ``$FP4COMPILE_CACHE_DIR``, else ``~/.cache/fp4compile``; where it cannot be
written, a private directory of this process. An entry is the payload followed by its SHA-256, so a
truncated or damaged one is noticed, and built again, before anything maps it; loaders ignore the
trailing bytes.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

DIGEST = 32


def key(*parts: str | bytes) -> str:
    """24 hex digits that identify ``parts``, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


def directory() -> Path:
    """The configured cache directory; it need not exist."""
    configured = os.environ.get("FP4COMPILE_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "fp4compile"


@lru_cache(maxsize=1)
def private_directory() -> Path:
    """A directory of this process alone, removed at its end."""
    path = tempfile.mkdtemp(prefix="fp4compile-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def read(path: Path) -> bytes | None:
    """The payload of an entry; None where it is missing, unreadable or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    payload, digest = data[:-DIGEST], data[-DIGEST:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def write(name: str, payload: bytes) -> Path:
    """Store an entry atomically, in the cache directory or, failing that, the private one."""
    try:
        return _write(directory(), name, payload)
    except OSError:
        return _write(private_directory(), name, payload)


def _write(where: Path, name: str, payload: bytes) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=where)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload + hashlib.sha256(payload).digest())
        os.chmod(temporary, 0o755)
        os.replace(temporary, where / name)
    except BaseException:
        os.unlink(temporary)
        raise
    return where / name


def fetch(name: str, build: Callable[[], bytes], force: bool = False) -> Path:
    """The path of the entry ``name``, built where it is missing or damaged, or with ``force``."""
    path = directory() / name
    if not force and read(path) is not None:
        return path
    return write(name, build())
