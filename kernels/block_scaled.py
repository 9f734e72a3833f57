"""NVFP4 and MXFP8 on block-scaled tensor cores (Blackwell): `torch.nn.functional.scaled_mm`.

| engine | form | a row of an operand | block scales |
|---|---|---|---|
| fp4 | fp4 | packed E2M1 codes [Cp/2] | E4M3, one for 16 |
| mxfp8 | mx | E4M3 bytes [Cp] | E8M0, one for 32; all 1 (byte 127) for exact FP8 values |

Block scales are swizzled (layout.py), padded with zeros. Where an operand's rows are the codes
that are saved, no second copy of them is made: in the place of an operand `quantize` then gives the
scales alone, and `scaled_mm` gets them beside the codes. An operand made for one GEMM has its
scales behind its rows, as more rows. One without either has scales of 1.

Whether a device multiplies so is found out by multiplying (`refusal`), not by version numbers.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import layout
from .formats import TensorFormat

FORMS = ("fp4", "mx")
BLOCK = {"fp4": 16, "mx": 32}  # elements that share a scale
ELEMENTS = {"fp4": 2, "mx": 1}  # in a byte
# Compute capabilities with block-scaled tensor cores; on others nothing is tried.
CAPABILITIES = ((10, 0), (10, 3), (12, 0), (12, 1))
# cuBLASLt wants rows of 16 bytes and, of the right operand, multiples of 16 rows.
ROW_BYTES, RIGHT_ROWS = 16, 16
UNIT = 127  # E8M0's 1


def scale_bytes(rows, blocks):
    """Bytes of the swizzled scales of [rows, blocks]; integers or symbols."""
    return 512 * ((rows + 127) // 128) * ((blocks + 3) // 4)


def in_place(fmt: TensorFormat, form: str) -> str:
    """What `quantize` gives in the place of an operand in ``form``.

    "scales" where the codes are the rows of the operand, "nothing" where they are the whole
    operand, "values" where it has E4M3 bytes of its own.
    """
    if form == "fp4":
        return "scales"
    if fmt.format == "mxfp8":
        return "nothing" if fmt.block == "row" else "scales"
    return "values"


def beside(fmt: TensorFormat, form: str, codes: Tensor, operand: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and scales ([0]: all 1) from what `quantize` gave as codes and in an operand's place."""
    what = in_place(fmt, form)
    rows = operand if what == "values" else codes
    return rows, operand if what == "scales" else codes.new_empty(0)


def place_of(fmt: TensorFormat, form: str, scales: Tensor) -> Tensor:
    """What `quantize` gives in an operand's place, from scales [R, blocks]; not for "values"."""
    return layout.swizzle(scales) if in_place(fmt, form) == "scales" else scales.new_empty(0)


def has_tail(fmt: TensorFormat, form: str) -> bool:
    """True where an operand made for one GEMM carries scales behind its rows."""
    return form in FORMS and in_place(fmt, form) == "scales"


def tail(rows, row_bytes, form: str):
    """Rows of ``row_bytes`` bytes that the scales of ``rows`` rows take; integers or symbols."""
    blocks = row_bytes * ELEMENTS[form] // BLOCK[form]
    return (scale_bytes(rows, blocks) + row_bytes - 1) // row_bytes


def with_tail(rows: Tensor, scales: Tensor, form: str) -> Tensor:
    """Rows [R, bytes] with their scales [R, blocks] swizzled behind them."""
    if rows.shape[1] == 0:
        return rows
    count, width = rows.shape
    out = rows.new_zeros((count + tail(count, width, form), width))
    flat = layout.swizzle(scales)
    out[:count] = rows
    out.view(-1)[rows.numel() : rows.numel() + flat.numel()] = flat
    return out


def turned_tiles(codes: Tensor, scales: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of the transpose [cols, R padded to 16] of an NVFP4 tensor in tiles."""
    from .elements import pack, unpack

    missing = -codes.shape[0] % 16
    elements = torch.nn.functional.pad(unpack(codes), (0, 0, 0, missing))[:, :cols]
    across = scales[::16].t()  # a tile's 16 rows have one scale
    return pack(elements.t().contiguous()), across.repeat_interleave(16, 0)[:cols].contiguous()


# ---- multiplying ------------------------------------------------------------------------------


def matmul(
    a: Tensor, b: Tensor, scales: tuple, outer: tuple, sizes: tuple[int, int], form: str,
    out_dtype: torch.dtype, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a[m, K] b[n, K]^T of operands in ``form``: [m, n] in ``out_dtype``, summed in FP32.

    ``scales``: those beside a and b, or None; ``outer``: both tensors' outer scales [1], which
    multiply the sums inside the call, or two Nones. ``out`` [m, n] is used where it fits.
    """
    m, n = sizes
    a, scale_a = parts(a, scales[0], m, form)
    b, scale_b = parts(b, scales[1], n, form)
    width = max(a.shape[1], b.shape[1])
    width += -width % ROW_BYTES
    if 0 in (m, n, width):
        return torch.zeros(m, n, dtype=out_dtype, device=a.device)
    missing = -n % RIGHT_ROWS
    a = torch.nn.functional.pad(a, (0, width - a.shape[1]))
    b = torch.nn.functional.pad(b, (0, width - b.shape[1], 0, missing))
    blocks = width * ELEMENTS[form] // BLOCK[form]
    scale_a = _fitting(a, scale_a, m, blocks)
    scale_b = _fitting(b, scale_b, n, blocks)
    result = native(a, b, scale_a, scale_b, outer, form, out_dtype, None if missing else out)
    return result[:, :n] if missing else result


def parts(operand: Tensor, scale: Tensor | None, rows: int, form: str) -> tuple[Tensor, Tensor]:
    """Rows and their swizzled scales ([0]: all 1), wherever these are."""
    if scale is not None and scale.numel():
        return operand, scale
    if operand.shape[0] == rows:
        return operand, operand.new_empty(0)
    width = operand.shape[1]
    size = scale_bytes(rows, width * ELEMENTS[form] // BLOCK[form])
    return operand[:rows], operand.view(-1)[rows * width : rows * width + size]


def _fitting(x: Tensor, scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Scales for ``blocks`` columns, at least those that ``scale`` is for, on a 16-byte boundary.

    Columns that are appended hold zeros: their scale may be anything but NaN.
    """
    size = scale_bytes(rows, blocks)
    if scale.numel() == 0:
        return x.new_full((size,), UNIT)
    if scale.numel() == size:
        return scale if scale.storage_offset() % 16 == 0 else scale.clone()
    strips = scale.view((rows + 127) // 128, -1)
    wanted = size // strips.shape[0]
    return torch.nn.functional.pad(strips, (0, wanted - strips.shape[1])).reshape(-1)


def native(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, outer: tuple, form: str,
    out_dtype: torch.dtype, out: Tensor | None,
) -> Tensor:  # fmt: skip
    """One call of the tensor cores' GEMM; a [M, bytes] and b [N, bytes] as `matmul` pads them."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    swizzled, plain = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE
    if form == "mx":
        element, scale_dtype = torch.float8_e4m3fn, torch.float8_e8m0fnu
        recipe, swizzle = [ScalingType.BlockWise1x32], [swizzled]
    else:
        element, scale_dtype = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
        recipe, swizzle = [ScalingType.BlockWise1x16], [swizzled]
    left, right = [scale_a.view(scale_dtype)], [scale_b.view(scale_dtype)]
    if outer[0] is not None:
        left, right = [*left, outer[0]], [*right, outer[1]]
        recipe, swizzle = [*recipe, ScalingType.TensorWise], [*swizzle, plain]
    a, b = a.view(element), b.view(element).t()
    if out is None:
        return scaled_mm(
            a, b, left, recipe, right, recipe, swizzle, swizzle, output_dtype=out_dtype
        )
    numbers = [r.value for r in recipe], [s.value for s in swizzle]
    arguments = (a, b, left, *numbers, right, *numbers, None, out_dtype)
    return torch.ops.aten._scaled_mm_v2.out(*arguments, out=out)


# ---- does it work here ------------------------------------------------------------------------


def refusal(form: str, device: torch.device) -> str:
    """Why ``device`` does not multiply in ``form``; "" where it does. Tried once a process."""
    if device.type != "cuda":
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CAPABILITIES:
        return f"sm_{capability[0]}{capability[1]} has no block-scaled tensor cores"
    index = torch.cuda.current_device() if device.index is None else device.index
    return _refusal(form, index)


@cache
def _refusal(form: str, index: int) -> str:
    with _disable_current_modes(), torch.cuda.device(index):
        return probe(form, torch.device("cuda", index))


def probe(form: str, device: torch.device) -> str:
    """Multiply small operands whose products are exact, and compare bits: "" or what went wrong."""
    for out_dtype in (torch.float32, torch.bfloat16):
        for outer in (False, True) if form == "fp4" and out_dtype == torch.bfloat16 else (False,):
            what = f"scaled_mm with {str(out_dtype).removeprefix('torch.')} results"
            try:
                got, want = _probe(form, device, out_dtype, outer)
            except Exception as error:  # noqa: BLE001 - whatever the library refuses with
                text = " ".join(f"{type(error).__name__}: {error}".split())
                return f"{what}: {text[:160]}"
            wrong = int((got != want).sum())
            if wrong:
                return f"{what}: {wrong} of {want.numel()} numbers are not the exact ones"
    return ""


PROBE = (37, 72, 176)  # M, N and K: none a multiple of the tiles


def _probe(
    form: str, device: torch.device, out_dtype: torch.dtype, outer: bool
) -> tuple[Tensor, Tensor]:
    """A product by `matmul` and the same in FP64; its sums need 14 bits.

    Random codes (1, 1.5, 2 and 3 in E4M3), scales 1 and 2 at random.
    """
    from . import reference

    m, n, k = PROBE
    generator = torch.Generator().manual_seed(1)
    fmt = TensorFormat("nvfp4") if form == "fp4" else TensorFormat("mxfp8")
    k += -k % BLOCK[form]
    one, step = (0x38, 8) if form == "fp4" else (UNIT, 1)
    rows, scales, values = [], [], []
    for size in (m, n):
        codes = torch.randint(256, (size, k // ELEMENTS[form]), generator=generator)
        if form == "mx":
            codes = 0x38 + 4 * (codes % 4) + (codes & 0x80)
        codes = codes.to(torch.uint8)
        scale = one + step * torch.randint(2, (size, k // BLOCK[form]), generator=generator)
        rows.append(codes.to(device))
        scales.append(layout.swizzle(scale.to(torch.uint8)).to(device))
        values.append(reference.values(codes, scale.to(torch.uint8), fmt).double())
    factors = [torch.tensor([f], device=device) if outer else None for f in (0.5, 8.0)]
    a, b = rows
    got = matmul(a, b, tuple(scales), tuple(factors), (m, n), form, out_dtype)
    want = values[0] @ values[1].t() * (4.0 if outer else 1.0)
    return got.cpu(), want.to(torch.float32).to(out_dtype)


# ---- which GEMMs ------------------------------------------------------------------------------


def form_for(left: TensorFormat, right: TensorFormat, turned: bool) -> str:
    """The form in which two formats multiply, "" if in none.

    ``turned``: the right operand is saved codes read along their other axis, where blocks of 16 in
    a row are none; exact E4M3 values are.
    """
    if left.format == right.format == "nvfp4" and (not turned or right.block == "tile"):
        return "fp4"
    e4m3 = (fmt.format == "mxfp8" or fmt.exact_in_fp8 for fmt in (left, right))
    return "mx" if all(e4m3) else ""
