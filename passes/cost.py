"""What a layer costs: bytes and operations of every kernel, in M (tokens), K and N (features).

    linear(scheme, machine)          the steps of one layer, forward and backward
    chain(schemes, machine)          of linear -> activation -> linear, or gate, up, down
    seconds, milliseconds            what they take on the machine

The steps follow from the scheme as `kernels.layer` and `kernels.autograd` carry it out, on the
engines of the machine. Sizes are symbols of sympy or plain numbers. A step takes the longer of its
bytes at the share of the copy bandwidth that its kernel reaches and its operations at the rate of
its GEMM. For choosing between precisions, to about 15 %; the host's own time is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from fp4compile.kernels.cuda_operands import supports
from fp4compile.kernels.formats import GEMMS, PREACTIVATION, Scheme, TensorFormat

from .machines import ENGINES, MACHINES, Machine, choose, rate_of, stored

M, K, N = sympy.symbols("M K N", positive=True)
Size = Any  # a sympy expression or a number

# Shares of the copy bandwidth that kernels reach on an H200, between K = 4096 and 16384
# (docs/results.md), by kernel and kind of format; "" stands for every other kind. What quantizes is
# limited by the issue of instructions: elsewhere its time goes with that rate, not with bandwidth.
SHARES = {
    ("quantize", "exact"): 0.75, ("quantize", "exact, FP32"): 0.40,
    ("quantize", "searched"): 0.48, ("quantize", "plain"): 0.78, ("quantize", ""): 0.90,
    ("quantize twice", ""): 0.65,
    ("act_quantize", "exact"): 0.55, ("act_quantize", "exact, FP32"): 0.33,
    ("act_quantize", "searched"): 0.56, ("act_quantize", ""): 0.55,
    ("act_quantize codes", "searched"): 0.36, ("act_quantize codes", ""): 0.57,
    ("decode", ""): 0.62, ("requantize", ""): 0.335, ("requantize", "fp8"): 0.535,
    ("gradient", "row"): 0.71, ("gradient", "fp8"): 0.79, ("gradient", ""): 0.63,
    ("quantize", "fp8"): 0.98, ("act_quantize codes", "fp8"): 0.74,
    ("act_grad", ""): 0.91, ("pointwise", ""): 0.92, ("optimizer", ""): 0.85, ("GEMM", ""): 1.0,
    # Formats without a kernel: PyTorch, about 60 passes over FP32 tensors, counted and not timed.
    ("PyTorch", ""): 0.008,
}  # fmt: skip
ISSUE_LIMITED = {
    "quantize", "quantize twice", "act_quantize", "act_quantize codes", "requantize", "gradient",
}  # fmt: skip
MOST = 0.92  # of the copy bandwidth, where only that limits


@dataclass(frozen=True)
class Step:
    """One kernel: bytes, operations by the GEMM rate ``rate``, share of the H200's bandwidth.

    ``layer``: of a chain, from 0; ``backward``: in the backward pass; ``issue``: its instructions
    limit it.
    """

    name: str
    share: float
    bytes: Size
    operations: Size = 0
    rate: str = ""
    layer: int = 0
    backward: bool = False
    issue: bool = False

    def seconds(self, machine: Machine, sizes: dict | None = None) -> float:
        """Predicted time on ``machine``, with ``sizes`` for the symbols ({M: ..., ...})."""
        size, here = _number(self.bytes, sizes), MACHINES["H200"]
        moving = size / machine.bandwidth.value / (MOST if self.issue else self.share)
        if self.issue:
            measured = size / here.bandwidth.value / self.share
            moving = max(moving, measured * here.issue.value / machine.issue.value)
        if self.rate:
            moving = max(moving, _number(self.operations, sizes) / machine.rates[self.rate].value)
        return machine.launch.value + moving


def _number(value: Size, sizes: dict | None) -> float:
    return float(value.subs(sizes)) if sizes and hasattr(value, "subs") else float(value)


def kind(fmt: TensorFormat) -> str:
    """What a format's kernel has to do, as `SHARES` calls it."""
    if fmt.float_scales:
        return "fp8"
    if fmt.block_scales == "fp8_exact":
        return "exact" if fmt.scale_search == "half" else "exact, FP32"
    if fmt.scale_search:
        return "searched"
    return "plain" if fmt.format in ("nvfp4", "mxfp4") else str(fmt.block)


def share(kernel: str, fmt: TensorFormat | None = None) -> float:
    """The share of the bandwidth that a kernel reaches with a format."""
    if fmt is not None and not supports(fmt):
        kernel, fmt = "PyTorch", None
    return SHARES.get((kernel, kind(fmt) if fmt else ""), SHARES[(kernel, "")])


class Costs:
    """The steps of one layer with a scheme: x [m, k], w [n, k], y [m, n]; ``high``: bytes of x."""

    def __init__(
        self, scheme: Scheme, machine: Machine, m: Size, k: Size, n: Size, high: int, layer: int = 0
    ) -> None:
        self.scheme, self.machine, self.high, self.layer = scheme, machine, high, layer
        self.m, self.k, self.n = m, k, n

    def step(
        self, name: str, kernel: str, moved: Size, fmt: TensorFormat | None = None,
        backward: bool = False,
    ) -> Step:  # fmt: skip
        """A kernel that moves so many bytes."""
        limited = kernel in ISSUE_LIMITED and (fmt is None or supports(fmt))
        return Step(name, share(kernel, fmt), moved, 0, "", self.layer, backward, limited)

    def format(self, name: str, side: int) -> TensorFormat:
        """The format of an operand; of the saved codes where it has none of its own."""
        return self.scheme.format_of(name, side)

    def engine(self, name: str) -> str:
        """The engine of a GEMM; "original" where it is not quantized."""
        gemm = getattr(self.scheme, name)
        if gemm is None:
            return "original"
        turned = gemm[1].source == "fprop" and gemm[1].format is None
        return choose(self.format(name, 0), self.format(name, 1), self.machine, turned)

    def gemm(self, name: str) -> Step:
        """One of the three GEMMs, whose result has ``high`` bytes an element."""
        shapes = {
            "fprop": (self.m, self.n, self.k),
            "dgrad": (self.m, self.k, self.n),
            "wgrad": (self.n, self.k, self.m),
        }
        rows, cols, depth = shapes[name]
        engine = self.engine(name)
        if engine == "original":
            rate = "bf16" if self.high == 2 else "fp32"
            a = b = float(self.high)
        else:
            rate = rate_of(engine, self.format(name, 1))
            a, b = (ENGINES[engine].operand(self.format(name, side)) for side in (0, 1))
        moved = a * rows * depth + b * cols * depth + self.high * rows * cols
        work, backward = 2 * rows * cols * depth, name != "fprop"
        return Step(f"GEMM {name}", 1.0, moved, work, rate, self.layer, backward)

    # forward ------------------------------------------------------------------------------------

    def quantize(self, what: str, side: int, rows: Size, cols: Size) -> list[Step]:
        """The forward operand of x or of the weight."""
        if self.scheme.fprop is None:
            return []
        fmt, engine = self.format("fprop", side), ENGINES[self.engine("fprop")]
        reads = 2 if fmt.outer == "tensor" else 1
        moved = (reads * self.high + stored(fmt) + engine.beside(fmt)) * rows * cols
        kernel = "quantize twice" if reads == 2 and supports(fmt) else "quantize"
        return [self.step(f"quantize {what}", kernel, moved, fmt)]

    def made(self, terms: int) -> list[Step]:
        """The activation of ``terms`` GEMM results as this layer's input."""
        elements = self.m * self.k
        if self.scheme.fprop is None:
            return [self.step("activation", "pointwise", (terms + 1) * self.high * elements)]
        fmt, engine = self.format("fprop", 0), ENGINES[self.engine("fprop")]
        if fmt.factor == "tensor":  # its maximum is another pass over the terms
            terms *= 2
        beside = engine.beside(fmt)
        moved = (terms * self.high + stored(fmt) + beside) * elements
        kernel = "act_quantize" if beside >= 1 else "act_quantize codes"
        return [self.step("activation, quantize", kernel, moved, fmt)]

    def from_input(self) -> list[Step]:
        """Backward operands that the forward pass quantizes from the high-precision tensors."""
        found = []
        for name, elements in (("dgrad", self.n * self.k), ("wgrad", self.m * self.k)):
            gemm = getattr(self.scheme, name)
            if gemm and gemm[1].source == "input":
                fmt = self.format(name, 1)
                reads = 2 if fmt.outer == "tensor" else 1
                moved = (reads * self.high + stored(fmt)) * elements
                what = f"quantize {GEMMS[name][1]} for {name}"
                found.append(self.step(what, "quantize", moved, fmt))
        return found

    def factors(self, name: str, elements: Size, of: str) -> list[Step]:
        """The multiplication of a GEMM's result by its factors."""
        gemm = getattr(self.scheme, name)
        if gemm is None or not (self.format(name, 0).factor or self._right_factor(name)):
            return []
        moved = 2 * self.high * elements
        return [self.step(f"factors of {of}", "pointwise", moved, None, name != "fprop")]

    def _right_factor(self, name: str) -> bool:
        folded = name == "wgrad" and bool(self.scheme.wgrad and self.scheme.wgrad[0].fold)
        return self.format(name, 1).factor is not None and not folded

    # backward -----------------------------------------------------------------------------------

    def gradient(self, known: bool) -> list[Step]:
        """The gradient in both orientations; ``known``: the maxima of rows and columns are."""
        names = [name for name in ("dgrad", "wgrad") if getattr(self.scheme, name)]
        if not names:
            return []
        engines = [ENGINES[self.engine(name)] for name in names]
        formats = [self.format(name, 0) for name in names]
        written = sum(e.operand(fmt) for e, fmt in zip(engines, formats))
        # one orientation after the other where both operands are as large as the gradient
        reads = len(names) if all(e is ENGINES["bf16"] for e in engines) else 1
        maxima = any(fmt.block == "row" or fmt.outer == "tensor" for fmt in formats)
        reads += maxima and not known
        moved = (reads * self.high + written) * self.m * self.n
        return [self.step("quantize g", "gradient", moved, formats[0], True)]

    def right(self, name: str) -> list[Step]:
        """What makes the operand beside the gradient of saved codes."""
        gemm = getattr(self.scheme, name)
        if gemm is None:
            return []
        elements = self.n * self.k if name == "dgrad" else self.m * self.k
        fmt, engine, what = self.format(name, 1), self.engine(name), GEMMS[name][1]
        operand = ENGINES[engine].operand(fmt)
        if gemm[1].source == "input" and operand == stored(fmt):
            return []  # the codes are the operand
        if gemm[1].source == "fprop" and gemm[1].format is not None:
            assert self.scheme.fprop is not None
            source = self.scheme.fprop[1 if name == "dgrad" else 0].format
            assert source is not None
            moved = (stored(source) + operand) * elements
            return [self.step(f"requantize {what}", "requantize", moved, fmt, True)]
        moved = (stored(fmt) + operand) * elements
        return [self.step(f"decode {what}", "decode", moved, None, True)]

    def backward(self, inner: bool = False, known: bool = False) -> list[Step]:
        """Everything from the gradient of y on; ``inner``: that of x goes into another kernel."""
        steps = [*self.gradient(known)]
        steps += [*self.right("wgrad"), self.gemm("wgrad")]
        steps += self.factors("wgrad", self.n * self.k, "dw")
        steps += [*self.right("dgrad"), self.gemm("dgrad")]
        return steps if inner else steps + self.factors("dgrad", self.m * self.k, "dx")


def linear(
    scheme: Scheme, machine: Machine, m: Size = M, k: Size = K, n: Size = N, high: int = 2
) -> list[Step]:
    """The steps of one layer, forward then backward, for x [m, k] and w [n, k].

    ``high``: bytes of an element in the original precision, 2 or 4.
    """
    costs = Costs(scheme, machine, m, k, n, high)
    return [
        *costs.quantize("x", 0, m, k), *costs.quantize("weight", 1, n, k), *costs.from_input(),
        costs.gemm("fprop"), *costs.factors("fprop", m * n, "y"), *costs.backward(),
    ]  # fmt: skip


def chain(
    schemes: Sequence[Scheme], machine: Machine, m: Size = M, k: Size = K, n: Size = N,
    out: Size = K, high: int = 2,
) -> list[Step]:  # fmt: skip
    """The steps of an MLP k -> n -> out with an activation: schemes of (up, down) or of (gate, up,
    down). A step's ``layer`` counts them in this order."""
    *before, last = schemes
    first = [Costs(scheme, machine, m, k, n, high, i) for i, scheme in enumerate(before)]
    down = Costs(last, machine, m, n, out, high, len(before))
    steps = []
    for i, costs in enumerate(first):
        lead, other = before[0].fprop, before[i].fprop
        shared = i > 0 and lead is not None and other is not None and lead[0] == other[0]
        steps += [] if shared else costs.quantize("x", 0, m, k)
        steps += [*costs.quantize("weight", 1, n, k), *costs.from_input(), costs.gemm("fprop")]
        if costs.scheme.preactivation:
            kept = (high + stored(PREACTIVATION)) * m * n
            steps += [costs.step("keep z", "quantize", kept, PREACTIVATION)]
    steps += [*down.made(len(first)), *down.quantize("weight", 1, out, n), *down.from_input()]
    steps += [down.gemm("fprop"), *down.factors("fprop", m * out, "y"), *down.backward(inner=True)]
    return steps + _hidden(first)


def _hidden(first: list[Costs]) -> list[Step]:
    """The backward pass of a chain's first layers, from the gradient of the hidden tensor."""
    lead, count = first[0], len(first)
    elements, high = lead.m * lead.n, lead.high
    steps = []
    for costs in first:
        if costs.scheme.preactivation:
            moved = (stored(PREACTIVATION) + high) * elements
            steps += [costs.step("decode z", "decode", moved, None, True)]
    moved = (1 + 2 * count) * high * elements
    steps += [lead.step("activation gradient", "act_grad", moved, None, True)]
    for costs in first:
        steps += costs.backward(inner=count > 1, known=True)
    if count > 1:  # both gradients of x are added
        moved = (count + 1) * high * lead.m * lead.k
        steps += [lead.step("sum of dx", "pointwise", moved, None, True)]
    return steps


def seconds(steps: Iterable[Step], machine: Machine, sizes: dict | None = None) -> float:
    """Predicted time of steps one after the other."""
    return sum(step.seconds(machine, sizes) for step in steps)


def milliseconds(
    steps: Iterable[Step], machine: Machine, tokens: int, width: int, hidden: int
) -> float:
    """The same for steps in the symbols M, K and N."""
    return 1e3 * seconds(steps, machine, {M: tokens, K: width, N: hidden})
