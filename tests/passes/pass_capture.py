"""Capture a model as a backend receives it, rewrite it, run it with exact stand-ins for the ops."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from fp4compile.kernels.formats import Scheme
from fp4compile.passes.nodes import graph_modules
from fp4compile.passes.printer import print_graph
from fp4compile.passes.rewrite import rewrite

LOW = "fprop(nvfp4:row, nvfp4:tensor) dgrad(mxfp8:32:sr, fprop>mxfp8:32) wgrad(mxfp8:32:sr, fprop>mxfp8:32)"
MX = "fprop(mxfp8:32, mxfp8:32) dgrad(mxfp8:32:sr, fprop>mxfp8:32) wgrad(mxfp8:32:sr, fprop>mxfp8:32)"


def decision(text="low", rule="default"):
    scheme = {"low": LOW, "mxfp8": MX}.get(text, text)
    return SimpleNamespace(scheme=Scheme.parse(scheme), scheme_name=text, rule=rule)


def everything(site, role):
    return decision("low", f"chain: {role}" if role else "default")


def by_name(table, default="original"):
    """decide() that looks the layer's name up: {name: scheme}."""
    return lambda site, role: decision(table.get(site.name, default), f"match: {site.name}")


ACTS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def exact_linear(x, w, b, scheme, out_dtype):
    with torch.autocast("cpu", enabled=False):
        bias = None if b is None else b.float()
        return F.linear(x.float(), w.float(), bias).to(out_dtype)


def exact_chain(x, w1, b1, w2, b2, act, scheme1, scheme2, hidden, out_dtype):
    h = ACTS[act](exact_linear(x, w1, b1, scheme1, hidden).float())
    return exact_linear(h, w2, b2, scheme2, out_dtype)


def exact_gated(x, wg, bg, wu, bu, wd, bd, act, sg, su, sd, hidden, out_dtype):
    gate = exact_linear(x, wg, bg, sg, hidden).float()
    up = exact_linear(x, wu, bu, su, hidden).float()
    return exact_linear(ACTS[act](gate) * up, wd, bd, sd, out_dtype)


EXACT = {"linear": exact_linear, "linear_act_linear": exact_chain, "gated_linear": exact_gated}


def make_exact(gm):
    """Replace the fp4 operators of a rewritten graph by high-precision functions."""
    for _, inner in graph_modules(gm):
        for node in inner.graph.nodes:
            if getattr(node.target, "namespace", "") == "fp4":
                node.target = EXACT[node.target._schema.name.removeprefix("fp4::")]
        inner.recompile()


@dataclass
class Run:
    """What happened to one compiled call: graphs as text, the passes' results, the output."""

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    results: list = field(default_factory=list)
    graphs: list = field(default_factory=list)
    out: object = None

    @property
    def rows(self):
        return [row for result in self.results for row in result.rows]

    @property
    def counts(self):
        return {k: n for k, n in self.results[0].counts.items() if n}

    def row(self, name):
        (row,) = [row for row in self.rows if row.fqn == name]
        return row


def compiled(model, *args, decide=everything, inspect=None, **options):
    """Compile and call ``model`` through the passes; every graph runs with the exact stand-ins."""
    run = Run()

    def backend(gm, inputs):
        run.before.append(print_graph(gm))
        if inspect:
            inspect(gm)
        run.results.append(rewrite(gm, decide))
        run.after.append(print_graph(gm))
        run.graphs.append(gm)
        make_exact(gm)
        return gm.forward

    torch._dynamo.reset()
    run.out = torch.compile(model, backend=backend, **options)(*args)
    return run


def same_as_eager(model, x, decide=everything, atol=2e-5, **options):
    """Run compiled and eager, forward and backward; returns the compiled run."""
    torch.manual_seed(1)
    want = model(x)
    want.float().square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch.manual_seed(1)
    run = compiled(model, x, decide=decide, **options)
    run.out.float().square().sum().backward()
    assert run.out.dtype == want.dtype and run.out.shape == want.shape
    torch.testing.assert_close(run.out, want, atol=atol, rtol=atol)
    mine = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(mine) == len(grads)
    for a, b in zip(mine, grads):
        torch.testing.assert_close(a, b, atol=atol * 50, rtol=atol * 50)
    model.zero_grad()
    return run
