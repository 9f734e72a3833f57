"""What `rewrite` returns and what it leaves in the graph."""

import inspect
from collections import Counter

import pytest
import torch
from fp4compile.passes import rewrite as module
from fp4compile.passes.nodes import graph_modules, value
from fp4compile.passes.rewrite import rewrite
from fp4compile.passes.sites import find_sites
from pass_capture import LOW, by_name, compiled, decision, everything
from pass_models import GPT2MLP, MLP, Block, Blocks, FusedGated, Gated
from torch import nn

X = torch.randn(2, 5, 32)
MODELS = {
    "mlp": (MLP, {"linear_act_linear": 1}, 2),
    "gated": (Gated, {"gated_linear": 1}, 3),
    "gpt2": (GPT2MLP, {"linear_act_linear": 1}, 2),
    "block": (Block, {"linear_act_linear": 1, "linear": 2}, 4),
    "checkpointed": (lambda: Blocks(3), {"linear_act_linear": 3}, 6),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_pass_returns_its_count(name):
    make, counts, layers = MODELS[name]
    seen = []
    run = compiled(make(), X, inspect=lambda gm: seen.append(len(find_sites(gm))))
    (result,) = run.results
    assert seen == [layers] == [len(result.rows)]
    assert run.counts == counts and result.changed == sum(counts.values())
    assert Counter(row.status for row in result.rows) == {"rewritten": layers}
    chains = counts.get("linear_act_linear", 0) + counts.get("gated_linear", 0)
    assert {row.chain for row in result.rows} - {None} == set(range(chains))
    assert result.reasons == {}


@pytest.mark.parametrize("name", MODELS)
def test_all_original_changes_nothing(name):
    make, _, layers = MODELS[name]
    run = compiled(make(), X, decide=lambda site, role: decision("original", "default"))
    (result,) = run.results
    assert run.before == run.after and result.changed == 0
    assert run.counts == {"left": layers} and result.reasons == {"default": layers}
    assert {row.scheme for row in run.rows} == {"original"}


def test_a_policy_without_a_rule_text():
    run = compiled(nn.Linear(32, 32), X, decide=lambda site, role: decision("original", ""))
    assert run.rows[0].reason == "policy: original"


def test_roles():
    seen = {}

    def decide(site, role):
        seen[site.name] = role
        return decision("low")

    compiled(Block(), X, decide=decide)
    assert seen == {"attn.qkv": None, "attn.proj": None, "mlp.up": "mlp", "mlp.down": "mlp"}


def test_a_row_says_everything():
    run = compiled(MLP(p=0.5), X, decide=by_name({"up": "low"}))
    row = run.row("up")
    assert (row.kind, row.shape, row.scheme, row.scheme_name) == ("linear", "64×32", LOW, "low")
    assert (row.rule, row.status, row.chain) == ("match: up", "rewritten", None)
    assert row.reason == "dropout p=0.5 between: no chain"


def collect(model, *args, **options):
    """The graphs after `rewrite`, as later stages of the compiler receive them."""
    graphs = []

    def backend(gm, inputs):
        rewrite(gm, everything)
        graphs.append(gm)
        nodes = [n for _, g in graph_modules(gm) for n in g.graph.nodes]
        new = [n for n in nodes if "fp4" in str(n.target)]
        checked.extend((n, dict(n.meta)) for n in new)
        for _, inner in graph_modules(gm):
            inner.graph.lint()
        return lambda *a: (X,)

    checked = []
    torch._dynamo.reset()
    torch.compile(model, backend=backend, **options)(*args)
    return graphs, checked


@pytest.mark.parametrize("make", [MLP, Gated, GPT2MLP, Block])
def test_new_nodes_carry_the_meta_of_the_old(make):
    _, new = collect(make(), X)
    assert new
    for node, meta in new:
        assert meta["example_value"].shape[-1] in (32, 96)
        assert meta["example_value"].dtype == torch.float32
        assert type(meta["example_value"]).__name__ == "FakeTensor"
        assert meta["nn_module_stack"] and meta["stack_trace"]
        assert isinstance(node.target, torch._ops.OpOverload)


def test_the_operators_accept_the_arguments():
    """Arguments in the order, number and types of the schemas; the fake output as announced."""
    for make in (MLP, lambda: Gated(bias=True), lambda: FusedGated(bias=True), GPT2MLP, Block):
        for node, _ in collect(make(), X)[1]:
            schema = node.target._schema
            needed = [a for a in schema.arguments if not a.has_default_value()]
            assert len(node.args) == len(needed) and not node.kwargs
            for a, argument in zip(node.args, schema.arguments):
                want = str(argument.type)
                if want == "str":
                    assert isinstance(a, str)
                elif "Tensor" in want:
                    assert a is None and "Optional" in want or value(a).dim() > 0
                else:
                    assert a is torch.float32


def test_no_dead_linear_remains():
    for make in (MLP, Gated, FusedGated, GPT2MLP):
        (gm,), _ = collect(make(), X)
        for node in gm.graph.nodes:
            assert node.users or node.op in ("placeholder", "output"), node


def test_imports_go_down_only():
    source = inspect.getsource(module)
    assert "from fp4compile.kernels" in source
    for name in ("policy", "backend", "report", "cli"):
        assert f"fp4compile.{name}" not in source
