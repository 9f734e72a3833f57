"""How many graphs are compiled: batch sizes share them, blocks with equal stamps share them."""

from __future__ import annotations

import pytest
import torch
from backend_models import Block, D, Mlp, Net, batch, policy
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified

import fp4compile as fp4
from fp4compile import backend

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def compiled_graphs(monkeypatch):
    """The forward and the backward graphs that AOTAutograd makes."""
    seen = {"forward": 0, "backward": 0}

    def count(name):
        def compiler(gm, inputs):
            seen[name] += 1
            return gm.forward

        return compiler

    def lower(gm, example_inputs, *rest):
        return aot_module_simplified(
            gm, example_inputs, fw_compiler=count("forward"), bw_compiler=count("backward")
        )

    monkeypatch.setattr(backend, "compile_graph", lower)
    return seen


def test_twelve_batch_sizes_cost_two_graphs(compiled_graphs):
    net = Net(2)
    call = torch.compile(net, backend="fp4", options={"policy": policy(default="low")})
    for rows in (3, 5, 7, 16, 31, 32, 33, 64, 100, 127, 128, 129):
        call(torch.randn(rows, 4, D)).square().mean().backward()
    assert compiled_graphs == {"forward": 2, "backward": 2}


def test_24_blocks_with_two_schemes_cost_two_graphs_a_direction(compiled_graphs):
    model = nn.Sequential(*(Block() for _ in range(24)))
    fp4.apply(model, policy(recipe="fp8-exact", default="low",
                            layers=[{"blocks": "last 4", "scheme": "mxfp8"}]))  # fmt: skip
    for block in model:
        block.compile(backend="fp4")
    x = batch().requires_grad_()
    model(x).square().mean().backward()
    assert compiled_graphs == {"forward": 2, "backward": 2}
    assert x.grad is not None


def test_a_phase_compiles_once_and_its_return_not_at_all(compiled_graphs):
    both = policy(
        recipe="fp8-exact", default="low", phases=[{"from_step": 10, "fprop": "original"}]
    )
    model = Mlp()
    fp4.apply(model, both, step=0)
    call = torch.compile(model, backend="fp4")
    for step in (0, 10, 0, 10, 11):
        fp4.apply(model, both, step=step)
        call(batch()).square().mean().backward()
    assert compiled_graphs == {"forward": 2, "backward": 2}


def test_stamps_written_after_compiling_take_effect():
    model = Mlp()
    call = torch.compile(model, backend="fp4", options={"compiler": "eager"})
    x = batch()
    with torch.no_grad():
        before = call(x)
        fp4.apply(model, "bf16")
        after = call(x)
    assert torch.equal(after, model(x)) and not torch.equal(before, after)
