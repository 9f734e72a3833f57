"""Optimizers, clipping and averaged copies around a compiled model."""

from __future__ import annotations

import copy

import pytest
import torch
from backend_models import Net, batch, compiled, policy, precision_warnings, schemes
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp4compile as fp4

LOW = policy(recipe="mxfp8", default="low")
EAGER = {"compiler": "eager"}


def muon(net):
    """Matrices by Muon, the rest by AdamW."""
    matrices = [p for p in net.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


OPTIMIZERS = {
    "fused AdamW": lambda net: [torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)],
    "foreach SGD": lambda net: [torch.optim.SGD(net.parameters(), lr=0.3, foreach=True)],
    "Muon": muon,
}


def train(net, call, optimizers, steps=5, clip=None):
    losses = []
    for i in range(steps):
        loss = (call(batch(seed=i % 2)) - 1).square().mean()
        loss.backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            clipped = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
            assert norm > clip >= clipped * 0.999
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad(set_to_none=i % 2 == 0)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cache", [False, True], ids=["", "cache_weights"])
def test_new_weights_are_used_after_every_step(name, cache):
    """The loss falls, and the next forward is that of a fresh model with the same weights."""
    net = Net(1)
    options = {**EAGER, "policy": LOW, "cache_weights": cache}
    call = torch.compile(net, backend="fp4", options=options)
    losses = train(net, call, OPTIMIZERS[name](net))
    assert losses[-1] < 0.9 * losses[0]
    found = call(batch())
    torch._dynamo.reset()
    assert torch.equal(found, compiled(copy.deepcopy(net), LOW)(batch()))


def test_clipped_gradients():
    net = Net(1)
    losses = train(net, compiled(net, LOW), [torch.optim.SGD(net.parameters(), lr=0.5)], clip=0.1)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("of", ["model", "compiled"])
def test_an_averaged_copy_keeps_its_stamps(of):
    """It runs in its original precision and says so, or is compiled like the model."""
    net = Net(1)
    fp4.apply(net, LOW)
    call = torch.compile(net, backend="fp4", options=EAGER)
    call(batch())
    average = AveragedModel(net if of == "model" else call, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        train(net, call, [optimizer], steps=1)
        average.update_parameters(net)
    stamps = [getattr(m, "fp4_scheme", None) for m in average.modules()]
    assert sum(stamp is not None for stamp in stamps) == 4
    assert not torch.equal(average.module.head.weight, net.head.weight)
    with torch.no_grad(), precision_warnings() as texts:
        average(batch())
    assert any("'head' ran outside" in text for text in texts) is (of == "model")
    compiled_average = torch.compile(average, backend="fp4", options=EAGER)
    with torch.no_grad():
        found = compiled_average(batch())
    net.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in average.module.state_dict().items()})
    assert torch.equal(found, call(batch()))
    assert set(schemes(average).values()) == {"low"}
