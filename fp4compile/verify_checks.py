"""What `fp4compile verify` checks: every primitive, engine and layer of this machine, by tables.

A check compares what a device's kernels give with the PyTorch reference on the CPU: bit for bit
where bits are specified, within a bound where they are not (activations, GEMM sums). Formats come
from `kernels.formats`, forms and engines from `kernels.engines`, schemes from the recipes, so that
a new row of those tables is checked without a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from .kernels import autograd, block_scaled, engines, fallback, reference
from .kernels import ops as _ops  # noqa: F401 - defines torch.ops.fp4
from .kernels.activations import ACTIVATIONS
from .kernels.formats import Scheme, TensorFormat
from .kernels.layer import Layer, Quantized
from .kernels.primitives import affine
from .verify_cases import Wrong, formats, forms, inputs, kernel, near, same, schemes, short

fp4 = torch.ops.fp4
SEED, STREAM = -0x1234_5678_9ABC, 3
# How far a GEMM's FP32 sums may be off, by the norm: FP32's own error; tensor cores add products of
# FP8 operands in fewer bits (H200: 1.3e-4 for MXFP8, docs/results.md).
ENGINE_BOUNDS = {"reference": 3e-5, "bf16": 3e-5}
TENSOR_CORE_BOUND = 3e-4


@dataclass(frozen=True)
class Check:
    """``run`` raises `Wrong`; ``missing``: why it is not run, "" where it is."""

    group: str
    name: str
    run: Callable[[], None]
    missing: str = ""


# ---- primitives -------------------------------------------------------------------------------

PARTS = ("codes", "scales", "factor", "operand")


def check_quantize(fmt: TensorFormat, form: str, transpose: bool, device: torch.device) -> None:
    """`quantize`, bit for bit."""
    for case, x in inputs(device, transpose):
        want = fallback.quantize_operand(x, fmt, form, transpose)
        got = fp4.quantize(x.to(device), str(fmt), form, transpose)
        same({p: (g, w) for p, g, w in zip(PARTS, got, want)}, case)


def check_decode(fmt: TensorFormat, form: str, transpose: bool, device: torch.device) -> None:
    """`decode` of what the reference quantized, bit for bit."""
    for case, x in inputs(device, True):
        codes, scales, _, _ = fallback.quantize_operand(x, fmt, "none", False)
        rest = (x.shape[1], form, transpose)
        want = fallback.decode_operand(codes, scales, fmt, *rest)
        got = fp4.decode(codes.to(device), scales.to(device), str(fmt), *rest)
        same({"operand": (got, want)}, case)


def check_requantize(
    source: TensorFormat, fmt: TensorFormat, form: str, device: torch.device
) -> None:
    """`requantize`, bit for bit."""
    for case, x in inputs(device, True):
        codes, scales, factor, _ = fallback.quantize_operand(x, source, "none", False)
        seed = torch.tensor(SEED)
        want = fallback.requantize_operand(
            codes, scales, factor, source, x.shape[1], fmt, form, seed, STREAM
        )
        saved = (t.to(device) for t in (codes, scales, factor))
        got = fp4.requantize(
            *saved, str(source), x.shape[1], str(fmt), form, seed.to(device), STREAM
        )
        same({p: (g, w) for p, g, w in zip(("operand", "factor"), got, want)}, case)


def check_gradient(
    dgrad: TensorFormat | None, wgrad: TensorFormat | None, forms: tuple[str, str], fold: bool,
    device: torch.device,
) -> None:  # fmt: skip
    """`quantize_grad` in both orientations, bit for bit; column sums within 1e-4."""
    for case, g in inputs(device):
        by = torch.rand(g.shape[0], generator=torch.Generator().manual_seed(1)) if fold else None
        seed = torch.tensor(SEED)
        want = fallback.gradient_operands(g, by, dgrad, wgrad, *forms, True, seed, STREAM)
        texts = ("" if f is None else str(f) for f in (dgrad, wgrad))
        by = by if by is None else by.to(device)
        got = fp4.quantize_grad(
            g.to(device), by, *texts, *forms, True, seed.to(device), STREAM
        )
        names = ("dgrad operand", "dgrad factor", "wgrad operand", "wgrad factor")
        same({p: (a, b) for p, a, b in zip(names, got, want)}, case)
        if g.isfinite().all():
            scale = g.double().abs().sum(0) + 1e-30
            off = ((got[4].cpu().double() - want[4].double()).abs() / scale).max()
            if not off <= 1e-4:
                raise Wrong(f"{case}, column sums: {off:.1e} of the sum of magnitudes off")


Term = tuple[Tensor, Tensor, Tensor, Tensor]


def term(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Term:
    """An affine term with every factor."""
    generator = torch.Generator().manual_seed(rows + cols)
    acc = torch.randn(rows, cols, generator=generator).to(dtype)
    row = torch.rand(rows, generator=generator) + 0.5
    col = torch.rand(1, generator=generator) + 0.5
    bias = torch.randn(cols, generator=generator).bfloat16()
    return acc.to(device), row.to(device), col.to(device), bias.to(device)


def check_act_quantize(act: str, gated: bool, fmt: TensorFormat, device: torch.device) -> None:
    """A fused activation: its values within 2e-5 of PyTorch's, so that few codes differ."""
    form = forms(fmt, device)[1]
    for dtype in (torch.bfloat16,) if gated else (torch.bfloat16, torch.float32):
        shape = (130, 2048) if device.type == "cuda" else (37, 272)
        z, up = term(*shape, dtype, device), term(*shape, dtype, device)
        up = (up[0].flip(0).contiguous(), *up[1:])
        h = ACTIVATIONS[act].forward(affine(*z).cpu())
        if gated:
            h = h * affine(*up).cpu()
            got = fp4.glu_quantize(*z, *up, act, str(fmt), form)
        else:
            got = fp4.act_quantize(*z, act, str(fmt), form)
        want = fallback.quantize_operand(h, fmt, form, False)
        case = f"{shape[0]} x {shape[1]} {short(dtype)}"
        if want[2].numel():
            near({"factor": (got[2], want[2])}, 1e-4, case)
        if fmt.float_scales:  # each is a maximum over 448, not rounded to a few bits
            near({PARTS[1]: (got[1], want[1])}, 1e-4, case)
        for part in (0,) if fmt.float_scales else (0, 1):
            wrong = float((got[part].cpu() != want[part]).float().mean())
            if wrong > 0.03:
                raise Wrong(f"{case}, {PARTS[part]}: {wrong:.1%} differ, 3 % is the bound")
        again = fallback.decode_operand(got[0].cpu(), got[1].cpu(), fmt, h.shape[1], form, False)
        if got[3].dtype in (torch.bfloat16, torch.float32):
            same({"operand of the codes": (got[3], again)}, case)


def check_act_grad(act: str, gated: bool, device: torch.device) -> None:
    """The derivative within 1e-3; maxima are those of what was written, bit for bit."""
    for dtype in (torch.bfloat16, torch.float32):
        z = term(130, 272, dtype, device)
        g = (z[0].flip(0).contiguous(), *z[1:3])
        up = (z[0].flip(1).contiguous(), *z[1:])
        pre, other = affine(*z).cpu(), affine(*up).cpu()
        dh, row = affine(*g, None).cpu(), ACTIVATIONS[act]
        if gated:
            want = [row.backward(dh * other, pre), dh * row.forward(pre)]
            got = fp4.glu_grad(*g, *z, *up, act, None, None, True)
        else:
            want = [row.backward(dh, pre)]
            got = fp4.act_grad(*g, *z, act, None, True)
        case = f"130 x 272 {short(dtype)}"
        for i, exact in enumerate(want):
            values, rows, cols = (t.cpu() for t in got[3 * i : 3 * i + 3])
            near({"derivative": (values, exact)}, 4e-3, case)
            size = values.float().abs()
            maxima = {"row maxima": (rows, size.amax(1)), "column maxima": (cols, size.amax(0))}
            same({p: (a.view(torch.float32), b) for p, (a, b) in maxima.items()}, case)


# ---- engines ----------------------------------------------------------------------------------


def check_engine(scheme: Scheme, shape: tuple[int, int, int], device: torch.device) -> None:
    """A forward GEMM against the product in FP64 of the operands that the reference decodes."""
    m, k, n = shape
    layer = Layer(Scheme(fprop=scheme.fprop), torch.float32, device)
    generator = torch.Generator().manual_seed(k)
    x, w = (torch.randn(r, k, generator=generator) for r in (m, n))
    xq, wq = _forward_operands(layer, x.to(device), w.to(device))
    y = layer.fprop(x.to(device), xq, w.to(device), wq, None).value(torch.float32)
    assert scheme.fprop is not None
    exact = [
        reference.dequantize(
            q.codes.cpu(), q.scales.cpu(), _outer(q, op.format), op.format, k
        ).double()
        for q, op in zip((xq, wq), scheme.fprop) if op.format
    ]  # fmt: skip
    bound = ENGINE_BOUNDS.get(layer.engine("fprop").name, TENSOR_CORE_BOUND)
    near({"y": (y, exact[0] @ exact[1].t())}, bound, f"{m} x {k} x {n}")


def _outer(q: Quantized, fmt: TensorFormat) -> Tensor:
    return q.factor.cpu().reshape(-1 if fmt.outer == "row" else ()) if fmt.outer else q.factor.cpu()


def _forward_operands(layer: Layer, x: Tensor, w: Tensor) -> tuple[Quantized, Quantized]:
    xq, wq = layer.quantize_activation(x), layer.quantize_weight(w)
    assert xq is not None and wq is not None
    return xq, wq


# ---- layers -----------------------------------------------------------------------------------


def check_layer(scheme: Scheme, device: torch.device) -> None:
    """y, dx, dw and db of a layer by the device's kernels and engines against the reference's.

    On the same seed, so that operands have the same bits; GEMM sums differ in their order.
    """
    for dtype, (m, k, n) in ((torch.float32, (70, 144, 80)), (torch.bfloat16, (130, 272, 48))):
        generator = torch.Generator().manual_seed(k)
        x, w, g = (
            torch.randn(*s, generator=generator).to(dtype) for s in ((m, k), (n, k), (m, n))
        )
        found: list[tuple[Tensor, ...]] = []
        for where in (device, torch.device("cpu")):
            with reference_only(device) if found else nullcontext():
                found.append(run_layer(scheme, *(t.to(where) for t in (x, w, g))))
        bound = 5e-3 if dtype == torch.bfloat16 or device.type == "cuda" else 1e-5
        names = ("y", "dx", "dw", "db")
        near({p: (a, b) for p, a, b in zip(names, *found)}, bound, f"{m} x {k} x {n}")


@contextmanager
def _without_kernels() -> Iterator[None]:
    before = fallback.native_for
    fallback.native_for = lambda device: None
    try:
        yield
    finally:
        fallback.native_for = before


def reference_only(device: torch.device) -> AbstractContextManager:
    """The CPU's own kernels are off where they are what is checked; not for several threads."""
    return _without_kernels() if device.type == "cpu" else nullcontext()


def run_layer(scheme: Scheme, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """One layer forward and backward with a fixed seed."""
    layer = Layer(scheme, x.dtype, x.device)
    xq, wq = layer.quantize_activation(x), layer.quantize_weight(w)
    y = layer.fprop(x, xq, w, wq, None).value(x.dtype)
    saved = layer.saved_activation(x, xq), layer.saved_weight(w, wq)
    seed = torch.tensor(SEED, device=x.device)
    dx, dw, db = autograd.backward_layer(
        layer, g, *saved, (True, True, True), seed, 0, x.shape[1], w.dtype
    )
    assert dx is not None and dw is not None and db is not None
    return y, dx.value(x.dtype), dw, db


def all_checks(device: torch.device) -> Iterator[Check]:
    """Every check of one device, those that it cannot run included."""
    for fmt in formats():
        if fmt.stochastic:  # gradients
            continue
        for form, transpose in product(forms(fmt, device), (False, True)):
            name, missing = f"{fmt} to {form}{', transposed' * transpose}", kernel(device, fmt)
            run = partial(check_quantize, fmt, form, transpose, device)
            yield Check("quantize", name, run, missing)
            if form != "none" and form not in block_scaled.FORMS:
                run = partial(check_decode, fmt, form, transpose, device)
                yield Check("decode", name, run, missing)
    yield from _backward_checks(device)
    yield from _fused_checks(device)
    for name, scheme in schemes().items():
        layer = Layer(scheme, torch.float32, device)
        for shape in ((64, 256, 48), (129, 1000, 72)):
            title = f"{layer.engine('fprop').name}: {name}, {' x '.join(map(str, shape))}"
            yield Check("engine", title, partial(check_engine, scheme, shape, device))
        if device.type == "cuda" or fallback.native_for(device) is not None:
            yield Check("layer", name, partial(check_layer, scheme, device))


def _backward_checks(device: torch.device) -> Iterator[Check]:
    """Gradients in every format, and as the recipes' schemes have them; requantized operands."""
    gradients: dict[tuple, None] = {}
    requantized: dict[tuple, None] = {}
    decoded: dict[tuple, None] = {}
    for fmt in formats():
        if fmt.stochastic and fmt.outer != "row":
            form = engines.choose(fmt, fmt, device).operand
            gradients[fmt, fmt, (form, form), False] = None
    for scheme in schemes().values():
        layer = Layer(scheme, torch.float32, device)
        texts, used = layer.gradient_formats(True, True)[:2], layer.gradient_formats(True, True)[2:]
        both = [TensorFormat.parse(t) if t else None for t in texts]
        gradients[(*both, used, bool(scheme.wgrad and scheme.wgrad[0].fold))] = None
        for gemm, side in (("dgrad", 1), ("wgrad", 0)):
            operands = getattr(scheme, gemm)
            if operands and operands[1].source == "fprop":
                form = layer.engine(gemm).operand
                source = scheme.fprop[side].format  # type: ignore[index]
                if operands[1].format is not None:
                    requantized[source, operands[1].format, form] = None
                elif form in block_scaled.FORMS:
                    decoded[source, form] = None
    for d, w, used, fold in gradients:
        name = f"{d} and {w} to {used[0]}, {used[1]}{', folded' * fold}"
        run = partial(check_gradient, d, w, used, fold, device)
        yield Check("gradient", name, run, kernel(device, *(f for f in (d, w) if f)))
    for fmt, form in decoded:
        run = partial(check_decode, fmt, form, True, device)
        yield Check("decode", f"{fmt} to {form}, transposed", run, kernel(device, fmt))
    for source, fmt, form in requantized:
        run = partial(check_requantize, source, fmt, form, device)
        yield Check(
            "requantize", f"{source} to {fmt} in {form}", run, kernel(device, source, fmt)
        )


def _fused_checks(device: torch.device) -> Iterator[Check]:
    """Activations and their derivatives, by the rows of `ACTIVATIONS` and the recipes' formats."""
    used = dict.fromkeys(s.fprop[0].format for s in schemes().values() if s.fprop)
    for act, gated in product(ACTIVATIONS, (False, True)):
        name = f"{act}{', gated' * gated}"
        for fmt in used:
            if fmt is not None:
                run = partial(check_act_quantize, act, gated, fmt, device)
                yield Check("activation", f"{name} to {fmt}", run, kernel(device, fmt))
        run = partial(check_act_grad, act, gated, device)
        yield Check("derivative", name, run, kernel(device))
