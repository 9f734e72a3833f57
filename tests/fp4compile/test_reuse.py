"""A second model that runs in the first one's graphs is watched and reported all the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from backend_models import (
    D,
    Mlp,
    Net,
    batch,
    compiled,
    policy,
    precision_warnings,
    schemes,
)
from torch import nn

import fp4compile as fp4

pytestmark = pytest.mark.usefixtures("fresh")
X = batch()
LOW = policy(default="low")


class Skipped(Mlp):
    """Dynamo cannot resume inside of ``try``: it runs the frame eagerly."""

    def forward(self, x):
        try:
            torch._dynamo.graph_break()
            return super().forward(x)
        finally:
            self.ran = True


class Holder(nn.Module):
    """A part that Dynamo runs eagerly, between two that are compiled."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(D, D), Skipped(), nn.Linear(D, D)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def alarms(texts):
    return [text.split("'")[1] for text in texts if "ran outside every compiled graph" in text]


def test_eager_layers_of_a_second_model_are_noticed(graphs):
    """By a frame that falls back after the shared graph was met; here the model run as it is."""
    compiled(Net(2), LOW)(X)
    graphs.new()
    net = Net(2)
    compiled(net, LOW)(X)
    assert graphs.new() == 0, "the graphs are shared"
    with precision_warnings() as texts:
        net(X)
    assert alarms(texts) == [name for name, m in net.named_modules() if isinstance(m, nn.Linear)]


def test_eager_layers_of_a_second_model_raise_when_strict():
    strict = policy(default="low", strict=True)
    nets = [Mlp(), Mlp()]
    for net in nets:
        compiled(net, strict)(X)
    with pytest.raises(fp4.PrecisionError, match="'up'"):
        nets[1](X)


def test_chains_of_a_second_model_are_known_without_gradients():
    """Under a chain rule; its graph has shown that the layers are an MLP's."""
    nets = [Mlp(), Mlp()]
    with torch.no_grad():
        for net in nets:
            compiled(net)(X)
        with precision_warnings() as texts:
            nets[1](X)
    assert alarms(texts) == ["up", "down"]


def test_chains_of_blocks_that_share_a_graph_are_known_without_gradients():
    net = Net(3)
    fp4.apply(net, policy(recipe="mxfp8"))
    for block in net.blocks:
        block.compile(backend="fp4", options={"compiler": "eager"})
    with torch.no_grad():
        net(X)
        with precision_warnings() as texts:
            net.blocks[2].forward(X)
    assert alarms(texts) == ["blocks.2.mlp.up", "blocks.2.mlp.down"]


def test_a_second_model_has_a_report(graphs):
    given = policy(default="low", layers=[{"match": "blocks.1.mlp.*", "scheme": "mxfp8"}])
    compiled(Net(2), given)(X)
    graphs.new()
    net = Net(2)
    with precision_warnings() as texts:
        compiled(net, given)(X)
    assert graphs.new() == 0 and not alarms(texts)
    report = fp4.explain(net)
    assert schemes(net)["blocks.1.mlp.up"] == "mxfp8" and schemes(net)["head"] == "low"
    assert len(list(report)) == 7 and report["blocks.0.mlp.up"].chain == 0


def test_parts_of_a_second_model_are_reported():
    for _ in range(2):
        net = Holder()
        call = compiled(net, LOW)
        with precision_warnings() as texts:
            for _ in range(2):
                call(X)
        assert not alarms(texts)
        assert schemes(net) == dict.fromkeys(("first", "inner.up", "inner.down", "last"), "low")


def test_a_model_in_a_function_is_met_by_its_name():
    def run(model, x):
        return model(x) * 2

    call = torch.compile(run, backend="fp4", options={"compiler": "eager", "policy": LOW})
    nets = [Mlp(), Mlp()]
    for net in nets:
        call(net, X)
    assert [schemes(net) for net in nets] == [{"up": "low", "down": "low"}] * 2
    with precision_warnings() as texts:
        nets[1](X)
    assert alarms(texts) == ["up", "down"]


class Loop(nn.Module):
    """Below its graph breaks the parts' frames are those of any other MLP."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            torch._dynamo.graph_break()
        return x


def test_a_block_that_meets_another_models_graph_is_said_and_mended():
    """The standalone MLP's answers are by other names than those of the MLP in a larger model."""
    keys = {"recipe": "mxfp8", "layers": [{"match": "parts.0.*", "scheme": "original"}]}
    net = Loop()
    with precision_warnings() as texts:
        compiled(Mlp(), policy(**keys))(X)
        call = compiled(net, policy(**keys))
        call(X)
        call(X)
    said = [text.split("'")[1] for text in texts if "of another model" in text]
    assert said == ["parts.0.up", "parts.0.down"], "once each"
    assert schemes(net) == {
        "parts.0.up": "left", "parts.0.down": "left", "parts.1.up": "low", "parts.1.down": "low"
    }  # fmt: skip


def test_another_models_graph_is_an_error_when_strict():
    layers = [{"match": "re:up|parts.0.down", "scheme": "original"}]
    given = policy(recipe="mxfp8", strict=True, layers=layers)
    compiled(Mlp(), given)(X)
    with pytest.raises(fp4.PrecisionError, match="'parts.0.up' ran once in the scheme of 'up'"):
        compiled(Loop(), given)(X)


def test_graphs_keep_no_model_alive():
    first, second = Mlp(), Mlp()
    with precision_warnings():
        compiled(first, LOW)(X)
        compiled(second, LOW)(X)
    seen = weakref.ref(second)
    del second
    gc.collect()
    assert seen() is None
    assert first is not None
