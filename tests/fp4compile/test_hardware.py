"""docs/hardware.md says what the engine table says; doctor and explain say what was found out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp4compile.kernels import block_scaled, cuda_loader, engines
from fp4compile.kernels.formats import TensorFormat
from typer.testing import CliRunner

import fp4compile as fp4
from fp4compile import backend, doctor, hardware
from fp4compile.cli import app

DOCS = Path(__file__).parent.parent.parent / "docs"
REFUSED = "scaled_mm with float32 results: RuntimeError: no"


def test_the_page_is_what_the_command_writes() -> None:
    assert (DOCS / "hardware.md").read_text(encoding="utf-8") == hardware.page()


@pytest.mark.parametrize("gpu", hardware.GPUS, ids=lambda gpu: gpu.name)
def test_the_page_is_what_choose_does(monkeypatch, gpu) -> None:
    """On each GPU, with native engines that work and with some that do not."""
    device = torch.device("cpu" if gpu.capability is None else "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: gpu.capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for native in (True, False):
        monkeypatch.setattr(block_scaled, "probe", lambda *a, n=native: "" if n else REFUSED)
        monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
        block_scaled._refusal.cache_clear()
        for _, left, right, turned in hardware.GEMMS:
            formats = TensorFormat.parse(left), TensorFormat.parse(right)
            engine = engines.choose(*formats, device, turned).name
            assert engine == hardware.engine_of(gpu, left, right, turned, native)
    block_scaled._refusal.cache_clear()


def test_every_gpu_of_the_loader_is_on_the_page() -> None:
    there = {cuda_loader.architecture(g.capability) for g in hardware.GPUS if g.capability}
    assert there == set(cuda_loader.ARCHITECTURES)
    assert {engine for *_, engine in [(hardware.engine_of(g, *rest),) for g in hardware.GPUS
            for _, *rest in hardware.GEMMS]} == set(hardware.WORDS)  # fmt: skip


def test_doctor_says_whether_the_native_engines_work(monkeypatch) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert "engine fp4" in result.output and "engine mxfp8" in result.output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    answers = {"fp4": "", "mx": REFUSED}
    monkeypatch.setattr(block_scaled, "refusal", lambda form, device: answers[form])
    assert list(doctor._block_scaled()) == [
        ("ok", "engine fp4, cuda:0: a small GEMM gave the exact bits"),
        ("missing", f"engine mxfp8, cuda:0: not used: {REFUSED}"),
    ]


def test_explain_gives_the_reason_of_a_fallback(monkeypatch) -> None:
    """For each GEMM that the tensor cores of the device could not multiply."""
    monkeypatch.setattr(
        engines, "why_not", lambda left, right, device, turned: "why" if turned else ""
    )
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    policy = fp4.Policy.from_dict({"version": 1, "recipe": "fp8-exact", "default": "low"})
    report = fp4.explain(model, (torch.randn(4, 32),), policy=policy)
    assert {row.reason for row in report} == {"dgrad by reference: why; wgrad by reference: why"}


def test_compile_caches_know_which_engines_work(monkeypatch) -> None:
    """A graph holds its engines: where a GEMM is refused now, a cached one must not call it."""
    key = "post_grad_custom_pre_pass"
    before = str(backend.patches({}, "policy")[key].uuid())
    monkeypatch.setattr(block_scaled, "refusal", lambda form, device: "" if form == "fp4" else "no")
    assert str(backend.patches({}, "policy")[key].uuid()) != before
