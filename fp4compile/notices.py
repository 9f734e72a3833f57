"""One-line warnings."""

from __future__ import annotations

import warnings

from .kernels.errors import PrecisionWarning


def warn(message: str, once: bool = True) -> None:
    """Warn with one line, no file and no source line.

    ``once``: not again for an equal text; False where the caller knows what was said already
    (layers of two models may have one name).
    """
    registry = globals().setdefault("__warningregistry__", {}) if once else {}
    warnings.warn_explicit(message, PrecisionWarning, "fp4compile", 1, registry=registry)
