"""Layers on the block-scaled engines against the reference, the same on the CPU and on a GPU."""

from __future__ import annotations

import stand_in
import torch
from fp4compile.kernels import engines, ops  # noqa: F401 - defines the operators
from fp4compile.kernels.formats import Scheme
from fp4compile.kernels.layer import Layer

import fp4compile as fp4

# Recipe's scheme, and the forms that its three GEMMs have on block-scaled tensor cores.
SCHEMES = [
    ("fp8-exact", "low", ("fp4", "mx", "mx")),
    ("fp8-exact", "mxfp8", ("mx", "mx", "mx")),
    ("thinking-machines", "low", ("fp4", "mx", "mx")),
    ("mxfp8", "low", ("mx", "mx", "mx")),
    ("nvidia", "low", ("fp4", "fp4", "fp4")),
]
SHAPES = [(37, 80, 48), (130, 144, 272), (1, 1, 1), (64, 17, 33)]


def scheme_of(recipe: str, name: str) -> Scheme:
    return fp4.Policy.recipe(recipe).schemes[name]


def forms(scheme: Scheme, device: torch.device) -> tuple[str, ...]:
    layer = Layer(scheme, torch.bfloat16, device)
    return tuple(layer.engine(name).operand for name in ("fprop", "dgrad", "wgrad"))


def step(scheme: Scheme, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device):
    """y, dx, dw and db of one linear layer."""
    generator = torch.Generator().manual_seed(m + k + n)
    x, w, b, g = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in ((m, k), (n, k), (n,), (m, n))
    )
    torch.manual_seed(3)
    y = torch.ops.fp4.linear(x, w, b, str(scheme), dtype)
    return [y, *torch.autograd.grad(y, (x, w, b), g)]


def chain(scheme: Scheme, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device):
    """y and the gradients of two layers with an activation between."""
    generator = torch.Generator().manual_seed(m + k + n)
    tensors = [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in ((m, k), (n, k), (n,), (k, n), (k,))
    ]
    torch.manual_seed(3)
    text = str(scheme)
    y = torch.ops.fp4.linear_act_linear(*tensors, "gelu_tanh", text, text, dtype, dtype)
    return [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]


def check(
    monkeypatch, run, recipe, name, shape, dtype, device, want_forms, other=stand_in.only_reference
) -> None:
    """The engines chosen are those wanted, each multiplied, and gave the bits of the ``other``."""
    scheme = scheme_of(recipe, name)
    with monkeypatch.context() as patch:
        stand_in.install(patch)
        assert forms(scheme, device) == want_forms
        got = run(scheme, *shape, dtype, device)
        inside = stand_in.calls.pop("outer", 0)
        expected = {form: want_forms.count(form) for form in set(want_forms)}
        times = 1 if run is step else 2
        assert stand_in.calls == {form: times * count for form, count in expected.items()}
    with monkeypatch.context() as patch:
        other(patch)
        want = run(scheme, *shape, dtype, device)
    for i, (a, b) in enumerate(zip(got, want)):
        if inside and dtype == torch.bfloat16:  # sums are scaled in FP32 and rounded once
            off = (a.detach().float() - b.detach().float()).norm() / b.detach().float().norm()
            assert off < 4e-3, (recipe, name, shape, i, float(off))
        elif device.type == "cuda" and a.dim() == 1:  # a bias's gradient: sums in another order
            assert (a - b).norm() <= 1e-6 * b.norm(), (recipe, name, shape, i)
        else:
            assert torch.equal(a, b), (recipe, name, shape, i, (a - b).abs().max())
