"""``cache_weights``: a weight is quantized once per change, and every counted change is seen."""

from __future__ import annotations

import copy

import pytest
import torch
from backend_models import Block, D, Mlp, batch, policy, step
from torch import nn

import fp4compile as fp4
from fp4compile import ready

pytestmark = pytest.mark.usefixtures("fresh")
X = batch()
LOW = policy(recipe="fp8-exact", default="low")


def cached(model, compiler="aot_eager", **options):
    options = {"policy": LOW, "compiler": compiler, "cache_weights": True, **options}
    return torch.compile(model, backend="fp4", options=options)


def entries(weight):
    return list(ready._entries[weight].values())


@torch.no_grad()
def both(model, call):
    """Output of the compiled model and of a copy of it that is compiled without the cache."""
    plain = torch.compile(
        copy.deepcopy(model), backend="fp4", options={"policy": LOW, "compiler": "aot_eager"}
    )
    return call(X), plain(X)


def optimizer_step(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def copy_in_place(model):
    with torch.no_grad():
        model.up.weight.copy_(torch.randn_like(model.up.weight))


def load(model):
    model.load_state_dict(Mlp().state_dict())


def other_data(model):
    model.up.weight.data = torch.randn_like(model.up.weight)


def another_parameter(model):
    model.up.weight = nn.Parameter(torch.randn_like(model.up.weight))


def swap_in_averages(model):
    average = torch.optim.swa_utils.AveragedModel(Mlp())
    with torch.no_grad():
        for p, q in zip(model.parameters(), average.module.parameters()):
            p.copy_(q)


CHANGES = [optimizer_step, copy_in_place, load, other_data, another_parameter, swap_in_averages]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    model = Mlp()
    call = cached(model)
    before = both(model, call)
    assert torch.equal(*before)
    change(model)
    after = both(model, call)
    assert torch.equal(*after) and not torch.equal(after[0], before[0])


def test_what_is_kept_is_used_until_a_change():
    model = Mlp()
    call = cached(model)
    with torch.no_grad():
        first = call(X)
        for entry in entries(model.up.weight):
            entry.tensors[3].zero_()  # the operand
        assert not torch.equal(call(X), first)
        model.up.weight.mul_(1)
        assert torch.equal(call(X), first)


def test_writes_that_are_not_counted_need_a_word():
    model = Mlp()
    call = cached(model)
    with torch.no_grad():
        first = call(X)
        model.up.weight.data.mul_(2)
        assert torch.equal(call(X), first)
        fp4.weights_changed()
    assert torch.equal(*both(model, call))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_training_has_the_same_bits(compiler):
    """Two micro-batches a step, evaluation between steps."""
    results = []
    for keep in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Block()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call, seen = cached(model, compiler, cache_weights=keep), []
        for _ in range(2):
            gradients = [step(model, call, x, seed=7)[1] for x in (X, 2 * X)]
            optimizer.step()
            with torch.no_grad():
                seen += [call(X), *gradients[0].values(), *gradients[1].values()]
        results.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_blocks_that_share_a_graph_have_their_own_weights():
    model = nn.Sequential(Mlp(), Mlp())
    for block in model:
        block.compile(backend="fp4", options={"policy": LOW, "cache_weights": True})
    plain = copy.deepcopy(model)
    for block in plain:
        block.compile(backend="fp4", options={"policy": LOW})
    torch.manual_seed(1)
    model(X).square().mean().backward()
    torch.manual_seed(1)
    plain(X).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(p.grad, q.grad)


def test_inference_tensors_are_quantized_at_every_call():
    with torch.inference_mode():
        model = Mlp()
        call = cached(model)
        first = call(X)
        model.up.weight.zero_()
        assert not torch.equal(call(X), first)


def test_changes_between_forward_and_backward_are_an_error():
    model = Mlp()
    call = cached(model)
    loss = call(X).square().mean()
    copy_in_place(model)
    call(X)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_cannot_be_followed_is_refused():
    class FSDPModule(nn.Module):
        pass

    class Sharded(Mlp, FSDPModule):
        pass

    with pytest.raises(fp4.PolicyError, match="cache_weights: FSDP's .* leave it out"):
        cached(Sharded())(X)
    with pytest.raises(fp4.PolicyError, match="cache_weights is True or False, not 'yes'"):
        cached(nn.Linear(D, D), cache_weights="yes")(X)
