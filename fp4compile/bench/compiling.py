"""Compile time of a GPT's first training step, each arm in a process of its own on empty caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from .arms import gpt_arms
from .models import GPT
from .timing import header

ARMS = ("bf16", "fp8-exact")


def first_step(name: str, width: int, layers: int) -> float:
    """Seconds of the first forward and backward pass, after one of a small compiled model."""
    torch.manual_seed(0)
    model = GPT(width, layers, width // 64, 1024, 50304).cuda()
    batch = torch.randint(50304, (4, 1025), device="cuda")
    small = torch.compile(torch.nn.Linear(8, 8).cuda())  # starts Inductor's worker processes
    small(torch.randn(2, 8, device="cuda")).sum().backward()
    compiled = gpt_arms()[name](model)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(batch[:, :-1], batch[:, 1:])
    loss.backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def run(width: int = 768, layers: int = 12, rounds: int = 2) -> dict:
    """The table as a dict; ``kernels`` says whether the package's kernels had to be built too."""
    result = {"bench": "compile", **header(), "width": width, "layers": layers, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds):
            for name in ARMS:
                caches = {
                    "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / f"{name}-{i}"),
                    "FP4COMPILE_CACHE_DIR": str(Path(folder) / "kernels"),
                }
                command = [sys.executable, "-m", __name__, name, str(width), str(layers)]
                done = subprocess.run(
                    command, env={**os.environ, **caches}, capture_output=True, text=True
                )
                if done.returncode:
                    raise RuntimeError(f"arm {name}: {done.stderr.strip()[-500:]}")
                seconds = json.loads(done.stdout.splitlines()[-1])
                row = {"arm": name, "seconds": round(seconds, 1)}
                result["rows"].append({**row, "kernels": "built" if i == 0 else "cached"})
    for row in result["rows"]:
        base = next(
            r for r in result["rows"] if r["arm"] == "bf16" and r["kernels"] == row["kernels"]
        )
        row["ratio"] = round(row["seconds"] / base["seconds"], 3)
    return result


if __name__ == "__main__":
    print(json.dumps(first_step(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
