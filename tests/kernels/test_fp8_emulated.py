"""The CUDA kernels of format fp8, run on the host, give the reference's bits."""

from __future__ import annotations

import emulated
import kernel_cases as cases
import pytest
import torch
from fp4compile.kernels import native_library

pytestmark = pytest.mark.skipif(native_library.compiler() is None, reason="no C++ compiler")
CPU, BF16 = torch.device("cpu"), torch.bfloat16
SHAPES = [(37, 17), (130, 144), (0, 32), (3, 0)]
BOTH = pytest.mark.parametrize("order", [0, 1], ids=["forwards", "backwards"], indirect=True)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    emulated.install(monkeypatch)


@pytest.fixture
def order(request, monkeypatch):
    """The threads of a CTA run in this order: a missing barrier shows."""
    monkeypatch.setattr(emulated, "order", request.param)


@pytest.mark.parametrize(("text", "form"), cases.FP8)
def test_forward(text: str, form: str) -> None:
    for i, (rows, cols) in enumerate(SHAPES):
        cases.check_fp8(text, form, cases.matrix(rows, cols, BF16, CPU, i == 1))


@BOTH
@pytest.mark.parametrize("full", [False, True])
def test_threads_in_any_order(full: bool, order) -> None:
    x = cases.matrix(128, 128 if full else 100, BF16, CPU)
    for text in ("fp8:128", "fp8:tile"):
        cases.check_fp8(text, "none", x)
    cases.check_fp8_gradient("fp8:128", "fp8:128", x, True)
    cases.check_fp8_requantize("fp8:128", x)


def test_dtypes_and_strides() -> None:
    cases.check_fp8("fp8:128", "none", cases.matrix(37, 44, torch.float16, CPU))
    x = cases.matrix(74, 100, BF16, CPU)
    for view in (x[:, 1:], x.t(), x[::2], x[:1].expand(40, 100), x[:, :-3]):
        cases.check_fp8_gradient("fp8:128", "fp8:128", view, True)


@pytest.mark.parametrize("exponent", [-148, -126, 119])
def test_sizes_of_values(exponent: int) -> None:
    x = torch.randn(9, 100, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    x = (x.double() * 2.0**exponent).float()
    for text in ("fp8:128", "fp8:tile"):
        cases.check_fp8(text, "none", x)
    cases.check_fp8_requantize("fp8:128", x)
    cases.check_fp8_gradient("fp8:128:sr", "fp8:128:sr", x, False)


@pytest.mark.parametrize("target", ["fp8:128", "fp8:128:sr"])
def test_requantize(target: str) -> None:
    for i, (rows, cols) in enumerate(SHAPES):
        cases.check_fp8_requantize(target, cases.matrix(rows, cols, BF16, CPU, i == 1))


@pytest.mark.parametrize(("dgrad", "wgrad"), cases.FP8_GRADIENTS)
def test_gradient(dgrad: str | None, wgrad: str | None) -> None:
    for i, (rows, cols) in enumerate(SHAPES):
        cases.check_fp8_gradient(dgrad, wgrad, cases.matrix(rows, cols, BF16, CPU, i == 1), True)


@pytest.mark.parametrize("act", ["gelu_tanh", "silu"])
def test_activations(act: str) -> None:
    shape = (128, 128) if act == "gelu_tanh" else (9, 80)
    cases.check_fp8_activation(act, act == "silu", torch.float32, CPU, shape)


def test_poisoned_memory_changes_nothing() -> None:
    cases.check_fp8_poisoned(CPU)
