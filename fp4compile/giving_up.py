"""Watch the layers of a model of which Dynamo captured no graph: no backend is ever called for it.

Its frames run eagerly. With the hook of `watching` on a linear, Dynamo compiles the linear's own
call; a layer that it cannot compile either is noticed.
"""

from __future__ import annotations

import weakref

from torch import nn

from . import dynamo
from .blocks import unwrap
from .choice import was_captured, watch_layers
from .kernels.errors import Fp4Error

_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def install() -> None:
    """From now on; once is enough."""
    dynamo.on_compile_end(_ended)


def _ended() -> None:
    entry = dynamo.entry()
    if entry is None or not isinstance(entry.model, nn.Module):
        return
    from .backend import as_policy

    model = unwrap(entry.model)
    if model in _seen or was_captured(model):
        return
    try:
        stamps = as_policy(entry.options.get("policy")).resolve(model).modules
    except Fp4Error:  # the backend says so when it is asked
        return
    _seen.add(model)
    watch_layers(model, stamps)
