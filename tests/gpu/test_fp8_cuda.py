"""Format fp8 on a GPU: the kernels give the reference's bits, the GEMM the exact product's sums."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import torch
from fp4compile.kernels import cuda_loader, engines, ops  # noqa: F401 - defines torch.ops.fp4
from fp4compile.kernels.formats import TensorFormat

FOUND, REASON = cuda_loader.available()
pytestmark = pytest.mark.skipif(not FOUND, reason=f"no usable GPU: {REASON}")
GPU, BF16 = torch.device("cuda"), torch.bfloat16
SHAPES = [(1, 1), (37, 17), (130, 272), (0, 32), (3, 0), (512, 1024), (129, 4096), (1000, 4112)]
fp4 = torch.ops.fp4
BLOCKS, TILES = TensorFormat.parse("fp8:128"), TensorFormat.parse("fp8:tile")
needs_engine = pytest.mark.skipif(
    FOUND and engines.choose(BLOCKS, TILES, GPU) is engines.REFERENCE,
    reason="no block-scaled FP8 GEMM here",
)


@pytest.mark.parametrize(("text", "form"), cases.FP8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_forward(text: str, form: str, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        for nonfinite in (False, True):
            cases.check_fp8(text, form, cases.matrix(rows, cols, dtype, GPU, nonfinite))


@pytest.mark.parametrize("exponent", [-148, -126, -100, 100, 119])
def test_sizes_of_values(exponent: int) -> None:
    x = torch.randn(130, 256, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    x = (x.double() * 2.0**exponent).float().to(GPU)
    for text in ("fp8:128", "fp8:tile"):
        cases.check_fp8(text, "e4m3", x)
    cases.check_fp8_requantize("fp8:128", x)
    cases.check_fp8_gradient("fp8:128:sr", "fp8:128:sr", x, False)


@pytest.mark.parametrize("target", ["fp8:128", "fp8:128:sr"])
def test_requantize(target: str) -> None:
    for rows, cols in SHAPES:
        cases.check_fp8_requantize(target, cases.matrix(rows, cols, BF16, GPU, rows == 130))


@pytest.mark.parametrize(("dgrad", "wgrad"), cases.FP8_GRADIENTS)
def test_gradient(dgrad: str | None, wgrad: str | None) -> None:
    for rows, cols in SHAPES:
        for dtype in (BF16, torch.float32):
            g = cases.matrix(rows, cols, dtype, GPU, rows == 130)
            cases.check_fp8_gradient(dgrad, wgrad, g, dtype == BF16)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu", "relu2", "silu"])
def test_activations(act: str) -> None:
    for dtype, shape in ((BF16, (256, 512)), (torch.float32, (137, 250))):
        cases.check_fp8_activation(act, act == "silu", dtype, GPU, shape)


def test_poisoned_memory_changes_nothing() -> None:
    cases.check_fp8_poisoned(GPU)


def product(m: int, n: int, k: int, right: TensorFormat, dtype: torch.dtype) -> tuple:
    """The engine's result, the exact one in FP64, and the sum of the terms' magnitudes."""
    a, b = cases.matrix(m, k, BF16, GPU), torch.randn(n, k, device=GPU)
    parts = [fp4.quantize(t, str(f), "e4m3", False) for t, f in ((a, BLOCKS), (b, right))]
    values = [
        fp4.decode(*p[:2], str(f), k, "f32", False).double() for p, f in zip(parts, (BLOCKS, right))
    ]
    scales = [parts[0][1].t(), parts[1][1] if right == TILES else parts[1][1].t()]
    got = fp4.scaled_mm(parts[0][3], parts[1][3], "fp8_block", m, n, dtype, *scales)
    assert got.shape == (m, n) and got.is_contiguous()
    return got.double(), values[0] @ values[1].t(), values[0].abs() @ values[1].abs().t()


@needs_engine
@pytest.mark.parametrize("right", [BLOCKS, TILES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine(right: TensorFormat, dtype: torch.dtype) -> None:
    """Ragged in every size. Hopper's sums within 128 columns keep about 13 bits below the largest."""
    shapes = ((1, 1, 1), (37, 33, 200), (131, 272, 128), (256, 144, 4112), (130, 300, 1000), (0, 3, 8))
    for m, n, k in shapes:
        got, want, terms = product(m, n, k, right, dtype)
        bound = terms * 2**-12 + (want.abs() * 2**-8 if dtype == BF16 else 0)
        assert ((got - want).abs() <= bound).all(), (m, n, k)


@needs_engine
def test_a_block_that_is_not_finite_stays_in_its_rows() -> None:
    a = torch.randn(64, 256, device=GPU)
    a[3, 5], a[7, 200] = float("nan"), float("inf")
    left = fp4.quantize(a, "fp8:128", "e4m3", False)
    b = fp4.quantize(torch.randn(256, 256, device=GPU), "fp8:tile", "e4m3", False)
    y = fp4.scaled_mm(left[3], b[3], "fp8_block", 64, 256, BF16, left[1].t(), b[1])
    assert y[[3, 7]].isnan().all() and y.isfinite().all(1).sum() == 62
