"""Stochastic rounding: unbiased, noisy, and what it does to the gradient of a real backward pass.

    python examples/reproduce/rounding.py --model runs/reproduce/bf16-0.pt --out docs/results/reproduce-rounding.json
"""  # noqa: E501

from __future__ import annotations

import common
import torch
import torch.nn.functional as F
from fp4compile.kernels import ops as _ops  # noqa: F401 - defines torch.ops.fp4
from fp4compile.kernels.formats import Scheme
from torch import Tensor

import fp4compile as fp4

DRAWS = (1, 4, 16, 64, 400)
RECIPES = ("thinking-machines", "fp8-exact")


def example(draws: int = 4096) -> float:
    """How often 2.25 becomes 3 rather than 2: the block's largest value 6 makes the scale 1."""
    x = torch.full((draws, 16), 2.25)
    x[:, 0] = 6
    x[0, 0] = 6 * 448  # the tensor's largest: an outer scale of 1
    q = fp4.quantize(x, "nvfp4", outer="tensor", rounding="stochastic", seed=3).dequantize()
    return float((q[1:, 1:] == 3).float().mean())


def gaussian(name: str, device: str) -> dict[str, float]:
    """Errors on Gaussian data: to nearest, and of the mean of n draws."""
    x = torch.randn(512, 1024, device=device, generator=torch.Generator(device).manual_seed(0))
    found = {"nearest": common.error(fp4.quantize(x, name).dequantize(), x)}
    total = torch.zeros_like(x)
    for seed in range(max(DRAWS)):
        total += fp4.quantize(x, name, rounding="stochastic", seed=seed).dequantize()
        if seed + 1 in DRAWS:
            found[f"mean of {seed + 1}"] = common.error(total / (seed + 1), x)
    return found


def schemes(recipe: str) -> tuple[str, str]:
    """The recipe's scheme, and the same with every backward operand rounded to nearest."""
    text = str(fp4.Policy.recipe(recipe).schemes["low"])
    return text, str(Scheme.parse(text.replace(":sr", "")))


def exact_gradients(scheme: str, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the quantized forward pass as it is, in FP32: operands decoded, none rounded again."""
    activation, weight = (op.format for op in Scheme.parse(scheme).fprop)

    def through(x: Tensor, fmt) -> Tensor:
        keys = {k: getattr(fmt, k) for k in ("outer", "block", "block_scales", "scale_search")}
        return fp4.quantize(x, fmt.format, **keys).dequantize()

    x, w1, w2 = (through(t[n], f) for n, f in (("x", activation), ("w1", weight), ("w2", weight)))
    z = x @ w1.t()
    h = through(F.gelu(z), activation)
    gz = torch.ops.aten.gelu_backward(t["g"] @ w2, z)
    return {"dw2": t["g"].t() @ h, "dw1": gz.t() @ x, "dx": gz @ w1}


def gradients(scheme: str, t: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Of the package's operator for the MLP."""
    x, w1, w2 = (t[n].clone().requires_grad_() for n in ("x", "w1", "w2"))
    y = torch.ops.fp4.linear_act_linear(
        x, w1, None, w2, None, "gelu", scheme, scheme, torch.float32, torch.float32
    )
    torch.manual_seed(seed)
    y.backward(t["g"])
    assert x.grad is not None and w1.grad is not None and w2.grad is not None
    return {"dw2": w2.grad, "dw1": w1.grad, "dx": x.grad}


def backward(recipe: str, t: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Errors of the MLP's three gradients against the exact ones: nearest and stochastic."""
    stochastic, nearest = schemes(recipe)
    want = exact_gradients(stochastic, t)

    def errors(got: dict[str, Tensor]) -> dict[str, float]:
        return {name: common.error(got[name], want[name]) for name in want}

    found = {"nearest": errors(gradients(nearest, t, 0))}
    total = {name: torch.zeros_like(value) for name, value in want.items()}
    for seed in range(64):
        for name, value in gradients(stochastic, t, seed).items():
            total[name] += value
        if seed + 1 in (1, 64):
            mean = {name: value / (seed + 1) for name, value in total.items()}
            found[f"mean of {seed + 1}"] = errors(mean)
    return found


def main() -> None:
    """The command line."""
    args = common.parser(__doc__).parse_args()
    tensors = common.mlp_tensors(args)
    result = {
        "share_of_2.25_to_3": example(),
        "gaussian": {name: gaussian(name, args.device) for name in ("nvfp4", "mxfp8")},
        "backward": {recipe: backward(recipe, tensors) for recipe in RECIPES},
    }
    common.write(args, result)


if __name__ == "__main__":
    main()
