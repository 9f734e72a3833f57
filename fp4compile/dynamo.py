"""Everything the package needs of Dynamo's private interfaces, in one place, with a self-test.

A backend receives only a graph. To know which module a parameter belongs to, and to make Dynamo
compile again when a module's stamp changes, it asks the frame that is being compiled.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .kernels.errors import Fp4Error, PrecisionError

STAMP = "fp4_scheme"


@dataclass(frozen=True)
class Frame:
    """The frame being compiled: its name and the names that sources are written in."""

    name: str
    scope: dict[str, Any]


def current_frame() -> Frame | None:
    """The frame that Dynamo is compiling; None outside of a compilation (an exported graph, say)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    root = getattr(tx.output, "root_tx", None) or tx
    return Frame(root.f_code.co_name, {"L": root.f_locals, "G": root.f_globals})


def source_name(source: Any) -> str:
    """The expression of a source; a method until torch 2.11, a property later."""
    return source.name() if callable(source.name) else source.name


def _bases(source: Any) -> list[Any]:
    """``source`` and the sources it is reached through, innermost first."""
    chain = []
    while source is not None:
        chain.append(source)
        source = getattr(source, "base", None)
    return chain


@dataclass(frozen=True)
class Owner:
    """Where a parameter lives: its module, the outermost module of the frame, and its own name."""

    source: Any
    module: nn.Module
    root: nn.Module
    parameter: str


def owner(source: Any, frame: Frame) -> Owner | None:
    """The module that owns the parameter at ``source``; None if no module leads to it."""
    modules = []
    for base in _bases(source)[1:]:
        value = _evaluate(base, frame)
        if isinstance(value, nn.Module):
            modules.append((base, value))
    if not modules:
        return None
    (base, module), root = modules[0], modules[-1][1]
    tensor = _evaluate(source, frame)
    names = itertools.chain(module._parameters.items(), module._buffers.items())
    name = next((n for n, t in names if t is tensor), source_name(source).rpartition(".")[2])
    return Owner(base, module, root, name)


def _evaluate(source: Any, frame: Frame) -> Any:
    try:
        return eval(source_name(source), dict(frame.scope))  # noqa: S307 - Dynamo's own expression
    except Exception:  # noqa: BLE001 - a source that is not an expression of the frame
        return None


def guard_stamp(found: Owner) -> None:
    """Compile again when the owner's stamp changes, appears or goes away."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards
    if hasattr(found.module, STAMP):
        source = AttrSource(found.source, STAMP)
        guards.add(source.make_guard(GuardBuilder.EQUALS_MATCH))
    else:
        absent = functools.partial(GuardBuilder.HASATTR, attr=STAMP)
        guards.add(found.source.make_guard(absent))


def surface(error: Fp4Error) -> Exception:
    """The same error so that Dynamo lets it through as it is.

    Dynamo wraps what a backend raises into a page about the backend, except for its own classes;
    to these it appends a hint, by setting ``args``.
    """
    from torch._dynamo.exc import ShortenTraceback

    def init(self: Any, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)

    cls, args = type(error), (str(error),)
    body = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__init__": init,
        "args": property(lambda self: args, lambda self, value: None),
    }
    return type(cls.__name__, (cls, ShortenTraceback), body)(*args)


def raise_recompile_limit(states: int) -> None:
    """Allow ``states`` compiled variants of one frame beside Dynamo's own default number."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 8 + states)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 256 + 8 * states)


def break_reasons() -> dict[str, int]:
    """Dynamo's graph-break reasons so far, with counts."""
    return dict(torch._dynamo.utils.counters["graph_break"])


@functools.cache
def self_test() -> None:
    """Check once a process that stamps are guarded on this version of torch.

    Raises:
        PrecisionError: where a changed stamp does not compile again; stamps would then be ignored.
    """
    seen = []

    def backend(gm, inputs):
        frame = current_frame()
        for node in gm.graph.nodes:
            if node.op == "placeholder" and "grapharg" in node.meta:
                found = owner(node.meta["grapharg"].source, frame) if frame else None
                if found is not None:
                    guard_stamp(found)
                    seen.append(getattr(found.module, STAMP, None))
        return gm

    class Probe(nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight)

    module = Probe(2, 2, bias=False)
    compiled = torch.compile(module, backend=backend)
    x = torch.ones(1, 2)
    for stamp in (None, "a", "b", "a"):
        if stamp is not None:
            setattr(module, STAMP, stamp)
        compiled(x)
    if seen != [None, "a", "b"]:
        raise PrecisionError(
            f"fp4.apply needs Dynamo guards that torch {torch.__version__} does not offer"
            f" (saw {seen}); use options={{'policy': ...}} on the whole model instead"
        )
