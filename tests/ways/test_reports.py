"""The report of a model whose blocks share graphs: every chain has a number, in the model's order."""

from __future__ import annotations

import pytest
import torch
from backend_models import Broken, Net, batch, compiled, policy, precision_warnings

import fp4compile as fp4

BY_BLOCK = policy(layers=[{"blocks": "first 1", "scheme": "original"}, {"blocks": "last 1", "scheme": "mxfp8"}])


@pytest.mark.parametrize("stamped", [False, True])
def test_chains_of_blocks_that_share_a_graph(stamped):
    net = Broken(4)
    if stamped:
        fp4.apply(net, policy())
    compiled(net)(batch()).sum().backward()
    report = fp4.explain(net)
    assert [row.chain for row in report] == [None, 0, 0, None, 1, 1, None, 2, 2, None, 3, 3, None]
    assert [row.fqn for row in report][-4:] == ["blocks.3.attn", "blocks.3.mlp.up", "blocks.3.mlp.down", "head"]
    assert "4 fused chains" in report.summary()


@pytest.mark.parametrize("options", [{}, {"policy": BY_BLOCK}], ids=["stamps", "and options"])
def test_an_original_block_of_a_stamped_model_is_no_alarm(options):
    net = Net(3)
    fp4.apply(net, BY_BLOCK)
    for block in net.blocks:
        block.compile(backend="fp4", options={"compiler": "eager", **options})
    with precision_warnings() as texts:
        net(batch()).sum().backward()
    assert texts == []


def test_a_stamped_model_of_which_nothing_is_rewritten_says_so():
    net = Net(2)
    fp4.apply(net, policy(recipe="bf16"))
    with precision_warnings() as texts:
        torch.compile(net, backend="fp4", options={"compiler": "eager"})(batch())
    assert len(texts) == 1 and "nothing was rewritten" in texts[0]
