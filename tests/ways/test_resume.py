"""A run that is stopped and resumed takes the bits of the run that was not, in and across phases."""

from __future__ import annotations

import pytest
import torch
from backend_models import D, Net, batch, schemes
from torch import nn

import fp4compile as fp4

POLICY = fp4.Policy.parse(
    """
version: 1
recipe: mxfp8
default: low
phases:
  - {from_step: 2, fprop: original}
  - {from_step: 6, all: original}
"""
)


def build(seed, kind):
    torch.manual_seed(seed)
    net = Net(1) if kind == "eager" else nn.Sequential(nn.Linear(D, D))
    options = {} if kind == "inductor" else {"compiler": kind}
    call = torch.compile(net, backend="fp4", options=options)
    return net, call, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(net, call, optimizer, policy, steps):
    for step in steps:
        fp4.apply(net, policy, step=step)
        call(batch(seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(path, net, optimizer, policy, step):
    policy.save(path / "policy.yaml")
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save({**state, "rng": torch.get_rng_state()}, path / "run.pt")


def resume(path, kind):
    net, call, optimizer = build(99, kind)
    run = torch.load(path / "run.pt")
    net.load_state_dict(run["model"])
    optimizer.load_state_dict(run["optimizer"])
    torch.set_rng_state(run["rng"])
    return net, call, optimizer, fp4.Policy.load(path / "policy.yaml"), run["step"]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", ["eager", "inductor"])
def test_a_resumed_run_in_the_middle_of_a_phase(kind, tmp_path):
    net, call, optimizer = build(0, kind)
    train(net, call, optimizer, POLICY, range(4))
    save(tmp_path, net, optimizer, POLICY, 4)
    train(net, call, optimizer, POLICY, range(4, 7))
    torch._dynamo.reset()

    other, other_call, other_optimizer, policy, step = resume(tmp_path, kind)
    train(other, other_call, other_optimizer, policy, range(step, 6))
    assert "mxfp8" in "".join(fp4.apply(other, policy, step=5).values())
    train(other, other_call, other_optimizer, policy, range(6, 7))
    assert equal(net, other)
    assert set(schemes(other).values()) == {"left"}, "the last phase is original"


@pytest.mark.parametrize("forgotten", ["rng", "phases"])
def test_what_is_forgotten_is_felt(forgotten, tmp_path):
    net, call, optimizer = build(0, "eager")
    train(net, call, optimizer, POLICY, range(4))
    save(tmp_path, net, optimizer, POLICY, 4)
    train(net, call, optimizer, POLICY, [4])
    other, other_call, other_optimizer, policy, step = resume(tmp_path, "eager")
    if forgotten == "rng":
        torch.manual_seed(1)
    else:
        policy = fp4.Policy.parse(policy.text.partition("phases:")[0])
    train(other, other_call, other_optimizer, policy, [step])
    assert not equal(net, other)
