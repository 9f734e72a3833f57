"""Spellings of whole models through the backend: the bits and bytes of plain linears."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp4compile as fp4

ALL = {"version": 1, "recipe": "fp8-exact", "layers": [{"match": "*", "scheme": "low"}]}


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(32, 128), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Apart(nn.Module):
    def __init__(self, fused: Fused) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.down.load_state_dict(fused.down.state_dict())
        with torch.no_grad():
            for half, layer in enumerate((self.gate, self.up)):
                layer.weight.copy_(fused.gate_up.weight.chunk(2)[half])
                layer.bias.copy_(fused.gate_up.bias.chunk(2)[half])

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def step(model: nn.Module) -> list[Tensor]:
    torch._dynamo.reset()
    options = {"policy": ALL, "compiler": "aot_eager"}
    compiled = torch.compile(model, backend="fp4", options=options)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(2), requires_grad=True)
    torch.manual_seed(1)
    y = compiled(x)
    y.square().sum().backward()
    layers = [layer for layer in model.children() if layer is not model.down]
    grads = [
        torch.cat([layer.weight.grad for layer in layers]),
        torch.cat([layer.bias.grad for layer in layers]),
    ]
    return [y.detach(), x.grad, *grads, *(p.grad for p in model.down.parameters())]


@pytest.mark.filterwarnings("ignore::fp4compile.PrecisionWarning")
def test_gate_and_up_as_one_linear_have_the_bits_of_two():
    torch.manual_seed(0)
    fused = Fused()
    apart = Apart(fused)
    for a, b in zip(step(fused), step(apart), strict=True):
        assert torch.equal(a, b)
    mine, theirs = fp4.explain(fused), fp4.explain(apart)
    assert [row.chain for row in mine] == [0, 0] and [row.chain for row in theirs] == [0, 0, 0]
    assert mine.original_bytes == theirs.original_bytes


class Heads(nn.Module):
    """A projection to heads and back, by einsum or as two linears with the same weights."""

    def __init__(self, einsum: bool) -> None:
        super().__init__()
        self.einsum = einsum
        self.q, self.o = nn.Parameter(torch.empty(32, 4, 8)), nn.Parameter(torch.empty(32, 4, 8))
        for p in self.parameters():
            nn.init.normal_(p, generator=torch.Generator().manual_seed(3))
        if not einsum:
            self.q, self.o = (nn.Parameter(p.detach().reshape(32, 32)) for p in (self.q, self.o))

    def forward(self, x: Tensor) -> Tensor:
        if self.einsum:
            q = torch.einsum("bth,hnd->btnd", x, self.q)
            return torch.einsum("btnd,hnd->bth", q.sin(), self.o)
        return F.linear((x @ self.q).sin(), self.o)


@pytest.mark.filterwarnings("ignore::fp4compile.PrecisionWarning")
def test_projections_with_an_axis_for_heads_are_two_linears():
    found = []
    for einsum in (True, False):
        model, x = Heads(einsum), torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(2))
        torch._dynamo.reset()
        options = {"policy": ALL, "compiler": "aot_eager"}
        y = torch.compile(model, backend="fp4", options=options)(x)
        torch.manual_seed(1)
        y.square().sum().backward()
        report = fp4.explain(model)
        assert [row.status for row in report] == ["rewritten"] * 2
        sizes = [(row.shape, row.saved_bytes, row.original_bytes) for row in report]
        found.append((y.detach(), [p.grad.reshape(32, 32) for p in model.parameters()], sizes))
    (y, grads, sizes), (want, want_grads, want_sizes) = found
    assert torch.equal(y, want) and sizes == want_sizes
    assert all(torch.equal(a, b) for a, b in zip(grads, want_grads, strict=True))
