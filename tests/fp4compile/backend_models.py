"""Small models and helpers for the tests of the backend, the stamps and the report."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4compile as fp4

D = 32


class Mlp(nn.Module):
    def __init__(self, d=D, bias=True):
        super().__init__()
        self.up = nn.Linear(d, 2 * d, bias=bias)
        self.down = nn.Linear(2 * d, d, bias=bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Twice(nn.Module):
    """One MLP under two names, used twice."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.alias = self.mlp

    def forward(self, x):
        return self.alias(self.mlp(x))


class Block(nn.Module):
    def __init__(self, d=D):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.attn = nn.Linear(d, d)
        self.mlp = Mlp(d)

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, n=2, d=D):
        super().__init__()
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
        self.head = nn.Linear(d, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Checkpointed(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Broken(Net):
    """A graph break after each block: Dynamo gives up the loop and compiles block by block."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(x)


class Disabled(Mlp):
    """Dynamo runs it eagerly."""

    @torch._dynamo.disable
    def forward(self, x):
        return super().forward(x)


class Skipped(Block):
    """Dynamo cannot resume inside of ``try``: it runs the frame eagerly, but not what it calls."""

    def forward(self, x):
        try:
            torch._dynamo.graph_break()
            x = x + self.attn(x)
            return x + self.mlp(self.norm(x))
        finally:
            self.ran = True


def batch(*sizes, seed=0):
    sizes = sizes or (4, 8, D)
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def planted(n):
    """A net whose second MLP has an outlier in each block of 16 weights, times a hidden unit that is
    0: the outliers do nothing, and beside them the others vanish in 4 bits."""
    torch.manual_seed(0)
    net = Net(n)
    mlp = net.blocks[1].mlp
    with torch.no_grad():
        for p in (mlp.up.weight, mlp.up.bias):
            p[::16] = 0
        mlp.down.weight *= 20
        mlp.down.weight[:, ::16] = 1000
    return net


def policy(**keys):
    return {"version": 1, **keys}


def compiled(model, given=None, compiler="eager", **kwargs):
    options = {"compiler": compiler, **({} if given is None else {"policy": given})}
    return torch.compile(model, backend="fp4", options=options, **kwargs)


def step(model, call, x, seed=0):
    """Loss and gradients by name of one step that starts from a seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = call(x).square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def same(one, other):
    """Bit for bit."""
    (loss1, grads1), (loss2, grads2) = one, other
    return (
        torch.equal(loss1, loss2)
        and grads1.keys() == grads2.keys()
        and all(torch.equal(grads1[n], grads2[n]) for n in grads1)
    )


def schemes(model):
    """What ran: {layer: name of its scheme, or "left"} of the recorded report."""
    return {
        row.fqn: row.scheme_name if row.status == "rewritten" else row.status
        for row in fp4.explain(model)
    }


@contextmanager
def precision_warnings():
    """The texts of all PrecisionWarnings meanwhile, repeated ones included."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if issubclass(w.category, fp4.PrecisionWarning)]
    assert all("\n" not in text for text in texts)


class Aot:
    """The rewritten Dynamo graphs of a compiled call, and AOTAutograd's graphs of them.

    ``codes`` are what the quantizers returned: (graph, operator, tensors).
    """

    def __init__(self):
        self.dynamo, self.forward, self.backward, self.codes = [], [], [], []


class Recorder(torch.fx.Interpreter):
    def __init__(self, gm, codes, name):
        super().__init__(gm)
        self.codes, self.name = codes, name

    def call_function(self, target, args, kwargs):
        out = super().call_function(target, args, kwargs)
        if str(target) in ("fp4.quantize.default", "fp4.act_quantize.default"):
            self.codes.append((self.name, str(target), [t.clone() for t in out[:3]]))
        return out


def aot(model, x, given=None, backward=True, **kwargs):
    """Run ``model`` through the backend's rewrite and Inductor's partitioner, without Inductor."""
    from fp4compile.passes.printer import print_graph
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    from fp4compile.backend import as_policy, rewrite_frame

    found = Aot()

    def keep(graphs, name):
        def compiler(gm, inputs):
            graphs.append(gm)
            return lambda *args: Recorder(gm, found.codes, name).run(*args)

        return compiler

    def backend(gm, inputs):
        rewrite_frame(gm, as_policy(given), explicit=given is not None)
        found.dynamo.append(print_graph(gm))
        return aot_autograd(
            fw_compiler=keep(found.forward, "forward"),
            bw_compiler=keep(found.backward, "backward"),
            inference_compiler=keep(found.forward, "inference"),
            partition_fn=min_cut_rematerialization_partition,
        )(gm, inputs)

    out = torch.compile(model, backend=backend, **kwargs)(x)
    if backward:
        out.square().mean().backward()
    return found
