"""Models as people write and wrap them: functional steps, ties, attention modules, modes, shapes."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from backend_models import (
    Block,
    Broken,
    Checkpointed,
    D,
    Mlp,
    Net,
    Twice,
    batch,
    compiled,
    policy,
    precision_warnings,
    same,
    schemes,
    step,
)
from torch import nn

import fp4compile as fp4

pytestmark = pytest.mark.usefixtures("fresh")
X = batch()
LOW = policy(default="low", recipe="mxfp8")
OPTIONS = {"compiler": "eager", "policy": LOW}
ALL_LOW = {"blocks.0.attn": "low", "blocks.0.mlp.up": "low", "blocks.0.mlp.down": "low", "head": "low"}
GLOBAL = Net(1)


# How the model is reached ---------------------------------------------------------------------------


class Trainer:
    def __init__(self, net):
        self.nets = {"a": net}

    @torch.compile(backend="fp4", options=OPTIONS)
    def step(self, x):
        return self.nets["a"](x).mean()


class Call:
    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x).mean()


def through_closure(net):
    return torch.compile(lambda x: net(x).mean(), backend="fp4", options=OPTIONS)


def through_argument(net):
    call = torch.compile(lambda net, x: net(x).mean(), backend="fp4", options=OPTIONS)
    return functools.partial(call, net)


def through_parameters(net):
    call = torch.compile(
        lambda p, x: torch.func.functional_call(net, p, (x,)).mean(), backend="fp4", options=OPTIONS
    )
    return functools.partial(call, dict(net.named_parameters()))


WAYS = {
    "model": lambda net: torch.compile(net, backend="fp4", options=OPTIONS),
    "forward": lambda net: torch.compile(net.forward, backend="fp4", options=OPTIONS),
    "argument": through_argument,
    "closure": through_closure,
    "attribute": lambda net: Trainer(net).step,
    "callable object": lambda net: torch.compile(Call(net), backend="fp4", options=OPTIONS),
    "partial": lambda net: torch.compile(
        functools.partial(lambda net, x: net(x), net), backend="fp4", options=OPTIONS
    ),
    "functional_call": through_parameters,
    "compiled twice": lambda net: torch.compile(
        torch.compile(net, backend="fp4", options=OPTIONS), backend="fp4", options=OPTIONS
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_model_is_found_however_it_is_reached(way):
    net = Net(1)
    with precision_warnings() as texts:
        WAYS[way](net)(X).sum().backward()
    assert schemes(net) == ALL_LOW, "names as in the model itself"
    assert all(p.grad is not None for p in net.parameters()) and not texts


def test_a_global_model():
    torch.compile(lambda x: GLOBAL(x).mean(), backend="fp4", options=OPTIONS)(X).backward()
    assert schemes(GLOBAL) == ALL_LOW


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda m: nn.ModuleDict({"net": m}), nn.DataParallel])
def test_names_in_containers(wrap):
    net = Net(1)
    outer = wrap(net)
    compiled_net = torch.compile(outer if wrap is not nn.DataParallel else net, backend="fp4", options=OPTIONS)
    if isinstance(outer, nn.ModuleDict):
        compiled_net = torch.compile(lambda x: outer["net"](x), backend="fp4", options=OPTIONS)
    compiled_net(X)
    prefix = {nn.Sequential: "0.", nn.DataParallel: ""}.get(type(outer), "net.")
    root = net if isinstance(outer, nn.DataParallel) else outer
    assert schemes(root) == {prefix + name: s for name, s in ALL_LOW.items()}


def test_a_student_and_a_teacher_have_policies_of_their_own():
    student, teacher = Net(1), Net(1)
    fp4.apply(student, LOW)
    fp4.apply(teacher, policy(recipe="bf16"))

    @torch.compile(backend="fp4", options={"compiler": "eager"})
    def train(student, teacher, x):
        with torch.no_grad():
            wanted = teacher(x)
        return (student(x) - wanted).square().mean()

    train(student, teacher, X).backward()
    assert schemes(student) == ALL_LOW and set(schemes(teacher).values()) == {"left"}


# Modules that are special ---------------------------------------------------------------------------


def test_a_shared_module_is_one_layer():
    net = Twice()
    given = policy(default="low", recipe="mxfp8", layers=[{"match": "alias.up", "scheme": "original"}])
    compiled(net, given)(X).sum().backward()
    assert schemes(net) == {"mlp.up": "left", "mlp.down": "low"}, "either name excludes it"


def test_attention_modules_of_torch():
    layer = nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    call = compiled(net)
    with precision_warnings() as texts:
        call(X).sum().backward()
    assert not texts
    report = fp4.explain(net)
    for i in range(2):
        assert report[f"layers.{i}.linear1"].status == "rewritten"
        row = report[f"layers.{i}.self_attn.in_proj_weight"]
        assert row.status == "left" and not row.refused
    net.eval()
    with precision_warnings() as texts, torch.no_grad():
        call(X)
    assert not texts and fp4.explain(net)["layers.0.linear1"].status == "rewritten"


def test_packed_attention_that_a_policy_names_is_refused_by_name():
    net = nn.MultiheadAttention(D, 4, batch_first=True)
    with pytest.raises(fp4.PrecisionError, match="multi_head_attention_forward"):
        compiled(net, {**LOW, "strict": True})(X, X, X)
    torch._dynamo.reset()
    compiled(net, LOW)(X, X, X)[0].sum().backward()
    rows = {row.fqn: (row.status, row.refused) for row in fp4.explain(net)}
    assert rows["in_proj_weight"] == rows["out_proj"] == ("left", True)


def test_a_layer_inside_another_operation_is_reported():
    """In evaluation torch runs a whole encoder layer as one operation, unless it has hooks."""
    layer = nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.0, batch_first=True).eval()
    net = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    with torch.no_grad(), precision_warnings() as texts:
        compiled(net, LOW)(X)
    rows = {row.fqn: row for row in fp4.explain(net)}
    row = rows["layers.0.linear1"]
    assert row.refused and "_transformer_encoder_layer_fwd" in row.reason
    assert len(texts) == 1 and "nothing was rewritten" in texts[0]
    torch._dynamo.reset()
    net = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    with torch.no_grad(), pytest.raises(fp4.PrecisionError, match="layers.0"):
        compiled(net, {**LOW, "strict": True})(X)


def test_regularizing_a_weight_is_no_refusal():
    net = Net(1)

    @torch.compile(backend="fp4", options={"compiler": "eager", "policy": {**LOW, "strict": True}})
    def penalty(net):
        return sum(p.square().sum() for p in net.parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        penalty(net).backward()


class Double(nn.Module):
    def forward(self, w):
        return w * 2


def test_parametrized_weights():
    net = Net(1)
    parametrize.register_parametrization(net.blocks[0].mlp.up, "weight", nn.Identity())
    parametrize.register_parametrization(net.blocks[0].mlp.down, "weight", Double())
    torch.nn.utils.parametrizations.weight_norm(net.blocks[0].attn)
    compiled(net, LOW)(X).sum().backward()
    report = fp4.explain(net)
    assert report["blocks.0.mlp.up"].status == "rewritten"
    for name in ("blocks.0.mlp.down", "blocks.0.attn"):
        assert report[name].status == "left" and "computed in the graph" in report[name].reason
    assert len(report) == 4
    torch._dynamo.reset()
    with pytest.raises(fp4.PrecisionError, match="'blocks.0.attn'"):
        compiled(net, {**LOW, "strict": True})(X)


def test_a_frozen_layer_and_a_frozen_input():
    net = Net(1)
    net.blocks[0].mlp.requires_grad_(False)
    call = compiled(net, LOW)
    call(X).sum().backward()
    assert schemes(net) == ALL_LOW and net.blocks[0].attn.weight.grad is not None
    assert net.blocks[0].mlp.up.weight.grad is None


# Modes ---------------------------------------------------------------------------------------------


def test_evaluation_between_training_steps_computes_the_training_forward(graphs):
    net = Net(2)
    call = compiled(net, LOW)
    training = call(X).detach()
    with torch.no_grad():
        evaluated = call(X)
    with torch.inference_mode():
        inferred = call(X)
    assert torch.equal(training, evaluated) and torch.equal(training, inferred)
    count = graphs.count
    step(net, call, X)
    with torch.no_grad():
        call(X)
    with torch.inference_mode():
        call(X)
    assert graphs.count == count <= 3
    assert (training - net(X)).norm() / training.norm() > 1e-3, "it is quantized"


def test_new_weights_are_quantized_after_the_optimizers_step():
    net = Net(1)
    call = compiled(net, LOW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first = call(X)
    first.square().mean().backward()
    optimizer.step()
    second = call(X)
    torch._dynamo.reset()
    twin = Net(1)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(second, compiled(twin, LOW)(X)) and not torch.equal(first, second)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_autocast(where, graphs):
    class Inside(Net):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    net = (Inside if where == "inside" else Net)(1)
    call = compiled(net, LOW)
    if where == "inside":
        y = call(X)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            y = call(X)
    y.float().square().mean().backward()
    assert y.dtype == torch.bfloat16 and schemes(net) == ALL_LOW
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    (gm,) = graphs.modules
    nodes = [n for n in gm.graph.nodes if "fp4" in str(n.target)]
    weights = [a for n in nodes for a in n.all_input_nodes if "weight" in str(a.target)]
    assert len(weights) == 4, "the masters are quantized, uncast"
    assert all(w.meta["example_value"].dtype == torch.float32 for w in weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters(dtype):
    net = Net(1).to(dtype)
    y = compiled(net, LOW)(X.to(dtype))
    y.float().square().mean().backward()
    assert y.dtype == dtype and schemes(net) == ALL_LOW
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in net.parameters())


def test_gradient_accumulation_sums_the_gradients_of_two_steps():
    net = Net(1)
    call = compiled(net, LOW)
    one = step(net, call, X, seed=1)[1]
    torch.manual_seed(1)
    call(X).square().mean().backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, 2 * one[name], atol=1e-6, rtol=1e-5)


# Shapes --------------------------------------------------------------------------------------------

SIZES = (4, 3, 7, 2, 16, 5, 9, 12, 33, 6, 8, 10)


def test_twelve_batch_sizes_cost_two_graphs(graphs):
    net = Net(1)
    call = compiled(net, LOW)
    for n in SIZES:
        found = step(net, call, batch(n, 8, D))
        assert all(g.isfinite().all() for g in found[1].values())
    assert graphs.count <= 2
    step(net, call, batch(1, 8, D))  # Dynamo gives size 1 a graph of its own
    assert graphs.count <= 3


def test_dynamic_graphs_compute_what_static_ones_do():
    net = Net(1)
    dynamic, static = compiled(net, LOW, dynamic=True), compiled(net, LOW, dynamic=False)
    for n in (3, 4):
        assert same(step(net, dynamic, batch(n, 8, D)), step(net, static, batch(n, 8, D)))


def test_two_dynamic_sizes_and_one_graph(graphs):
    net = Net(1)
    call = compiled(net, LOW, dynamic=True)
    for n, t in ((3, 8), (5, 6), (2, 17)):
        step(net, call, batch(n, t, D))
    assert graphs.count == 1 and schemes(net) == ALL_LOW


def test_fullgraph():
    net = Checkpointed(1)
    call = compiled(net, LOW, fullgraph=True)
    with precision_warnings() as texts:
        for _ in range(2):
            step(net, call, X)
    assert schemes(net) == ALL_LOW and not texts
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(Broken(1), LOW, fullgraph=True)(X)


def test_an_input_without_rows():
    net = Mlp()
    y = compiled(net, LOW)(torch.zeros(0, D))
    y.sum().backward()
    assert y.shape == (0, D) and net.up.weight.grad.abs().sum() == 0


def test_functions_in_the_model_that_are_no_layers():
    """Scores of attention, a product of activations: they stay."""

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(D, 3 * D)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return F.softmax(q @ k.transpose(-1, -2), -1) @ v

    net = Scores()
    compiled(net, LOW)(X).sum().backward()
    assert schemes(net) == {"qkv": "low"}


def test_block_inside_a_larger_eager_model():
    net = Net(2)
    net.blocks[1] = torch.compile(Block(), backend="fp4", options=OPTIONS)
    with precision_warnings() as texts:
        net(X).sum().backward()
    assert not texts
    assert set(schemes(net.blocks[1]._orig_mod).values()) == {"low"}
