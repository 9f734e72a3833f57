"""Every spelling of an activation is recognised, makes a chain, and computes what it did."""

import pytest
import torch
import torch.nn.functional as F
from pass_capture import compiled, same_as_eager
from pass_models import MLP, SPELLINGS, Gated


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_becomes_a_chain(spelling):
    act, name = SPELLINGS[spelling]
    run = same_as_eager(MLP(act=act), torch.randn(2, 3, 32))
    assert run.counts == {"linear_act_linear": 1}
    assert f"'{name}'" in run.after[0]
    assert {row.chain for row in run.rows} == {0}
    assert [row.reason for row in run.rows] == ["", ""]


@pytest.mark.parametrize("order", ["gate*up", "up*gate"])
@pytest.mark.parametrize(
    "spelling", ["F.silu", "x*sigmoid", "NewGELU", "F.gelu", "relu**2", "F.relu"]
)
def test_gated_spelling(spelling, order):
    act, name = SPELLINGS[spelling]
    run = same_as_eager(Gated(act, order, bias=True), torch.randn(4, 32))
    assert run.counts == {"gated_linear": 1}
    assert f"'{name}'" in run.after[0]


@pytest.mark.parametrize(
    "act, name",
    [
        (F.relu6, "relu6"),
        (F.leaky_relu, "leaky_relu"),
        (F.elu, "elu"),
        (F.mish, "mish"),
        (F.hardswish, "hardswish"),
    ],
)
def test_unsupported_activation_is_named(act, name):
    run = same_as_eager(MLP(act=act), torch.randn(4, 32))
    assert run.counts == {"linear": 2}
    why = f"activation {name} has no operator: no chain"
    assert [(row.status, row.reason, row.rule) for row in run.rows] == [
        ("rewritten", why, "chain: mlp")
    ] * 2


@pytest.mark.parametrize(
    "act",
    [
        torch.tanh,
        lambda x: x * 1.5,
        lambda x: 0.5 * x * (1 + torch.tanh(0.79 * (x + 0.044715 * x**3))),
        lambda x: x * torch.sigmoid(x + 0.001),
        lambda x: F.layer_norm(x, (64,)),
        lambda x: F.softmax(x, -1),
        lambda x: F.gelu(x) + 1e-4,
        lambda x: F.gelu(x) * x[..., :1],
    ],
)
def test_other_functions_are_no_chain(act):
    run = same_as_eager(MLP(act=act), torch.randn(4, 32))
    assert run.counts == {"linear": 2}
    assert [(row.reason, row.rule) for row in run.rows] == [("", "default")] * 2


def test_symbolic_constants_of_a_dynamic_graph():
    run = compiled(MLP(act=SPELLINGS["NewGELU"][0]), torch.randn(2, 3, 32), dynamic=True)
    assert run.counts == {"linear_act_linear": 1}
    assert "'gelu_tanh'" in run.after[0]
