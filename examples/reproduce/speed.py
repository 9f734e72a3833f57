"""Speed on a GPU: bare GEMMs, one MLP by operation, whole steps at three widths and their parts.

    python examples/reproduce/speed.py --out docs/results/reproduce-speed.json

The article's sizes: 32,768 tokens, a GEMM of 8192 -> 32,768, GPTs of 4 blocks and 16 heads with a
context of 256 at widths 2048, 4096 and 8192, AdamW; MLPs in the arm's precision, all else BF16.
The quantize kernels are `fp4compile bench kernels`' and its table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
from arms import policy_of
from torch import nn

from fp4compile.bench.arms import bf16
from fp4compile.bench.timing import median_ms
from fp4compile.bench.training import gpt_step, measure, mlp_step

TOKENS = 32768
ARMS = ("bf16", "fp8", "thinking-machines", "fp8-exact")
# Parts of a step by a word in the kernel's name, the first that fits.
PARTS = {
    "attention": ("flash", "fmha", "attention"),
    "GEMM": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "sm90"),
    "quantize": ("quantize", "tensor_amax", "decode", "requantize", "rows", "transpose"),
    "hidden gradient": ("act_grad", "hidden"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "pointwise and norms": ("triton", "elementwise", "reduce", "vectorized"),
    "copies": ("memcpy", "memset"),
}


def arm(name: str) -> Callable[[nn.Module], Any]:
    """How a model is compiled for the arm ``name``."""
    if name == "bf16":
        return bf16
    options = {"policy": policy_of(name)}
    return lambda model: torch.compile(model, backend="fp4", options=options)


def gemms() -> list[dict]:
    """A bare product, TOKENS x k -> n, in BF16 and FP8."""
    rows = []
    for k, n in ((2048, 8192), (4096, 16384), (8192, 32768)):
        a = torch.randn(TOKENS, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        fp8 = partial(torch._scaled_mm, a8, b8.t(), one, one, out_dtype=torch.bfloat16)
        row = {"k": k, "n": n, "bf16": median_ms(lambda a=a, b=b: a @ b.t()), "fp8": median_ms(fp8)}
        rows.append({key: round(value, 3) for key, value in row.items()})
    return rows


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to."""
    low = kernel.lower()
    return next((p for p, words in PARTS.items() if any(w in low for w in words)), "other")


def by_part(step: Callable[[], object]) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of kernels in one step by part, and of the costliest kernels by name."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    parts: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for event in found.key_averages():
        ms = event.self_device_time_total / 1e3
        if ms > 0:
            parts[part_of(event.key)] = parts.get(part_of(event.key), 0) + ms
            kernels[event.key[:80]] = ms
    top = sorted(kernels.items(), key=lambda item: -item[1])[:16]
    return {k: round(v, 3) for k, v in parts.items()}, {k: round(v, 3) for k, v in top}


def mlp(d: int) -> list[dict]:
    """One MLP, forward and backward, by part."""
    rows = []
    for name in ("bf16", "fp8-exact", "thinking-machines"):
        torch._dynamo.reset()
        step = mlp_step(d, TOKENS, arm(name))
        step()
        parts, kernels = by_part(step)
        rows.append({"d": d, "arm": name, "parts": parts, "kernels": kernels})
    return rows


def steps(widths: tuple[int, ...]) -> list[dict]:
    """Whole steps: milliseconds, peak memory, and the parts of one."""
    rows = []
    for width in widths:
        for name in ARMS:
            build = partial(gpt_step, arm(name), width, 4, 256, TOKENS)
            made: list[Callable[[], object]] = []

            def keep(build=build, made=made) -> Callable[[], object]:
                made.append(build())
                return made[0]

            row = measure(keep)
            if made and "ms" in row:
                row["parts"] = by_part(made[0])[0]
            rows.append({"width": width, "arm": name, **row})
            base = next(r for r in rows if r["width"] == width and r["arm"] == "bf16")
            if "ms" in row and "ms" in base:
                rows[-1]["speedup"] = round(base["ms"] / row["ms"], 3)
            made.clear()
    return rows


def main() -> None:
    """The command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=(2048, 4096, 8192))
    args = parser.parse_args()
    if args.device != "cuda":
        raise SystemExit("speed: a CUDA GPU is needed")
    result = {"gemms": gemms(), "mlp": mlp(8192), "steps": steps(tuple(args.widths))}
    common.write(args, result)


if __name__ == "__main__":
    main()
