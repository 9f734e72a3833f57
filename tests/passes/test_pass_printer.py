"""The printer shows the same computation alike, whatever its nodes and symbols are called."""

import expecttest
import torch
from fp4compile.passes.printer import print_graph, print_saved, saved_for_backward
from pass_capture import LOW, compiled
from pass_models import MLP
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

X = torch.randn(2, 5, 32)


def aot_graphs(model, x, **options):
    """AOTAutograd's forward and backward graph of a model."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch.compile(model, backend=backend, **options)(x).sum().backward()
    return graphs


class Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 32))

    def forward(self, x):
        return torch.tanh(x @ self.w.t())


class Printer(expecttest.TestCase):
    maxDiff = None

    def test_aot_forward_and_backward(self):
        forward, backward = aot_graphs(Tanh(), torch.randn(4, 32))
        self.assertExpectedInline(
            print_graph(forward) + "\n",
            """\
%0: f32[16, 32]  primals_1
%1: f32[4, 32]  primals_2
%2: f32[32, 16] = t(%0)
%3: f32[4, 16] = mm(%1, %2)
%4: f32[4, 16] = tanh(%3)
return (%4, %1, %4)
""",
        )
        self.assertExpectedInline(
            print_graph(backward) + "\n",
            """\
%0: f32[4, 32]  primals_2
%1: f32[4, 16]
%2: f32[4, 16]  tangents_1
%3: f32[4, 16] = tanh_backward(%2, %1)
%4: f32[16, 4] = t(%3)
%5: f32[16, 32] = mm(%4, %0)
%6: f32[32, 16] = t(%5)
%7: f32[16, 32] = t(%6)
return (%7, None)
""",
        )
        self.assertExpectedInline(
            print_saved(forward, backward) + "\n",
            """\
saved for backward: 2 tensors, 768 B
  primals_2: f32[4, 32] 512 B
  tanh: f32[4, 16] 256 B
""",
        )

    def test_symbols_are_renamed_in_order_of_appearance(self):
        run = compiled(lambda x: x.reshape(-1, 4) * x.shape[1], torch.randn(6, 8), dynamic=True)
        self.assertExpectedInline(
            run.before[0] + "\n",
            """\
%0: s0  size.0
%1: s1  size.1
%2: f32[s0, s1]  x
%3: f32[((s0*s1)//4), ((s0*s1)//(((s0*s1)//4)))] = reshape(%2, -1, 4)
%4: f32[((s0*s1)//4), ((s0*s1)//(((s0*s1)//4)))] = mul(%3, %1)
return %4
""",
        )

    def test_long_texts_are_written_once(self):
        run = compiled(MLP(), X)
        self.assertEqual(run.after[0].count(LOW), 1)
        self.assertTrue(run.after[0].endswith(f"$0 = {LOW!r}"))

    def test_only_fp4_and_its_neighbours(self):
        def function(x):
            y = torch.sin(x)
            scaled = torch.cos(y)
            out = torch.ops.fp4_printer.double(scaled)
            return torch.exp(torch.tan(out + 1)), y

        lib = torch.library.Library("fp4_printer", "DEF")
        lib.define("double(Tensor x) -> Tensor")
        lib.impl("double", lambda x: x * 2, "CPU")
        lib.impl("double", torch.empty_like, "Meta")
        gm = make_fx(function, tracing_mode="fake")(torch.randn(3))
        self.assertExpectedInline(
            print_graph(gm, only="fp4_printer") + "\n",
            """\
%0: f32[3]
%1: f32[3] = cos(<sin>)
%2: f32[3] = fp4_printer::double(%1)
%3: f32[3] = add(%2, 1)
return (<exp>, <sin>)
""",
        )
        lib._destroy()

    def test_names_of_nodes_do_not_matter(self):
        def rename(gm):
            for i, node in enumerate(gm.graph.nodes):
                node._rename(f"other_{i}")

        first, second = compiled(MLP(), X), compiled(MLP(), X, inspect=rename)
        self.assertEqual(first.after, second.after)

    def test_saved_tensors(self):
        forward, backward = aot_graphs(Tanh(), torch.randn(4, 32))
        saved = saved_for_backward(forward, backward)
        self.assertEqual([s.nbytes for s in saved], [4 * 32 * 4, 4 * 16 * 4])
        self.assertEqual([s.shape for s in saved], [("4", "32"), ("4", "16")])
        self.assertEqual({s.dtype for s in saved}, {torch.float32})
