"""Formats: their values, and what they lose on the tensors of a trained model.

    python examples/reproduce/formats.py --model runs/reproduce/bf16-0.pt --out docs/results/reproduce-formats.json
"""  # noqa: E501

from __future__ import annotations

import common
import torch
from torch import Tensor

import fp4compile as fp4

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMATS = {
    "NVFP4": {"format": "nvfp4", "outer": "tensor"},
    "NVFP4, token scales": {"format": "nvfp4", "outer": "row"},
    "NVFP4, four over six": {"format": "nvfp4", "outer": "row", "scale_search": "four_over_six"},
    "NVFP4, factors 0.875, 1, 1.5": {
        "format": "nvfp4", "outer": "row", "scale_search": [0.875, 1, 1.5],
    },
    "FP8-exact NVFP4": {"format": "nvfp4", "outer": "row", "block_scales": "fp8_exact"},
    "NVFP4 in 16x16 tiles": {"format": "nvfp4", "outer": "tensor", "block": "tile"},
    "MXFP4": {"format": "mxfp4"},
    "MXFP8": {"format": "mxfp8", "block": 32},
}  # fmt: skip


def one_scale(x: Tensor) -> Tensor:
    """E2M1 with one scale for the whole tensor, to nearest."""
    scale = x.abs().amax() / 6
    sizes = torch.tensor(E2M1, device=x.device)
    edges = (sizes[1:] + sizes[:-1]) / 2
    return sizes[torch.bucketize(x.abs() / scale, edges)] * scale * x.sign()


def decoded(x: Tensor, name: str) -> Tensor:
    """``x`` [R, C] through the format ``name`` and back."""
    if name == "one scale":
        return one_scale(x)
    if name == "BF16":
        return x.bfloat16().float()
    return fp4.quantize(x, **FORMATS[name]).dequantize()


def zeroed(x: Tensor, q: Tensor) -> float:
    """The share of x's values other than 0 that became 0."""
    return float(((q == 0) & (x != 0)).sum() / (x != 0).sum())


def worst_tile(w: Tensor) -> dict[str, int]:
    """Of the 16x16 tile that loses most as a tile: values rounded to 0 by rows, columns, tile."""
    lost = {
        "rows": (decoded(w, "NVFP4") == 0) & (w != 0),
        "columns": (decoded(w.t().contiguous(), "NVFP4").t() == 0) & (w != 0),
        "tile": (decoded(w, "NVFP4 in 16x16 tiles") == 0) & (w != 0),
    }
    rows, cols = (n // 16 for n in w.shape)
    counts = {
        name: mask[: rows * 16, : cols * 16].view(rows, 16, cols, 16).sum((1, 3))
        for name, mask in lost.items()
    }
    gain = (counts["tile"] - counts["rows"]).flatten()
    return {name: int(count.flatten()[gain.argmax()]) for name, count in counts.items()}


def facts() -> dict:
    """Values and sizes of the formats, read off the package's own tensors."""
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    block = torch.zeros(1, 32)
    block[0, 0] = -54
    plain = fp4.quantize(block, "nvfp4", outer="row")
    mx = fp4.quantize(block, "mxfp4")
    x = torch.randn(256, 4096)
    nvfp4 = fp4.quantize(x, "nvfp4", outer="tensor")
    codes = torch.arange(16, dtype=torch.uint8)
    values = torch.zeros(2, 16)
    values[0] = torch.tensor([*E2M1, *(-v for v in E2M1)])
    values[1, 0] = 6 * 448  # the tensor's largest: an outer scale of 1
    pairs = fp4.quantize(values, "nvfp4", outer="tensor").dequantize()[0]
    return {
        "E2M1 sizes": sorted({abs(float(v)) for v in pairs}),
        "E2M1 codes": len(codes),
        "E4M3 sizes": len({float(v) for v in e4m3}),
        "E4M3 largest": float(e4m3.max()),
        "block of -54, stored": float(plain.dequantize()[0, 0]),
        "block of -54, MX scale": 2.0 ** (int(mx.scales[0, 0]) - 127),
        "NVFP4 bits": nvfp4.nbytes * 8 / x.numel(),
        "MXFP8 bits": fp4.quantize(x, "mxfp8").nbytes * 8 / x.numel(),
    }


def main() -> None:
    """The command line."""
    args = common.parser(__doc__).parse_args()
    torch.manual_seed(0)
    tensors = {"gaussian": torch.randn(4096, 1024, device=args.device)}
    tensors |= common.mlp_tensors(args)
    errors = {
        name: {f: common.error(decoded(t, f), t) for f in ("one scale", *FORMATS, "BF16")}
        for name, t in tensors.items()
    }
    zeros = {
        name: {f: zeroed(t, decoded(t, f)) for f in ("one scale", "NVFP4", "NVFP4 in 16x16 tiles")}
        for name, t in tensors.items()
    }
    tile = worst_tile(tensors["w1"])
    common.write(args, {"facts": facts(), "errors": errors, "zeros": zeros, "worst_tile": tile})


if __name__ == "__main__":
    main()
