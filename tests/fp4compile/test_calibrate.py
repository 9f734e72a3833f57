"""`calibrate` finds the layer that was planted, within the budget, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from backend_models import D, Net, batch, planted
from torch import nn
from typer.testing import CliRunner

import fp4compile as fp4
from fp4compile.cli import app

pytestmark = pytest.mark.usefixtures("fresh")
X = batch()


def loss(model, x):
    return model(x).square().mean()


def test_the_planted_layer_is_kept_and_the_model_is_as_before():
    net = planted(3)
    before = {n: p.clone() for n, p in net.named_parameters()}
    random = torch.get_rng_state()
    found = fp4.calibrate(net, [X, 2 * X], budget="20%", loss=loss)
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in net.named_parameters())
    assert not any("fp4" in key for m in net.modules() for key in m.__dict__)
    assert not any(m._forward_hooks for m in net.modules())
    layers = {f"blocks.{i}.mlp.{n}" for i in range(3) for n in ("up", "down")}
    assert {f.layer for f in found.figures} == layers
    worst = found.figures[0]
    assert worst.layer == "blocks.1.mlp.down" and worst.kept and worst.y > 0.5
    kept = sum(f.parameters for f in found.figures if f.kept)
    assert 0 < kept <= 0.2 * sum(f.parameters for f in found.figures)


def test_figures_are_those_of_the_formats():
    """Gaussian data: about 9.5 % for activations under fp8-exact, 3.8 % for MXFP8 gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    up = {f.layer: f for f in fp4.calibrate(
        net, [torch.randn(64, 256)], loss=lambda m, x: (m(x) * torch.randn(64, 256)).sum()
    ).figures}["0"]  # fmt: skip
    assert 0.08 < up.x < 0.105 and 0.03 < up.g < 0.045
    assert abs(up.kurtosis - 3) < 0.3 and 0 < up.zeros < 0.12
    assert abs(up.y - (up.x**2 + up.w**2) ** 0.5) < 0.01
    assert up.g < up.dx < 0.15 and up.g < up.dw < 0.15


def test_the_policy_says_what_was_kept(tmp_path):
    net = planted(3)
    found = fp4.calibrate(net, [X], budget=0.2, higher="original", loss=loss)
    found.save(tmp_path / "policy.yaml")
    report = fp4.explain(net, X, policy=tmp_path / "policy.yaml")
    for f in found.figures:
        assert report[f.layer].status == ("left" if f.kept else "rewritten"), f.layer
    assert "blocks.1.mlp.down" in found.text and "# y " in found.text
    none = fp4.calibrate(net, [X], budget=0, loss=loss)
    assert not any(f.kept for f in none.figures)
    assert all(r.scheme_name == "low" for r in fp4.explain(net, X, policy=none.policy).rewritten)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batches": []}, "no batches"),
        ({"budget": "lots"}, "budget 'lots': a share such as 0.15 or '15%'"),
        ({"budget": 7}, "budget 7: a share"),
        ({"recipe": "fp8-exakt"}, "fp8-exakt"),
        ({"higher": "mxfp9"}, "mxfp9"),
        ({"loss": lambda m, x: m(x)}, "one finite loss"),
        ({"batches": [X, X[:0]], "loss": lambda m, x: m(x).square().sum()}, "gives it no rows"),
        (
            {"batches": [X, X * torch.nan], "loss": lambda m, x: m(x).nan_to_num().sum()},
            "its (input|output's gradient) holds NaN or inf in a batch",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(arguments, text):
    with pytest.raises(fp4.Fp4Error, match=text) as raised:
        fp4.calibrate(Net(1), **{"batches": [X], "loss": loss, **arguments})
    assert "\n" not in str(raised.value)


def test_frozen_models_and_statistics():
    with pytest.raises(fp4.InputError, match="no parameter of the model requires a gradient"):
        fp4.calibrate(Net(1).requires_grad_(False), [X], loss=loss)
    net = nn.Sequential(nn.Linear(D, 32), nn.BatchNorm1d(32), nn.Linear(32, D))
    fp4.calibrate(net, [X.flatten(0, -2)], recipe="mxfp8", loss=lambda m, x: m(x).square().sum())
    assert net[1].num_batches_tracked == 0 and not net[1].running_mean.any()


def test_command(tmp_path, monkeypatch):
    (tmp_path / "tuned.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        f"        self.mlp = nn.Sequential(nn.Linear({D}, 64), nn.GELU(), nn.Linear(64, {D}))\n"
        "    def forward(self, x):\n        return self.mlp(x).square().mean()\n"
        f"def make():\n    return Net(), [torch.randn(8, {D})]\n"
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        app, ["calibrate", "tuned:make", "--budget", "50%", "--figure", "heat.png"]
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "heat.png").stat().st_size > 1000
    assert fp4.Policy.load(tmp_path / "policy.yaml")
