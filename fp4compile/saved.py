"""Bytes that a layer keeps from forward to backward, from its scheme and sizes."""

from __future__ import annotations

import torch

from .kernels.formats import BITS, BLOCK, Operand, Scheme, TensorFormat


def format_bytes(fmt: TensorFormat, rows: int, cols: int) -> int:
    """Codes, scales and outer scales of [rows, cols] stored in ``fmt``."""
    block = BLOCK[fmt.format]
    padded = -(-cols // block) * block
    factor = {"row": rows, "tensor": 1, None: 0}[fmt.factor]
    scales = rows * (padded // block)
    if fmt.float_scales:
        scales = 4 * (padded // block) * (-(-rows // block) if fmt.block == "tile" else rows)
    return rows * (padded * BITS[fmt.format] // 8) + scales + 4 * factor


def activation_bytes(scheme: Scheme, m: int, k: int, dtype: torch.dtype) -> int:
    """What WGRAD needs of the input x [m, k]: x itself where the GEMM is original."""
    return _operand_bytes(scheme, "wgrad", m, k, m * k * dtype.itemsize)


def weight_bytes(scheme: Scheme, n: int, k: int) -> int:
    """What DGRAD needs of the weight beside the parameter itself, w [n, k]."""
    return _operand_bytes(scheme, "dgrad", n, k, 0)


def _operand_bytes(scheme: Scheme, name: str, rows: int, cols: int, original: int) -> int:
    gemm = getattr(scheme, name)
    if gemm is None:
        return original
    saved: Operand = gemm[1]
    if saved.source == "input":
        assert saved.format is not None
        return format_bytes(saved.format, cols, rows)
    assert scheme.fprop is not None
    fmt = scheme.fprop[1 if name == "dgrad" else 0].format
    assert fmt is not None
    return format_bytes(fmt, rows, cols)
