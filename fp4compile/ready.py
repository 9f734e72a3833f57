"""Weights quantized once per change instead of once per call: ``options={"cache_weights": True}``.

A change is any step of a `torch.optim.Optimizer` (fused ones do not count their writes, so a hook
does), and what PyTorch counts on the parameter: ``copy_`` and other in-place operations,
``load_state_dict``, another ``param.data``. Writes through ``param.data`` and by foreign kernels
are not counted; after them `weights_changed` is to be called. Off unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .kernels import observing
from .kernels.errors import PolicyError
from .kernels.formats import Scheme
from .kernels.layer import Layer
from .passes.prepared import Prepared, prepare_weights


@dataclass
class Entry:
    """A weight's codes, scales, factor and operand, and of which state of it they are."""

    tensors: list[Tensor] = field(default_factory=list)
    stamp: Any = None


_entries: Any = WeakTensorKeyDictionary()
_round = 0


@cache
def _after_steps() -> None:
    register_optimizer_step_post_hook(lambda *_: weights_changed())


def weights_changed() -> None:
    """Have every weight quantized again at its next use.

    Needed under ``cache_weights`` after writes that PyTorch does not count: ``param.data.copy_``
    and the like, kernels of other packages, collectives into a parameter's memory.
    """
    global _round
    _round += 1


def follow(
    gm: GraphModule, example_inputs: list, models: list[nn.Module],
    compile_graph: Callable[[GraphModule, list], Callable],
) -> Callable:  # fmt: skip
    """Compile ``gm`` with its quantized weights as inputs, and hand them over at each call.

    Raises:
        PolicyError: for models under FSDP, which writes parameters without being counted.
    """
    _after_steps()
    for model in models:
        bases = {base.__name__ for m in model.modules() for base in type(m).__mro__}
        if any("FSDP" in name for name in bases):
            raise PolicyError("cache_weights: FSDP's writes are not counted; leave it out")
    gm, prepared = prepare_weights(gm, _operand)
    if not prepared:
        return compile_graph(gm, example_inputs)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    extra = [n.meta["example_value"] for n in placeholders[len(placeholders) - 4 * len(prepared) :]]
    compiled = compile_graph(gm, [*example_inputs, *extra])

    def call(*args: Any) -> Any:
        ready = [quantized(args[each.position], each) for each in prepared]
        for each, tensors in zip(prepared, ready) if observing.observers else ():
            weight = _matrix(args[each.position], each)
            observing.tell("quantize", (weight, each.format, each.operand, False), tensors)
        return compiled(*args, *(t for tensors in ready for t in tensors))

    return call


def _operand(scheme: str, device: torch.device) -> tuple[str, str] | None:
    return Layer(Scheme.parse(scheme), torch.float32, device).weight_operand()


def _matrix(weight: Tensor, each: Prepared) -> Tensor:
    return weight.detach().t() if each.transposed else weight.detach()


def quantized(weight: Tensor, each: Prepared) -> list[Tensor]:
    """The four tensors of ``weight``, at one address as long as its shape stays."""
    of_weight = _entries.setdefault(weight, {})
    entry = of_weight.setdefault((each.transposed, each.format, each.operand), Entry())
    version = None if weight.is_inference() else weight._version
    stamp = (version, weight.data_ptr(), weight.shape, weight.dtype, weight.device, _round)
    if entry.stamp == stamp and version is not None:
        return entry.tensors
    with torch.no_grad():
        new = torch.ops.fp4.quantize(_matrix(weight, each), each.format, each.operand, False)
        same = [t.shape == n.shape and t.device == n.device for t, n in zip(entry.tensors, new)]
        if entry.tensors and all(same):
            for tensor, result in zip(entry.tensors, new):
                tensor.copy_(result)
        else:
            entry.tensors = list(new)
    entry.stamp = stamp
    return entry.tensors
