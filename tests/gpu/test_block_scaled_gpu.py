"""The block-scaled engines on a GPU: swizzled operands by its kernels, the GEMM by a stand-in."""

from __future__ import annotations

import block_scaled_cases as cases
import pytest
import stand_in
import test_compiled_cuda as compiled
import torch
from fp4compile.kernels import block_scaled, cuda_loader
from torch._inductor import config as inductor_config

FOUND, REASON = cuda_loader.available()
pytestmark = pytest.mark.skipif(not FOUND, reason=f"no usable GPU: {REASON}")
GPU = torch.device("cuda")
# Ragged and larger than the kernels' tiles.
SHAPES = [(37, 80, 48), (300, 1040, 272), (1, 1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("recipe", "name", "forms"), cases.SCHEMES)
def test_layers_have_the_bits_of_the_older_engines(monkeypatch, recipe, name, forms, dtype) -> None:
    for shape in SHAPES:
        rest = (recipe, name, shape, dtype, GPU, forms, stand_in.only_older)
        cases.check(monkeypatch, cases.step, *rest)
        if recipe != "nvidia" or dtype == torch.float32:
            cases.check(monkeypatch, cases.chain, *rest)


@pytest.mark.parametrize("recipe", ["fp8-exact", "mxfp8", "nvidia"])
def test_inductor_gives_the_graphs_bits(monkeypatch, recipe) -> None:
    stand_in.install(monkeypatch)
    with inductor_config.patch(fallback_random=True):
        got = compiled.steps(compiled.Mlp, recipe, torch.float32)
        assert sum(stand_in.calls[form] for form in block_scaled.FORMS) == 6
        want = compiled.steps(compiled.Mlp, recipe, torch.float32, compiler="aot_eager")
    # An ulp of the result moves the loss's gradient, and NVFP4 rounds that with coarse steps.
    bound = 2e-2 if recipe == "nvidia" else 1e-6
    for a, b in zip(got, want):
        assert (a - b).norm() <= bound * b.norm()


def test_outer_scales_inside_a_compiled_call(monkeypatch) -> None:
    stand_in.install(monkeypatch)
    compiled.steps(compiled.Mlp, "nvidia", torch.bfloat16)
    assert stand_in.calls["outer"] == 2  # both forward GEMMs


@pytest.mark.parametrize("form", block_scaled.FORMS)
def test_the_probe_refuses_a_gpu_that_cannot(form) -> None:
    """PyTorch's own refusal, on a GPU that would not be asked."""
    if torch.cuda.get_device_capability() in block_scaled.CAPABILITIES:
        pytest.skip("this GPU can")
    reason = block_scaled.probe(form, GPU)
    assert reason.startswith("scaled_mm with float32 results: ") and "\n" not in reason
    torch.cuda.synchronize()
    assert torch.ones(2, device=GPU).sum() == 2  # the device is as before
