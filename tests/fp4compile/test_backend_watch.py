"""A layer that the policy names never runs in high precision unnoticed, and there is no false alarm."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from backend_models import (
    Block,
    Broken,
    D,
    Disabled,
    Mlp,
    Net,
    Skipped,
    batch,
    compiled,
    policy,
    precision_warnings,
    schemes,
    step,
)
from torch import nn

import fp4compile as fp4
from fp4compile import dynamo, watching

pytestmark = pytest.mark.usefixtures("fresh")
X = batch()
LOW = policy(default="low")
STRICT = policy(default="low", strict=True)


def alarms(texts):
    return [text.split("'")[1] for text in texts if "ran outside every compiled graph" in text]


# Frames that Dynamo runs eagerly ------------------------------------------------------------------


class Holder(nn.Module):
    """``inner`` between two parts that are compiled; no loop, so that Dynamo resumes."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(D, D), inner, nn.Linear(D, D)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def test_disabled_layers_are_noticed_by_name():
    call = compiled(Holder(Disabled()), LOW)
    with precision_warnings() as texts:
        for _ in range(3):
            call(X)
    assert alarms(texts) == ["inner.up", "inner.down"], "once each"
    assert "'recipe fp8-exact: chain mlp' names it" in texts[-1] and "fp4.explain" in texts[-1]


def test_two_models_with_equal_names_are_both_noticed():
    """Also where Python shows an equal warning only once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            compiled(Holder(Disabled()), LOW)(X)
            torch._dynamo.reset()
    assert alarms([str(w.message) for w in caught]) == ["inner.up", "inner.down"] * 2


def test_disabled_layers_raise_when_strict():
    with pytest.raises(fp4.PrecisionError, match="'inner.up'") as caught:
        compiled(Holder(Disabled()), STRICT)(X)
    assert "\n" not in str(caught.value)


def test_a_chain_rule_is_decided_by_the_chain():
    """Under the default policy only layers of an MLP are named."""
    net = Net(3)
    net.blocks[1].mlp = Disabled()
    net.blocks[2] = nn.Sequential(torch._dynamo.disable(nn.Linear(D, D)), nn.LayerNorm(D), Mlp())
    call = compiled(net)
    with precision_warnings() as texts:
        for _ in range(2):
            call(X).sum().backward()
    assert alarms(texts) == ["blocks.1.mlp.up", "blocks.1.mlp.down"]


class Straight(Mlp):
    """No activation between, and one that is read by no linear: no chain."""

    @torch._dynamo.disable
    def forward(self, x):
        return F.gelu(self.down(self.up(x) * 2))


def test_linears_without_an_activation_between_are_no_chain():
    call = compiled(Holder(Straight()))
    with precision_warnings() as texts:
        for _ in range(2):
            call(X)
    assert not alarms(texts)


class EagerGated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, D), nn.Linear(D, D)
        self.down, self.other = nn.Linear(D, D), nn.Linear(D, D)

    @torch._dynamo.disable
    def forward(self, x):
        h = F.silu(self.gate(x)) * self.up(x)
        return self.other(torch.softmax(self.down(F.dropout(h, 0.1)), -1))


def test_a_gated_chain_is_seen_in_eager_runs():
    call = compiled(Holder(EagerGated()))
    with precision_warnings() as texts:
        call(X)
    assert sorted(alarms(texts)) == ["inner.down", "inner.gate", "inner.up"]


class Acts(nn.Module):
    """An eager MLP whose down projection reads ``between`` of two linears' outputs."""

    def __init__(self, between):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(D, D) for _ in range(3))
        self.between = between

    @torch._dynamo.disable
    def forward(self, x):
        return self.down(self.between(self.gate(x), self.up(x)))


CHAINS = {
    "gelu": (lambda g, u: F.gelu(g), {"gate", "down"}),
    "relu in place": (lambda g, u: F.relu_(u), {"up", "down"}),
    "swiglu": (lambda g, u: F.silu(g) * u, {"gate", "up", "down"}),
    "dropout, off": (lambda g, u: F.dropout(F.relu(u) ** 2, training=False), {"up", "down"}),
    "none": (lambda g, u: u, set()),
    "scaled": (lambda g, u: u * 2, set()),
    "attention": (lambda g, u: torch.softmax(g @ u.mT, -1) @ u, set()),
    "zeros": (lambda g, u: F.relu(u) * 0, set()),
    "product": (lambda g, u: g * u, set()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CHAINS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_chain_is_seen_in_the_values(case, dtype, mode):
    between, chain = CHAINS[case]
    call = compiled(Holder(Acts(between)).to(dtype))
    with mode(), precision_warnings() as texts:
        for _ in range(2):
            call(X.to(dtype))
    assert sorted(alarms(texts)) == sorted(f"inner.{name}" for name in chain)


def test_layers_in_no_chain_are_compared_a_few_times_only(monkeypatch):
    seen, original = [], watching._sample
    monkeypatch.setattr(watching, "_sample", lambda x: seen.append(x) or original(x))
    call = compiled(Holder(Acts(CHAINS["none"][0])))
    with torch.no_grad():
        for _ in range(3 * watching.TRIES):
            call(X)
    layers = 3 + 2  # the holder's own may run eagerly, too; an input and an output each
    assert 0 < len(seen) <= layers * 2 * watching.TRIES


def test_eager_chains_hold_no_graph_alive():
    import gc
    import weakref

    call = compiled(Holder(Disabled()))
    call(X)
    x = X.clone().requires_grad_()
    y = call(x)
    seen = weakref.ref(x)
    del x, y
    gc.collect()
    assert seen() is None


def test_a_frame_that_cannot_be_resumed():
    """Its linear runs eagerly (from torch 2.13 compiled alone), its submodules' frames do not."""
    net = Net(3)
    net.blocks[1] = Skipped()
    call = compiled(net, policy(default="low"))
    with precision_warnings() as texts:
        for _ in range(2):
            call(X).sum().backward()
    found = schemes(net)
    eager = [name for name in ("blocks.1.attn", "head") if found[name] == "not compiled"]
    assert alarms(texts) == eager and found["blocks.1.mlp.up"] == "low"


class CastedLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class Tried(nn.Module):
    """Its frame is skipped; a linear with a forward of its own is compiled alone, torch's is not."""

    def __init__(self):
        super().__init__()
        self.own, self.torchs = CastedLinear(D, D), nn.Linear(D, D)

    def forward(self, x):
        try:
            torch._dynamo.graph_break()
            return self.torchs(self.own(self.own(x)))
        finally:
            self.ran = True


def test_a_linear_that_is_compiled_alone_is_no_alarm():
    net = Holder(Tried())
    call = compiled(net, LOW)
    with precision_warnings() as texts:
        for _ in range(3):
            call(X)
    found = schemes(net)
    assert found["inner.own"] == "low" and watching.eager_runs(net.inner.own) == 0
    assert alarms(texts) == (["inner.torchs"] if found["inner.torchs"] == "not compiled" else [])


def test_a_linear_that_is_no_longer_compiled_alone_is_an_alarm():
    net = Holder(Tried())
    call = compiled(net, LOW, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1), precision_warnings() as texts:
        call(X)
        assert watching.eager_runs(net.inner.own) == 0
        call(batch(3, 8, D))
    assert "inner.own" in alarms(texts)


def test_an_eager_run_after_a_resumed_frame_is_an_alarm():
    """The frame after the break calls ``last`` from its stack: that is no frame of its own."""
    net = Holder(Tried())
    call = compiled(net, LOW)
    with precision_warnings():
        call(X)
        call(X)
    assert schemes(net)["last"] == "low" and watching.eager_runs(net.last) == 0
    with precision_warnings() as texts:
        net.last(X)
    assert alarms(texts) == ["last"] and not watching.ran_alone(net.last)


# Dynamo's recompile limit -------------------------------------------------------------------------


def test_at_the_recompile_limit_layers_are_noticed():
    call = compiled(Net(1), LOW, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), precision_warnings() as texts:
        for n in range(2, 7):
            call(batch(n, 8, D))
    assert alarms(texts) == ["blocks.0.attn", "blocks.0.mlp.up", "blocks.0.mlp.down", "head"]


def test_at_the_recompile_limit_a_strict_policy_raises():
    call = compiled(Net(1), STRICT, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        call(batch(2, 8, D))
        call(batch(3, 8, D))
        with pytest.raises(fp4.PrecisionError, match="'blocks.0.attn'.*recompile limit"):
            call(batch(4, 8, D))
        call(batch(2, 8, D))  # the graphs that exist are still used


def test_stamped_layers_at_the_recompile_limit():
    """Under per-block compile the block's frame is at its limit, the stamps are not."""
    net = Net(2)
    fp4.apply(net, STRICT)
    for block in net.blocks:
        block.compile(backend="fp4", options={"compiler": "eager"}, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        net.blocks[0](batch(2, 8, D))
        with pytest.raises(fp4.PrecisionError, match="'blocks.0.attn'"):
            net.blocks[0](batch(3, 8, D))


def test_models_of_one_class_do_not_use_up_each_others_graphs(graphs):
    """Arms of one experiment: the same code object, another policy each, training and evaluation."""
    for i in range(7):
        net = Mlp()
        given = policy(default="low", layers=[{"match": f"h{i}", "scheme": "mxfp8"}])
        call = compiled(net, given, dynamic=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(net, call, X)
            with torch.no_grad():
                call(X)
        assert graphs.new() == 2, f"arm {i}"
        with precision_warnings() as texts:
            step(net, call, X)
        assert not texts and schemes(net)["down"] == "low"


def test_widths_of_one_class_do_not_use_up_each_others_graphs(graphs):
    for i in range(10):
        net = Mlp(d=16 * (i + 1))
        compiled(net, LOW, dynamic=False)(batch(4, 8, 16 * (i + 1)))
        assert graphs.new() == 1 and schemes(net)["down"] == "low"


def test_a_users_own_limit_is_kept_for_one_model(graphs):
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            call = compiled(Mlp(16), LOW, dynamic=False)
            for n in range(2, 5):
                call(batch(n, 8, 16))
            assert graphs.new() == 2
            torch._dynamo.reset()


def test_explaining_uses_up_no_graphs(graphs):
    net = nn.Sequential(nn.Linear(D, D))
    for _ in range(9):
        fp4.explain(net, (X,))
    call = compiled(net, LOW)
    with precision_warnings() as texts:
        call(X)
    assert graphs.new() == 1 and not alarms(texts)
    for _ in range(9):
        fp4.explain(net, (X,))
    call(X)
    assert graphs.new() == 0, "explaining drops no graph"
    call(batch(2, 3, 8, D))
    assert graphs.new() == 1, "nor does it use up the limit"


def test_apply_raises_the_limit_to_what_its_phases_need(graphs):
    gemms = ("fprop", "dgrad", "wgrad")
    kept = [[g for i, g in enumerate(gemms) if mask >> i & 1] for mask in range(1, 7)]
    phases = [
        {"from_step": at + 1, **dict.fromkeys(off, "original")} for at, off in enumerate(kept)
    ]
    net = nn.Sequential(nn.Linear(D, D))
    given = policy(recipe="mxfp8", default="low", strict=True, phases=phases)
    call = compiled(net)
    for at in range(len(phases) + 1):
        fp4.apply(net, given, step=at)
        call(X).sum().backward()
        with torch.no_grad():
            call(X)
        assert graphs.new() == 2, at


# Graph breaks -------------------------------------------------------------------------------------

MIXED = policy(
    layers=[
        {"match": "blocks.1.*", "scheme": "original"},
        {"match": "blocks.2.attn", "scheme": "mxfp8"},
        {"blocks": "last 1", "chain": "mlp", "scheme": "mxfp8"},
    ],
)
MIXED_SCHEMES = {
    "blocks.0.attn": "left", "blocks.0.mlp.up": "low", "blocks.0.mlp.down": "low",
    "blocks.1.attn": "left", "blocks.1.mlp.up": "left", "blocks.1.mlp.down": "left",
    "blocks.2.attn": "mxfp8", "blocks.2.mlp.up": "low", "blocks.2.mlp.down": "low",
    "blocks.3.attn": "left", "blocks.3.mlp.up": "mxfp8", "blocks.3.mlp.down": "mxfp8",
    "head": "left",
}  # fmt: skip


@pytest.mark.parametrize("kind", [Net, Broken])
def test_every_block_gets_its_scheme_below_a_graph_break(kind):
    net = kind(4)
    call = compiled(net, MIXED)
    with precision_warnings() as texts:
        for _ in range(2):
            call(X)
    found = schemes(net)
    if kind is Broken:  # the head runs alone: torch 2.11 does not compile it
        assert found.pop("head") in ("left", "not compiled")
    assert found.items() <= MIXED_SCHEMES.items() and len(found) >= 12 and not texts


def test_broken_and_whole_models_compute_the_same():
    """What the report says is what runs: equal steps with and without graph breaks."""
    whole, broken = Net(4), Broken(4)
    whole.head = broken.head = nn.Identity()
    broken.load_state_dict(whole.state_dict())
    given = policy(**{**MIXED, "schemes": {"mine": FORWARD_ONLY}, "default": "mine"})
    one = step(whole, compiled(whole, given), X)
    other = step(broken, compiled(broken, given), X)
    assert torch.equal(one[0], other[0])
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], atol=1e-6, rtol=1e-5)


FORWARD_ONLY = {
    "fprop": {
        "activation": {"format": "nvfp4", "outer": "row"},
        "weight": {"format": "nvfp4", "outer": "tensor"},
    },
    "dgrad": "original",
    "wgrad": "original",
}


def test_blocks_share_graphs_below_a_graph_break(graphs):
    net = Broken(8)
    compiled(net, policy(default="low", layers=[{"match": "blocks.5.*", "scheme": "mxfp8"}]))(X)
    # the first block (its input has no gradient), the others, block 5, the last (recipe), the head
    assert graphs.count <= 5
    assert schemes(net)["blocks.4.mlp.up"] == "low" and schemes(net)["blocks.5.attn"] == "mxfp8"


class RawBlock(nn.Module):
    """Weights that belong to no linear."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2 * D, D) / 8)
        self.w2 = nn.Parameter(torch.randn(D, 2 * D) / 8)

    def forward(self, x):
        return x + torch.softmax(x @ self.w1.t(), -1) @ self.w2.t()


class RawBroken(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(RawBlock() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def kinds(graphs):
    """The forward formats of each graph's fp4 nodes."""
    found = []
    for gm in graphs.modules:
        nodes = [n for n in gm.graph.nodes if "fp4" in str(n.target)]
        found.append([str(n.args[3]).partition(":")[0].removeprefix("fprop(") for n in nodes])
    return found


def test_raw_parameters_below_a_graph_break(graphs):
    layers = [{"match": "blocks.1.w1", "scheme": "mxfp8"}, {"match": "blocks.2.w2", "scheme": "low"}]
    net = RawBroken()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(net, policy(layers=layers))(X.requires_grad_())
    assert kinds(graphs) == [[], ["mxfp8"], ["nvfp4"]]
    assert [r.fqn for r in fp4.explain(net)][:2] == ["blocks.0.w1", "blocks.0.w2"]


def test_nested_modules_in_resumed_frames():
    class Resumed(Net):
        def forward(self, x):
            x = self.blocks[0](x)
            print(end="")
            x = self.blocks[1](x)
            print(end="")
            return self.head(self.blocks[2](x))

    net = Resumed(3)
    given = policy(
        layers=[{"match": "blocks.1.mlp.*", "scheme": "mxfp8"}, {"match": "head", "scheme": "low"}]
    )
    call = compiled(net, given)
    with precision_warnings() as texts:
        call(X)
        call(X)
    found = schemes(net)
    assert not texts
    assert found["blocks.0.mlp.up"] == "low" and found["blocks.1.mlp.up"] == "mxfp8"
    assert found["head"] == "low" and found["blocks.2.attn"] == "left"


def test_another_policy_after_a_graph_break_replaces_the_backends_own_stamps():
    net = Broken(3)
    compiled(net, policy(default="low"))(X)
    compiled(net, policy(default="mxfp8", recipe="mxfp8"))(X)
    assert schemes(net)["blocks.1.mlp.up"] in ("low", "mxfp8")
    assert fp4.explain(net)["blocks.1.mlp.up"].scheme.startswith("fprop(mxfp8")
    report = fp4.explain(net, (X,), policy=policy(default="original", recipe="bf16"))
    assert {row.status for row in report if row.fqn != "head"} == {"left"}


def test_the_backend_never_replaces_a_users_stamps():
    net = Broken(2)
    fp4.apply(net, LOW)
    before = net.blocks[0].attn.fp4_scheme
    net.head = CastedLinear(D, 16)  # not stamped, and compiled alone
    call = compiled(net)
    for _ in range(2):
        call(X)
    assert net.blocks[0].attn.fp4_scheme == before and hasattr(net.head, "fp4_scheme")
    assert schemes(net)["blocks.0.attn"] == "low"


# No false alarm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Net, Broken])
@pytest.mark.parametrize("given", [None, STRICT])
def test_a_normal_run_has_no_alarm(kind, given):
    net = kind(2)
    if kind is Broken:
        net.head = nn.Identity()  # it runs outside of the blocks' frames
    call = compiled(net, given)
    with precision_warnings() as texts:
        for _ in range(2):
            net.train()
            call(X).sum().backward()
            net.eval()
            with torch.no_grad():
                call(batch(2, 8, D))
            with torch.inference_mode():
                call(batch(3, 8, D))
            with torch.autocast("cpu", torch.bfloat16):
                call(X).sum().backward()
    assert not texts


def test_layers_outside_of_compiled_blocks_are_no_alarm_under_the_default_policy():
    """Compiling block by block leaves the head eager; it is in no MLP chain."""
    net = Net(6)
    fp4.apply(net, policy(strict=True))
    for block in net.blocks:
        block.compile(backend="fp4", options={"compiler": "eager"})
    with precision_warnings() as texts:
        for _ in range(2):
            net(X).sum().backward()
    assert not texts


def test_the_original_model_in_eager_mode_is_noticed():
    net = Net(1)
    compiled(net, LOW)(X)
    with precision_warnings() as texts:
        net(X)
    assert "blocks.0.attn" in alarms(texts)


def test_excluded_layers_are_no_alarm():
    net = Holder(Disabled())
    call = compiled(net, policy(default="low", layers=[{"match": "inner.*", "scheme": "original"}]))
    with precision_warnings() as texts:
        call(X)
    assert not alarms(texts)


# Hooks --------------------------------------------------------------------------------------------


def test_state_dict_is_untouched():
    net = Net(2)
    keys = list(net.state_dict())
    compiled(net, LOW)(X).sum().backward()
    fp4.apply(net, LOW)
    assert list(net.state_dict()) == keys
    assert [n for n, _ in net.named_buffers()] == [] and len(list(net.parameters())) == len(keys)
    Net(2).load_state_dict(net.state_dict(), strict=True)
    net.load_state_dict(Net(2).state_dict(), strict=True)


@pytest.mark.parametrize("stamped", [False, True])
def test_copies_of_a_watched_model(stamped):
    net = Net(1)
    if stamped:
        fp4.apply(net, STRICT)
    compiled(net, None if stamped else STRICT)(X)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(buffer, weights_only=False),
    ]
    for twin in copies:
        assert list(twin.state_dict()) == list(net.state_dict())
        if stamped:  # the stamp names the copy's layers, too
            with pytest.raises(fp4.PrecisionError, match="'blocks.0.attn'"):
                twin(X)
        else:  # nobody asked for the copy to be compiled
            twin(X)
        torch.testing.assert_close(compiled(twin)(X), compiled(twin)(X))
    assert not [m for m in copies[0].modules() if len(m._forward_hooks) > 1]


def test_hooks_are_registered_once():
    net = Net(1)
    for recipe in ("fp8-exact", "mxfp8", "fp8-exact"):
        fp4.apply(net, policy(default="low", recipe=recipe))
        compiled(net)(X)
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in net.modules()]
    assert max(hooks) == 1


def test_a_users_hooks_run_in_order():
    seen = []
    net = Net(1)
    net.head.register_forward_pre_hook(lambda m, a: seen.append("before"))
    net.head.register_forward_hook(lambda m, a, out: out * 2)
    whole = compiled(net, LOW)
    first = whole(X)
    second = whole(X)
    assert torch.equal(first, second) and seen.count("before") >= 1
    net.head._forward_hooks.clear()
    torch._dynamo.reset()
    assert torch.allclose(compiled(net, LOW)(X) * 2, first)


def test_eager_hooks_are_inlined_but_never_compiled():
    seen = []

    def hook(module, args):
        seen.append(torch.compiler.is_compiling())

    dynamo.eager_hook(hook)
    net = Holder(Tried())
    net.inner.torchs.register_forward_pre_hook(hook)
    net.first.register_forward_pre_hook(hook)
    torch.compile(net, backend="eager")(X)
    assert sorted(set(seen)) == [False, True]


def test_the_self_test_fails_where_guards_do_not_work(monkeypatch):
    dynamo.self_test.cache_clear()
    monkeypatch.setattr(dynamo, "guard_stamp", lambda *args: None)
    with pytest.raises(fp4.PrecisionError, match="does not offer"):
        fp4.apply(Net(1), LOW)
    monkeypatch.undo()
    dynamo.self_test.cache_clear()
    torch._dynamo.reset()
    dynamo.self_test()


def test_block_alone():
    block = Block()
    with precision_warnings() as texts:
        compiled(block)(X)
    assert not alarms(texts)


# Models of which Dynamo captures nothing, and functions without a module -------------------------


class Loop(nn.Module):
    """A Python loop that Dynamo gives up: it skips the frame and never asks a backend."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
            if x.abs().max().item() > 1e4:
                x = x / 2
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("kind", [Loop, Recurrent])
@pytest.mark.parametrize("in_place", [False, True])
def test_layers_of_skipped_frames_are_rewritten_alone(kind, in_place):
    net, x = kind(), torch.randn(4, 2, 64)
    want = net(x)
    options = {"compiler": "eager", "policy": policy(default="low", strict=True)}
    call = net if in_place else torch.compile(net, backend="fp4", options=options)
    if in_place:
        net.compile(backend="fp4", options=options)
    assert not torch.equal(call(x), want)
    assert {row.status for row in fp4.explain(net)} == {"rewritten"}


def test_layers_under_vmap_of_a_model_without_a_graph_are_an_error_when_strict():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))

        def forward(self, x):
            return torch.vmap(self.inner)(x)

    net = Mapped()
    with pytest.raises(fp4.PrecisionError, match="'inner.1'"):
        compiled(net, policy(default="low", strict=True))(torch.randn(4, 2, 64))


def test_a_function_over_plain_tensors_and_layers_that_stay_are_said():
    w = torch.randn(64, 32, requires_grad=True)

    def product(x):
        return x @ w

    with precision_warnings() as texts:
        torch.compile(product, backend="fp4", options={"compiler": "eager"})(torch.randn(4, 64))
    assert [t for t in texts if "nothing was rewritten in 'product'" in t]
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).double())
    net[1].forward = lambda x: F.linear(x.double(), net[1].weight).float()
    with precision_warnings() as texts:
        compiled(net, policy(default="low"))(torch.randn(4, 64))
    stay = [t for t in texts if "stay" in t]
    assert len(stay) == 1 and "float64" in stay[0]
