"""A quantized weight, transposed: how far its second quantization is from the forward's copy.

    python examples/reproduce/transposition.py --model runs/reproduce/bf16-0.pt --out docs/results/reproduce-transposition.json
"""  # noqa: E501

from __future__ import annotations

import common
import torch
from torch import Tensor

import fp4compile as fp4

TARGETS = {"NVFP4": {"format": "nvfp4", "outer": "tensor"}, "MXFP8": {"format": "mxfp8"}}
DRAWS = (1, 16, 256)


def requantized(copy: Tensor, target: dict, draws: int) -> Tensor:
    """``copy`` quantized along its other axis; the mean of so many draws, 0: to nearest."""
    turned = copy.t().contiguous()
    if not draws:
        return fp4.quantize(turned, **target).dequantize().t()
    total = torch.zeros_like(turned)
    for seed in range(draws):
        q = fp4.quantize(turned, **target, rounding="stochastic", seed=seed)
        total += q.dequantize()
    return (total / draws).t()


def exact(w: Tensor, **keywords) -> float:
    """The mismatch of a copy whose codes are read along the other axis as they are."""
    codes = fp4.quantize(w, "nvfp4", outer="tensor", **keywords)
    if keywords.get("block") == "tile":
        turned = fp4.quantize(w.t().contiguous(), "nvfp4", outer="tensor", **keywords)
        return common.error(turned.dequantize().t(), codes.dequantize())
    copy = codes.dequantize() / codes.outer
    return common.error(copy.to(torch.float8_e4m3fn).float(), copy)


def main() -> None:
    """The command line."""
    args = common.parser(__doc__).parse_args()
    w = common.mlp_tensors(args)["w1"]
    copy = fp4.quantize(w, **TARGETS["NVFP4"]).dequantize()
    mismatch: dict[str, dict[str, float]] = {name: {} for name in TARGETS}
    for name, target in TARGETS.items():
        for n in (0, *DRAWS):
            key = f"mean of {n}" if n else "nearest"
            mismatch[name][key] = common.error(requantized(copy, target, n), copy)
    sizes = {
        name: float(requantized(copy, target, 1).abs().mean() / copy.abs().mean())
        for name, target in TARGETS.items()
    }
    same = {"tiles": exact(w, block="tile"), "fp8-exact": exact(w, block_scales="fp8_exact")}
    result = {"quantization": common.error(copy, w), "mismatch": mismatch, "mean_size": sizes}
    common.write(args, {**result, "codes_as_they_are": same})


if __name__ == "__main__":
    main()
