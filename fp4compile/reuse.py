"""Models that run in a graph which was compiled for another one, so that no backend ever saw them.

Dynamo uses the graph of a function for every module that passes its guards. So each graph looks at
the module that its frame runs for; the layers of one that is new to it are watched and reported as
if it had been compiled itself.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torch import nn

from . import stamping, watching
from .blocks import clean_name, unwrap
from .choice import Choice, resolve, watch_layers
from .describing import Described
from .kernels.errors import PrecisionError
from .notices import warn
from .passes.names import source_name
from .policy import Policy
from .report import reports
from .roots import entry_root

DEPTH = 8  # frames between a graph and the function that it was captured from
_LOCAL = re.compile(r"L\['(\w+)'\]")


@dataclass(frozen=True)
class _Layer:
    """An answer in the graph, by the owner's path below the frame's module."""

    path: str
    attribute: str
    in_chain: bool
    stamp: str


class _Graph:
    """What one graph holds for the module in the local variable ``name`` of its frame."""

    def __init__(self, name: str, root: nn.Module, choice: Choice, found: list[Described]) -> None:
        self.name, self.policy, self.label = name, choice.policy, choice.label
        paths = {module: path for path, module in root.named_modules()}
        asked = [(a, a.place) for a in choice.asked if a.place and a.place.owner.root is root]
        self.layers = [
            _Layer(paths[p.owner.module], p.attribute, a.in_chain, str(a.stamp)) for a, p in asked
        ]
        self.stamped = all(stamping.stamp_of(p.owner.module, p.attribute) for _, p in asked)
        mine = [d for d in found if d.place is not None and d.place.owner.root is root]
        self.rows = [(d.place.relative, d.row, str(d.stamp)) for d in mine if d.place]
        self.met = weakref.WeakSet([root])
        self.models = weakref.WeakSet(p.model for _, p in asked)

    def meet(self, root: Any, frame: FrameType) -> None:
        """Watch and report the module ``root``, for which the frame runs, if it is new."""
        if root in self.met or not isinstance(root, nn.Module):
            return
        self.met.add(root)
        model = entry_root(root, root, frame)
        if not self.stamped:
            self._watch(root, model)
        for layer in self.layers:
            if layer.attribute == stamping.STAMP:
                watching.seen_in_graph(root.get_submodule(layer.path), layer.in_chain)
        if model not in self.models:
            self.models.add(model)
            self._report(root, model)

    def _watch(self, root: nn.Module, model: nn.Module) -> None:
        stamps, warnings = resolve(self.policy, model, model is not unwrap(root))
        for warning in warnings:
            warn(warning)
        watch_layers(model, stamps)
        for layer in self.layers:
            module = root.get_submodule(layer.path)
            if layer.attribute == stamping.STAMP and module in stamps:
                _compare(self.policy, module, layer, str(stamps[module]))

    def _report(self, root: nn.Module, model: nn.Module) -> None:
        prefix = next((n for n, m in model.named_modules() if m is unwrap(root)), "")
        names = [clean_name(f"{prefix}.{relative}".strip(".")) for relative, _, _ in self.rows]
        below = model is not unwrap(root)
        keys = [(type(root), name, text) if below else None for name, _, text in self.rows]
        rows = [replace(row, fqn=name) for name, (_, row, _) in zip(names, self.rows)]
        reports.record(model, self.label, rows, [text for *_, text in self.rows], keys)


def _compare(policy: Policy, module: nn.Module, layer: _Layer, wanted: str) -> None:
    """Another model's graph may have other schemes where names differ; stamps mend the next call.

    Raises:
        PrecisionError: for a strict policy.
    """
    if wanted == layer.stamp:
        return
    name = stamping.name_of(module) or layer.path
    message = (
        f"layer {name!r} ran once in the scheme of {layer.path!r} of another model, whose graph it"
        " shares; call fp4.apply(model, policy) on both"
    )
    if policy.strict:
        raise PrecisionError(message)
    warn(message, once=False)


def follow(choice: Choice, found: list[Described], compiled: Callable) -> Callable:
    """``compiled``, the graph of ``choice``, which notices each further model that it runs for."""
    frame = choice.places.frame
    if frame is None:
        return compiled
    graphs = []
    for root, source in choice.places.roots.items():
        local = _LOCAL.fullmatch(source_name(source))
        if local:
            graphs.append(_Graph(local[1], root, choice, found))
    name, file = frame.code.co_name, frame.code.co_filename

    def call(*args: Any) -> Any:
        running = _running(name, file)
        if running is not None:
            for graph in graphs:
                graph.meet(running.f_locals.get(graph.name), running)
        return compiled(*args)

    return call


def _running(name: str, file: str) -> FrameType | None:
    """The frame that runs Dynamo's version of a function and has called the graph."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(DEPTH):
        if frame is None:
            break
        if frame.f_code.co_name == name and frame.f_code.co_filename == file:
            return frame
        frame = frame.f_back
    return None
