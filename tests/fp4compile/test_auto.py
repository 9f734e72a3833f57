"""`scheme: auto` quantizes where the cost model says that it gains, and says what it left."""

from __future__ import annotations

import warnings

import pytest
import torch
from fp4compile.kernels.errors import InputError, PolicyError, PrecisionWarning
from fp4compile.passes.machines import MACHINES
from torch import nn

import fp4compile as fp4
from fp4compile import predicting
from fp4compile.policy import Policy
from fp4compile.stamp import Stamp

AUTO = [{"chain": "mlp", "scheme": "auto"}, {"match": "head", "scheme": "auto"}]


def policy(machine: str | None = "H200", recipe: str = "fp8-exact", **more) -> Policy:
    named = {"machine": machine} if machine else {}
    return Policy.from_dict({"version": 1, "recipe": recipe, "layers": AUTO, **named, **more})


class Net(nn.Module):
    """An MLP and a head of widths d."""

    def __init__(self, d: int, device: str = "cpu") -> None:
        super().__init__()
        self.up = nn.Linear(d, 4 * d, device=device)
        self.down = nn.Linear(4 * d, d, device=device)
        self.head = nn.Linear(d, 2 * d, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(nn.functional.gelu(self.up(x))))


def explained(d: int, tokens: int, of: Policy, **more):
    """The report of a BF16 model; on the meta device, where nothing is computed."""
    net = Net(d, "meta").bfloat16()
    x = torch.empty(tokens, d, device="meta", dtype=torch.bfloat16)
    return fp4.explain(net, x, policy=of, **more)


def test_large_layers_are_quantized_and_small_ones_kept():
    large, small = explained(4096, 16384, policy()), explained(256, 128, policy())
    assert [row.scheme_name for row in large] == ["low", "low", "low"]
    assert large["up"].chain == large["down"].chain is not None
    assert {row.scheme for row in small} == {"original"} and not any(r.refused for r in small)
    assert "auto: 0." in large["up"].rule and "x its time on H200 (" in large["up"].rule
    for row in small:
        ratio = float(row.reason.partition("auto: ")[2].partition(" x")[0])
        assert ratio > 1 and row.reason.endswith("kept")


def test_a_chain_is_decided_as_one_and_other_layers_by_themselves():
    """As the predicted times say."""
    h200 = MACHINES["H200"]
    scheme, seen = policy().schemes["low"], set()
    sizes = [(512, 4096), (1024, 1024), (1024, 4096), (1024, 8192), (2048, 16384)]
    for d, m in sizes:
        rows = list(explained(d, m, policy()))
        for names, scheme_count, dims in (
            (("up", "down"), 2, (m, d, 4 * d, d)), (("head",), 1, (m, d, 2 * d)),
        ):  # fmt: skip
            now, before = (
                sum(predicting._times((s,) * scheme_count, h200, dims, 2, False))
                for s in (scheme, type(scheme)())
            )
            want = "low" if now < before else "original"
            assert {r.scheme_name for r in rows if r.fqn in names} == {want}, (d, m, names)
            seen.add((names, want))
    assert {(("up", "down"), "low"), (("head",), "original")} <= seen


def test_the_machine_decides():
    """At this size thinking-machines gains on a B200 and not on an H200."""
    for machine, name in (("H200", "original"), ("B200", "low")):
        report = explained(4096, 32768, policy(machine, "thinking-machines"))
        assert {row.scheme_name for row in report} == {name}
    report = explained(4096, 32768, policy(None, "thinking-machines"), machine="B200")
    assert {row.scheme_name for row in report} == {"low"}


def test_without_a_known_machine_it_is_an_error():
    with pytest.raises(PolicyError, match=r"auto .*does not know this machine \(no GPU\).*H200"):
        net = Net(32)
        torch.compile(net, backend="fp4", options={"policy": policy(None), "compiler": "eager"})(
            torch.randn(4, 32)
        )


def compiled(net: nn.Module, of: Policy, **more):
    return torch.compile(net, backend="fp4", options={"policy": of, "compiler": "eager"}, **more)


def test_one_line_names_what_stayed():
    net = Net(64)
    run = compiled(net, policy())
    x = torch.randn(8, 64)
    with pytest.warns(PrecisionWarning) as caught:
        got = run(x)
    text = [str(w.message) for w in caught]
    assert [t for t in text if "auto keeps 3 of 3 linear layers" in t and "up, down, head" in t]
    assert not [t for t in text if "nothing was rewritten" in t]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it runs eagerly
        assert torch.equal(got, net(x))  # in the original precision, bit for bit


def test_dynamic_sizes_add_no_graph():
    """The example's size decides; other sizes run in the same graph."""
    torch._dynamo.reset()
    net, sizes = Net(64), (8, 24, 40, 72)
    run = compiled(net, policy(), dynamic=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for m in sizes:
            run(torch.randn(m, 64))
    kept = [w for w in caught if "auto keeps" in str(w.message)]
    assert len(kept) == 1
    assert fp4.explain(run).graphs == 1


def test_stamps_carry_it_and_blocks_share_graphs():
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList(Net(64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.h:
                x = block(x)[:, :64].contiguous()
            return x

    torch._dynamo.reset()
    net, of = Stack(), policy(layers=[{"chain": "mlp", "scheme": "auto"}])
    texts = fp4.apply(net, of)
    assert texts["h.0.up"].startswith("chain: auto(H200) fprop(")
    stamp = Stamp.parse(texts["h.0.up"])
    assert stamp.chain.auto == "H200" and str(stamp) == texts["h.0.up"]
    seen = []

    def counted(gm, inputs, **options):
        from fp4compile.backend import fp4 as backend

        seen.append(gm)
        return backend(gm, inputs, options={"compiler": "eager"})

    for block in net.h:
        block.compile(backend=counted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.randn(8, 64, requires_grad=True)
        net(x)
        assert len(seen) == 1
        fp4.apply(net, policy("B200", layers=[{"chain": "mlp", "scheme": "auto"}]))
        net(x)  # another stamp: compiled again
    assert len(seen) == 2


def test_phases_keep_auto():
    of = policy(phases=[{"from_step": 5, "fprop": "original"}, {"from_step": 9, "all": "original"}])
    stamps = [of.stamp_for("head", step=step) for step in (0, 5, 9)]
    assert [s.plain.auto for s in stamps] == ["H200", "H200", None]
    assert stamps[1].plain.scheme.fprop is None and stamps[2].original


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"machine": "H20"}, ":2: machine: unknown machine 'H20'; did you mean 'H200'"),
        ({"schemes": {"auto": {"fprop": "original", "dgrad": "original", "wgrad": "original"}}},
         "'auto' is built in"),
        ({"recipe": "bf16", "default": "auto"}, "`low` of recipe bf16 is original: no choice"),
        ({"phases": [{"from_step": 1, "all": "auto"}]}, "auto is for layers and default"),
        ({"default": "atuo"}, "unknown scheme 'atuo'; did you mean 'auto'"),
    ],
)  # fmt: skip
def test_policy_errors(data, message):
    with pytest.raises(PolicyError) as raised:
        Policy.from_dict({"version": 1, **data})
    assert message.removeprefix(":2: machine: ") in str(raised.value)


def test_equal_texts_mean_equal_policies():
    assert str(policy("h200")) == str(policy("H200")) != str(policy("B200"))
    low = [{**rule, "scheme": "low"} for rule in AUTO]
    assert str(policy("H200")) != str(policy("H200", layers=low))


def test_explain_predicts_for_a_machine():
    low = Policy.from_dict({"version": 1, "layers": [{"chain": "mlp", "scheme": "low"}]})
    none = explained(2048, 8192, low)
    assert {row.predicted_ms for row in none} == {0.0} and "predicted" not in str(none)
    report = explained(2048, 8192, low, machine="b200")
    up, head = report["up"], report["head"]
    assert 0 < up.predicted_ms < up.original_ms and head.predicted_ms == head.original_ms > 0
    text = str(report)
    assert "predicted on B200 (datasheet, article)" in text and " x " in text
    with torch.no_grad():
        forward = explained(2048, 8192, low, machine="B200")
    assert forward["up"].predicted_ms < 0.5 * up.predicted_ms
    with pytest.raises(InputError, match="unknown machine 'B2000'"):
        explained(2048, 8192, low, machine="B2000")


def test_gate_and_up_in_one_linear_are_predicted_as_both():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(512, 4096, bias=False, device="meta", dtype=torch.bfloat16)
            self.down = nn.Linear(2048, 512, bias=False, device="meta", dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.both(x).chunk(2, -1)
            return self.down(nn.functional.silu(gate) * up)

    x = torch.empty(4096, 512, device="meta", dtype=torch.bfloat16)
    low = Policy.from_dict({"version": 1, "default": "low"})
    report = fp4.explain(Gated(), x, policy=low, machine="H200")
    assert report["both"].chain == report["down"].chain is not None
    h200, scheme = MACHINES["H200"], low.schemes["low"]
    each = predicting._times((scheme,) * 3, h200, (4096, 512, 2048, 512), 2, False)
    assert report["both"].predicted_ms == pytest.approx(each[0] + each[1])
    assert report["down"].predicted_ms == pytest.approx(each[2])
