"""`bisect` names the layer that moves the loss, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from backend_models import D, batch, planted
from torch import nn
from typer.testing import CliRunner

import fp4compile as fp4
from fp4compile.cli import app

pytestmark = pytest.mark.usefixtures("fresh")
LOW = {"version": 1, "recipe": "thinking-machines", "default": "low"}


def with_loss():
    net, x = planted(2), batch()
    with torch.no_grad():
        target = net(x)
    return net, lambda model: (model(x) - target).square().mean()


def test_the_planted_layer_comes_first_and_the_model_is_as_before():
    net, loss = with_loss()
    before = {n: p.clone() for n, p in net.named_parameters()}
    found = fp4.bisect(net, loss, LOW)
    assert found.effects[0].layer == "blocks.1.mlp.down"
    assert len(found.effects) == 7 and found.original < 1e-9 < found.quantized
    others = max(abs(e.loss) for e in found.effects[1:])
    assert found.effects[0].loss > 2 * others
    # rounding noise of the gradient, 1 to 20 %; the first layer's input needs no gradient
    effects = {e.layer: e for e in found.effects}
    assert effects["blocks.0.attn"].dgrad == 0
    assert all(0 < e.wgrad < 0.3 for e in found.effects)
    assert "blocks.1.mlp.down" in str(found).splitlines()[5]
    for name, p in net.named_parameters():
        assert p.grad is None and torch.equal(p, before[name])
    assert not any("fp4_scheme" in m.__dict__ for m in net.modules())


def test_statistics_and_random_state_come_back():
    net = nn.Sequential(nn.Linear(D, 32), nn.BatchNorm1d(32), nn.Linear(32, D))
    random = torch.get_rng_state()
    fp4.bisect(net, lambda model: model(batch().flatten(0, -2)).square().mean(), LOW)
    assert torch.equal(random, torch.get_rng_state())
    assert net[1].num_batches_tracked == 0 and not net[1].running_mean.any()


def test_stamps_come_back():
    net, loss = with_loss()
    policy = fp4.Policy.from_dict(LOW)
    fp4.apply(net, policy)
    stamps = {n: m.fp4_scheme for n, m in net.named_modules() if isinstance(m, nn.Linear)}
    fp4.bisect(net, loss, {**LOW, "layers": [{"match": "head", "scheme": "low"}], "default": "original"})
    assert stamps == {n: m.fp4_scheme for n, m in net.named_modules() if isinstance(m, nn.Linear)}


def test_what_cannot_be_bisected_is_one_line():
    net, loss = with_loss()
    with pytest.raises(fp4.InputError, match="quantizes none of the model's linears"):
        fp4.bisect(net, loss, "bf16")
    with pytest.raises(fp4.InputError, match="must return one finite number"):
        fp4.bisect(net, lambda model: model(batch()), LOW)


def test_command(tmp_path, monkeypatch):
    (tmp_path / "planted_net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))\n"
        "    return net, lambda model: model(torch.ones(4, 32)).square().mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bisect", "planted_net:make", "--policy", "fp8-exact"])
    assert result.exit_code == 0, result.output
    assert "wgrad error" in result.output and result.output.count("low") == 2
