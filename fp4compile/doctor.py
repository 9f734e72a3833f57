"""What this machine can run, and why not: one finding a line, no finding raises."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED = ((2, 11), (2, 14))  # torch versions the tests run on, first and last


@dataclass(frozen=True)
class Finding:
    """``status`` is "ok", "missing" (something still works without it) or "broken"."""

    what: str
    status: str
    detail: str


def examine() -> list[Finding]:
    """Every check, in the order of a person's questions."""
    findings: list[Finding] = []
    for what, check in CHECKS:
        try:
            findings += [Finding(what, *found) for found in check()]
        except Exception as exc:  # noqa: BLE001 - a doctor reports, whatever happens
            text = " ".join(f"{type(exc).__name__}: {exc}".split())
            findings.append(Finding(what, "broken", text[:200]))
    return findings


Found = Iterator[tuple[str, str]]


def _torch() -> Found:
    version = tuple(int(v) for v in torch.__version__.split("+")[0].split(".")[:2])
    span = " to ".join(".".join(map(str, v)) for v in SUPPORTED)
    inside = SUPPORTED[0] <= version <= SUPPORTED[1]
    note = "" if inside else f"; tested on {span}"
    status = "ok" if inside else "missing" if version > SUPPORTED[1] else "broken"
    yield status, f"torch {torch.__version__}, Python {platform.python_version()}{note}"


def _backend() -> Found:
    points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    found = any(p.name == "fp4" for p in points)
    text = 'torch.compile(model, backend="fp4")' if found else "install the package (pip install .)"
    yield ("ok" if found else "broken"), text


def _stamps() -> Found:
    from .dynamo import self_test

    self_test()
    yield "ok", "fp4.apply: stamps are guarded by compiled graphs"


def _compiler() -> Found:
    from .kernels import native

    ok, reason = native.available()
    text = "CPU kernels built" if ok else f"{reason}; CPU tensors use the PyTorch reference"
    yield ("ok" if ok else "missing"), text


def _cache() -> Found:
    import os

    from .kernels import cache

    where = cache.directory()
    probe = where if where.exists() else where.parent
    writable = os.access(probe, os.W_OK)
    note = "" if writable else " cannot be written: kernels are built again in every process"
    yield ("ok" if writable else "missing"), f"{where}{note}"


def _gpus() -> Found:
    if not torch.cuda.is_available():
        built = f"torch was built for CUDA {torch.version.cuda}" if torch.version.cuda else (
            "torch was built without CUDA"
        )
        yield "missing", f"no GPU ({built}); engine reference on the CPU"
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        yield "ok", f"cuda:{index} {name}, sm_{major}{minor}"


def _kernels() -> Found:
    from .kernels import cuda_loader

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found, reason = cuda_loader.compiler_available()
    if not found:
        what = "CUDA tensors use the PyTorch reference, slowly" if gpus else "needed on GPUs only"
        yield "missing", f"{reason}; {what}"
        return
    architectures = ", ".join(cuda_loader.ARCHITECTURES)
    yield "ok", f"NVRTC {cuda_loader.version()} builds them when first used, for {architectures}"
    for index in range(gpus):
        ok, reason = cuda_loader.available(index)
        slow = "its tensors use the PyTorch reference, slowly"
        text = "a kernel was built and loaded" if ok else f"{reason}; {slow}"
        yield ("ok" if ok else "missing"), f"cuda:{index}: {text}"


def _engines() -> Found:
    from .kernels.engines import choose, why_reference
    from .policy import Policy, recipes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in recipes():
        scheme = Policy.recipe(name).schemes.get("low")
        if scheme is None or scheme.fprop is None:
            continue
        left, right = (operand.format for operand in scheme.fprop)
        assert left is not None and right is not None
        reason = why_reference(left, right, device)
        engine = choose(left, right, device).name + (f" ({reason})" if reason else "")
        yield "ok", f"{name}: forward GEMM by engine {engine}"
    yield from _block_scaled()


def _block_scaled() -> Found:
    """The engines of block-scaled tensor cores: a small GEMM was multiplied, or why not."""
    from .kernels.block_scaled import refusal
    from .kernels.engines import BLOCK_SCALED

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for form, engine in BLOCK_SCALED.items():
        if not gpus:
            yield "missing", f"engine {engine.name}: no GPU; it needs sm_100, 103, 120 or 121"
        for index in range(gpus):
            why = refusal(form, torch.device("cuda", index))
            text = "a small GEMM gave the exact bits" if not why else f"not used: {why}"
            yield ("missing" if why else "ok"), f"engine {engine.name}, cuda:{index}: {text}"


CHECKS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("torch", _torch),
    ("backend", _backend),
    ("stamps", _stamps),
    ("C++ compiler", _compiler),
    ("cache", _cache),
    ("GPU", _gpus),
    ("CUDA kernels", _kernels),
    ("engines", _engines),
)
