"""Activation checkpointing, full and selective: what backward remakes, and with which bits."""

from __future__ import annotations

import copy
import functools
from collections import Counter

import torch
import torch.nn.functional as F
from backend_models import D, Net, aot, batch, compiled, policy, same, schemes, step
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fp4compile as fp4

X = batch()
LOW = policy(default="low")
QUANTIZERS = {"fp4.quantize.default", "fp4.act_quantize.default", "fp4.glu_quantize.default"}


class GatedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Ways(Net):
    """Blocks kept ("none"), remade ("full") or remade but for `fp4.ops_to_save` ("selective")."""

    way = "none"

    def __init__(self):
        super().__init__(2)
        self.blocks[1].mlp = GatedMlp()

    def forward(self, x):
        extra = {}
        if self.way == "selective":
            context = functools.partial(create_selective_checkpoint_contexts, fp4.ops_to_save())
            extra = {"context_fn": context}
        for block in self.blocks:
            if self.way == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, **extra)
        return self.head(x)


def ways():
    torch.manual_seed(0)
    models = {"none": Ways()}
    for way in ("full", "selective"):
        models[way] = copy.deepcopy(models["none"])
        models[way].way = way
    return models


def operators(gm):
    return Counter(str(node.target) for node in gm.graph.nodes if "fp4." in str(node.target))


def kept_bytes(gm, inputs):
    """Bytes from forward to backward but for parameters and the batch."""
    known = {(tuple(t.shape), t.dtype) for t in inputs}
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    return sum(t.nbytes for t in values if (tuple(t.shape), t.dtype) not in known)


def test_backward_remakes_no_operator_that_is_kept():
    found = {way: aot(model, X, LOW) for way, model in ways().items()}
    counts = {way: operators(graphs.backward[0]) for way, graphs in found.items()}
    assert counts["selective"] == counts["none"]
    assert not QUANTIZERS & set(counts["selective"])
    assert set(counts["full"]) >= QUANTIZERS
    # attention and the first layers of each MLP run again, the layers that end a block do not
    assert counts["full"]["fp4.scaled_mm.default"] == counts["none"]["fp4.scaled_mm.default"] + 5


def test_full_checkpointing_keeps_less_than_selective():
    models = ways()
    inputs = [X, *models["none"].parameters()]
    kept = {way: kept_bytes(aot(m, X, LOW).backward[0], inputs) for way, m in models.items()}
    assert kept["full"] < kept["selective"] < kept["none"]


def test_codes_that_are_remade_have_the_bits_of_the_forward():
    found = aot(ways()["full"], X, LOW)
    made = [entry[1:] for entry in found.codes if entry[0] == "forward"]
    remade = [entry[1:] for entry in found.codes if entry[0] == "backward"]
    assert len(remade) == 2 + 4 + 2 + 4  # of two blocks: attention's two, then the MLP's
    for operator, tensors in remade:
        assert any(
            name == operator and all(map(torch.equal, tensors, others)) for name, others in made
        )


def test_every_way_takes_the_same_step():
    found = {}
    for way, model in ways().items():
        torch._dynamo.reset()
        found[way] = step(model, compiled(model, LOW, "aot_eager"), X)
        assert "left" not in schemes(model).values()
    assert same(found["full"], found["none"]) and same(found["selective"], found["none"])


def test_eager_checkpoints_around_compiled_blocks():
    """Backward runs the compiled block again; its random numbers are those of no checkpoint."""
    models = ways()
    found = {}
    for way in ("none", "full"):
        torch._dynamo.reset()
        fp4.apply(models[way], LOW)
        for block in models[way].blocks:
            block.compile(backend="fp4", options={"compiler": "eager"})
        models[way].head.compile(backend="fp4", options={"compiler": "eager"})
        found[way] = step(models[way], models[way], X)
    assert same(found["full"], found["none"])
