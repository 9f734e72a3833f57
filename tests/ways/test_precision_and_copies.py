"""Loss scaling, evaluation, frozen and tied parameters, adapters, and copies of compiled models."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from backend_models import (
    Block,
    D,
    Mlp,
    Net,
    aot,
    batch,
    compiled,
    policy,
    precision_warnings,
    same,
    schemes,
    step,
)  # fmt: skip
from torch import nn

import fp4compile as fp4

X = batch()
LOW = policy(recipe="mxfp8", default="low")
NVFP4 = policy(recipe="thinking-machines", default="low", layers=[{"chain": "mlp", "scheme": "low"}])
EAGER = {"compiler": "eager", "policy": LOW}


# Loss scaling --------------------------------------------------------------------------------------


def scaled_step(net, call, scaler, optimizer, factor=1.0):
    with torch.autocast("cpu", torch.float16):
        loss = (factor * call(X)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def test_fp16_with_a_gradient_scaler():
    net = Net(1)
    call = compiled(net, LOW)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(scaled_step(net, call, scaler, optimizer))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert scaler.get_scale() == 2.0**10 and set(schemes(net).values()) == {"low"}


@pytest.mark.parametrize("given", [LOW, NVFP4], ids=["mxfp8", "nvfp4"])
def test_an_overflow_skips_the_step(given):
    """Infinite gradients are not rounded to finite ones: the scaler must see them."""
    net = Net(1)
    before = copy.deepcopy(net.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaled_step(net, compiled(net, given), scaler, optimizer, factor=100.0)
    assert not net.blocks[0].mlp.up.weight.grad.isfinite().all()
    assert scaler.get_scale() == 2.0**16
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())


# Evaluation ----------------------------------------------------------------------------------------


def test_inductors_evaluation_is_the_training_forward():
    net = Block()
    call = torch.compile(net, backend="fp4", options={"policy": LOW})
    with torch.autocast("cpu", torch.bfloat16):
        training = call(X)
        training.square().mean().backward()
        with torch.no_grad():
            evaluated = call(X)
        assert torch.equal(evaluated, training) and torch.equal(call(X), training)


# What needs no gradient ----------------------------------------------------------------------------


def gemms(gm):
    return sum(str(n.target) == "fp4.scaled_mm.default" for n in gm.graph.nodes)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("needs", [False, True])
def test_only_gradients_that_are_needed_are_computed(frozen, needs):
    net = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    net[0].requires_grad_(not frozen)
    (backward,) = aot(net, batch().requires_grad_(needs), LOW).backward
    weights = 1 + (not frozen)
    inputs = needs + (needs or not frozen)  # of the first, of the second layer
    assert gemms(backward) == weights + inputs


# Tied weights --------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embedding, self.mlp = nn.Embedding(16, D), Mlp()
        self.head = nn.Linear(D, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.mlp(self.embedding(tokens)))


def test_a_tied_weight_gets_the_gradients_of_both_uses():
    tied, free = Tied(), Tied(tied=False)
    free.load_state_dict(tied.state_dict())
    tokens = torch.arange(12).view(3, 4)
    found = step(tied, compiled(tied, LOW), tokens)
    wanted = step(free, compiled(free, LOW), tokens)
    assert schemes(tied) == schemes(free) == dict.fromkeys(["mlp.up", "mlp.down", "head"], "low")
    assert torch.equal(found[0], wanted[0])
    both = wanted[1]["embedding.weight"] + wanted[1]["head.weight"]
    torch.testing.assert_close(found[1]["embedding.weight"], both)


# Adapters ------------------------------------------------------------------------------------------


def lora(net):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(net, peft.LoraConfig(target_modules=["up", "down"], r=4))


def test_lora_bases_by_name():
    """The frozen bases in low precision, the adapters as they are."""
    net = lora(Net(2))
    layers = [{"match": "*.base_layer", "scheme": "low"}]
    call = compiled(net, policy(recipe="mxfp8", layers=layers, default="original"))
    out = call(X)
    out.square().mean().backward()
    found = schemes(net)
    bases = {name for name in found if name.endswith("base_layer")}
    assert len(bases) == 4 and {n for n, s in found.items() if s == "low"} == bases
    trained = {n for n, p in net.named_parameters() if p.grad is not None}
    assert len(trained) == 8 and all("lora_" in name for name in trained)
    with precision_warnings() as texts:
        assert not torch.equal(out, net(X)), "it is quantized"
    assert len(texts) == 4, "the eager run is noticed, layer by layer"


def test_lora_everywhere_and_a_word_where_nothing_is_a_chain():
    net = lora(Net(2))
    compiled(net, LOW)(X).square().mean().backward()
    assert set(schemes(net).values()) == {"low"} and len(fp4.explain(net)) == 2 * 7 + 1
    torch._dynamo.reset()
    with precision_warnings() as texts:
        compiled(lora(Net(2)))(X)
    assert [t for t in texts if "nothing was rewritten" in t], "adapters stand inside of the MLPs"


# Copies --------------------------------------------------------------------------------------------


def unpickled(model):
    return pickle.loads(pickle.dumps(model))


def loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled, loaded])
def test_a_copy_of_what_torch_compile_returns_is_compiled(copied, ran):
    net = Net(1)
    call = torch.compile(net, backend="fp4", options=EAGER)
    if ran:
        call(X)
    twin = copied(call)
    assert same(step(twin, twin, X), step(call, call, X))
    assert set(schemes(twin).values()) == {"low"} and twin.head.weight is not net.head.weight


@pytest.mark.parametrize("stamped", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled, loaded])
def test_a_copy_of_a_model_compiled_in_place_says_that_it_is_not_compiled(copied, stamped):
    """PyTorch leaves the compiled call behind; what the layers were goes along."""
    net = Net(1)
    if stamped:
        fp4.apply(net, LOW)
    options = {"compiler": "eager"} if stamped else EAGER
    net.compile(backend="fp4", options=options)
    wanted = net(X)
    twin = copied(net)
    with precision_warnings() as texts:
        twin(X)
    assert any("'head' ran outside every compiled graph" in text for text in texts)
    twin.compile(backend="fp4", options=options)
    assert torch.equal(twin(X), wanted)
