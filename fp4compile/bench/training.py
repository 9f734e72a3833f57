"""One MLP layer and a GPT, trained by each arm: milliseconds a step, peak memory, ratio to BF16."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ..kernels.errors import InputError
from ..monitoring import Monitor
from .arms import Arm, gpt_arms, mlp_arms
from .models import GPT, MLP
from .timing import header, median_ms

GIB = 2**30


def measure(build: Callable[[], Callable[[], object]]) -> dict:
    """Milliseconds and peak GiB of the step that ``build`` makes; an error in its place."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    try:
        step = build()
        step()
        step()
        torch.cuda.reset_peak_memory_stats()
        ms = median_ms(step, budget_ms=2000)
        return {"ms": round(ms, 3), "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3)}
    except Exception as exc:  # noqa: BLE001 - one arm that fails leaves the others' figures
        return {"error": " ".join(f"{type(exc).__name__}: {exc}".split())[:300]}


def mlp_step(d: int, tokens: int, arm: Arm) -> Callable[[], object]:
    """Forward and backward of an MLP with BF16 parameters on x [tokens, d]."""
    return mlp_parts(d, tokens, arm)[1]


def mlp_parts(d: int, tokens: int, arm: Arm) -> tuple[Callable[[], object], Callable[[], object]]:
    """The forward pass of `mlp_step` alone, and the whole step."""
    torch.manual_seed(0)
    model = MLP(d).to("cuda", torch.bfloat16)
    compiled = arm(model)
    x = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for p in (x, *model.parameters()):
            p.grad = None
        compiled(x).backward(g)

    return lambda: compiled(x), step


def gpt_step(
    arm: Arm, width: int, layers: int, context: int, tokens: int, heads: int = 0,
    vocabulary: int = 32768,
) -> Callable[[], object]:  # fmt: skip
    """A whole step of a GPT with FP32 parameters under BF16 autocast, fused AdamW."""
    torch.manual_seed(0)
    model: nn.Module = GPT(width, layers, heads or width // 128, context, vocabulary).cuda()
    compiled = arm(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(vocabulary, (tokens // context, context + 1), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def run_mlp(widths: tuple[int, ...] = (2048, 4096, 8192), tokens: int = 32768) -> dict:
    """The table of one MLP layer, forward and backward, as a dict."""
    result = {"bench": "mlp", **header(), "tokens": tokens, "rows": []}
    for d in widths:
        for name, arm in mlp_arms().items():
            row = measure(partial(mlp_step, d, tokens, arm))
            flops = 6 * 2 * tokens * d * 4 * d
            if "ms" in row:
                row["tflops"] = round(flops / row["ms"] / 1e9)
            result["rows"].append({"d": d, "arm": name, **row})
    return with_ratios(result, "d")


def run_gpt(
    width: int = 2048, layers: int = 12, context: int = 1024, tokens: int = 32768,
    names: list[str] | None = None,
) -> dict:  # fmt: skip
    """The table of a GPT's whole training step as a dict; ``names``: of the arms, default all."""
    arms = gpt_arms()
    if unknown := [name for name in names or () if name not in arms]:
        raise InputError(f"bench gpt: no arm {unknown[0]!r}; there are {', '.join(arms)}")
    sizes = {"width": width, "layers": layers, "context": context, "tokens": tokens}
    result = {"bench": "gpt", **header(), **sizes, "rows": []}
    for name in names or arms:
        row = measure(partial(gpt_step, arms[name], width, layers, context, tokens))
        result["rows"].append({"width": width, "arm": name, **row})
    return with_ratios(result, "width")


SAMPLE = 50  # steps for one sample


def run_monitor(width: int = 768, layers: int = 12, tokens: int = 16384, turns: int = 3) -> dict:
    """What `fp4.monitor` costs a GPT's step, fp8-exact, as a dict of one row.

    The row: milliseconds of a step without a monitor, between samples, and in a sampled step,
    medians of steps that are waited for; of steps in runs of 50, without a monitor and with one
    sample each (medians of ``turns`` runs); the share that one sample in 50 steps adds by the first
    figures, where the host is waited for, and by the runs.
    """
    row = _monitored(width, layers, tokens, turns)
    sizes = {"width": width, "layers": layers, "tokens": tokens}
    return {"bench": "monitor", **header(), "rows": [{**sizes, **row}]}


def _monitored(width: int, layers: int, tokens: int, turns: int, steps: int = 12) -> dict:
    models: list[nn.Module] = []

    def keep(model: nn.Module) -> object:
        models.append(model)
        return gpt_arms()["fp8-exact"](model)

    step = gpt_step(keep, width, layers, 1024, tokens)
    every_of = {"off": 0, "between": 1000, "sampled": 1}
    times: dict[str, list[float]] = {name: [] for name in every_of}
    for turn in range(steps + 2):
        for i in range(3):  # in another order each turn: a step pays for what the last one left
            name = list(every_of)[(turn + i) % 3]
            spent = _timed_steps(step, models[0], every_of[name], 1, 1)
            if turn > 1:  # compiled, and the monitor's own memory is there
                times[name].append(spent)
    found = {f"{name}_ms": round(statistics.median(all_ms), 3) for name, all_ms in times.items()}
    runs: dict[int, list[float]] = {0: [], SAMPLE: []}
    for turn in range(turns):
        for every in sorted(runs, reverse=bool(turn % 2)):
            runs[every].append(_timed_steps(step, models[0], every, SAMPLE, SAMPLE // 2))
    off, sampled = (statistics.median(all_ms) for all_ms in runs.values())
    alone = (found["sampled_ms"] - found["between_ms"]) / SAMPLE / found["off_ms"]
    return {
        **found,
        "runs_off_ms": [round(ms / SAMPLE, 3) for ms in runs[0]],
        "runs_ms": [round(ms / SAMPLE, 3) for ms in runs[SAMPLE]],
        "run_off_ms": round(off / SAMPLE, 3),
        "run_ms": round(sampled / SAMPLE, 3),
        "sample_alone": round(alone, 4),
        "added": round(sampled / off - 1, 4),
    }


def _timed_steps(
    step: Callable[[], object], model: nn.Module, every: int, steps: int, first: int
) -> float:
    """Milliseconds of ``steps`` steps, the device waited for at their end; ``every`` 0: alone."""
    monitor = Monitor(model, every, 64, None, None, first, True) if every else None
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    spent = 1e3 * (time.perf_counter() - began)
    if monitor is not None:
        monitor.stop()
    return spent


def with_ratios(result: dict, key: str) -> dict:
    """``result`` with every row's time and memory over those of the BF16 row of equal ``key``."""
    base = {row[key]: row for row in result["rows"] if row["arm"] == "bf16"}
    for row in result["rows"]:
        first = base.get(row[key], {})
        if "ms" in row and "ms" in first:
            row["time_ratio"] = round(row["ms"] / first["ms"], 3)
            row["memory_ratio"] = round(row["peak_gib"] / first["peak_gib"], 3)
    return result
