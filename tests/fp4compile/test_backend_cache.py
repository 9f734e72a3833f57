"""The on-disk compile caches never serve what an older package or another policy compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fp4compile.kernels
import fp4compile.passes

import fp4compile

RUN = """
import json, sys, torch
from torch import nn
import torch._inductor.config
from torch._dynamo.utils import counters

torch.manual_seed(0)
torch._inductor.config.fallback_random = True  # nothing is left for the C++ compiler to do
model = nn.Sequential(nn.Linear(32, 48, bias=False))
x = torch.randn(16, 32)

def grads(call, seed):
    model.zero_grad(set_to_none=True)
    if seed is not None:
        torch.manual_seed(seed)
    call(x).square().sum().backward()
    return model[0].weight.grad.double().tolist()

found = []
for default in sys.argv[1:]:
    torch._dynamo.reset()
    counters.clear()
    policy = {"version": 1, "recipe": "mxfp8", "default": default}
    call = torch.compile(model, backend="fp4", options={"policy": policy})
    steps = [grads(call, 0), grads(call, None), grads(call, 0)]
    aot = counters["aot_autograd"]
    found.append({
        "hit": aot["autograd_cache_hit"], "miss": aot["autograd_cache_miss"],
        "bypass": aot["autograd_cache_bypass"], "steps": steps,
    })
import fp4compile
print(json.dumps({"runs": found, "file": fp4compile.__file__}))
"""


def start(cache, path, *schemes):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(path)}
    command = [sys.executable, "-c", RUN, *schemes]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, cwd=cache, **pipes), path


def finish(process, path):
    out, err = process.communicate()
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(path)
    return found["runs"]


def copy_to(where):
    """The package as it would be installed."""
    skip = shutil.ignore_patterns("__pycache__", "*.bak")
    for package in (fp4compile, fp4compile.passes, fp4compile.kernels):
        inner = package.__name__.split(".")
        root = next(iter(package.__path__))
        shutil.copytree(root, where.joinpath(*inner), ignore=skip, dirs_exist_ok=True)
    return where


CHANGE = """

_unchanged = backward_layer


def backward_layer(*args):
    dx, dw, db = _unchanged(*args)
    return dx, dw * 2, db
"""


def test_a_changed_backward_formula_is_compiled_again(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    unchanged, changed = copy_to(tmp_path / "unchanged"), copy_to(tmp_path / "changed")
    autograd = changed / "fp4compile" / "kernels" / "autograd.py"
    autograd.write_text(autograd.read_text() + CHANGE)
    (one,) = finish(*start(cache, unchanged, "low"))
    later = start(cache, unchanged, "low", "original"), start(cache, changed, "low")
    (same, other), (new,) = (finish(*each) for each in later)

    assert (one["hit"], one["miss"], one["bypass"]) == (0, 1, 0)
    assert (same["hit"], same["miss"], same["bypass"]) == (1, 0, 0), "an unchanged package hits"
    assert same["steps"] == one["steps"]
    assert (other["hit"], other["miss"]) == (0, 1), "another policy misses"
    assert other["steps"] != one["steps"]
    assert (new["hit"], new["miss"], new["bypass"]) == (0, 1, 0), "a changed package misses"
    assert new["steps"] == [[[2 * v for v in row] for row in g] for g in one["steps"]]

    # in every process: a seed repeats a step bit for bit, the next step draws new noise
    assert one["steps"][0] == one["steps"][2] != one["steps"][1]
