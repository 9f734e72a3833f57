"""The primitive operators: opaque, functional, the same bits on every device.

They are what the AOT graphs show. Each is one kernel; which implementation runs (CUDA, native C++,
PyTorch reference) depends on the device alone. Words: an *operand* is the tensor a GEMM reads, a
*factor* what its result is multiplied with afterwards (docs/design.md). An operand in FP8 with FP32
scales has those in the place of the factor where the engine reads them beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import activations, block_scaled, engines
from .activations import ACTIVATIONS, evaluate
from .formats import BITS, BLOCK, TensorFormat
from .observing import observed
from .reference import padded

LIBRARY = torch.library.Library("fp4", "DEF")
NAMES: list[str] = []

_TERM = "Tensor acc{0}, Tensor? row{0}, Tensor? col{0}, Tensor? bias{0}"
_QUANTIZED = "(Tensor, Tensor, Tensor, Tensor)"
_GRADIENT = (
    "str dgrad, str wgrad, str operand_d, str operand_w, bool bias_grad, Tensor? seed, int stream"
)
_GRADIENT_OUT = "Tensor, Tensor, Tensor, Tensor, Tensor"


def primitive(schema: str, fake: Callable) -> Callable:
    """Define ``fp4::<schema>`` with the decorated function as implementation on every device."""
    name = schema.partition("(")[0]

    def register(function: Callable) -> Callable:
        LIBRARY.define(schema)
        LIBRARY.impl(name, observed(name, function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fp4::{name}", fake, lib=LIBRARY)
        NAMES.append(name)
        return function

    return register


def implementation(x: Tensor, *formats: TensorFormat | None):
    """The module that quantizes ``x``: CUDA kernels, native C++ or the PyTorch fallback."""
    from . import fallback

    module = fallback.native_for(x.device)
    if module is not None and all(f is None or module.supports(f) for f in formats):
        return module
    return fallback


def _fused(name: str, x: Tensor, *formats: str) -> Callable | None:
    """A fused kernel of the implementation for ``x``, where it has one."""
    return getattr(implementation(x, *map(parse, formats)), name, None)


def parse(text: str) -> TensorFormat | None:
    """The format of a canonical text; None for the empty text."""
    return TensorFormat.parse(text) if text else None


def as_operand(values: Tensor, form: str) -> Tensor:
    """FP32 ``values`` (exact in the form) as the tensor an engine reads."""
    if form == "none":
        return values.new_empty(0)
    if form in ("e4m3", "mx"):
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    return values.to(engines.OPERAND_DTYPES[form])


def fake_codes(x: Tensor, rows, cols, fmt: TensorFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Empty codes, scales and factor of [rows, cols] in ``fmt``."""
    width = padded(cols, fmt)
    dtype = torch.int8 if fmt.format == "s2f6" else torch.uint8
    codes = x.new_empty((rows, width * BITS[fmt.format] // 8), dtype=dtype)
    if fmt.float_scales:
        scales = stored_scales(empty_scales(x, rows, width, fmt), fmt)
    else:
        scales = x.new_empty((rows, width // BLOCK[fmt.format]), dtype=torch.uint8)
    return codes, scales, fake_factor(x, rows, fmt)


def stored_scales(scales: Tensor, fmt: TensorFormat) -> Tensor:
    """FP32 scales in the engine's shape -> in the public one, a view; and back."""
    return scales if fmt.block == "tile" else scales.t()


def empty_scales(x: Tensor, rows, width, fmt: TensorFormat) -> Tensor:
    """FP32 scales of [rows, width] as an engine reads them: [width/128, rows], or tile by tile."""
    blocks = width // BLOCK[fmt.format]
    shape = ((rows + 127) // 128, blocks) if fmt.block == "tile" else (blocks, rows)
    return x.new_empty(shape, dtype=torch.float32)


def fake_factor(x: Tensor, rows, fmt: TensorFormat) -> Tensor:
    """Empty factor: [rows], [1] or [0], FP32."""
    size = {"row": rows, "tensor": 1, None: 0}[fmt.factor]
    return x.new_empty((size,), dtype=torch.float32)


def fake_beside(x: Tensor, rows, cols, fmt: TensorFormat, form: str) -> Tensor:
    """What comes with an operand [rows, cols]: its factor, or scales that the engine reads."""
    if fmt.float_scales and form == "e4m3":
        return empty_scales(x, rows, padded(cols, fmt), fmt)
    return fake_factor(x, rows, fmt)


def fake_operand(x: Tensor, rows, cols, fmt: TensorFormat, form: str) -> Tensor:
    """Empty operand: [rows, cols padded to the block] in the engine's dtype; [0] for "none".

    Block-scaled forms: with its scales behind its rows (block_scaled.py).
    """
    if form == "none":
        return x.new_empty((0,), dtype=torch.float32)
    width = padded(cols, fmt)
    if form == "fp4":
        width = width // 2
    if block_scaled.has_tail(fmt, form) and width != 0:
        rows = rows + block_scaled.tail(rows, width, form)
    return x.new_empty((rows, width), dtype=engines.OPERAND_DTYPES[form])


def fake_place(x: Tensor, rows, cols, fmt: TensorFormat, form: str) -> Tensor:
    """Empty result of `quantize` in the place of an operand."""
    what = block_scaled.in_place(fmt, form) if form in block_scaled.FORMS else "values"
    if what == "values":
        return fake_operand(x, rows, cols, fmt, form)
    blocks = padded(cols, fmt) // BLOCK[fmt.format]
    size = block_scaled.scale_bytes(rows, blocks) if what == "scales" else 0
    return x.new_empty((size,), dtype=torch.uint8)


def _fake_quantize(x, format, operand, transpose):
    fmt = TensorFormat.parse(format)
    rows, cols = (x.shape[1], x.shape[0]) if transpose else x.shape
    return *fake_codes(x, rows, cols, fmt), fake_place(x, rows, cols, fmt, operand)


@primitive(
    f"quantize(Tensor x, str format, str operand, bool transpose) -> {_QUANTIZED}", _fake_quantize
)
def quantize(x: Tensor, format: str, operand: str, transpose: bool):
    """x [R, C] (or its transpose) along the last axis -> codes, scales, factor, operand.

    Where the codes are the operand's rows there are its block scales in its place, if any
    (`block_scaled.in_place`).
    """
    fmt = TensorFormat.parse(format)
    return implementation(x, fmt).quantize_operand(x, fmt, operand, transpose)


def affine(acc: Tensor, row: Tensor | None, col: Tensor | None, bias: Tensor | None) -> Tensor:
    """FP32 z = (acc * row) * col + bias; row [M] or [1] over rows, col [N] or [1] over columns."""
    return activations.affine(acc, None if row is None else row[:, None], col, bias)


def _fake_act_quantize(acc, row, col, bias, act, format, operand):
    return _fake_quantize(acc, format, operand, False)


@primitive(
    f"act_quantize({_TERM.format('')}, str act, str format, str operand) -> {_QUANTIZED}",
    _fake_act_quantize,
)
def act_quantize(acc, row, col, bias, act, format, operand):
    """h = act((acc * row) * col + bias), FP32, never stored, then as `quantize`."""
    fused = _fused("act_quantize_operand", acc, format)
    done = fused and fused((acc, row, col, bias), act, TensorFormat.parse(format), operand)
    if done:
        return done
    h = evaluate(ACTIVATIONS[act].forward, affine(acc, row, col, bias))
    return quantize(h, format, operand, False)


def _fake_glu_quantize(
    acc_g, row_g, col_g, bias_g, acc_u, row_u, col_u, bias_u, act, format, operand
):
    return _fake_quantize(acc_g, format, operand, False)


@primitive(
    f"glu_quantize({_TERM.format('_g')}, {_TERM.format('_u')}, str act, str format, str operand)"
    f" -> {_QUANTIZED}",
    _fake_glu_quantize,
)
def glu_quantize(acc_g, row_g, col_g, bias_g, acc_u, row_u, col_u, bias_u, act, format, operand):
    """h = act(gate) * up of the two affine terms, FP32, never stored, then as `quantize`."""
    fused = _fused("glu_quantize_operand", acc_g, format)
    terms = (acc_g, row_g, col_g, bias_g), (acc_u, row_u, col_u, bias_u)
    done = fused and fused(*terms, act, TensorFormat.parse(format), operand)
    if done:
        return done
    gate = evaluate(ACTIVATIONS[act].forward, affine(acc_g, row_g, col_g, bias_g))
    return quantize(gate * affine(acc_u, row_u, col_u, bias_u), format, operand, False)


def _fake_decode(codes, scales, format, cols, operand, transpose):
    fmt = TensorFormat.parse(format)
    rows, cols = (cols, codes.shape[0]) if transpose else (codes.shape[0], cols)
    return fake_operand(codes, rows, cols, fmt, operand)


@primitive(
    "decode(Tensor codes, Tensor scales, str format, SymInt cols, str operand, bool transpose)"
    " -> Tensor",
    _fake_decode,
)
def decode(codes, scales, format, cols, operand, transpose):
    """The operand of saved codes, exactly; transposed it is [cols, R padded to the block]."""
    fmt = TensorFormat.parse(format)
    return implementation(codes, fmt).decode_operand(codes, scales, fmt, cols, operand, transpose)


def _fake_requantize(codes, scales, factor, source, cols, format, operand, seed, stream):
    fmt = TensorFormat.parse(format)
    rows = codes.shape[0]
    beside = fake_beside(codes, cols, rows, fmt, operand)
    return fake_operand(codes, cols, rows, fmt, operand), beside


@primitive(
    "requantize(Tensor codes, Tensor scales, Tensor factor, str source, SymInt cols, str format,"
    " str operand, Tensor? seed, int stream) -> (Tensor, Tensor)",
    _fake_requantize,
)
def requantize(codes, scales, factor, source, cols, format, operand, seed, stream):
    """Saved codes decoded (with their factor), transposed, quantized again -> operand, factor."""
    src, fmt = TensorFormat.parse(source), TensorFormat.parse(format)
    impl = implementation(codes, src, fmt)
    return impl.requantize_operand(codes, scales, factor, src, cols, fmt, operand, seed, stream)


def _fake_gradient(g, dgrad, wgrad, operand_d, operand_w, bias_grad):
    m, n = g.shape
    out = []
    for text, form, rows, cols in ((dgrad, operand_d, m, n), (wgrad, operand_w, n, m)):
        if text:
            fmt = TensorFormat.parse(text)
            beside = fake_beside(g, rows, cols, fmt, form)
            out += [fake_operand(g, rows, cols, fmt, form), beside]
        else:
            out += [g.new_empty((0,), dtype=torch.float32) for _ in range(2)]
    return *out, g.new_empty((n if bias_grad else 0,), dtype=torch.float32)


def _fake_quantize_grad(
    g, fold, dgrad, wgrad, operand_d, operand_w, bias_grad, seed, stream,
    row_amax=None, col_amax=None,
):  # fmt: skip
    return _fake_gradient(g, dgrad, wgrad, operand_d, operand_w, bias_grad)


@primitive(
    f"quantize_grad(Tensor g, Tensor? fold, {_GRADIENT}, Tensor? row_amax=None,"
    f" Tensor? col_amax=None) -> ({_GRADIENT_OUT})",
    _fake_quantize_grad,
)
def quantize_grad(
    g, fold, dgrad, wgrad, operand_d, operand_w, bias_grad, seed, stream,
    row_amax=None, col_amax=None,
):  # fmt: skip
    """g [M, N] in both orientations, from one set of random bits, and its column sums.

    Returns dgrad operand [M, Np] and factor, wgrad operand [N, Mp] of (g * fold[:, None])^T and
    factor, bias gradient FP32 [N]. An empty format text leaves its orientation out ([0] tensors).
    ``row_amax`` and ``col_amax``, if known: `act_grad`'s.
    """
    d, w = parse(dgrad), parse(wgrad)
    impl = implementation(g, d, w)
    if d is None and w is None and g.is_cuda:  # column sums alone have no CUDA kernel
        from . import fallback as impl
    known = (row_amax, col_amax) if hasattr(impl, "act_grad") else ()
    arguments = (g, fold, d, w, operand_d, operand_w, bias_grad, seed, stream)
    return impl.gradient_operands(*arguments, *known)


_ACT_GRAD = (
    "g, Tensor? row, Tensor? col, " + _TERM.format(1) + ", str act, Tensor? fold, bool amax"
)
_GLU_GRAD = (
    f"g, Tensor? row, Tensor? col, {_TERM.format('_g')}, {_TERM.format('_u')}, str act,"
    " Tensor? fold_g, Tensor? fold_u, bool amax"
)


def _fake_maxima(g, amax):
    return [g.new_empty((n if amax else 0,), dtype=torch.int32) for n in g.shape]


def _fake_act_grad_(g, *rest):
    return tuple(_fake_maxima(g, rest[-1]))


def _fake_act_grad(g, *rest):
    return g.new_empty(g.shape), *_fake_maxima(g, rest[-1])


@primitive(f"act_grad_(Tensor(a!) {_ACT_GRAD}) -> (Tensor, Tensor)", _fake_act_grad_)
def act_grad_(g, row, col, acc1, row1, col1, bias1, act, fold, amax):
    """`act_grad` written over g [M, N]."""
    return _write_grad((g, row, col, None), (acc1, row1, col1, bias1), None, act, (fold,), amax, g)


@primitive(f"act_grad(Tensor {_ACT_GRAD}) -> (Tensor, Tensor, Tensor)", _fake_act_grad)
def act_grad(g, row, col, acc1, row1, col1, bias1, act, fold, amax):
    """dz = (g * row * col) * act'(z) [M, N], z = (acc1 * row1) * col1 + bias1; FP32, in g's dtype.

    Returns dz and, with ``amax`` (else [0]), the FP32 bits as int32 of the maxima of the rows [M]
    of |dz| and of the columns [N] of |dz * fold[:, None]|.
    """
    out, z = g.new_empty(g.shape), (acc1, row1, col1, bias1)
    return out, *_write_grad((g, row, col, None), z, None, act, (fold,), amax, out)


def _fake_glu_grad_(g, *rest):
    amax = rest[-1]
    return *_fake_maxima(g, amax), g.new_empty(g.shape), *_fake_maxima(g, amax)


def _fake_glu_grad_both(g, *rest):
    return g.new_empty(g.shape), *_fake_glu_grad_(g, *rest)


@primitive(
    f"glu_grad_(Tensor(a!) {_GLU_GRAD}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_glu_grad_,
)
def glu_grad_(g, row, col, acc_g, row_g, col_g, bias_g, acc_u, row_u, col_u, bias_u, act,
              fold_g, fold_u, amax):  # fmt: skip
    """`glu_grad`, the gate's gradient written over g [M, N]."""
    gate, up = (acc_g, row_g, col_g, bias_g), (acc_u, row_u, col_u, bias_u)
    return _write_grad((g, row, col, None), gate, up, act, (fold_g, fold_u), amax, g)


@primitive(
    f"glu_grad(Tensor {_GLU_GRAD}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_glu_grad_both,
)
def glu_grad(g, row, col, acc_g, row_g, col_g, bias_g, acc_u, row_u, col_u, bias_u, act,
             fold_g, fold_u, amax):  # fmt: skip
    """As `act_grad` for both terms of act(gate) * up: gate's three results, then up's."""
    gate, up = (acc_g, row_g, col_g, bias_g), (acc_u, row_u, col_u, bias_u)
    out = g.new_empty(g.shape)
    return out, *_write_grad((g, row, col, None), gate, up, act, (fold_g, fold_u), amax, out)


def _write_grad(g, z, up, act, folds, amax, out) -> tuple[Tensor, ...]:
    """`cuda_kernels.act_grad`, in PyTorch where there is no such kernel."""
    fused = _fused("act_grad", out)
    if fused and out.is_contiguous():
        return fused(g, z, up, act, folds, amax, out)
    results = []
    for i, (dz, fold) in enumerate(zip(_hidden_gradients(g, z, up, act), folds)):
        values = dz.to(out.dtype) if i else out.copy_(dz)
        results += ([values] if i else []) + _maxima(values.float(), fold, amax)
    return tuple(results)


def _hidden_gradients(g, z, up, act) -> list[Tensor]:
    """FP32 gradients of act(z), or of both terms of act(z) * up, from that of the result."""
    dh, z = affine(*g), affine(*z)
    if up is None:
        return [evaluate(ACTIVATIONS[act].backward, dh, z)]
    dz = evaluate(ACTIVATIONS[act].backward, dh * affine(*up), z)
    return [dz, dh * evaluate(ACTIVATIONS[act].forward, z)]


def _maxima(dz: Tensor, fold: Tensor | None, amax: bool) -> list[Tensor]:
    if not amax or dz.numel() == 0:
        return [dz.new_zeros(n * amax, dtype=torch.int32) for n in dz.shape]
    folded = dz if fold is None else dz * fold[:, None]
    return [dz.abs().amax(1).view(torch.int32), folded.abs().amax(0).view(torch.int32)]


def _fake_act_grad_quantize(g, row, col, acc, row1, col1, bias1, act, fold, *rest):
    return _fake_gradient(acc, *rest[:5])


@primitive(
    "act_grad_quantize(Tensor g, Tensor? row, Tensor? col, Tensor acc1, Tensor? row1, Tensor? col1,"
    f" Tensor? bias1, str act, Tensor? fold, {_GRADIENT}) -> ({_GRADIENT_OUT})",
    _fake_act_grad_quantize,
)
def act_grad_quantize(g, row, col, acc, row1, col1, bias1, act, fold, *rest):
    """`quantize_grad` of (g * row * col) * act'(z), z = (acc * row1) * col1 + bias1, in FP32."""
    (dz,) = _hidden_gradients((g, row, col, None), (acc, row1, col1, bias1), None, act)
    return quantize_grad(dz, fold, *rest)


_GATED = "str act, Tensor? fold_g, Tensor? fold_u"


def _fake_glu_grad(g, row, col, acc_g, row_g, col_g, bias_g, acc_u, row_u, col_u, bias_u, act,
                   fold_g, fold_u, dgrad_g, wgrad_g, dgrad_u, wgrad_u,
                   operand_dg, operand_wg, operand_du, operand_wu, bias_grad_g, bias_grad_u,
                   seed, stream):  # fmt: skip
    gate = _fake_gradient(acc_g, dgrad_g, wgrad_g, operand_dg, operand_wg, bias_grad_g)
    return *gate, *_fake_gradient(acc_u, dgrad_u, wgrad_u, operand_du, operand_wu, bias_grad_u)


@primitive(
    f"glu_grad_quantize(Tensor g, Tensor? row, Tensor? col, {_TERM.format('_g')},"
    f" {_TERM.format('_u')}, {_GATED}, str dgrad_g, str wgrad_g, str dgrad_u, str wgrad_u,"
    " str operand_dg, str operand_wg, str operand_du, str operand_wu,"
    " bool bias_grad_g, bool bias_grad_u, Tensor? seed, int stream)"
    f" -> ({_GRADIENT_OUT}, {_GRADIENT_OUT})",
    _fake_glu_grad,
)
def glu_grad_quantize(g, row, col, acc_g, row_g, col_g, bias_g, acc_u, row_u, col_u, bias_u, act,
                      fold_g, fold_u, dgrad_g, wgrad_g, dgrad_u, wgrad_u,
                      operand_dg, operand_wg, operand_du, operand_wu, bias_grad_g, bias_grad_u,
                      seed, stream):  # fmt: skip
    """`quantize_grad` of both terms of h = act(gate) * up; up's stream is 16 higher."""
    gate, up = (acc_g, row_g, col_g, bias_g), (acc_u, row_u, col_u, bias_u)
    d_gate, d_up = _hidden_gradients((g, row, col, None), gate, up, act)
    return (
        *quantize_grad(
            d_gate, fold_g, dgrad_g, wgrad_g, operand_dg, operand_wg, bias_grad_g, seed, stream
        ),
        *quantize_grad(
            d_up, fold_u, dgrad_u, wgrad_u, operand_du, operand_wu, bias_grad_u, seed, stream + 16
        ),
    )


def _fake_scaled_mm(a, b, engine, m, n, out_dtype, *beside):
    return a.new_empty((m, n), dtype=out_dtype)


_BESIDE = "Tensor? scale_a=None, Tensor? scale_b=None, Tensor? outer_a=None, Tensor? outer_b=None"


@primitive(
    "scaled_mm(Tensor a, Tensor b, str engine, SymInt m, SymInt n, ScalarType out_dtype,"
    f" {_BESIDE}) -> Tensor",
    _fake_scaled_mm,
)
def scaled_mm(
    a, b, engine, m, n, out_dtype, scale_a=None, scale_b=None, outer_a=None, outer_b=None
):
    """a[m, K] b[n, K]^T of two operands by ``engine``, FP32 sums, no factor applied.

    ``scale_a``, ``scale_b``: block scales that ``engine`` reads beside the operands (engines.py).
    ``outer_a``, ``outer_b``: factors [1] that engine fp4 applies inside of the call.
    """
    beside = (scale_a, scale_b, (m, n), (outer_a, outer_b))
    return engines.matmul(a, b, engine, out_dtype, None, *beside)


LIBRARY.define(
    f"scaled_mm.out(Tensor a, Tensor b, str engine, SymInt m, SymInt n, {_BESIDE},"
    " *, Tensor(a!) out) -> Tensor(a!)"
)


def scaled_mm_out(
    a, b, engine, m, n, scale_a=None, scale_b=None, outer_a=None, outer_b=None, *, out
):
    """`scaled_mm` into ``out`` [m, n], contiguous; Inductor calls it (inductor.py)."""
    beside = (scale_a, scale_b, (m, n), (outer_a, outer_b))
    return engines.matmul(a, b, engine, out.dtype, out, *beside)


LIBRARY.impl("scaled_mm.out", observed("scaled_mm", scaled_mm_out), "CompositeExplicitAutograd")

# The same with the tensors first, as Inductor writes an extern kernel's arguments.
_TENSORS = "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b"
LIBRARY.define(
    f"scaled_mm.scales_out({_TENSORS}, str engine, SymInt m, SymInt n, *, Tensor(a!) out)"
    " -> Tensor(a!)"
)
LIBRARY.define(
    f"scaled_mm.outer_out({_TENSORS}, Tensor outer_a, Tensor outer_b, str engine, SymInt m,"
    " SymInt n, *, Tensor(a!) out) -> Tensor(a!)"
)


def scaled_mm_scales_out(a, b, scale_a, scale_b, engine, m, n, *, out):
    """`scaled_mm_out` of an engine that reads scales."""
    return scaled_mm_out(a, b, engine, m, n, scale_a, scale_b, out=out)


def scaled_mm_outer_out(a, b, scale_a, scale_b, outer_a, outer_b, engine, m, n, *, out):
    """`scaled_mm_out` with outer scales inside of the call."""
    return scaled_mm_out(a, b, engine, m, n, scale_a, scale_b, outer_a, outer_b, out=out)


for _name, _function in (("scales_out", scaled_mm_scales_out), ("outer_out", scaled_mm_outer_out)):
    _call = observed("scaled_mm", _function)
    LIBRARY.impl(f"scaled_mm.{_name}", _call, "CompositeExplicitAutograd")
