"""Stands in for block-scaled tensor cores: unswizzles operands, decodes them, multiplies in FP64.

Nothing but a test's monkeypatch puts it in the place of the engine's GEMM; no option does.
"""

from __future__ import annotations

from collections import Counter

import torch
from fp4compile.kernels import block_scaled, engines, layout, reference
from fp4compile.kernels.formats import TensorFormat

calls: Counter[str] = Counter()  # by form
FORMATS = {"fp4": TensorFormat("nvfp4"), "mx": TensorFormat("mxfp8")}


def values(rows, scale, form):
    """What the tensor cores read: FP64 [R, K]. Padding that is neither 0 nor 1 is an error."""
    blocks = rows.shape[1] * block_scaled.ELEMENTS[form] // block_scaled.BLOCK[form]
    assert scale.numel() == block_scaled.scale_bytes(rows.shape[0], blocks)
    assert rows.shape[1] % 16 == 0 and scale.storage_offset() % 16 == 0 and scale.is_contiguous()
    whole = layout.unswizzle(scale, -(-rows.shape[0] // 128) * 128, -(-blocks // 4) * 4)
    padding = torch.cat([whole[rows.shape[0] :].flatten(), whole[:, blocks:].flatten()])
    unit = form == "mx" and bool((whole == block_scaled.UNIT).all())
    assert unit or not padding.any(), "stale bytes in the padding of the scales"
    plain = whole[: rows.shape[0], :blocks].contiguous()
    return reference.values(rows.contiguous(), plain, FORMATS[form]).double()


def native(a, b, scale_a, scale_b, outer, form, out_dtype, out):
    """`block_scaled.native`."""
    calls[form] += 1
    product = values(a, scale_a, form) @ values(b, scale_b, form).t()
    if outer[0] is not None:
        calls["outer"] += 1
        product = product * (outer[0] * outer[1])
    return product.to(torch.float32).to(out_dtype)


def exact(a, b, out_dtype, out):
    """The reference engine's GEMM, in FP64 too, so that no order of sums shows."""
    result = (a.double() @ b.double().t()).to(torch.float32).to(out_dtype)
    return result if out is None else out.copy_(result)


def install(monkeypatch) -> None:
    """The block-scaled engines on every device, the CPU too."""
    calls.clear()
    monkeypatch.setattr(block_scaled, "refusal", lambda form, device: "")
    monkeypatch.setattr(block_scaled, "native", native)


def only_reference(monkeypatch) -> None:
    """Engine reference on every device."""
    monkeypatch.setattr(engines, "choose", lambda *formats: engines.REFERENCE)
    monkeypatch.setitem(engines._MATMUL, "reference", exact)


def only_older(monkeypatch) -> None:
    """The engines of an H200 on every GPU, in FP64: the same fused kernels before the GEMM."""

    def choose(left, right, device, turned=False):
        return engines.without_block_scales(left, right, (9, 0))

    def of_bytes(a, b, out_dtype, out):
        a, b = (t.view(torch.float8_e4m3fn).float() for t in (a, b))
        return exact(a, b, out_dtype, out)

    monkeypatch.setattr(engines, "choose", choose)
    for name, gemm in (("bf16", exact), ("fp8", of_bytes), (engines.FP8_FAST, of_bytes)):
        monkeypatch.setitem(engines._MATMUL, name, gemm)
