"""Engines: the ways one GEMM of quantized operands is executed, as rows of a table.

| engine | where | operands |
|---|---|---|
| fp4 | sm_100, 103, 120, 121 | NVFP4 codes and block scales (block_scaled.py) |
| mxfp8 | sm_100, 103, 120, 121 | E4M3 bytes and block scales of 32 (block_scaled.py) |
| fp8 | sm_89 and later | E4M3 bytes; only for formats that are exact in FP8 |
| fp8_block | sm_90 | E4M3 bytes and FP32 block scales beside them, both of format fp8 |
| bf16 | any CUDA GPU from sm_80 | code x block scale in BF16, exact |
| reference | everywhere | code x block scale in FP32 |

The engine changes no specified bit: every operand holds the same values, the sums are FP32. The
FP32 scales of format fp8 fit into no BF16 operand: without fp8_block its GEMMs are the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import block_scaled
from .formats import TensorFormat

try:
    from torch.nn.functional import ScalingType
except ImportError:  # a build without it
    ScalingType = None  # type: ignore[assignment, misc]


@dataclass(frozen=True)
class Engine:
    """``name`` as `explain` prints it; ``operand`` is the form in which it reads its operands.

    ``scales``: it reads FP32 block scales beside them.
    """

    name: str
    operand: str
    scales: bool = False


REFERENCE = Engine("reference", "f32")
BF16 = Engine("bf16", "bf16")
FP8 = Engine("fp8", "e4m3")
FP8_BLOCK = Engine("fp8_block", "e4m3", scales=True)
FP4 = Engine("fp4", "fp4")
MXFP8 = Engine("mxfp8", "mx")
BLOCK_SCALED = {engine.operand: engine for engine in (FP4, MXFP8)}
_FORMS = {engine.name: form for form, engine in BLOCK_SCALED.items()}
# Backward GEMMs with a BF16 result: the tensor core's own accumulation, 1.3e-3 to 2.4e-3 off for
# K = 4096 to 32768 (H200), the size of the result's rounding; never in the forward pass.
FP8_FAST = "fp8_fast"
# Fast accumulation is slower below this size (H200: 0.79 against 0.87 ms at 1.1e12, 3.7 against 3.3
# ms at 4.4e12 operations).
FAST_FROM = 2e12
OPERAND_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "e4m3": torch.uint8}
OPERAND_DTYPES.update(dict.fromkeys(block_scaled.FORMS, torch.uint8))
# An FP8 GEMM of cuBLASLt reads columns in multiples of 16 and writes rows in multiples of 16.
FP8_ALIGN = 16


def choose(
    left: TensorFormat, right: TensorFormat, device: torch.device, turned: bool = False
) -> Engine:
    """The fastest engine of ``device`` that multiplies the two formats exactly.

    ``turned``: the right operand is saved codes, read along their other axis.
    """
    if device.type != "cuda":
        capability = None
    else:
        capability = torch.cuda.get_device_capability(device)
    if why_reference(left, right, device):
        return REFERENCE
    form = block_scaled.form_for(left, right, turned)
    if form and not block_scaled.refusal(form, device):
        return BLOCK_SCALED[form]
    return without_block_scales(left, right, capability)


def without_block_scales(
    left: TensorFormat, right: TensorFormat, capability: tuple[int, int] | None
) -> Engine:
    """The engine for two formats on a GPU of ``capability`` (None: a CPU) that has none."""
    if capability is None or capability < (8, 0):
        return REFERENCE
    if left.float_scales or right.float_scales:
        return FP8_BLOCK if capability == (9, 0) and left.format == right.format else REFERENCE
    both_exact = left.exact_in_fp8 and right.exact_in_fp8
    return FP8 if both_exact and capability >= (8, 9) else BF16


def by_capability(
    left: TensorFormat, right: TensorFormat, capability: tuple[int, int] | None,
    turned: bool = False, native: bool = True,
) -> Engine:  # fmt: skip
    """`choose` for a GPU that is not at hand, whose block-scaled engines work if ``native``."""
    known = native and capability in block_scaled.CAPABILITIES
    form = block_scaled.form_for(left, right, turned) if known else ""
    return BLOCK_SCALED[form] if form else without_block_scales(left, right, capability)


def why_not(
    left: TensorFormat, right: TensorFormat, device: torch.device, turned: bool = False
) -> str:
    """Why a GEMM does not run on block-scaled tensor cores of a GPU that has them; "" else."""
    if device.type != "cuda":
        return ""
    if torch.cuda.get_device_capability(device) not in block_scaled.CAPABILITIES:
        return ""
    form = block_scaled.form_for(left, right, turned)
    if form:
        return block_scaled.refusal(form, device)
    return f"no instruction multiplies {left} and {right}{' transposed' * turned}"


def why_reference(left: TensorFormat, right: TensorFormat, device: torch.device) -> str:
    """Why a GEMM on a GPU goes through PyTorch in FP32, one line; "" where it does not."""
    if device.type != "cuda" or not (left.float_scales or right.float_scales):
        return ""
    if left.format != right.format:
        return f"no engine multiplies {left.format} with {right.format}"
    return _fp8_block_missing(device)


def _fp8_block_missing(device: torch.device) -> str:
    """Why engine fp8_block does not run on ``device``; "" where it does."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"fp8_block needs compute capability 9.0, not {major}.{minor}"
    cuda = tuple(int(n) for n in (torch.version.cuda or "0").split(".")[:2])
    if cuda < (12, 9) or ScalingType is None:
        return f"fp8_block needs CUDA 12.9 in PyTorch, not {torch.version.cuda}"
    return ""


_ones: dict[torch.device, Tensor] = {}


def prepare(device: torch.device) -> None:
    """Make now what GEMMs on ``device`` need at each call: not in the memory of a CUDA graph.

    The block-scaled engines are tried here, before a graph is traced or captured.
    """
    if device.type == "cuda" and device not in _ones:
        with _disable_current_modes():  # a fake tensor is of no use later
            _ones[device] = torch.ones((), dtype=torch.float32, device=device)
        for form in block_scaled.FORMS:
            block_scaled.refusal(form, device)


def pad_columns(a: Tensor, columns: int) -> Tensor:
    """``a`` [R, C] with zero columns appended up to ``columns``."""
    missing = columns - a.shape[1]
    return torch.nn.functional.pad(a, (0, missing)) if missing else a


def matmul(
    a: Tensor, b: Tensor, engine: str, out_dtype: torch.dtype, out: Tensor | None = None,
    scale_a: Tensor | None = None, scale_b: Tensor | None = None, sizes: tuple = (),
    outer: tuple = (None, None),
) -> Tensor:  # fmt: skip
    """a[M, K] b[N, K]^T of two operands in the engine's form, summed in FP32, as ``out_dtype``.

    Contiguous, in ``out`` [M, N] if given; ambient autocast changes nothing. ``scale_a`` and
    ``scale_b``: the block scales of engines that read them beside the operands (`SCALED`);
    ``sizes``: M and N, which `BLOCK_SCALED` engines need; ``outer``: see `block_scaled.matmul`.
    """
    with torch._C._DisableAutocast():
        if engine in _FORMS:
            scales, form = (scale_a, scale_b), _FORMS[engine]
            result = block_scaled.matmul(a, b, scales, outer, sizes, form, out_dtype, out)
        elif engine in SCALED:
            result = SCALED[engine](a, b, scale_a, scale_b, out_dtype, out)
        else:
            assert scale_a is None and scale_b is None, f"engine {engine} reads no scales"
            columns = max(a.shape[1], b.shape[1])
            a, b = pad_columns(a, columns), pad_columns(b, columns)
            result = _MATMUL[engine](a, b, out_dtype, out)
    return result.contiguous() if out is None or result is out else out.copy_(result)


def plain(a: Tensor, b: Tensor) -> Tensor:
    """a[M, K] b[K, N] in the tensors' own dtype, whatever autocast says: an original GEMM."""
    with torch._C._DisableAutocast():
        return a @ b


def _reference(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out_dtype == torch.float32:
        return torch.mm(a.float(), b.float().t(), out=out)
    return (a.float() @ b.float().t()).to(out_dtype)


def _bf16(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out_dtype == torch.float32:
        return torch.mm(a, b.t(), out_dtype=torch.float32, out=out)
    return torch.mm(a, b.t(), out=out)


def _fp8_fast(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    operations = 2 * a.shape[0] * b.shape[0] * a.shape[1]
    return _fp8(a, b, out_dtype, out, out_dtype != torch.float32 and operations >= FAST_FROM)


def _fp8(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None, fast: bool = False
) -> Tensor:
    m, n = a.shape[0], b.shape[0]
    k = -(-a.shape[1] // FP8_ALIGN) * FP8_ALIGN
    a, b = pad_columns(a, k), pad_columns(b, k)
    if n % FP8_ALIGN:
        b, out = torch.nn.functional.pad(b, (0, 0, 0, -n % FP8_ALIGN)), None
    if 0 in (m, n, k):
        return torch.zeros(m, n, dtype=out_dtype, device=a.device)
    one = _ones.get(a.device)
    if one is None:
        one = torch.ones((), dtype=torch.float32, device=a.device)
    e4m3 = torch.float8_e4m3fn
    result = torch._scaled_mm(
        a.view(e4m3), b.view(e4m3).t(), one, one, out_dtype=out_dtype, use_fast_accum=fast, out=out
    )
    return result[:, :n] if result.shape[1] != n else result


_MATMUL = {"reference": _reference, "bf16": _bf16, "fp8": _fp8, FP8_FAST: _fp8_fast}


def _fp8_block(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    """E4M3 a [M, K], b [N, K], K a multiple of 128; the scales of 1x128 blocks are FP32 [K/128, M]
    and [K/128, N], those of tiles of b [ceil(N/128), K/128]. Sums go to FP32 every 128 columns.

    Rows that cuBLASLt cannot take (M by 4, N by 16, by 128 for tiles) are padded in a copy.
    """
    (m, k), n = a.shape, b.shape[0]
    tiles = scale_b.shape != (k // 128, n)
    if 0 in (m, n, k):
        return torch.zeros(m, n, dtype=out_dtype, device=a.device)
    pad, more_m, more_n = torch.nn.functional.pad, -m % 4, -n % (128 if tiles else FP8_ALIGN)
    if more_m:
        a, scale_a = pad(a, (0, 0, 0, more_m)), pad(scale_a, (0, more_m))
    if more_n:
        b = pad(b, (0, 0, 0, more_n))
        scale_b = scale_b if tiles else pad(scale_b, (0, more_n))
    if tiles and k // 128 % 4:  # rows of scales lie on 16 bytes
        scale_b = pad(scale_b, (0, -(k // 128) % 4))
    left = ScalingType.BlockWise1x128.value
    right = ScalingType.BlockWise128x128.value if tiles else left
    scales = [scale_a.contiguous().t()], [scale_b.contiguous().t()]
    e4m3 = torch.float8_e4m3fn
    arguments: tuple = (
        a.view(e4m3), b.view(e4m3).t(), scales[0], [left], [], scales[1], [right], [], None,
        out_dtype, [], False,
    )  # fmt: skip
    if more_m or more_n or out is None:
        return torch._scaled_mm_v2(*arguments)[:m, :n]
    return torch._scaled_mm_v2(*arguments, out=out)


# Engines that read block scales beside the operands: (a, b, scale_a, scale_b, out_dtype, out).
SCALED: dict[str, Callable] = {FP8_BLOCK.name: _fp8_block}
