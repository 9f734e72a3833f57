"""Every error this package raises on purpose; each message is one line: what, where, instead."""

from __future__ import annotations


class Fp4Error(Exception):
    """Base class of the package's errors."""


class PolicyError(Fp4Error, ValueError):
    """A policy, recipe or scheme that cannot be used; names file, line, word and nearest word."""


class FormatError(Fp4Error, ValueError):
    """A combination of format, granularity, rounding or rotation that does not exist."""


class InputError(Fp4Error, TypeError):
    """A tensor that cannot be quantized: wrong dtype, device or shape."""


class EngineError(Fp4Error, RuntimeError):
    """No engine on this machine runs a GEMM with the requested operands."""


class PrecisionError(Fp4Error, RuntimeError):
    """A layer that a strict policy names ran, or would run, in another precision."""


class PrecisionWarning(UserWarning):
    """A layer that a policy names ran outside a compiled graph, in its original precision."""
