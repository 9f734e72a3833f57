"""One-line warnings."""

from __future__ import annotations

import warnings

from .kernels.errors import PrecisionWarning


def warn(message: str) -> None:
    """Warn with one line: no file, no source line, and once for each text."""
    registry = globals().setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, PrecisionWarning, "fp4compile", 1, registry=registry)
