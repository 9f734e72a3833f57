"""Which model is being compiled: Dynamo hands over one frame, which may be a part of it."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

from .blocks import unwrap

# Dynamo's wrapper around every compiled callable; frames outside of it are not being compiled.
ENTRY = ("compile_wrapper", "_fn")


def entry_root(module: nn.Module, inner: nn.Module) -> nn.Module:
    """The outermost module of the compiled call that holds ``module``; ``inner`` if none does.

    Below a graph break Dynamo compiles submodules as frames of their own, whose names are relative.
    The Python stack between the compiled call and Dynamo still has the modules that led there.
    """
    found = inner
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ENTRY and code.co_filename.endswith("eval_frame.py"):
            break
        if "/torch/_dynamo/" not in code.co_filename:
            found = _holder(frame, module) or found
        frame = frame.f_back
    return unwrap(found)


def _holder(frame: FrameType, module: nn.Module) -> nn.Module | None:
    for value in list(frame.f_locals.values()):
        if isinstance(value, nn.Module) and any(m is module for m in value.modules()):
            return value
    return None
