"""What the CUDA kernels are compared with, the same on the host's emulation and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from fp4compile.kernels import (
    block_scaled,
    cuda_fourbit,
    cuda_fp8,
    cuda_kernels,
    cuda_operands,
    fallback,
    layout,
    reference,
)
from fp4compile.kernels.activations import ACTIVATIONS
from fp4compile.kernels.formats import TensorFormat
from fp4compile.kernels.primitives import affine, as_operand

ROW_FORMATS = [
    ("nvfp4:row", "none"),
    ("nvfp4:tensor", "bf16"),
    ("nvfp4:row:four_over_six", "bf16"),
    ("nvfp4:tensor:four_over_six", "none"),
    ("nvfp4:row:fp8_exact", "e4m3"),
    ("nvfp4:tensor:fp8_exact", "bf16"),
    ("nvfp4:row:fp8_exact:half", "e4m3"),
    ("nvfp4:tensor:fp8_exact:half", "bf16"),
    ("nvfp4:tensor:tile", "bf16"),
    ("mxfp8:32", "bf16"),
    ("mxfp8:row", "e4m3"),
    ("mxfp8:row", "bf16"),
    ("nvfp4:row", "fp4"),
    ("nvfp4:row:fp8_exact:half", "fp4"),
    ("nvfp4:tensor:tile", "fp4"),
    ("mxfp8:32", "mx"),
    ("mxfp8:row", "mx"),
    ("nvfp4:row:fp8_exact:half", "mx"),
]
GPU_ROW_FORMATS = [
    *ROW_FORMATS,
    ("nvfp4:tensor:four_over_six", "fp4"),
    ("nvfp4:row:fp8_exact", "fp4"),
]
FP8 = [("fp8:128", "e4m3"), ("fp8:tile", "e4m3"), ("fp8:128", "none"), ("fp8:tile", "none")]
FP8_GRADIENTS = [
    ("fp8:128", "fp8:128"), ("fp8:128", None), (None, "fp8:128"), ("fp8:128:sr", "fp8:128:sr"),
    ("fp8:128:sr", "fp8:128"), ("fp8:128", "fp8:128:sr"),
]  # fmt: skip
GRADIENTS = [
    ("mxfp8:row:sr", "mxfp8:row:sr", "e4m3"),
    ("mxfp8:32:sr", "mxfp8:32:sr", "bf16"),
    ("mxfp8:row:sr", "mxfp8:32:sr", "bf16"),
    (None, "mxfp8:row:sr", "bf16"),
    ("mxfp8:32:sr", None, "bf16"),
    ("mxfp8:32:sr", "mxfp8:32:sr", "mx"),
    ("mxfp8:row:sr", "mxfp8:32:sr", "mx"),
    ("mxfp8:row", "mxfp8:row", "e4m3"),  # to nearest
    ("mxfp8:32", "mxfp8:32", "bf16"),
    ("mxfp8:32", "mxfp8:32", "mx"),
    ("mxfp8:32:sr", "mxfp8:row", "bf16"),
    ("mxfp8:row", "mxfp8:32:sr", "bf16"),
]
GPU_GRADIENTS = [*GRADIENTS, ("mxfp8:32:sr", "mxfp8:row:sr", "mx"), ("mxfp8:32:sr", None, "mx")]
DECODE = [
    ("nvfp4:row:fp8_exact", "e4m3"),
    ("nvfp4:row:fp8_exact", "bf16"),
    ("nvfp4:tensor:tile", "bf16"),
    ("mxfp8:32", "bf16"),
    ("mxfp8:row", "e4m3"),
    ("mxfp8:row", "bf16"),
    ("mxfp4", "bf16"),
    ("nvfp4:tensor:had32", "bf16"),  # transposed, rows are padded to the rotation
]
REQUANTIZE = [
    ("mxfp4", "mxfp8:32:sr", "bf16"),
    ("nvfp4:row:four_over_six", "mxfp8:32:sr", "bf16"),
    ("nvfp4:tensor", "mxfp8:row:sr", "e4m3"),
    ("mxfp8:row", "mxfp8:row:sr", "e4m3"),
    ("mxfp8:32", "mxfp8:32:sr", "bf16"),
    ("nvfp4:row:four_over_six", "mxfp8:32:sr", "mx"),
    ("mxfp8:row", "mxfp8:row:sr", "mx"),
    ("nvfp4:row:four_over_six", "mxfp8:32", "bf16"),
    ("mxfp8:32", "mxfp8:row", "e4m3"),
]
GPU_REQUANTIZE = [*REQUANTIZE, ("mxfp8:32", "mxfp8:32:sr", "mx"), ("nvfp4:tensor", "mxfp8:32:sr", "mx")]
# 4-bit formats that couple nothing along a row: along rows, and of the transpose.
FOUR_BIT = ["nvfp4:tensor", "mxfp4"]
TRANSPOSED = ["nvfp4:tensor:had16", "mxfp4:had32", "nvfp4:tensor", "mxfp4", "nvfp4:tensor:had32", "mxfp4:had16"]
FOUR_BIT_GRADIENTS = [
    ("nvfp4:tensor:sr", "nvfp4:tensor:sr:had16"),
    ("mxfp4:sr", "mxfp4:sr:had32"),
    ("nvfp4:tensor:sr", "nvfp4:tensor:sr"),
    ("mxfp4:sr", "mxfp4:sr"),
    ("nvfp4:tensor", "nvfp4:tensor:had32"),
    ("mxfp8:32:sr", "mxfp4:sr:had16"),
    ("mxfp4", None),
    (None, "nvfp4:tensor:sr:had32"),
    ("nvfp4:tensor:sr", "mxfp8:32:sr"),
]
SHAPES = [(1, 1), (37, 17), (5, 48), (70, 144), (130, 272), (0, 32), (3, 0)]
STREAM = 3
VECTORS = np.load(Path(__file__).parent.parent / "data" / "vectors.npz")


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that PyTorch hands out uninitialized holds NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_poisoned(device) -> None:
    """Every kernel writes all that it hands out, padding included, and reads nothing else."""
    x = matrix(37, 45, torch.float32, device)
    with poisoned():
        assert torch.empty(3, device=device).isnan().all()
        for text, form in ROW_FORMATS:
            check_rows(text, form, x)
        for text, form in DECODE:
            check_decode(text, form, x)
        for source, target, form in REQUANTIZE:
            check_requantize(source, target, form, x)
        for case in GRADIENTS:
            check_gradient(*case, x, None, True)
        for text in FOUR_BIT:
            check_four_bit(text, x)
        few = slice(0 if x.is_cuda else 2, 4)  # on the host each costs a compilation
        for text in TRANSPOSED[few]:
            check_transposed(text, x)
        for pair in FOUR_BIT_GRADIENTS[few]:
            check_four_bit_gradient(*pair, x, None)
        check_activation("gelu", True, torch.float32, device)
        check_act_grad("silu", True, torch.float32, device)


# With block-scaled tensor cores.
CODED_GRADIENTS = [
    ("nvfp4:tensor:sr", "nvfp4:tensor:sr:had16"), ("nvfp4:tensor:sr", "nvfp4:tensor:sr"),
    ("nvfp4:tensor", "nvfp4:tensor:had32"),
]  # fmt: skip


def seed(device) -> torch.Tensor:
    return torch.tensor(-0x1234_5678_9ABC, device=device)


def matrix(rows: int, cols: int, dtype, device, nonfinite: bool = False) -> torch.Tensor:
    """Gaussian rows of widely different sizes, with ties, zeros of both signs and tiny values."""
    generator = torch.Generator().manual_seed(1000 * rows + cols)
    x = torch.randn(rows, cols, generator=generator)
    if x.numel():
        x *= torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator).float())
        x.view(-1)[::7] = (x.view(-1)[::7] * 4).round() / 4
        x.view(-1)[3::11] = -0.0
        x[rows // 2] = -0.0
        x[:, cols // 2] *= 1e-30
    if x.numel() and nonfinite:
        x[rows // 3, cols // 2] = float("nan")
        x[2 * rows // 3, cols // 3] = float("-inf")
    return x.to(device=device, dtype=dtype)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, all NaN alike."""
    if not x.is_floating_point():
        return x
    x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x).contiguous()
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def assert_same(got, want) -> None:
    assert len(got) == len(want)
    for part, (a, b) in enumerate(zip(got, want)):
        assert a.shape == b.shape and a.dtype == b.dtype, (part, a.shape, b.shape, a.dtype, b.dtype)
        wrong = bits_of(a) != bits_of(b)
        assert not wrong.any(), (
            f"part {part}: {int(wrong.sum())} wrong, first {wrong.nonzero()[0].tolist()}"
        )


def wanted(x: torch.Tensor, fmt: TensorFormat, form: str):
    codes, scales, outer = reference.quantize(x, fmt)
    values, factor = reference.split(codes, scales, outer, fmt)
    if form in block_scaled.FORMS and block_scaled.in_place(fmt, form) != "values":
        beside = layout.swizzle(scales) if fmt.block != "row" else scales.new_empty(0)
        return codes, scales, factor, beside
    return codes, scales, factor, as_operand(values, form)


def written(operand: torch.Tensor, rows: int, fmt: TensorFormat | None, form: str):
    """What a kernel writes of an operand: the last row of scales behind it may be longer."""
    if fmt is None or not block_scaled.has_tail(fmt, form):
        return operand
    blocks = operand.shape[1] * block_scaled.ELEMENTS[form] // block_scaled.BLOCK[form]
    size = rows * operand.shape[1] + block_scaled.scale_bytes(rows, blocks)
    return operand.flatten()[:size]


def operand_of(codes, scales, values, fmt: TensorFormat, form: str) -> torch.Tensor:
    """The operand of a quantized tensor [R, C] made for one GEMM, as `written` gives it."""
    if not block_scaled.has_tail(fmt, form):
        return as_operand(values, form)
    return torch.cat([codes.flatten(), layout.swizzle(scales)])


def check_rows(text: str, form: str, x: torch.Tensor) -> None:
    fmt = TensorFormat.parse(text)
    assert cuda_kernels.supports(fmt, form)
    assert_same(cuda_kernels.quantize(x, fmt, form), wanted(x, fmt, form))


def check_decode(text: str, form: str, x: torch.Tensor) -> None:
    fmt = TensorFormat.parse(text)
    codes, scales, _, _ = wanted(x, fmt, "none")
    values = reference.split(codes, scales, torch.empty(0, device=x.device), fmt)[0]
    rows, cols = x.shape
    assert_same([cuda_kernels.decode(codes, scales, fmt, cols, form)], [as_operand(values, form)])
    want = torch.nn.functional.pad(values[:, :cols].t(), (0, -rows % fmt.padding))
    got = cuda_kernels.decode(codes, scales, fmt, cols, form, True)
    assert_same([got], [as_operand(want.contiguous(), form)])


def check_requantize(source: str, target: str, form: str, x: torch.Tensor) -> None:
    src, fmt = TensorFormat.parse(source), TensorFormat.parse(target)
    assert cuda_kernels.supports_gradient(fmt, form)
    codes, scales, factor, _ = wanted(x, src, "none")
    values = reference.split(codes, scales, factor, src)[0][:, : x.shape[1]]
    values = values * factor[:, None] if factor.numel() else values
    back = reference.quantize(values.t(), fmt, seed(x.device), STREAM)
    operand, out_factor = reference.split(*back, fmt)
    got = cuda_kernels.requantize(
        codes, scales, factor, src, x.shape[1], fmt, form, seed(x.device), STREAM
    )
    want = operand_of(*back[:2], operand, fmt, form)
    assert_same([written(got[0], x.shape[1], fmt, form), got[1]], [want, out_factor])


def check_gradient(dgrad, wgrad, form: str, g: torch.Tensor, fold, sums: bool) -> None:
    formats = [t and TensorFormat.parse(t) for t in (dgrad, wgrad)]
    got = cuda_kernels.quantize_grad(g, fold, *formats, form, form, sums, seed(g.device), STREAM)
    operands = [written(got[i], g.shape[i // 2], formats[i // 2], form) for i in (0, 2)]
    parts = [operands[0], got[1], operands[1], got[3]]
    assert_same(parts, gradient_parts(g.float(), fold, formats, form))
    if sums:
        again = cuda_kernels.quantize_grad(
            g, fold, *formats, form, form, sums, seed(g.device), STREAM
        )
        assert_same([got[4]], [again[4]])
        torch.testing.assert_close(got[4], g.float().sum(0), equal_nan=True, rtol=1e-4, atol=1e-2)


def gradient_parts(g: torch.Tensor, fold, formats, form: str) -> list[torch.Tensor]:
    nothing = torch.empty(0, device=g.device)
    bits = reference.random_bits(seed(g.device), STREAM, *g.shape, 32)[:, : g.shape[1]]
    folded = g if fold is None else g * fold[:, None]
    parts = []
    for fmt, x, b in ((formats[0], g, bits), (formats[1], folded.t(), bits.t())):
        if fmt is None:
            parts += [nothing, nothing]
            continue
        back = reference.quantize(x, fmt, bits=b.contiguous())
        values, factor = reference.split(*back, fmt)
        parts += [operand_of(*back[:2], values, fmt, form), factor]
    return parts


def check_four_bit(text: str, x: torch.Tensor, forms=("bf16",)) -> None:
    fmt = TensorFormat.parse(text)
    for form in forms:
        assert cuda_fourbit.supports(fmt, form, False)
        assert_same(cuda_operands.quantize_operand(x, fmt, form, False), wanted(x, fmt, form))


def check_transposed(text: str, x: torch.Tensor, form: str = "none") -> None:
    """Codes, scales and factor of the transpose, and what decoding them gives."""
    fmt = TensorFormat.parse(text)
    assert cuda_fourbit.supports(fmt, form, True)
    got = cuda_operands.quantize_operand(x, fmt, form, True)
    assert_same(got, wanted(x.t(), fmt, form))


def check_turned(x: torch.Tensor) -> None:
    """A tensor in tiles, saved along rows, as the operand of its transpose."""
    fmt, cols = TensorFormat.parse("nvfp4:tensor:tile"), x.shape[1]
    codes, scales, *_ = fallback.quantize_operand(x, fmt, "none", False)
    given = (codes, scales, fmt, cols, "fp4", True)
    got, want = (
        written(m.decode_operand(*given), cols, fmt, "fp4") for m in (cuda_operands, fallback)
    )
    assert_same([got], [want])


def check_four_bit_gradient(dgrad, wgrad, g: torch.Tensor, fold, sums: bool = False, form="bf16"):
    """Both orientations are the reference's; returns all five results."""
    formats = [t and TensorFormat.parse(t) for t in (dgrad, wgrad)]
    sides = [cuda_operands._side(f, form, bool(i)) for i, f in enumerate(formats)]
    assert cuda_fourbit in sides and fallback not in sides
    arguments = (g, fold, *formats, form, form, sums, seed(g.device), STREAM)
    got, want = ([*m.gradient_operands(*arguments)] for m in (cuda_operands, fallback))
    for results in (got, want):
        for i in (0, 2):
            results[i] = written(results[i], g.shape[i // 2], formats[i // 2], form)
    assert_same(got[:4], want[:4])
    torch.testing.assert_close(got[4], want[4], equal_nan=True, rtol=1e-4, atol=1e-2)
    return got


def check_four_bit_activation(text: str, act: str, gated: bool, dtype, device, shape) -> None:
    """As `check_activation`, for formats whose maximum is that of the activation's tensor."""
    fmt = TensorFormat.parse(text)
    gate, up = terms(*shape, dtype, device), terms(shape[0], shape[1] + 1, dtype, device)
    up = (up[0][:, :-1], up[1], None, None)
    h = ACTIVATIONS[act].forward(affine(*gate))
    if gated:
        h = h * affine(*up)
        got = cuda_operands.glu_quantize_operand(gate, up, act, fmt, "bf16")
    else:
        got = cuda_operands.act_quantize_operand(gate, act, fmt, "bf16")
    assert_near(got, h, fmt)


def assert_near(got, h: torch.Tensor, fmt: TensorFormat) -> None:
    """Values agree to 2e-5 of the row before quantizing, so codes differ rarely, and by one step."""
    codes, scales, factor, operand = got
    want = wanted(h, fmt, "bf16")
    torch.testing.assert_close(factor, want[2], rtol=3e-5, atol=0)
    same_scale = (scales == want[1]).float().mean()
    wrong = (operand.float() != want[3].float()).float().mean()
    assert same_scale >= 0.97 and wrong <= 0.03, (same_scale, wrong)
    # What is written is consistent with itself, bit for bit.
    values = reference.split(codes, scales, factor, fmt)[0]
    assert_same([operand], [values.to(torch.bfloat16)])


def terms(m: int, n: int, dtype, device):
    """An affine term with every factor."""
    generator = torch.Generator().manual_seed(m + n)
    acc = torch.randn(m, n, generator=generator).to(device=device, dtype=dtype)
    row = torch.rand(m, generator=generator).to(device) + 0.5
    col = torch.rand(1, generator=generator).to(device) + 0.5
    bias = torch.randn(n, generator=generator).to(device=device, dtype=torch.bfloat16)
    return acc, row, col, bias


def check_activation(act: str, gated: bool, dtype, device, shape=(9, 80)) -> None:
    """Values agree to 2e-5 of the row before quantizing, so codes differ rarely, and by one step."""
    fmt = TensorFormat.parse("nvfp4:row:fp8_exact")
    gate, up = terms(*shape, dtype, device), terms(shape[0], shape[1] + 1, dtype, device)
    up = (up[0][:, :-1], up[1], None, None)
    h = ACTIVATIONS[act].forward(affine(*gate))
    if gated:
        h = h * affine(*up)
        got = cuda_kernels.glu_quantize(gate, up, act, fmt, "bf16")
    else:
        got = cuda_kernels.act_quantize(gate, act, fmt, "bf16")
    assert_near(got, h, fmt)


def check_act_grad(act: str, gated: bool, dtype, device, shape=(70, 80)) -> None:
    """Values agree to the fit of erf and tanh.approx; maxima are those of what was written."""
    (m, n), fmt = shape, TensorFormat.parse("mxfp8:row:sr")
    z, up, g = terms(m, n, dtype, device), terms(m, n + 1, dtype, device), terms(m, n, dtype, device)
    up, g = (up[0][:, :-1], *up[1:3], None), (g[0].flip(0).contiguous(), *g[1:3], None)
    folds = (g[1].abs(), None) if gated else (g[1].abs(),)
    out = torch.empty_like(g[0])
    row_max, col_max, *more = cuda_kernels.act_grad(
        g, z, up if gated else None, act, folds, True, out
    )
    dh = affine(*g)
    want = [(dh * affine(*up) if gated else dh, ACTIVATIONS[act].backward)]
    got = [(out, row_max, col_max, folds[0])]
    if gated:
        want.append((dh, lambda d, z: d * ACTIVATIONS[act].forward(z)))
        got.append((*more, None))
    for (d, derivative), (values, rows, cols, fold) in zip(want, got):
        # act'(z) is within 3e-4: the fit of erf is 1.1e-4 off, tanh.approx adds its part.
        size = 8e-3 if values.dtype == torch.bfloat16 else 0
        bound = (3e-4 + size) * d.abs() * (1 + affine(*z) ** 2) + 1e-30
        exact = derivative(d, affine(*z))
        assert ((values.float() - exact).abs() <= bound).all()
        assert_same([rows.view(torch.float32)], [values.float().abs().amax(1)])
        folded = values.float() if fold is None else values.float() * fold[:, None]
        assert_same([cols.view(torch.float32)], [folded.abs().amax(0)])
        rest = (fold, fmt, fmt, "e4m3", "e4m3", False, seed(device), STREAM)
        known = cuda_kernels.quantize_grad(values, *rest, rows, cols)
        assert_same(known, cuda_kernels.quantize_grad(values, *rest))
    again = g[0].clone()
    parts = cuda_kernels.act_grad(
        (again, *g[1:]), z, up if gated else None, act, folds, False, again
    )
    assert_same([again], [out])
    assert not any(t.numel() for t in parts[:2])


def check_half_unit(device) -> None:
    """Vectors whose rounding depends on the half unit below the 16 random bits."""
    x = torch.from_numpy(VECTORS["halfbit/x"]).to(device)
    key, stream = VECTORS["random16/seed_stream"].tolist()
    fmt = TensorFormat.parse("mxfp8:32:sr")
    codes, scales = (
        torch.from_numpy(VECTORS[f"halfbit/mxfp8_sr_32/{part}"]).to(device)
        for part in ("codes", "scales")
    )
    want = reference.split(codes, scales, torch.empty(0, device=device), fmt)[0]
    got = cuda_kernels.quantize_grad(
        x, None, fmt, None, "bf16", "none", False, torch.tensor(key, device=device), stream
    )
    assert_same([got[0]], [want.to(torch.bfloat16)])


def check_fp8(text: str, form: str, x: torch.Tensor) -> None:
    """Rows, tiles and the transpose of x."""
    fmt = TensorFormat.parse(text)
    assert cuda_operands.supports(fmt) and cuda_fp8.supports(fmt, form)
    for transpose in (False, True):
        want = fallback.quantize_operand(x, fmt, form, transpose)
        got = cuda_operands.quantize_operand(x, fmt, form, transpose)
        assert_same(got[:3], want[:3])
        assert got[1].stride() == want[1].stride() or 1 in got[1].shape or got[1].numel() == 0
        assert_same([got[3]], [want[3]])
        codes, scales = want[:2]
        for turn in (False, True):
            decoded = (codes, scales, fmt, (x.shape[0] if transpose else x.shape[1]), "e4m3", turn)
            assert_same(
                [cuda_operands.decode_operand(*decoded)], [fallback.decode_operand(*decoded)]
            )


def check_fp8_requantize(target: str, x: torch.Tensor) -> None:
    src, fmt = TensorFormat.parse("fp8:128"), TensorFormat.parse(target)
    codes, scales, factor, _ = fallback.quantize_operand(x, src, "none", False)
    call = (codes, scales, factor, src, x.shape[1], fmt, "e4m3", seed(x.device), STREAM)
    assert_same(cuda_operands.requantize_operand(*call), fallback.requantize_operand(*call))


def check_fp8_gradient(dgrad, wgrad, g: torch.Tensor, sums: bool) -> None:
    formats = [t and TensorFormat.parse(t) for t in (dgrad, wgrad)]
    call = (g, None, *formats, "e4m3", "e4m3", sums, seed(g.device), STREAM)
    got, want = cuda_operands.gradient_operands(*call), fallback.gradient_operands(*call)
    assert_same(got[:4], want[:4])
    if sums:
        assert_same([got[4]], [cuda_operands.gradient_operands(*call)[4]])
        torch.testing.assert_close(got[4], want[4], equal_nan=True, rtol=1e-4, atol=1e-2)


def check_fp8_activation(act: str, gated: bool, dtype, device, shape) -> None:
    """As `check_activation`; scales and codes of what is written agree with each other."""
    fmt = TensorFormat.parse("fp8:128")
    gate, up = terms(*shape, dtype, device), terms(shape[0], shape[1] + 1, dtype, device)
    up = (up[0][:, :-1], up[1], None, None)
    h = ACTIVATIONS[act].forward(affine(*gate))
    h = h * affine(*up) if gated else h
    call = (gate, up) if gated else (gate,)
    fused = cuda_operands.glu_quantize_operand if gated else cuda_operands.act_quantize_operand
    codes, scales, _, operand = fused(*call, act, fmt, "e4m3")
    want = fallback.quantize_operand(h, fmt, "e4m3", False)
    torch.testing.assert_close(scales, want[1], rtol=1e-4, atol=0)
    assert (codes != want[0]).float().mean() <= 0.01 and operand is codes
    nothing = torch.empty(0, device=device)
    values = reference.dequantize(codes, scales, nothing, fmt, shape[1])
    steps = scales.repeat_interleave(128, 1)[:, : shape[1]]
    bound = h.abs() / 16 + steps * 2**-10 + 3e-4  # rounding, and the fits of the activations
    assert ((values - h).abs() <= bound).all()


def check_fp8_poisoned(device) -> None:
    x = matrix(137, 245, torch.bfloat16, device)
    with poisoned():
        for case in FP8:
            check_fp8(*case, x)
        check_fp8_requantize("fp8:128", x)
        for case in FP8_GRADIENTS[:3]:
            check_fp8_gradient(*case, x, True)
