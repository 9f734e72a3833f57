"""Dynamo graphs before and after the rewrite, as the project's printer shows them.

``EXPECTTEST_ACCEPT=1 pytest tests/passes/test_pass_golden.py`` writes them anew.
"""

import os
from pathlib import Path

import expecttest
import torch
from pass_capture import by_name, compiled, everything, same_as_eager
from pass_models import GPT2MLP, MLP, Block, Blocks, Gated

EXPECTED = Path(__file__).parent / "expected"
X = torch.randn(2, 5, 32)


def graphs(run):
    """Before and after, the inputs (which do not change) once."""
    (before,), (after,) = run.before, run.after
    return f"{before}\n--- after\n{after}\n"


def attention_stays(site, role):
    decide = by_name({"mlp.up": "mxfp8", "attn.proj": "mxfp8", "mlp.down": "low"})
    return decide(site, role)


class Golden(expecttest.TestCase):
    maxDiff = None

    def assert_file(self, name, text):
        path = EXPECTED / f"{name}.expected"
        if os.environ.get("EXPECTTEST_ACCEPT"):
            path.write_text(text)
        self.assertMultiLineEqual(path.read_text(), text)

    def test_gelu_mlp_with_bias(self):
        run = same_as_eager(MLP(), X)
        self.assertEqual(run.counts, {"linear_act_linear": 1})
        self.assertExpectedInline(
            graphs(run),
            """\
%0: f32[64, 32]  up.weight
%1: f32[64]  up.bias
%2: f32[2, 5, 32]  x
%3: f32[32, 64]  down.weight
%4: f32[32]  down.bias
%5: f32[2, 5, 64] = linear(%2, %0, %1)
%6: f32[2, 5, 64] = gelu(%5)
%7: f32[2, 5, 64] = dropout(%6, 0.0, True, False)
%8: f32[2, 5, 32] = linear(%7, %3, %4)
return %8
--- after
%0: f32[64, 32]  up.weight
%1: f32[64]  up.bias
%2: f32[2, 5, 32]  x
%3: f32[32, 64]  down.weight
%4: f32[32]  down.bias
%5: f32[2, 5, 32] = fp4::linear_act_linear(%2, %0, %1, %3, %4, 'gelu', $0, $0, f32, f32)
return %5
$0 = 'fprop(nvfp4:row, nvfp4:tensor) dgrad(mxfp8:32:sr, fprop>mxfp8:32) wgrad(mxfp8:32:sr, fprop>mxfp8:32)'
""",
        )

    def test_gelu_mlp_without_bias(self):
        run = same_as_eager(MLP(bias=False, act="gelu_tanh"), X)
        self.assertEqual(run.counts, {"linear_act_linear": 1})
        self.assertExpectedInline(
            graphs(run),
            """\
%0: f32[64, 32]  up.weight
%1: f32[2, 5, 32]  x
%2: f32[32, 64]  down.weight
%3: f32[2, 5, 64] = linear(%1, %0, None)
%4: f32[2, 5, 64] = gelu(%3, approximate='tanh')
%5: f32[2, 5, 64] = dropout(%4, 0.0, True, False)
%6: f32[2, 5, 32] = linear(%5, %2, None)
return %6
--- after
%0: f32[64, 32]  up.weight
%1: f32[2, 5, 32]  x
%2: f32[32, 64]  down.weight
%3: f32[2, 5, 32] = fp4::linear_act_linear(%1, %0, None, %2, None, 'gelu_tanh', $0, $0, f32, f32)
return %3
$0 = 'fprop(nvfp4:row, nvfp4:tensor) dgrad(mxfp8:32:sr, fprop>mxfp8:32) wgrad(mxfp8:32:sr, fprop>mxfp8:32)'
""",
        )

    def test_gated_mlp(self):
        run = same_as_eager(Gated(order="up*gate"), X)
        self.assertEqual(run.counts, {"gated_linear": 1})
        self.assertExpectedInline(
            graphs(run),
            """\
%0: f32[64, 32]  gate.weight
%1: f32[2, 5, 32]  x
%2: f32[64, 32]  up.weight
%3: f32[32, 64]  down.weight
%4: f32[2, 5, 64] = linear(%1, %0, None)
%5: f32[2, 5, 64] = silu(%4)
%6: f32[2, 5, 64] = linear(%1, %2, None)
%7: f32[2, 5, 64] = mul(%6, %5)
%8: f32[2, 5, 32] = linear(%7, %3, None)
return %8
--- after
%0: f32[64, 32]  gate.weight
%1: f32[2, 5, 32]  x
%2: f32[64, 32]  up.weight
%3: f32[32, 64]  down.weight
%4: f32[2, 5, 32] = fp4::gated_linear(%1, %0, None, %2, None, %3, None, 'silu', $0, $0, $0, f32, f32)
return %4
$0 = 'fprop(nvfp4:row, nvfp4:tensor) dgrad(mxfp8:32:sr, fprop>mxfp8:32) wgrad(mxfp8:32:sr, fprop>mxfp8:32)'
""",
        )

    def test_attention_block_with_a_mixed_policy(self):
        run = same_as_eager(Block(), X, decide=attention_stays)
        self.assertEqual(run.counts, {"linear_act_linear": 1, "linear": 1, "left": 1})
        self.assert_file("attention_block", graphs(run))

    def test_excluded_layers(self):
        model = torch.nn.Sequential(MLP(bias=False), torch.nn.Linear(32, 32))
        run = same_as_eager(model, X, decide=by_name({"0.up": "mxfp8", "1": "original"}))
        self.assertEqual(run.counts, {"linear": 1, "left": 2})
        self.assertExpectedInline(
            graphs(run),
            """\
%0: f32[64, 32]  0.up.weight
%1: f32[2, 5, 32]  0
%2: f32[32, 64]  0.down.weight
%3: f32[32, 32]  1.weight
%4: f32[32]  1.bias
%5: f32[2, 5, 64] = linear(%1, %0, None)
%6: f32[2, 5, 64] = gelu(%5)
%7: f32[2, 5, 64] = dropout(%6, 0.0, True, False)
%8: f32[2, 5, 32] = linear(%7, %2, None)
%9: f32[2, 5, 32] = linear(%8, %3, %4)
return %9
--- after
%0: f32[64, 32]  0.up.weight
%1: f32[2, 5, 32]  0
%2: f32[32, 64]  0.down.weight
%3: f32[32, 32]  1.weight
%4: f32[32]  1.bias
%5: f32[2, 5, 64] = fp4::linear(%1, %0, None, $0, f32)
%6: f32[2, 5, 64] = gelu(%5)
%7: f32[2, 5, 64] = dropout(%6, 0.0, True, False)
%8: f32[2, 5, 32] = linear(%7, %2, None)
%9: f32[2, 5, 32] = linear(%8, %3, %4)
return %9
$0 = 'fprop(mxfp8:32, mxfp8:32) dgrad(mxfp8:32:sr, fprop>mxfp8:32) wgrad(mxfp8:32:sr, fprop>mxfp8:32)'
""",
        )

    def test_checkpointed_blocks(self):
        run = same_as_eager(Blocks(2), X)
        self.assertEqual(run.counts, {"linear_act_linear": 2})
        self.assert_file("checkpointed_blocks", graphs(run))

    def test_dynamic_batch(self):
        x = torch.randn(6, 32)
        torch._dynamo.mark_dynamic(x, 0)
        run = compiled(MLP(between=lambda h: h.unsqueeze(1)), x)
        self.assertEqual(run.counts, {"linear_act_linear": 1})
        self.assertExpectedInline(
            graphs(run),
            """\
%0: f32[64, 32]  up.weight
%1: f32[64]  up.bias
%2: s0  size.0
%3: f32[s0, 32]  x
%4: f32[32, 64]  down.weight
%5: f32[32]  down.bias
%6: f32[s0, 64] = linear(%3, %0, %1)
%7: f32[s0, 64] = gelu(%6)
%8: f32[s0, 64] = dropout(%7, 0.0, True, False)
%9: f32[s0, 1, 64] = unsqueeze(%8, 1)
%10: f32[s0, 1, 32] = linear(%9, %4, %5)
return %10
--- after
%0: f32[64, 32]  up.weight
%1: f32[64]  up.bias
%2: s0  size.0
%3: f32[s0, 32]  x
%4: f32[32, 64]  down.weight
%5: f32[32]  down.bias
%6: f32[s0, 32] = fp4::linear_act_linear(%3, %0, %1, %4, %5, 'gelu', $0, $0, f32, f32)
%7: f32[s0, 1, 32] = reshape(%6, [-1, 1, 32])
return %7
$0 = 'fprop(nvfp4:row, nvfp4:tensor) dgrad(mxfp8:32:sr, fprop>mxfp8:32) wgrad(mxfp8:32:sr, fprop>mxfp8:32)'
""",
        )

    def test_conv1d_and_written_out_gelu(self):
        run = same_as_eager(GPT2MLP(), X)
        self.assertEqual(run.counts, {"linear_act_linear": 1})
        self.assert_file("gpt2_mlp", graphs(run))

    def test_twelve_batch_sizes_are_two_graphs(self):
        made = []

        def decide(site, role):
            made.append(site.name)
            return everything(site, role)

        model = torch.nn.Sequential(GPT2MLP(), MLP(between=lambda h: h.flatten(0, 1)))
        graph_count = 0

        def backend(gm, inputs):
            nonlocal graph_count
            from fp4compile.passes.rewrite import rewrite
            from pass_capture import make_exact

            graph_count += 1
            self.assertEqual(rewrite(gm, decide).changed, 2)
            make_exact(gm)
            return gm.forward

        torch._dynamo.reset()
        step = torch.compile(model, backend=backend)
        for rows in range(2, 14):
            x = torch.randn(rows, 5, 32)
            torch.testing.assert_close(step(x), model(x), atol=2e-5, rtol=2e-5)
        self.assertEqual(graph_count, 2)
