"""Timing and the machine's ceilings: copy bandwidth and GEMM rates, measured in the same run."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from ..kernels.errors import Fp4Error


def median_ms(fn: Callable[[], object], budget_ms: float = 300.0, most: int = 50) -> float:
    """Median milliseconds of ``fn`` by device events, after warm-up; at least 5 runs."""
    fn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    once = max((time.perf_counter() - start) * 1e3, 1e-3)
    runs = int(min(most, max(5, budget_ms / once)))
    for _ in range(min(runs, 3)):
        fn()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(runs)
    ]
    for begin, end in events:
        begin.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


@dataclass
class Ceilings:
    """Measured rates: device copy (bytes read + written) in TB/s, GEMMs in TFLOP/s."""

    copy_tbs: float
    bf16_tflops: float
    fp8_tflops: float | None


def ceilings(size: int = 8192) -> Ceilings:
    """Copy of 2 GiB, BF16 and FP8 products of ``size`` cubed, random data."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e9
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    flops = 2 * size**3
    bf16 = flops / median_ms(lambda: a @ b.t()) / 1e9
    return Ceilings(copy, bf16, _fp8(a, b, flops))


def _fp8(a: torch.Tensor, b: torch.Tensor, flops: int) -> float | None:
    if torch.cuda.get_device_capability() < (8, 9):
        return None
    e4m3, one = torch.float8_e4m3fn, torch.ones((), device="cuda")
    a8, b8 = a.to(e4m3), b.to(e4m3).t()
    product = lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)  # noqa: E731
    return flops / median_ms(product) / 1e9


def header() -> dict:
    """Hardware, versions and date of a result."""
    from .. import __version__

    if not torch.cuda.is_available():
        raise Fp4Error("bench needs a CUDA GPU: its figures are about GPU kernels")
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "fp4compile": __version__,
        "ceilings": asdict(ceilings()),
    }
