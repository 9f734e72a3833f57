"""Which model is being compiled, and which of its layers a site of the captured graph is.

Dynamo hands over one frame, which may be a part of the model, and one of the names of a tensor,
which may be another module's (tied weights).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

from torch import nn
from torch.fx import GraphModule, Node

from . import dynamo
from .blocks import clean_name, linears, parameter_name, unwrap
from .passes.names import module_id, source_name, source_of
from .passes.sites import Site
from .stamping import attribute_of

# Dynamo's wrapper around every compiled callable; frames outside of it are not being compiled.
ENTRY = ("compile_wrapper", "_fn")


@dataclass(frozen=True)
class Place:
    """Where a site's weight lives: its owner, the model of the compiled call, its name in it.

    ``attribute`` of the owner's module holds the layer's stamp.
    """

    owner: dynamo.Owner
    model: nn.Module
    name: str
    attribute: str

    @property
    def below_break(self) -> bool:
        """True where the frame is only a part of the model."""
        return self.model is not unwrap(self.owner.root)

    @property
    def relative(self) -> str:
        """The layer's name in the frame."""
        inner = unwrap(self.owner.root)
        prefix = next((n for n, m in self.model.named_modules() if m is inner), "")
        return self.name.removeprefix(clean_name(prefix)).removeprefix(".")

    @property
    def alone(self) -> bool:
        """True where the frame is the forward of this one layer.

        A frame that resumes at a call of the layer has it on its stack, and runs its hooks, too.
        """
        stacked = source_name(self.owner.root_source).startswith("L['___stack")
        return self.owner.module is self.owner.root and not stacked


class Places:
    """The places of the sites of one captured graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.frame = dynamo.current_frame()
        self.roots = dynamo.frame_roots(gm, self.frame)
        self.breaks = dynamo.ends_in_break(gm)
        self._linears = {id(m): (m, root) for root in self.roots for m in linears(root)}
        self._models: dict[nn.Module, nn.Module] = {}
        self._names: dict[nn.Module, dict[nn.Module, str]] = {}

    def of(self, site: Site) -> Place | None:
        """The place of ``site``; None where no module leads to its weight."""
        owner = self._owner(site)
        return self._place(owner) if owner is not None else None

    def of_input(self, node: Node) -> Place | None:
        """The place of a graph's input; None where no module leads to it."""
        source = source_of(node)
        if node.op != "placeholder" or source is None or self.frame is None:
            return None
        owner = dynamo.owner(source, self.frame)
        return self._place(owner) if owner is not None else None

    def _place(self, owner: dynamo.Owner) -> Place:
        model = self.model(owner)
        name = parameter_name(self._name(owner.module, model), owner.parameter)
        return Place(owner, model, name, attribute_of(owner.parameter))

    def _owner(self, site: Site) -> dynamo.Owner | None:
        """By the linear whose forward has the site; else by the weight's source.

        The source of a tied or parametrized weight is not the linear's.
        """
        found = None
        if site.source is not None and self.frame is not None:
            found = dynamo.owner(site.source, self.frame)
        called = self._linears.get(module_id(site.node) or 0) if len(site.origins) == 1 else None
        if called is None or (found is not None and found.module is called[0]):
            return found
        return dynamo.member(called[0], called[1], self.roots[called[1]]) or found

    def model(self, owner: dynamo.Owner) -> nn.Module:
        """The outermost module of the compiled call that holds ``owner``."""
        if owner.root not in self._models:
            self._models[owner.root] = entry_root(owner.module, owner.root)
        return self._models[owner.root]

    def _name(self, module: nn.Module, model: nn.Module) -> str:
        if model not in self._names:
            self._names[model] = {m: clean_name(name) for name, m in model.named_modules()}
        return self._names[model].get(module, type(module).__name__)


def entry_root(
    module: nn.Module, inner: nn.Module, start: FrameType | None = None
) -> nn.Module:
    """The outermost module of the compiled call that holds ``module``; ``inner`` if none does.

    ``start``: the innermost frame that counts, for a graph that runs; default: the caller's.

    Below a graph break Dynamo compiles submodules as frames of their own, whose names are relative.
    The Python stack between the compiled call and Dynamo still has the modules that led there.
    """
    found = inner
    frame: FrameType | None = start or sys._getframe(1)
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
