"""The CUDA kernels on a GPU give the reference's bits."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import torch
from fp4compile.kernels import cuda_kernels, cuda_loader
from fp4compile.kernels.formats import TensorFormat

FOUND, REASON = cuda_loader.available()
pytestmark = pytest.mark.skipif(not FOUND, reason=f"no usable GPU: {REASON}")
GPU = torch.device("cuda")
SHAPES = [*cases.SHAPES, (300, 1040), (129, 4096), (65, 16384), (33, 20000), (1000, 4112)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("text", "form"), cases.GPU_ROW_FORMATS)
def test_rows(text: str, form: str, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        for nonfinite in (False, True):
            cases.check_rows(text, form, cases.matrix(rows, cols, dtype, GPU, nonfinite))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("text", cases.FOUR_BIT)
def test_four_bit_rows(text: str, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        for nonfinite in (False, True):
            x = cases.matrix(rows, cols, dtype, GPU, nonfinite)
            cases.check_four_bit(text, x, ("none", "bf16"))
    x = cases.matrix(300, 1040, dtype, GPU)
    for view in (x[:, 1:], x.t(), x[::2], x[:1].expand(40, 1040), x[:, :-3], x[1:, 8:]):
        cases.check_four_bit(text, view)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("text", cases.TRANSPOSED)
def test_transposed(text: str, dtype: torch.dtype) -> None:
    for rows, cols in (*SHAPES, (5000, 384), (4096, 129)):
        for nonfinite in (False, True):
            cases.check_transposed(text, cases.matrix(rows, cols, dtype, GPU, nonfinite))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dgrad", "wgrad"), cases.FOUR_BIT_GRADIENTS)
def test_four_bit_gradient(dgrad: str | None, wgrad: str | None, dtype: torch.dtype) -> None:
    for rows, cols in (*SHAPES, (5000, 384)):
        g = cases.matrix(rows, cols, dtype, GPU, rows == 300)
        fold = (
            cases.matrix(rows, 1, torch.float32, GPU)[:, 0] if rows else torch.ones(0, device=GPU)
        )
        both = cases.check_four_bit_gradient(dgrad, wgrad, g, None, True)
        again = cases.check_four_bit_gradient(dgrad, wgrad, g, None, True)
        cases.assert_same(both, again)
        cases.check_four_bit_gradient(dgrad, wgrad, g, fold)


@pytest.mark.parametrize(("dgrad", "wgrad"), cases.CODED_GRADIENTS)
def test_operands_for_block_scaled_tensor_cores(dgrad: str, wgrad: str) -> None:
    for rows, cols in (*SHAPES, (5000, 384)):
        x = cases.matrix(rows, cols, torch.bfloat16, GPU, rows == 300)
        fold = torch.rand(rows, device=GPU) + 0.5
        cases.check_four_bit_gradient(dgrad, wgrad, x, fold, True, "fp4")
        cases.check_transposed("nvfp4:tensor:had16", x, "fp4")
        cases.check_turned(x)


def test_rows_with_strides() -> None:
    x = cases.matrix(300, 1040, torch.bfloat16, GPU)
    for view in (x[:, 1:], x.t(), x[::2], x[:1].expand(40, 1040), x[:, :-3], x[1:, 8:]):
        cases.check_rows("nvfp4:row:fp8_exact", "e4m3", view)
        cases.check_rows("nvfp4:tensor", "bf16", view)


@pytest.mark.parametrize("exponent", [-148, -140, -126, -100, 60, 100, 120, 126])
def test_sizes_of_values(exponent: int) -> None:
    x = torch.randn(33, 96, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    x = (x.double() * 2.0**exponent).float().to(GPU)
    for text, form in cases.ROW_FORMATS:
        if form != "bf16" or "mxfp8:32" not in text:
            cases.check_rows(text, form, x)
    for text in cases.FOUR_BIT if exponent < 120 else ():  # rotations overflow
        cases.check_four_bit(text, x)
    for text in cases.TRANSPOSED:
        cases.check_transposed(text, x)
    for pair in cases.FOUR_BIT_GRADIENTS[:4]:
        cases.check_four_bit_gradient(*pair, x, None)


def test_every_half_precision_number() -> None:
    """Ties of each scale: all finite BF16 and FP16 numbers, in rows of one exponent."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
        x = x[x.isfinite()].view(-1, 64).to(GPU)
        for text, form in cases.ROW_FORMATS:
            cases.check_rows(text, form, x)
        for text in cases.FOUR_BIT:
            cases.check_four_bit(text, x)
            cases.check_transposed(text, x.t())


@pytest.mark.parametrize(("text", "form"), cases.DECODE)
def test_decode(text: str, form: str) -> None:
    for rows, cols in SHAPES:
        cases.check_decode(text, form, cases.matrix(rows, cols, torch.bfloat16, GPU, True))


@pytest.mark.parametrize(("source", "target", "form"), cases.GPU_REQUANTIZE)
def test_requantize(source: str, target: str, form: str) -> None:
    for rows, cols in SHAPES:
        for nonfinite in (False, True):
            x = cases.matrix(rows, cols, torch.bfloat16, GPU, nonfinite)
            cases.check_requantize(source, target, form, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dgrad", "wgrad", "form"), cases.GPU_GRADIENTS)
def test_gradient(dgrad: str | None, wgrad: str | None, form: str, dtype: torch.dtype) -> None:
    for rows, cols in (*SHAPES, (5000, 384)):
        g = cases.matrix(rows, cols, dtype, GPU, rows == 300)
        fold = (
            cases.matrix(rows, 1, torch.float32, GPU)[:, 0] if rows else torch.ones(0, device=GPU)
        )
        cases.check_gradient(dgrad, wgrad, form, g, fold, True)
        cases.check_gradient(dgrad, wgrad, form, g, None, False)


def test_half_unit() -> None:
    cases.check_half_unit(GPU)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu", "relu2", "silu", "quick_gelu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations(act: str, dtype: torch.dtype) -> None:
    for shape in ((9, 80), (130, 2048)):
        cases.check_activation(act, False, dtype, GPU, shape)
        cases.check_activation(act, True, dtype, GPU, shape)
        cases.check_act_grad(act, False, dtype, GPU, shape)
        cases.check_act_grad(act, True, dtype, GPU, shape)
        for text in cases.FOUR_BIT:
            cases.check_four_bit_activation(text, act, False, dtype, GPU, shape)
            cases.check_four_bit_activation(text, act, True, dtype, GPU, shape)


def test_poisoned_memory_changes_nothing() -> None:
    cases.check_poisoned(GPU)


def test_streams_and_graphs() -> None:
    """The current stream is used, and a captured launch replays on new contents."""
    fmt = TensorFormat.parse("nvfp4:row:fp8_exact")
    x = cases.matrix(300, 1040, torch.bfloat16, GPU)
    cuda_kernels.quantize(x, fmt, "e4m3")  # compiled and loaded
    graph = torch.cuda.CUDAGraph()
    static = x.clone()
    with torch.cuda.graph(graph):
        got = cuda_kernels.quantize(static, fmt, "e4m3")
    for scale in (1.0, -3.0):
        static.copy_(x * scale)
        graph.replay()
        cases.assert_same(got, cases.wanted(static, fmt, "e4m3"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = x * 2
        on_side = cuda_kernels.quantize(late, fmt, "e4m3")
    side.synchronize()
    cases.assert_same(on_side, cases.wanted(late, fmt, "e4m3"))
