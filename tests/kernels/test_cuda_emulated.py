"""The CUDA kernels' arithmetic and indexing, run on the host, give the reference's bits.

The sources are the GPU's; only conversions written in PTX have a host form. What this cannot see
(memory ordering, PTX, speed) is left to tests/gpu.
"""

from __future__ import annotations

import emulated
import kernel_cases as cases
import pytest
import torch
from fp4compile.kernels import cuda_fourbit, cuda_kernels, cuda_loader, native_library
from fp4compile.kernels.formats import TensorFormat

pytestmark = pytest.mark.skipif(native_library.compiler() is None, reason="no C++ compiler")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulated.install(monkeypatch)


@pytest.fixture(params=[0, 1], ids=["forwards", "backwards"])
def order(request, monkeypatch):
    monkeypatch.setattr(emulated, "order", request.param)


@pytest.mark.parametrize(("text", "form"), cases.ROW_FORMATS)
def test_rows(text: str, form: str, order) -> None:
    for rows, cols in cases.SHAPES:
        for nonfinite in (False, True):
            cases.check_rows(text, form, cases.matrix(rows, cols, torch.bfloat16, CPU, nonfinite))


# Partial groups of everything; whole ones and a second tile; nothing at all.
FEW = [(37, 17), (70, 144), (3, 0)]


@pytest.mark.parametrize("text", cases.FOUR_BIT)
def test_four_bit_rows(text: str, order) -> None:
    for rows, cols in FEW:
        for nonfinite in (False, True):
            cases.check_four_bit(text, cases.matrix(rows, cols, torch.bfloat16, CPU, nonfinite))


@pytest.mark.parametrize("text", cases.TRANSPOSED[:3])
def test_transposed(text: str, order) -> None:
    for rows, cols in (FEW if "had16" in text else FEW[1:]) + [(33, 2), (0, 2), (130, 18)]:
        cases.check_transposed(text, cases.matrix(rows, cols, torch.bfloat16, CPU, cols == 144))


@pytest.mark.parametrize(("dgrad", "wgrad"), cases.FOUR_BIT_GRADIENTS[:4])
def test_four_bit_gradient(dgrad: str | None, wgrad: str | None, order) -> None:
    for rows, cols in FEW[1:]:
        g = cases.matrix(rows, cols, torch.bfloat16, CPU)
        cases.check_four_bit_gradient(dgrad, wgrad, g, None, True)


@pytest.mark.parametrize(("dgrad", "wgrad"), cases.CODED_GRADIENTS)
def test_four_bit_gradients_for_block_scaled_tensor_cores(dgrad: str, wgrad: str, order) -> None:
    for rows, cols in (*FEW[:2], (150, 272)):
        for nonfinite in (False, True)[: 1 + (rows == 37)]:
            g = cases.matrix(rows, cols, torch.bfloat16, CPU, nonfinite)
            fold = cases.matrix(rows, 1, torch.float32, CPU)[:, 0] if rows == 70 else None
            cases.check_four_bit_gradient(dgrad, wgrad, g, fold, True, "fp4")


def test_turned_tiles_for_block_scaled_tensor_cores(order) -> None:
    for rows, cols in [*FEW, (33, 2), (150, 144), (130, 272), (0, 2)]:
        cases.check_turned(cases.matrix(rows, cols, torch.bfloat16, CPU))


@pytest.mark.parametrize("text", ["nvfp4:tensor:had16", "nvfp4:tensor"])
def test_transposed_for_block_scaled_tensor_cores(text: str, order) -> None:
    for rows, cols in [*FEW, (33, 2), (150, 144), (0, 2)]:
        cases.check_transposed(text, cases.matrix(rows, cols, torch.bfloat16, CPU, cols == 144), "fp4")


def test_other_four_bit_gradients() -> None:
    g = cases.matrix(37, 45, torch.float32, CPU)
    fold = cases.matrix(37, 1, torch.float32, CPU)[:, 0]
    for dgrad, wgrad in cases.FOUR_BIT_GRADIENTS[4:6]:
        cases.check_four_bit_gradient(dgrad, wgrad, g, fold, True)


@pytest.mark.parametrize("exponent", [-148, -126, -104, -98, 120])
def test_sizes_of_four_bit_values(exponent: int) -> None:
    """Scales that FP32 cannot undo in one factor, and block maxima whose sixth loses bits."""
    x = torch.randn(37, 45, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    x = (x.double() * 2.0**exponent).float()
    for text in cases.FOUR_BIT:
        cases.check_four_bit(text, x)
        cases.check_transposed(text, x)
    for pair in cases.FOUR_BIT_GRADIENTS[2:4]:
        cases.check_four_bit_gradient(*pair, x, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_in_other_dtypes(dtype: torch.dtype) -> None:
    cases.check_rows("nvfp4:row:fp8_exact", "e4m3", cases.matrix(37, 80, dtype, CPU))
    cases.check_rows("nvfp4:tensor:tile", "bf16", cases.matrix(37, 80, dtype, CPU))


@pytest.mark.parametrize(
    ("text", "form"),
    [("nvfp4:row", "fp4"), ("nvfp4:tensor", "bf16"), ("nvfp4:row:fp8_exact", "e4m3"),
     ("nvfp4:tensor:tile", "fp4"), ("mxfp8:32", "mx")],
)  # fmt: skip
def test_rows_by_conversion_instructions(monkeypatch, text: str, form: str) -> None:
    """What Blackwell's instructions make of them, by their model."""
    seen = []

    def launch(file, kernel, defines, *rest):
        seen.append(kernel)
        emulated.launch(file, kernel, (*defines, ("FP4_PTX_MODEL", 1)), *rest)

    monkeypatch.setattr(cuda_loader, "launch", launch)
    for rows, cols in ((37, 17), (70, 144)):
        cases.check_rows(text, form, cases.matrix(rows, cols, torch.bfloat16, CPU, rows == 70))
    assert seen


def test_rows_longer_than_a_thread_holds(monkeypatch) -> None:
    for held, stages in ((2, 2), (4, 1), (0, 2)):
        team = cuda_kernels.Team(32, held, 1, stages)
        monkeypatch.setattr(cuda_kernels, "_team", lambda *a, team=team: team)
        cases.check_rows("nvfp4:row:fp8_exact", "e4m3", cases.matrix(7, 1000, torch.bfloat16, CPU))
        cases.check_activation("relu", False, torch.bfloat16, CPU, (7, 1024 if held else 1200))
    cases.check_rows("mxfp8:32", "bf16", cases.matrix(7, 1500, torch.bfloat16, CPU))


def test_rows_with_strides() -> None:
    x = cases.matrix(37, 144, torch.bfloat16, CPU)
    for view in (x[:, 1:], x.t(), x[::2], x[:1].expand(40, 144), x[:, :-3]):
        cases.check_rows("nvfp4:row:fp8_exact", "e4m3", view)


@pytest.mark.parametrize("exponent", [-148, -126, -100, 100, 120, 126])
def test_sizes_of_values(exponent: int) -> None:
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    x = (x.double() * 2.0**exponent).float()
    for text in ("nvfp4:row:fp8_exact", "mxfp8:row"):
        cases.check_rows(text, "e4m3", x)
    for text in ("nvfp4:row", "nvfp4:row:four_over_six"):
        cases.check_rows(text, "bf16", x)


@pytest.mark.parametrize(("text", "form"), cases.DECODE)
def test_decode(text: str, form: str, order) -> None:
    for rows, cols in cases.SHAPES:
        cases.check_decode(text, form, cases.matrix(rows, cols, torch.bfloat16, CPU, True))


@pytest.mark.parametrize(("source", "target", "form"), cases.REQUANTIZE)
def test_requantize(source: str, target: str, form: str, order) -> None:
    for rows, cols in cases.SHAPES:
        for nonfinite in (False, True):
            x = cases.matrix(rows, cols, torch.bfloat16, CPU, nonfinite)
            cases.check_requantize(source, target, form, x)


@pytest.mark.parametrize(("dgrad", "wgrad", "form"), cases.GRADIENTS)
def test_gradient(dgrad: str | None, wgrad: str | None, form: str, order) -> None:
    for rows, cols in (*cases.SHAPES, (200, 130)):
        g = cases.matrix(rows, cols, torch.bfloat16, CPU, rows == 70)
        fold = cases.matrix(rows, 1, torch.float32, CPU)[:, 0] if rows else torch.ones(0)
        cases.check_gradient(dgrad, wgrad, form, g, fold, True)
        cases.check_gradient(dgrad, wgrad, form, g, None, True)


def test_gradient_in_chunks(monkeypatch) -> None:
    monkeypatch.setattr(cuda_kernels, "_chunk", lambda rows, cols: 64)
    g = cases.matrix(300, 144, torch.bfloat16, CPU)
    for case in cases.GRADIENTS[:2]:
        cases.check_gradient(*case, g, None, True)


def test_large_tensors_and_other_shapes_of_a_cta(monkeypatch) -> None:
    """64-bit groups of random bits; warps of a CTA side by side."""
    for name, value in (("BIG", 0), ("GRADIENT_ACROSS", 8), ("TRANSPOSE_ACROSS", 4)):
        monkeypatch.setattr(cuda_kernels, name, value)
    for name, value in (("BIG", 0), ("COLUMNS_ACROSS", 4)):
        monkeypatch.setattr(cuda_fourbit, name, value)
    g = cases.matrix(130, 272, torch.bfloat16, CPU)
    cases.check_gradient(*cases.GRADIENTS[0], g, None, True)
    cases.check_requantize(*cases.REQUANTIZE[0], g)
    for pair in cases.FOUR_BIT_GRADIENTS[:3:2]:
        cases.check_four_bit_gradient(*pair, g[:40, :144], None)
    cases.check_decode(*cases.DECODE[0], g)


@pytest.mark.parametrize("exponent", [-148, -126, 8, 20, 100, 120])
def test_sizes_of_gradients(exponent: int) -> None:
    """Scale bytes that one factor cannot undo."""
    g = torch.randn(37, 80, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    g = (g.double() * 2.0**exponent).float()
    for case in (*cases.GRADIENTS[:3], *cases.GRADIENTS[7:9]):
        cases.check_gradient(*case, g, None, False)
    cases.check_gradient(*cases.GRADIENTS[1], g.bfloat16(), None, False)
    for source, target, form in cases.REQUANTIZE:
        if "tensor" not in source:
            cases.check_requantize(source, target, form, g)


def test_poisoned_memory_changes_nothing() -> None:
    cases.check_poisoned(CPU)


def test_half_unit() -> None:
    cases.check_half_unit(CPU)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu", "relu2", "silu", "quick_gelu"])
def test_activations(act: str) -> None:
    cases.check_activation(act, act == "silu", torch.float32, CPU)
    cases.check_act_grad(act, act == "silu", torch.float32, CPU)
    for text, of in zip(cases.FOUR_BIT, ("silu", "gelu")):
        if act == of:
            cases.check_four_bit_activation(text, act, act == "silu", torch.float32, CPU, (9, 80))
    cases.check_act_grad(act, act == "relu", torch.bfloat16, CPU, (37, 45))


@pytest.mark.parametrize("text", ["nvfp4:row", "nvfp4:row:four_over_six"])
def test_blocks_of_every_scale(text: str) -> None:
    """Scale bytes from 0 up, subnormal ones where values round past 6, ties of each."""
    x = torch.arange(0, 0x7F80, 7, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[: x.numel() // 64 * 64].view(-1, 64)
    x[::2] *= -1
    cases.check_rows(text, "bf16", x)
    steps = torch.randn(24, 1, 16, generator=torch.Generator().manual_seed(3))
    wide = (steps * 2.0 ** (-0.25 * torch.arange(96.0)[:, None])).reshape(24, -1)
    cases.check_rows(text, "bf16", wide)
    scales = cases.wanted(wide, TensorFormat.parse(text), "none")[1]
    assert set(range(9)) <= set(scales.flatten().tolist())
