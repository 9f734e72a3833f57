"""Layers have the name that they have in the model, wherever their code is."""

import pytest
import torch
import torch.nn.functional as F
from fp4compile.passes.names import dotted, module_id, source_name, strip_wrappers
from fp4compile.passes.sites import find_sites, per_caller
from pass_capture import by_name, compiled
from pass_models import GPT2MLP, MLP, Blocks
from torch import nn
from torch.utils.checkpoint import checkpoint

X = torch.randn(2, 5, 32)


@pytest.mark.parametrize(
    "expression, name",
    [
        ("L['self']._modules['mlp']._modules['up']._parameters['weight']", "mlp.up.weight"),
        ("L['self']._modules['blocks']._modules['0']._parameters['w']", "blocks.0.w"),
        ("G['model']._modules['a.b']._parameters['weight']", "a.b.weight"),
        ("L['self'].layers[3].up.weight", "layers.3.up.weight"),
        ("L['s'].d['a']._parameters['weight']", "d.a.weight"),
        ("L['self']._modules['module']._modules['up']._parameters['weight']", "up.weight"),
        ("L['self']._modules['_orig_mod']._modules['up']._buffers['w']", "up.w"),
        ("L['m']._modules['0']._modules['_checkpoint_wrapped_module']._parameters['w']", "0.w"),
        ("L['self']", ""),
    ],
)
def test_dotted(expression, name):
    assert dotted(expression) == name


@pytest.mark.parametrize(
    "name, stripped",
    [
        ("module.up", "up"),
        ("module.module.up", "up"),
        ("_orig_mod.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.up", "blocks.0.up"),
        ("submodule.up", "submodule.up"),
        ("blocks.module.up", "blocks.module.up"),
    ],
)
def test_strip_wrappers(name, stripped):
    assert strip_wrappers(name) == stripped


def names(model, *args, **options):
    return [row.fqn for row in compiled(model, *args, **options).rows]


def test_plain_names():
    assert names(nn.Sequential(MLP(), MLP()), X) == ["0.up", "0.down", "1.up", "1.down"]


def test_names_inside_checkpoint_and_nested_checkpoint():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Blocks(2)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    want = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert names(Blocks(2), X) == want
    assert names(Outer(), X) == ["inner." + name for name in want]


def test_wrappers_are_stripped():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    assert names(Wrapper(torch.compile(MLP(), backend="eager")), X) == ["up", "down"]


def test_functional_call_in_the_root_is_named_after_its_parameter():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Parameter(torch.randn(8, 32))
            self.head = nn.Module()
            self.head.weight = nn.Parameter(torch.randn(8, 32))

        def forward(self, x):
            return F.linear(x, self.proj) + x @ self.head.weight.t()

    assert names(Root(), X) == ["proj", "head"]


def test_a_function_over_modules():
    model = MLP()

    def step(x):
        return model(x)

    assert [name.split(".")[-1] for name in names(step, X)] == ["up", "down"]


def test_source_and_module_of_a_site():
    model = GPT2MLP()
    seen = []

    def inspect(gm):
        for site in find_sites(gm):
            seen.append((source_name(site.source), site.module_path, module_id(site.node)))

    compiled(model, X, inspect=inspect)
    expressions, paths, ids = zip(*seen)
    assert expressions[0].endswith("._modules['c_fc']._parameters['weight']")
    assert paths == ("c_fc", "c_proj")
    assert ids == (id(model.c_fc), id(model.c_proj))


def test_names_without_sources_come_from_the_module_stack():
    seen = []

    def forget(gm):
        inputs = [node for node in gm.graph.nodes if "grapharg" in node.meta]
        kept = [node.meta.pop("grapharg") for node in inputs]
        seen.extend(site.name for site in find_sites(gm))
        for node, graph_arg in zip(inputs, kept):
            node.meta["grapharg"] = graph_arg

    compiled(GPT2MLP(), X, inspect=forget)
    assert seen == ["c_fc", "c_proj"]


@torch.compiler.nested_compile_region
def region(x, w1, w2):
    return F.linear(F.gelu(F.linear(x, w1)), w2)


class Regions(nn.Module):
    """Three layers computed by one compiled region."""

    def __init__(self):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(3))

    def forward(self, x):
        for up, down in zip(self.up, self.down):
            x = region(x, up.weight, down.weight)
        return x


def test_one_region_serves_several_layers():
    x, model, callers = X.clone().requires_grad_(), Regions(), []

    def inspect(gm):
        callers.extend([s.name for s in per_caller(site)] for site in find_sites(gm))

    run = compiled(model, x, inspect=inspect)
    assert sorted(row.fqn for row in run.rows) == sorted(
        f"{part}.{i}" for part in ("up", "down") for i in range(3)
    )
    torch.testing.assert_close(run.out, model(x), atol=1e-5, rtol=1e-5)
    if len(callers) == 2:  # Dynamo shares the body (how far it does depends on the version)
        assert callers == [["up.0", "up.1", "up.2"], ["down.0", "down.1", "down.2"]]
        run = compiled(model, x, decide=by_name({"up.0": "mxfp8"}, default="low"))
        why = "one compiled region serves up.0, up.1, up.2, whose schemes differ"
        assert run.row("up.1").reason == why + ": give them one scheme"
        assert run.row("up.1").status == "left" and run.row("down.1").status == "rewritten"


def test_foreign_regions_are_left():
    class Cond(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda t: self.a(t), lambda t: self.b(t), (x,))

    with torch.no_grad():
        run = compiled(Cond(), X)
    assert [(row.fqn, row.status) for row in run.rows] == [("a", "left"), ("b", "left")]
    assert {row.reason for row in run.rows} == {"inside cond: its body is left as it is"}
    assert run.before == run.after


def test_custom_autograd_function_is_left():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return F.linear(x, w)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, torch.einsum("bto,bti->oi", g, x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(32, 32)

        def forward(self, x):
            return Square.apply(x, self.a.weight)

    run = compiled(Model(), X)
    assert [(row.fqn, row.reason) for row in run.rows] == [
        ("a", "inside autograd_function_apply: its body is left as it is")
    ]


def test_function_transforms_are_left():
    layer = nn.Linear(32, 32)
    run = compiled(lambda x: torch.func.vmap(layer)(x), X)
    assert [row.status for row in run.rows] == ["left"]
    assert run.rows[0].reason == (
        "inside a torch.func transform, which the operators do not support"
    )


def test_packed_attention_is_reported():
    run = compiled(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), X)
    assert run.counts == {"linear_act_linear": 1, "left": 2}
    assert [(row.fqn, row.shape) for row in run.rows[:2]] == [
        ("self_attn.in_proj_weight", "96×32"),
        ("self_attn.out_proj", "32×32"),
    ]
    assert run.rows[0].reason.startswith("inside F.multi_head_attention_forward")
