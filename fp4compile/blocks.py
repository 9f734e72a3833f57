"""Layers and blocks of a model by name: which linears it has, and which of its blocks each is in.

A *block* is an element of the model's repeated container: a ModuleList, Sequential or ModuleDict
whose elements (two or more) are all of one class and hold a linear each. A container inside a block
of another (the experts of a mixture) is not considered; of the rest the longest is taken, the first
of equals. Containers of bare linears (a list of heads) count only where there is no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .passes.names import WRAPPERS, strip_wrappers

_ATTRIBUTES = tuple(prefix.rstrip(".") for prefix in WRAPPERS)
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def clean_name(fqn: str) -> str:
    """A module's name without what wrappers add to it, at its end too (a compiled linear)."""
    return strip_wrappers(fqn + ".").removesuffix(".")


def is_linear(module: nn.Module) -> bool:
    """True for `nn.Linear` and for the transposed ``Conv1D`` of Hugging Face's GPT-2."""
    if isinstance(module, nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and getattr(weight, "ndim", 0) == 2


def weight_shape(module: nn.Module) -> str:
    """The shape of a linear's weight as a report shows it: ``out×in`` (Conv1D: as stored)."""
    return "×".join(str(n) for n in module.get_parameter("weight").shape)


def linears(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every linear of ``model`` with all its names, wrappers stripped, in the model's order."""
    found: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if is_linear(module):
            names = found.setdefault(module, [])
            name = clean_name(fqn)
            if name not in names:
                names.append(name)
    return found


def parameter_name(module: str, parameter: str) -> str:
    """The name of a layer by its weight: the module's own name where it is called ``weight``."""
    return ".".join(word for word in (module, parameter) if word and word != "weight")


def other_matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """2-D parameters that are no linear's weight: (module, the parameter's name, the layer's).

    ``F.linear`` may multiply by them: a bare parameter, the ``in_proj_weight`` of attention, the
    weight of an embedding that is tied to a head.
    """
    for fqn, module in model.named_modules():
        own = is_linear(module)
        for parameter, tensor in module._parameters.items():
            if tensor is not None and tensor.ndim == 2 and not (own and parameter == "weight"):
                yield module, parameter, parameter_name(clean_name(fqn), parameter)


def other_names(model: nn.Module) -> list[str]:
    """Names that a rule may have of parameters that are no linear's weight, batches included."""
    batches = (
        parameter_name(clean_name(fqn), parameter)
        for fqn, module in model.named_modules()
        for parameter, tensor in module._parameters.items()
        if tensor is not None and tensor.ndim > 2
    )
    return [*(name for _, _, name in other_matrices(model)), *batches]


@dataclass(frozen=True)
class Blocks:
    """The repeated container of a model: its name and its elements' keys, in order."""

    container: str
    keys: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.keys)

    def block_of(self, fqn: str) -> tuple[int, int] | None:
        """(index, count) of the block that the layer ``fqn`` is in, None outside the blocks."""
        prefix = self.container + "." if self.container else ""
        name = clean_name(fqn)
        if not name.startswith(prefix):
            return None
        key = name[len(prefix) :].split(".")[0]
        return (self.keys.index(key), self.count) if key in self.keys else None


def find_blocks(model: nn.Module) -> Blocks | None:
    """The repeated container of ``model`` (see the module's text), None where it has none."""
    candidates = list(_outermost(model, ""))
    composite = [blocks for blocks, bare in candidates if not bare]
    ranked = composite or [blocks for blocks, _ in candidates]
    return max(ranked, key=lambda b: b.count, default=None)


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[Blocks, bool]]:
    """Repeated containers that are in no block of another, and whether they hold bare linears."""
    if _repeated(module):
        bare = all(is_linear(unwrap(child)) for child in _elements(module).values())
        yield Blocks(clean_name(name), tuple(_elements(module))), bare
        return
    for key, child in _elements(module).items():
        yield from _outermost(child, f"{name}.{key}" if name else key)


def _elements(module: nn.Module) -> dict[str, nn.Module]:
    """The children by key; unlike `named_children` it keeps a child that appears twice."""
    return {key: child for key, child in module._modules.items() if child is not None}


def _repeated(module: nn.Module) -> bool:
    if not isinstance(module, CONTAINERS):
        return False
    elements = [unwrap(m) for m in _elements(module).values()]
    if len(elements) < 2 or len({inner_class(m) for m in elements}) > 1:
        return False
    return all(any(is_linear(m) for m in element.modules()) for element in elements)


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """What runs inside leaves ``model``'s buffers and every random state as they were."""
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before:
                    buffer.copy_(before[name])


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside compile, FSDP, checkpoint and DDP wrappers."""
    while True:
        names = [w for w in _ATTRIBUTES if w in module._modules]
        if type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
            names.append("module")
        if not names:
            return module
        module = getattr(module, names[0])


def inner_class(module: nn.Module) -> type:
    """The class that the user wrote; FSDP2 replaces it by a subclass of (FSDPModule, class)."""
    bases = type(module).__bases__
    if len(bases) == 2 and bases[0].__name__ == "FSDPModule":
        return bases[1]
    return type(module)
