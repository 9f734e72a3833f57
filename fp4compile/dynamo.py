"""Everything the package needs of Dynamo's private interfaces, in one place, with a self-test.

A backend receives only a graph. To know which module a parameter belongs to, and to make Dynamo
compile again when a module's stamp changes, it asks the frame that is being compiled.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.fx import GraphModule

from .kernels.errors import Fp4Error, PrecisionError
from .passes.names import source_name

STAMP = "fp4_scheme"


@dataclass(frozen=True)
class Frame:
    """The frame being compiled: its code, and the names that sources are written in."""

    code: CodeType
    scope: dict[str, Any]


def current_frame() -> Frame | None:
    """The frame that Dynamo is compiling; None outside of a compilation (`torch.export`, say)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    root = getattr(tx.output, "root_tx", None) or tx
    return Frame(root.f_code, {"L": root.f_locals, "G": root.f_globals})


def ends_in_break(gm: GraphModule) -> bool:
    """True where the frame's graph goes on after a graph break."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def before_split(gm: GraphModule) -> GraphModule | None:
    """The captured graph of which ``gm`` is DDP's part for one bucket of gradients; None if none.

    DDP's optimizer cuts a graph before it asks the backend; its own frame still has the whole.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_fn" and code.co_filename.endswith("distributed.py"):
            whole = frame.f_locals.get("gm")
            return whole if isinstance(whole, GraphModule) and whole is not gm else None
        frame = frame.f_back
    return None


@dataclass(frozen=True)
class Entry:
    """A compiled call with backend fp4 that is running: its model (or None), code and options."""

    model: Any
    code: CodeType | None
    options: dict[str, Any]


def entry() -> Entry | None:
    """The innermost compiled call on the Python stack, if its backend is fp4."""
    from torch._dynamo.eval_frame import innermost_backend

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, names = frame.f_code, frame.f_locals
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            backend: Any = innermost_backend(names["callback"]) if names.get("callback") else None
            if getattr(backend, "compiler_name", None) != "fp4":
                return None
            function = names.get("fn")
            model, own = getattr(function, "__self__", None), getattr(function, "__code__", None)
            return Entry(model, own, dict(backend.kwargs.get("options") or {}))
        frame = frame.f_back
    return None


def on_compile_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` whenever Dynamo has compiled or given up a frame, before the frame runs.

    After `torch._dynamo.reset`, too, which forgets callbacks.
    """
    from torch._dynamo.callback import callback_handler as handler

    def ended(_: Any) -> None:
        callback()

    clear = handler.clear

    def clear_others() -> None:
        clear()
        handler.register_end_callback(ended)

    handler.register_end_callback(ended)
    handler.clear = clear_others  # type: ignore[method-assign]


# Sources -----------------------------------------------------------------------------------------


def _bases(source: Any) -> list[Any]:
    """``source`` and the sources it is reached through, innermost first."""
    chain = []
    while source is not None:
        chain.append(source)
        source = getattr(source, "base", None)
    return chain


@dataclass(frozen=True)
class Owner:
    """Where a parameter lives: its module, the outermost module of the frame, and its own name.

    ``source`` and ``root_source`` are how the frame reaches the two modules.
    """

    source: Any
    module: nn.Module
    root_source: Any
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
    (base, module), (root_base, root) = modules[0], modules[-1]
    tensor = _evaluate(source, frame)
    names = itertools.chain(module._parameters.items(), module._buffers.items())
    name = next((n for n, t in names if t is tensor), source_name(source).rpartition(".")[2])
    return Owner(base, module, root_base, root, name)


def member(module: nn.Module, root: nn.Module, root_source: Any) -> Owner | None:
    """The owner of the weight of a ``module`` inside ``root``; None where it is not inside."""
    from torch._dynamo.source import AttrSource, DictGetItemSource

    path = next((name for name, m in root.named_modules() if m is module), None)
    if path is None:
        return None
    source = root_source
    for key in path.split(".") if path else ():
        source = DictGetItemSource(AttrSource(source, "_modules"), key)
    return Owner(source, module, root_source, root, "weight")


def frame_roots(gm: GraphModule, frame: Frame | None) -> dict[nn.Module, Any]:
    """The outermost modules that the inputs of a captured graph belong to, with their sources."""
    roots: dict[nn.Module, Any] = {}
    for node in gm.graph.nodes if frame else ():
        source = getattr(node.meta.get("grapharg"), "source", None)
        found = owner(source, frame) if source is not None and frame else None
        if found is not None:
            roots.setdefault(found.root, found.root_source)
    return roots


def _evaluate(source: Any, frame: Frame) -> Any:
    try:
        return eval(source_name(source), dict(frame.scope))  # noqa: S307 - Dynamo's own expression
    except Exception:  # noqa: BLE001 - a source that is not an expression of the frame
        return None


# Guards ------------------------------------------------------------------------------------------


def guard_stamp(found: Owner, attribute: str) -> None:
    """Compile again when the owner's stamp changes, appears or goes away."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource

    source = AttrSource(found.source, attribute)
    if hasattr(found.module, attribute):
        _add_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
    elif "attr" in inspect.signature(GuardBuilder.HASATTR).parameters:
        absent = functools.partial(GuardBuilder.HASATTR, attr=attribute)
        _add_guard(found.source.make_guard(absent))
    else:  # torch 2.11
        _add_guard(source.make_guard(GuardBuilder.HASATTR))


def guard_identity(found: Owner) -> None:
    """Capture the frame again for every other module that it runs for."""
    from torch._dynamo.guards import GuardBuilder

    _add_guard(found.root_source.make_guard(GuardBuilder.ID_MATCH))


def _add_guard(guard: Any) -> None:
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None:
        context.guards_context.dynamo_guards.add(guard)


# Errors and hooks --------------------------------------------------------------------------------


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


def eager_hook(hook: Callable) -> Callable:
    """A hook that Dynamo inlines into a module's graph, but never compiles by itself.

    Otherwise a hook that runs between two compiled frames would be compiled, and
    `torch.compiler.is_compiling` be True in it.
    """
    torch._dynamo.eval_frame.skip_code(hook.__code__)
    return hook


def break_reasons() -> dict[str, int]:
    """Dynamo's graph-break reasons so far, with counts."""
    return dict(torch._dynamo.utils.counters["graph_break"])


# The recompile limit -----------------------------------------------------------------------------
# Dynamo counts the graphs of a function, whichever model, policy or backend they belong to, and at
# `recompile_limit` it runs the function eagerly for all of them, without calling a backend.

_graphs: weakref.WeakKeyDictionary[CodeType, list[weakref.ref]] = weakref.WeakKeyDictionary()
_granted = [0, 0]  # what was added to Dynamo's limit, and the limit that this gave


def graph_count(code: CodeType) -> int:
    """How many graphs Dynamo keeps for a function."""
    return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))  # type: ignore[attr-defined]


def make_room(frame: Frame | None, root: nn.Module | None) -> None:
    """Other models' graphs of the frame's function do not count against the limit of ``root``'s."""
    if frame is None or root is None:
        return
    before = graph_count(frame.code)
    mine = _graphs.setdefault(frame.code, [])
    if not before:
        mine.clear()
    mine.append(weakref.ref(root))
    allow_graphs(before + 1 - sum(ref() is root for ref in mine))


def allow_graphs(others: int) -> None:
    """Raise Dynamo's limit to its own number and ``others``."""
    config = torch._dynamo.config
    own = config.recompile_limit - (_granted[0] if config.recompile_limit == _granted[1] else 0)
    limit = max(config.recompile_limit, own + others)
    _granted[:] = limit - own, limit
    more = limit - config.recompile_limit
    config.recompile_limit = limit
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit + more, limit)


def forget_graphs(codes: dict[CodeType, int]) -> None:
    """Drop the graphs that were added to functions which had as many graphs as given before."""
    for code, before in codes.items():
        if not before:
            torch._C._dynamo.eval_frame.reset_code(code)
        else:
            allow_graphs(graph_count(code))


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
                    guard_stamp(found, STAMP)
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
