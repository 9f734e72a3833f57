"""What AOTAutograd makes of the rewritten graphs, and what it keeps for backward, as text.

The same on every supported torch version. ``EXPECTTEST_ACCEPT=1 pytest
tests/fp4compile/test_goldens_aot.py`` writes the expected files anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import expecttest
import pytest
import torch
import torch.nn.functional as F
from backend_models import Checkpointed, D, Mlp, aot, batch, policy
from fp4compile.passes.printer import print_graph, print_saved, saved_for_backward
from torch import nn

from fp4compile.backend import patches

pytestmark = pytest.mark.usefixtures("fresh")
EXPECTED = Path(__file__).parent / "expected"
# Written out here, so that a recipe can change without them.
ROW8 = {"format": "mxfp8", "block": "row", "rounding": "stochastic"}
BLOCK8 = {"format": "mxfp8", "rounding": "stochastic"}
AGAIN = {"from": "fprop", **BLOCK8}
SCHEMES = {
    "exact": {
        "fprop": {
            "activation": {"format": "nvfp4", "outer": "row", "block_scales": "fp8_exact"},
            "weight": {"format": "nvfp4", "outer": "tensor", "block_scales": "fp8_exact"},
        },
        "dgrad": {"gradient": ROW8, "weight": {"from": "fprop"}},
        "wgrad": {"gradient": {**ROW8, "fold": "outer"}, "activation": {"from": "fprop"}},
    },
    "again": {
        "fprop": {
            "activation": {"format": "nvfp4", "outer": "row", "scale_search": "four_over_six"},
            "weight": {"format": "nvfp4", "outer": "tensor"},
        },
        "dgrad": {"gradient": BLOCK8, "weight": AGAIN},
        "wgrad": {"gradient": BLOCK8, "activation": AGAIN},
    },
    "eight": {
        "fprop": {"activation": {"format": "mxfp8"}, "weight": {"format": "mxfp8"}},
        "dgrad": {"gradient": BLOCK8, "weight": AGAIN},
        "wgrad": {"gradient": BLOCK8, "activation": AGAIN},
    },
}


def given(default="original", *layers):
    return policy(recipe="bf16", schemes=SCHEMES, layers=list(layers), default=default)


EXACT = given("exact")


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 2 * D, bias=False)
        self.up = nn.Linear(D, 2 * D, bias=False)
        self.down = nn.Linear(2 * D, D, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Four layers; q, k and v read one tensor."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.proj = nn.Linear(D, D, bias=False)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        return x + self.proj(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


class AttentionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(), Mlp(bias=False)

    def forward(self, x):
        x = self.attn(x)
        return x + self.mlp(x)


MIXED = given(
    "original",
    {"match": "attn.proj", "scheme": "eight"},
    {"match": "attn.[qkv]", "scheme": "again"},
    {"chain": "mlp", "scheme": "again"},
)
EXCLUDED = given("exact", {"match": "*up", "scheme": "original"})


def graphs(model, chosen, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = batch(2, 16, D).requires_grad_()
    return aot(model, x, chosen, **options)


def text_of(found, only=None):
    (forward,), (backward,) = found.forward, found.backward
    parts = {
        "dynamo": found.dynamo[0],
        "forward": print_graph(forward, only),
        "backward": print_graph(backward, only),
        "saved": print_saved(forward, backward),
    }
    return "\n".join(f"--- {name}\n{text}" for name, text in parts.items()) + "\n"


def operators(graph):
    """{fp4 operator: how often}."""
    counts = {}
    for node in graph.graph.nodes:
        name = str(node.target)
        if name.startswith("fp4."):
            counts[name.split(".")[1]] = counts.get(name.split(".")[1], 0) + 1
    return counts


class Golden(expecttest.TestCase):
    maxDiff = None

    def assert_file(self, name, text):
        path = EXPECTED / f"aot_{name}.expected"
        if os.environ.get("EXPECTTEST_ACCEPT"):
            path.write_text(text)
        self.assertMultiLineEqual(path.read_text(), text)

    def test_gelu_mlp_with_bias(self):
        found = graphs(Mlp(), EXACT)
        self.assertEqual(
            operators(found.forward[0]), {"quantize": 3, "scaled_mm": 2, "act_quantize": 1}
        )
        self.assert_file("gelu_mlp_with_bias", text_of(found))

    def test_gelu_mlp_without_bias(self):
        found = graphs(Mlp(bias=False), given("again"))
        self.assertEqual(
            operators(found.backward[0]),
            {"quantize_grad": 1, "act_grad_quantize": 1, "requantize": 4, "scaled_mm": 4},
        )
        self.assert_file("gelu_mlp_without_bias", text_of(found))

    def test_gated_mlp(self):
        found = graphs(Gated(), EXACT)
        self.assertEqual(
            operators(found.forward[0]), {"quantize": 4, "scaled_mm": 3, "glu_quantize": 1}
        )
        self.assert_file("gated_mlp", text_of(found))

    def test_attention_block_with_a_mixed_policy(self):
        found = graphs(AttentionBlock(), MIXED)
        # inputs of q/k/v (one), of proj and of the chain; six weights
        self.assertEqual(operators(found.forward[0])["quantize"], 3 + 6)
        self.assert_file("attention_block_with_a_mixed_policy", text_of(found, only="fp4"))

    def test_excluded_layers(self):
        found = graphs(nn.Sequential(Mlp(), nn.LayerNorm(D), Gated()), EXCLUDED)
        self.assertIn("linear(", found.dynamo[0])
        self.assert_file("excluded_layers", text_of(found, only="fp4"))

    def test_nothing_but_excluded_layers(self):
        found = graphs(Mlp(), given())
        self.assertEqual(operators(found.forward[0]) | operators(found.backward[0]), {})

    def test_checkpointed_block(self):
        found = graphs(Checkpointed(1), given("original", {"chain": "mlp", "scheme": "exact"}))
        kept = saved_for_backward(found.forward[0], found.backward[0])
        codes = [s for s in kept if s.name.startswith("fp4::")]
        self.assertEqual(codes, [], "codes are remade, not kept")
        self.assertEqual(operators(found.backward[0])["act_quantize"], 1)
        self.assert_file("checkpointed_block", text_of(found, only="fp4"))

    def test_dynamic_batch(self):
        found = graphs(Mlp(), EXACT, dynamic=True)
        self.assert_file("dynamic_batch", text_of(found))

    def test_inference(self):
        torch._dynamo.reset()
        with torch.no_grad():
            found = aot(Mlp(), batch(2, 16, D), EXACT, backward=False)
        self.assertEqual(found.backward, [])
        self.assert_file("inference", print_graph(found.forward[0]) + "\n")

    def test_inference_quantizes_a_shared_input_once(self):
        """AOTAutograd merges equal nodes in training graphs only; the pass that Inductor runs does."""
        torch._dynamo.reset()
        with torch.no_grad():
            found = aot(Attention(), batch(2, 16, D), EXACT, backward=False)
        (graph,) = found.forward
        self.assertEqual(operators(graph)["quantize"], 4 + 4)
        patches({}, "policy")["post_grad_custom_pre_pass"](graph.graph)
        self.assertEqual(operators(graph)["quantize"], 2 + 4)

    def test_every_expected_file_is_used(self):
        tests = {name.removeprefix("test_") for name in dir(self) if name.startswith("test_")}
        files = {p.stem.removeprefix("aot_") for p in EXPECTED.glob("aot_*.expected")}
        self.assertLessEqual(files, tests)
        self.assertEqual(len(files), 8)
