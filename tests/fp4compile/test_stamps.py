"""Stamps: every block gets its own scheme however it is compiled; phases; agreement with options."""

from __future__ import annotations

import warnings

import pytest
import torch
from backend_models import (
    Block,
    Broken,
    D,
    Mlp,
    Net,
    batch,
    compiled,
    policy,
    precision_warnings,
    same,
    schemes,
    step,
)
from torch import nn

import fp4compile as fp4
from fp4compile import stamping
from fp4compile.stamp import Stamp

pytestmark = pytest.mark.usefixtures("fresh")
X = batch().requires_grad_()
LOW = policy(default="low")
EAGER = {"compiler": "eager"}


def compile_blocks(model, **options):
    for block in model.blocks:
        block.compile(backend="fp4", options={**EAGER, **options})
    return model


def engines_of(graphs):
    """The schemes of each graph's fp4 nodes, one letter a layer: n(vfp4), m(xfp8)."""
    found = []
    for gm in graphs.modules:
        text = ""
        for node in gm.graph.nodes:
            if "fp4" in str(node.target):
                names = [a for a in node.args if isinstance(a, str) and a.startswith("fprop(")]
                text += "".join(name[len("fprop(")] for name in names)
        found.append(text)
    return found


DIFFER = policy(
    layers=[
        {"blocks": "last 1", "scheme": "mxfp8"},
        {"match": "blocks.0.attn", "scheme": "low"},
        {"match": "blocks.1.*", "scheme": "original"},
    ]
)


def test_each_block_gets_its_own_scheme(graphs):
    net = Net(5)
    stamps = fp4.apply(net, DIFFER)
    compile_blocks(net)
    net(X)
    # blocks 0, 1, 2 (and 3, which is equal), 4; in a block attention first
    assert engines_of(graphs) == ["nnn", "", "nn", "mmm"]
    low = stamps["blocks.0.attn"]
    assert low.startswith("fprop(nvfp4") and stamps["blocks.1.attn"] == "original"
    assert stamps["blocks.2.attn"].endswith("| original") and low in stamps["blocks.2.attn"]
    assert stamps["blocks.4.attn"].startswith("fprop(mxfp8")
    assert net.blocks[4].attn.fp4_scheme == stamps["blocks.4.attn"]
    assert len(stamps) == 5 * 3 + 1


def test_blocks_compute_what_the_whole_model_computes():
    whole, parts = Net(4), Net(4)
    parts.load_state_dict(whole.state_dict())
    fp4.apply(parts, DIFFER)
    whole.head = parts.head = nn.Identity()
    compile_blocks(parts)
    forward_only = [
        step(whole, compiled(whole, DIFFER), X)[0], step(parts, parts, X)[0]
    ]  # fmt: skip
    assert torch.equal(*forward_only)


def test_a_changed_stamp_compiles_again_and_returning_does_not(graphs):
    net = compile_blocks(Net(3))
    counts = []
    for given in (LOW, policy(default="mxfp8", recipe="mxfp8"), LOW):
        fp4.apply(net, given)
        for _ in range(2):
            net(X)
        counts.append(graphs.new())
    assert counts == [1, 1, 0]


def test_one_changed_block_compiles_one_graph(graphs):
    net = compile_blocks(Net(4))
    fp4.apply(net, policy(recipe="mxfp8", default="low"))
    net(X)
    assert graphs.new() == 1
    layers = [{"match": "blocks.2.attn", "scheme": "original"}]
    fp4.apply(net, policy(recipe="mxfp8", default="low", layers=layers))
    net(X)
    assert graphs.new() == 1
    assert schemes(net.blocks[2])["attn"] == "left"


def test_user_blocks_without_apply_are_an_error_that_says_so():
    net = compile_blocks(
        Net(3), policy=policy(layers=[{"blocks": "last 1", "scheme": "mxfp8"}])
    )
    with pytest.raises(fp4.PolicyError, match=r"call fp4.apply\(model, policy\)") as caught:
        net(X)
    assert "\n" not in str(caught.value) and "<dict>:3" in str(caught.value)


def test_the_default_policys_blocks_without_apply_are_a_warning():
    net = compile_blocks(Net(3))
    with precision_warnings() as texts:
        net(X)
    assert texts and all("call fp4.apply(model, policy)" in text for text in texts)


def test_apply_after_compile_on_an_unstamped_model(graphs):
    for parts in (False, True):
        net = Net(2)
        call = compile_blocks(net) if parts else compiled(net)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(X)
        assert set(engines_of(graphs)) == ({"nn"} if parts else {"nnnn"})
        graphs.new()
        fp4.apply(net, LOW)
        call(X)
        assert set(engines_of(graphs)) == ({"nnn"} if parts else {"nnnnnnn"})
        graphs.new()
        torch._dynamo.reset()


def test_a_removed_stamp_compiles_again(graphs):
    net = Net(1)
    fp4.apply(net, LOW)
    call = compiled(net)
    call(X)
    for module in net.modules():
        for key in (stamping.STAMP, stamping.INFO):
            module.__dict__.pop(key, None)
    graphs.new()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(X)
    assert engines_of(graphs) == ["nn"]


def test_stamps_win_and_disagreement_is_an_error():
    net = Net(1)
    fp4.apply(net, LOW)
    compiled(net)(X)
    assert schemes(net)["head"] == "low"
    with pytest.raises(fp4.PolicyError, match="stamped with another policy") as caught:
        compiled(net, policy(default="mxfp8"))(X)
    assert "\n" not in str(caught.value) and "'blocks.0.attn'" in str(caught.value)
    compiled(net, dict(LOW))(X)  # an equal policy agrees, whatever object it is
    compiled(net, {**LOW, "recipe": "fp8-exact"})(X)


def test_policies_that_decide_alike_agree(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("# a comment\nversion: 1\ndefault: low\n")
    net = Net(1)
    fp4.apply(net, str(path))
    compiled(net, LOW)(X)
    fp4.apply(net, path)
    compiled(net, fp4.Policy.load(path))(X)


PHASES = policy(
    default="low",
    phases=[{"from_step": 10, "fprop": "original"}, {"from_step": 20, "scheme": "mxfp8"}],
)


def test_phases(graphs):
    net = Net(1)
    call = compiled(net)
    seen = []
    for at in (0, 9, 10, 19, 20, 5, None):
        stamps = fp4.apply(net, PHASES, step=at)
        step(net, call, X)
        seen.append((at, graphs.new(), stamps["head"][len("fprop(") :][:5]))
    assert seen == [
        (0, 1, "nvfp4"), (9, 0, "nvfp4"), (10, 1, "origi"), (19, 0, "origi"), (20, 1, "mxfp8"),
        (5, 0, "nvfp4"), (None, 0, "nvfp4"),
    ]  # fmt: skip


def test_phases_that_nobody_starts_are_said():
    given = policy(default="low", phases=[{"from_step": 1, "fprop": "original"}])
    said = "its phases begin only where fp4.apply\\(model, policy, step=n\\) is called"
    with pytest.warns(fp4.PrecisionWarning, match=said):
        compiled(Mlp(), given)(X)
    with pytest.warns(fp4.PrecisionWarning, match=said):
        fp4.apply(Mlp(), given)
    model = Mlp()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fp4.apply(model, given, step=0)
        compiled(model, given)(X)
    assert not any("phases" in str(each.message) for each in seen)


def test_a_phase_changes_what_is_computed():
    net = Net(1)
    call = compiled(net)
    results = {}
    for at in (0, 10, 0, 10):
        fp4.apply(net, PHASES, step=at)
        found = step(net, call, X)
        assert at not in results or same(results[at], found)
        results[at] = found
    plain = step(net, net, X)
    assert not torch.equal(results[0][0], plain[0])
    torch.testing.assert_close(results[10][0], plain[0], atol=1e-6, rtol=1e-5)
    gap = results[10][1]["head.weight"] - plain[1]["head.weight"]
    assert 0 < gap.norm() / plain[1]["head.weight"].norm() < 0.2, "backward is still in 8 bits"


def test_options_agree_with_phases():
    net = Net(1)
    call = compiled(net, PHASES)
    for at in (0, 10):
        fp4.apply(net, PHASES, step=at)
        call(X)
    assert fp4.explain(net)["head"].scheme_name == "low, fprop original"


def test_apply_takes_a_policy_in_every_form(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\ndefault: low\n")
    forms = [str(path), path, fp4.Policy.load(path), LOW]
    results = [fp4.apply(Net(1), form) for form in forms]
    assert all(result == results[0] for result in results)
    with pytest.raises(fp4.PolicyError, match=r"\(int\)"):
        fp4.apply(Net(1), 3)
    with pytest.raises(fp4.PolicyError, match="no such file"):
        fp4.apply(Net(1), "nowhere.yaml")
    with pytest.raises(fp4.PolicyError, match="holds for no layer"):
        fp4.apply(Net(1), policy(strict=True, layers=[{"match": "no.such", "scheme": "low"}]))


def test_arguments_of_apply_that_cannot_be_used_are_refused_in_one_line():
    net = Net(1)
    for arguments, words in (
        ((fp4.Policy.default(), net), "the model comes first, not a Policy"),
        (("policy.yaml", net), "the model comes first, not a str"),
        ((net, net), r"a policy is a path, .*, not Net\(.*\(Net\)"),
        ((net, LOW, -1), "step=-1: 0 or a larger whole number"),
        ((net, LOW, 1.5), r"step=1.5: 0 or a larger whole number"),
    ):
        with pytest.raises(fp4.PolicyError, match=words) as caught:
            fp4.apply(*arguments)
        assert "\n" not in str(caught.value) and not hasattr(net.head, "fp4_scheme")


def test_a_strict_policy_may_name_a_raw_parameter(graphs):
    given = policy(strict=True, layers=[{"match": "w1", "scheme": "mxfp8"}])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for apply in (False, True):
            net = Raw()
            if apply:
                fp4.apply(net, given)
            compiled(net, None if apply else given)(X)
            assert schemes(net) == {"w1": "mxfp8", "w2": "left"}


def test_stamps_are_texts_that_parse():
    stamps = fp4.apply(Net(6), policy(strict=True, layers=[{"match": "*.attn", "scheme": "low"}]))
    for text in stamps.values():
        assert str(Stamp.parse(text)) == text and Stamp.parse(text).strict
    assert len(set(stamps.values())) == 3  # attention; MLP or head; the last block's MLP


def test_equal_stamps_share_a_graph_whatever_rule_chose_them(graphs):
    layers = [{"match": f"blocks.{i}.*", "scheme": "low"} for i in range(3)]
    net = Net(6)
    fp4.apply(net, policy(recipe="mxfp8", default="low", layers=layers))
    compile_blocks(net)(X)
    assert graphs.count == 1


def test_names_of_wrapped_models():
    net = Net(2)
    wrapped = nn.ModuleDict({"module": net})
    wrapped = nn.Sequential(net)
    assert set(fp4.apply(wrapped, LOW)) == {f"0.{name}" for name in fp4.apply(net, LOW)}
    whole = torch.compile(net, backend="fp4", options=EAGER)
    assert set(fp4.apply(whole, LOW)) == set(fp4.apply(net, LOW))
    parallel = nn.DataParallel(net)
    assert set(fp4.apply(parallel, LOW)) == set(fp4.apply(net, LOW))


class Raw(nn.Module):
    """A block whose weights belong to no linear."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(D, D) / 8)
        self.w2 = nn.Parameter(torch.randn(D, D) / 8)
        self.gain = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return torch.softmax(x @ self.w1.t(), -1) @ self.w2.t() * self.gain


def test_raw_parameters_are_stamped(graphs):
    net = nn.Module()
    net.blocks = nn.ModuleList(Raw() for _ in range(3))
    given = policy(default="low", layers=[{"match": "blocks.1.w1", "scheme": "mxfp8"}])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fp4.apply(net, given) == {}
    assert net.blocks[1].fp4_scheme_w1.startswith("fprop(mxfp8")
    assert not hasattr(net.blocks[1], "fp4_scheme_gain")
    compile_blocks(net)
    for block in net.blocks:
        block(X)
    assert engines_of(graphs) == ["nn", "mn"]


class Lora(nn.Linear):
    def __init__(self):
        super().__init__(D, D)
        self.down = nn.Parameter(torch.randn(4, D) / 8)
        self.up = nn.Parameter(torch.randn(D, 4) / 8)

    def forward(self, x):
        return super().forward(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def test_other_matrices_of_a_linear_are_layers_of_their_own(graphs):
    given = policy(recipe="mxfp8", default="low", layers=[{"match": "1.down", "scheme": "original"}])
    for apply in (False, True):
        net = nn.Sequential(nn.Linear(D, D), Lora())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if apply:
                fp4.apply(net, given)
            compiled(net, None if apply else given)(X).sum().backward()
        assert schemes(net) == {"0": "low", "1": "low", "1.down": "left", "1.up": "low"}
        assert engines_of(graphs) == ["mmm"]
        graphs.new()
        torch._dynamo.reset()


def test_a_tied_weight_has_the_stamp_of_the_layer_that_uses_it(graphs):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.mlp = nn.Embedding(16, D), Mlp()
            self.lm_head = nn.Linear(D, 16, bias=False)
            self.lm_head.weight = self.wte.weight

        def forward(self, ids):
            return self.lm_head(self.mlp(self.wte(ids)))

    ids = torch.arange(16).view(2, 8)
    for given, wanted in ((policy(default="low", layers=[{"match": "lm_head", "scheme": "original"}]), "nn"),
                          (policy(layers=[{"match": "lm_head", "scheme": "low"}]), "nnn")):  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = Tied()
            compiled(net, given)(ids).sum().backward()
            assert engines_of(graphs) == [wanted] and "lm_head" in schemes(net)
            graphs.new()
            fp4.apply(net, given)
            call = compiled(net)
            call(ids)
            assert engines_of(graphs) == [wanted]
            graphs.new()
            fp4.apply(net, policy(default="original", recipe="bf16"))
            call(ids)
            assert engines_of(graphs) == [""], "the head's stamp is guarded"
            graphs.new()
        torch._dynamo.reset()


def test_stamps_below_a_graph_break(graphs):
    net = Broken(4)
    net.head = nn.Identity()
    fp4.apply(net, DIFFER)
    compiled(net)(X)
    assert engines_of(graphs) == ["nnn", "", "nn", "mmm"]


def test_strict_refusals_name_the_layer_in_the_model():
    net = Net(2)
    net.blocks[1] = net.blocks[1].double()
    fp4.apply(net, policy(default="low", strict=True))
    compile_blocks(net)
    net.blocks[0](X)
    with pytest.raises(fp4.PrecisionError, match="'blocks.1.attn'.*float64"):
        net.blocks[1](X.double())


def test_block_class_and_linear_alone():
    block = Block()
    assert set(fp4.apply(block, {**LOW, "recipe": "mxfp8"})) == {"attn", "mlp.up", "mlp.down"}
    linear = nn.Linear(D, D)
    assert set(fp4.apply(linear, {**LOW, "recipe": "mxfp8"})) == {""}
    compiled(linear)(X)
