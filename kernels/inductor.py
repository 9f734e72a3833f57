"""How Inductor lowers the primitives: each stays one opaque call; everything around them fuses."""

from __future__ import annotations

import functools

import torch


@functools.cache
def register() -> None:
    """Register every primitive as an extern call, once a process, without Inductor's warnings."""
    from torch._inductor.lowering import lowerings, make_fallback

    from . import ops, primitives  # noqa: F401 - defines the operators

    for name in primitives.NAMES:
        op = getattr(torch.ops.fp4, name).default
        if op not in lowerings:
            make_fallback(op, warn=False)
