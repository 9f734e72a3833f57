"""One sampled step of `fp4.monitor`: what each quantization was, and of which layer.

Operators carry no names, since blocks of equal schemes share a graph. What they carry is memory: a
weight is quantized from its parameter, a GEMM reads operands that a quantizer wrote, backward
decodes codes that the forward saved. So the weight names the forward GEMM, and with it the
activation; the codes of the weight name DGRAD, and with it the gradient; a gradient that DGRAD does
not read is named by the activation beside it in WGRAD.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .blocks import clean_name, parameter_name
from .kernels import observing
from .kernels.health import Quantization, Rows, address, measure, quantizations

MODEL = "(the model)"
Key = tuple[str, str]  # a layer's name and an operand's, such as "dgrad.gradient"

_samples: list[Sample] = []


def in_backward() -> bool:
    """True where autograd is running backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def follow(compiled: Callable, graphed: bool) -> Callable:
    """``compiled``, a graph's call, which tells the samples that are open that it runs.

    ``graphed``: its kernels are replayed as CUDA graphs, so that nothing of it can be sampled.
    """

    def call(*args: Any) -> Any:
        return _call(compiled, graphed, args) if _samples else compiled(*args)

    return call


def _call(compiled: Callable, graphed: bool, args: tuple) -> Any:
    entered = [sample for sample in tuple(_samples) if sample.enter(args, graphed)]
    try:
        return compiled(*args)
    finally:
        for sample in entered:
            sample.leave()


class Addresses:
    """The matrices of a model by the memory that they have now."""

    def __init__(self, model: nn.Module) -> None:
        self.ids: set[int] = set()
        spans: dict[int, tuple[int, str]] = {}
        for name, t in itertools.chain(model.named_parameters(), model.named_buffers()):
            self.ids.add(id(t))
            # FSDP's shards and other subclasses have no memory that a kernel reads as it is
            plain = not is_traceable_wrapper_subclass(t) and t.layout == torch.strided
            if plain and t.ndim >= 2 and address(t):
                module, _, parameter = name.rpartition(".")
                label = parameter_name(clean_name(module), clean_name(parameter))
                spans.setdefault(address(t), (t.nbytes, label or MODEL))
        self.starts = sorted(spans)
        self.spans = [spans[start] for start in self.starts]

    def name(self, source: int) -> str | None:
        """The layer whose matrix holds the address; which part, where it is not the first."""
        at = bisect.bisect_right(self.starts, source) - 1
        if at < 0 or not source:
            return None
        size, label = self.spans[at]
        offset = source - self.starts[at]
        if offset >= size:
            return None
        return label if offset == 0 else f"{label}[{offset / size:.0%}:]"


class Sample:
    """What the primitives did in one training step of ``model``; figures from about ``rows`` rows.

    Of several micro-batches the first is taken. Calls without gradients are not.
    """

    def __init__(self, model: nn.Module, rows: Rows) -> None:
        self.model, self.rows = model, rows
        self.graphed = self.captured = False
        self.calls = 0
        self._depth, self._backward = 0, False
        self._addresses: Addresses  # of the call that `enter` let in
        self._operands: dict[int, Quantization | None] = {}
        self._codes: dict[int, Quantization] = {}
        self._nodes: dict[tuple, tuple[Any, set[str]]] = {}
        self._products: list[tuple[Quantization, Quantization]] = []

    def open(self) -> None:
        """Observe from now on."""
        _samples.append(self)
        observing.observers.append(self.observe)

    def close(self) -> None:
        """Observe no more."""
        if self in _samples:
            _samples.remove(self)
            observing.observers.remove(self.observe)

    # what runs ------------------------------------------------------------------------------------

    def enter(self, args: tuple, graphed: bool) -> bool:
        """A compiled graph is about to run; True where it is to be sampled."""
        if not torch.is_grad_enabled():
            return False
        self._addresses = Addresses(self.model)  # FSDP gives weights their memory for the call
        parameters = [a for a in args if isinstance(a, nn.Parameter)]
        if parameters and not any(id(p) in self._addresses.ids for p in parameters):
            return False
        if in_backward():  # a checkpointed part runs again
            return False
        if self._backward:  # the next micro-batch
            self.close()
            return False
        self.calls += 1
        self.graphed |= graphed
        self._depth += not graphed
        return not graphed

    def leave(self) -> None:
        """That graph has run."""
        self._depth -= 1

    def observe(self, name: str, args: tuple, out: Any) -> None:
        """After a primitive: see `observing`."""
        first = args[0]
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            self.captured = True  # kernels launched now would run at every replay
            return
        if name == "scaled_mm":
            self._multiplied(address(first), address(args[1]))
        elif name in ("decode", "requantize"):
            known = self._codes.get(address(first))
            self._operands[address(out[0] if name == "requantize" else out)] = known
            mine = known is not None and known.kept is not None
            self._backward |= mine and in_backward()
        else:
            self._quantized(name, args, out)

    def _quantized(self, name: str, args: tuple, out: Any) -> None:
        wanted = not self.graphed and (self._depth > 0 or in_backward())
        for made in quantizations(name, args, out, self.rows if wanted else None):
            if made.side == "forward":
                if wanted and self._depth == 0:  # a checkpointed part again, on memory of its own
                    self._addresses = Addresses(self.model)
                label = self._addresses.name(made.source) if wanted else None
                made.names = [label] if label else []
                if made.codes:
                    self._codes[made.codes] = made
            else:
                made.node = self._node(made)
            for memory in {made.operand, made.codes} - {0}:  # some engines read the codes
                self._operands[memory] = made

    def _node(self, made: Quantization) -> list[str]:
        """The names, still to come, that both orientations of one gradient share.

        They are made in one call, or in two one after the other from the same memory and seed.
        """
        names, sides = self._nodes.get(made.node, ([], set()))
        if made.side in sides:
            names, sides = [], set()
        self._nodes[made.node] = names, sides | {made.side}
        return names

    def _multiplied(self, a: int, b: int) -> None:
        left, right = self._operands.get(a), self._operands.get(b)
        if left is None or right is None or right.kept is None:  # another model's
            return
        self._products.append((left, right))
        if left.side == "dgrad":
            left.node.extend(n for n in right.names if n not in left.node)

    # what it was ----------------------------------------------------------------------------------

    def found(self) -> dict[Key, list[Quantization]]:
        """The quantizations of each layer's operands, by name and operand."""
        readers: dict[Any, list[tuple[str, int]]] = {}  # of activations, and of what they were
        for left, right in self._products:
            if left.side == "forward":
                for key in (left, left.source):
                    readers.setdefault(key, []).extend((n, right.rows) for n in right.names)
        found: dict[Key, list[Quantization]] = {}
        for left, right in self._products:
            beside = readers.get(right.source if right.transposed else right, [])
            for name, operand, made in _operands(left, right, beside):
                of_layer = found.setdefault((name, operand), [])
                if not any(made is other for other in of_layer):
                    of_layer.append(made)
        measure(made for of_layer in found.values() for made in of_layer)
        return {
            key: measured
            for key, of_layer in found.items()
            if (measured := [made for made in of_layer if made.sums is not None])
        }


def _operands(
    left: Quantization, right: Quantization, readers: list[tuple[str, int]]
) -> Iterator[tuple[str, str, Quantization]]:
    """(layer, operand, quantization) of one GEMM; ``readers`` of its activation, with their N."""
    if left.side == "forward":
        for name in right.names:
            yield name, "fprop.activation", left
            yield name, "fprop.weight", right
        return
    names = list(left.node)
    if not names and left.side == "wgrad":
        fitting = dict.fromkeys(name for name, n in readers if n == left.rows)
        names = [" or ".join(fitting)] if fitting else [f"? {left.rows}×{right.rows}"]
    for name in names:
        yield name, f"{left.side}.gradient", left
        if right.transposed:
            yield name, f"{left.side}.{'weight' if left.side == 'dgrad' else 'activation'}", right


def stacked(found: dict[Key, list[Quantization]]) -> Iterator[tuple[torch.device, list, Tensor]]:
    """By device: the keys and quantizations, and their sums FP32 [n, 6]."""
    by_device: dict[torch.device, list[tuple[Key, Quantization]]] = {}
    for key, all_made in found.items():
        for made in all_made:
            assert made.sums is not None
            by_device.setdefault(made.sums.device, []).append((key, made))
    for device, rows in by_device.items():
        yield device, rows, torch.stack([q.sums for _, q in rows if q.sums is not None])
