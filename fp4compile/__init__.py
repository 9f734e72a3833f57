"""fp4compile: ``torch.compile(model, backend="fp4")`` trains linear layers in 4 bits.

Importing the package is cheap: nothing below is loaded before its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bisecting import bisect
    from .calibrating import calibrate
    from .checkpointing import ops_to_save
    from .explaining import explain
    from .kernels.errors import (
        EngineError,
        FormatError,
        Fp4Error,
        InputError,
        PolicyError,
        PrecisionError,
        PrecisionWarning,
    )
    from .kernels.quantized import QuantizedTensor, quantize
    from .monitoring import Monitor, monitor
    from .policy import Policy
    from .ready import weights_changed
    from .report import Report
    from .stamping import apply

__version__ = "0.1.0"

_HOME = {
    "apply": ".stamping",
    "bisect": ".bisecting",
    "calibrate": ".calibrating",
    "explain": ".explaining",
    "monitor": ".monitoring",
    "Monitor": ".monitoring",
    "Policy": ".policy",
    "Report": ".report",
    "ops_to_save": ".checkpointing",
    "quantize": ".kernels.quantized",
    "weights_changed": ".ready",
    "QuantizedTensor": ".kernels.quantized",
    "Fp4Error": ".kernels.errors",
    "PolicyError": ".kernels.errors",
    "FormatError": ".kernels.errors",
    "InputError": ".kernels.errors",
    "EngineError": ".kernels.errors",
    "PrecisionError": ".kernels.errors",
    "PrecisionWarning": ".kernels.errors",
}
__all__ = [
    "EngineError",
    "FormatError",
    "Fp4Error",
    "InputError",
    "Monitor",
    "Policy",
    "PolicyError",
    "PrecisionError",
    "PrecisionWarning",
    "QuantizedTensor",
    "Report",
    "apply",
    "bisect",
    "calibrate",
    "explain",
    "monitor",
    "ops_to_save",
    "quantize",
    "weights_changed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fp4compile' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
