"""What is compiled computes what the rewritten graph says: seeds, noise, checkpointing, Inductor."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from backend_models import (
    Broken,
    Checkpointed,
    D,
    Mlp,
    Net,
    aot,
    batch,
    compiled,
    policy,
    same,
    step,
)
from fp4compile.kernels.layer import Layer
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code
from torch.utils.checkpoint import checkpoint

import fp4compile as fp4

pytestmark = pytest.mark.usefixtures("fresh")
X = batch()
RECIPES = ("fp8-exact", "thinking-machines", "nvidia", "mxfp8")


def low(recipe):
    return policy(recipe=recipe, default="low")


def twins(*kinds, n=2):
    """Models of several classes with equal weights."""
    nets = [kind(n) for kind in kinds]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    return nets


# The hidden gradient ------------------------------------------------------------------------------


class Glu(nn.Module):
    def __init__(self, d=D):
        super().__init__()
        self.gate, self.up = nn.Linear(d, 2 * d), nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("kind", [Mlp, Glu])
@pytest.mark.parametrize("recipe", ["fp8-exact", "thinking-machines"])
def test_a_stored_hidden_gradient_is_written_over_the_product(kind, recipe, monkeypatch):
    """As on a GPU, in BF16: Inductor's in-place kernels give the bits of the functional graph."""
    monkeypatch.setattr(Layer, "stores_hidden_gradient", True)
    net, got = kind().bfloat16(), []
    for compiler in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        net.zero_grad(set_to_none=True)
        call = compiled(net, low(recipe), compiler=compiler)
        with fresh_inductor_cache(), inductor_config.patch(fallback_random=True):
            (results, sources) = run_and_get_code(step, net, call, X.bfloat16(), seed=3)
        got.append(results)
    assert same(*got)
    op = "glu_grad_" if kind is Glu else "act_grad_"
    assert sum(source.count(f"torch.ops.fp4.{op}.default(") for source in sources) == 1


# Seeds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_seed_repeats_a_step_and_the_next_step_draws_new_noise(recipe):
    net = Mlp()
    call = compiled(net, low(recipe), compiler="aot_eager")
    first = step(net, call, X, seed=3)
    net.zero_grad(set_to_none=True)
    call(X).square().mean().backward()
    second = {n: p.grad.clone() for n, p in net.named_parameters()}
    assert same(step(net, call, X, seed=3), first)
    for name in ("up.weight", "down.weight"):
        assert not torch.equal(second[name], first[1][name]), name
        noise = (second[name] - first[1][name]).norm() / first[1][name].norm()
        assert noise < 0.6


def test_forward_draws_nothing():
    net = Net(1)
    call = compiled(net, low("fp8-exact"))
    call(X)
    state = torch.get_rng_state()
    with torch.no_grad():
        one = call(X)
    other = call(X)
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(one, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_way_to_compile_takes_the_same_step(recipe):
    """Draws happen in the order of the backward pass, which checkpointing and AOT keep."""
    plain, remade = twins(Net, Checkpointed, n=1)
    wanted = step(plain, compiled(plain, low(recipe)), X)
    if recipe == "fp8-exact":
        assert same(step(plain, compiled(plain, low(recipe), compiler="aot_eager"), X), wanted)
        assert same(step(remade, compiled(remade, low(recipe)), X), wanted)
    assert same(step(remade, compiled(remade, low(recipe), compiler="aot_eager"), X), wanted)


def test_blocks_and_graph_breaks_take_the_same_step():
    whole, broken, parts = twins(Net, Broken, Net)
    for net in (whole, broken, parts):
        net.head = nn.Identity()
        fp4.apply(net, low("fp8-exact"))
    wanted = step(whole, compiled(whole), X)
    assert same(step(broken, compiled(broken), X), wanted)
    for block in parts.blocks:
        block.compile(backend="fp4", options={"compiler": "eager"})
    assert same(step(parts, parts, X), wanted)


def test_other_dropout_masks_do_not_meet_the_layers_draws():
    """Dropout draws in the forward pass, the layers in the backward pass; recomputation restores."""

    class Dropped(Net):
        remake = False

        def forward(self, x):
            for block in self.blocks:
                x = F.dropout(x, 0.3)
                x = checkpoint(block, x, use_reentrant=False) if self.remake else block(x)
                x = F.dropout(x, 0.3)
            return self.head(x)

    class Remade(Dropped):
        remake = True

    plain, remade = twins(Dropped, Remade, n=1)
    wanted = step(plain, compiled(plain, low("fp8-exact")), X)
    assert same(step(remade, compiled(remade, low("fp8-exact")), X), wanted)


# Checkpointing -------------------------------------------------------------------------------------


def test_layers_inside_a_checkpoint_are_rewritten():
    net = Checkpointed(2)
    found = aot(net, X, policy())
    (text,) = found.dynamo
    body = text.split("body0:")[1]
    assert body.count("fp4::linear_act_linear") == 2 and "gelu(" not in text
    assert {name for _, name, _ in found.codes} == {"fp4.quantize.default", "fp4.act_quantize.default"}


def test_codes_remade_in_backward_are_those_of_the_forward():
    """Both graphs quantize the layers' inputs and weights; the codes are equal bit for bit."""
    found = aot(Checkpointed(2), X, low("thinking-machines"))
    made = [entry[1:] for entry in found.codes if entry[0] == "forward"]
    remade = [entry[1:] for entry in found.codes if entry[0] == "backward"]
    # a block: 3 weights, the inputs of attention and of the chain, the hidden tensor; then the head
    assert len(made) == 2 * 6 + 2 and len(remade) == 2 * 6
    for operator, tensors in remade:
        matches = [
            name == operator and all(map(torch.equal, tensors, others)) for name, others in made
        ]
        assert sum(matches) == 1


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing_a_wrapped_function(selective):
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.last = Mlp(), nn.Linear(D, D)

        def forward(self, x):
            extra = {}
            if selective:
                ops = [torch.ops.aten.mm.default]
                context = functools.partial(create_selective_checkpoint_contexts, ops)
                extra = {"context_fn": context}
            return self.last(checkpoint(self.mlp, x, use_reentrant=False, **extra))

    class Straight(Functional):
        def forward(self, x):
            return self.last(self.mlp(x))

    straight, remade = Straight(), Functional()
    remade.load_state_dict(straight.state_dict())
    wanted = step(straight, compiled(straight, low("fp8-exact"), compiler="aot_eager"), X)
    found = step(remade, compiled(remade, low("fp8-exact"), compiler="aot_eager"), X)
    assert same(found, wanted)
    assert {row.status for row in fp4.explain(remade)} == {"rewritten"}


# Inductor ------------------------------------------------------------------------------------------


def test_inductor_computes_what_the_rewritten_graph_says():
    """One compilation, many checks: FP32 rounding apart, Inductor changes nothing."""
    net = Checkpointed(1)
    given = policy(default="low", layers=[{"match": "*.attn", "scheme": "mxfp8"}])
    wanted = step(net, compiled(net, given), X)
    with torch._inductor.config.patch(fallback_random=True):
        call = torch.compile(net, backend="fp4", options={"policy": given, "max_autotune": False})
        found = step(net, call, X)
        again = step(net, call, X)
        net.zero_grad(set_to_none=True)
        call(X).square().mean().backward()
        fresh_noise = net.head.weight.grad.clone()
    torch.testing.assert_close(found[0], wanted[0], atol=0, rtol=1e-6)
    for name, gradient in wanted[1].items():
        gap = (found[1][name] - gradient).norm() / gradient.norm()
        assert gap < 2e-6, (name, gap)
    assert same(found, again) and not torch.equal(fresh_noise, found[1]["head.weight"])
    assert {r.fqn: r.scheme_name for r in fp4.explain(net)}["blocks.0.attn"] == "mxfp8"


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_and_inductors_own_random_numbers(mode):
    """A mode leaves no room for options: the policy comes with the stamps."""
    net = nn.Sequential(nn.Linear(D, D, bias=False))
    fp4.apply(net, policy(recipe="mxfp8", default="low"))
    call = torch.compile(net, backend="fp4", mode=mode)
    first = step(net, call, X, seed=1)
    net.zero_grad(set_to_none=True)
    call(X).square().mean().backward()
    second = net[0].weight.grad.clone()
    assert same(step(net, call, X, seed=1), first)
    assert not same(step(net, call, X, seed=2), first)
    assert not torch.equal(second, first[1]["0.weight"])
    assert fp4.explain(net)["0"].status == "rewritten"


def test_the_quantizers_codes_are_the_public_ones():
    """The graph's forward quantizers give the bits of `fp4.quantize`, whatever compiles it."""
    from fp4compile.kernels import ops  # noqa: F401 - defines torch.ops.fp4

    x = batch(16, D)
    compiled_op = torch.compile(
        lambda x: torch.ops.fp4.quantize(x, "nvfp4:row:fp8_exact", "none", False)[:3],
        backend="aot_eager",
    )
    q = fp4.quantize(x, "nvfp4", outer="row", block_scales="fp8_exact")
    for got in (compiled_op(x), torch.ops.fp4.quantize(x, "nvfp4:row:fp8_exact", "none", False)[:3]):
        assert torch.equal(got[0], q.codes) and torch.equal(got[1], q.scales)
        assert torch.equal(got[2], q.outer)


@pytest.mark.parametrize("kind", [Mlp, Glu])
def test_an_empty_batch_gives_empty_results_and_zero_gradients(kind):
    net = kind()
    call = compiled(net, low("fp8-exact"), compiler="inductor")
    x = torch.randn(0, D, requires_grad=True)
    call(x).sum().backward()
    assert x.grad.shape == (0, D)
    assert all(p.grad.shape == p.shape and not p.grad.any() for p in net.parameters())


def test_a_preactivation_in_8_bits_by_the_policy():
    """Half the bytes of the pre-activation in BF16, the same loss, gradients within its rounding."""
    net, runs, kept = Mlp().bfloat16(), [], []
    for save in ("original", "mxfp8"):
        given = policy(recipe="fp8-exact", default="low", save_preactivation=save)
        runs.append(step(net, compiled(net, given, compiler="aot_eager"), X.bfloat16(), seed=3))
        kept.append(fp4.explain(net, X.bfloat16(), policy=given).saved_bytes)
        torch._dynamo.reset()
    (loss, grads), (loss8, grads8) = runs
    assert torch.equal(loss, loss8)
    tokens = X.numel() // D
    assert kept[0] - kept[1] == tokens * 2 * D * 2 - tokens * 2 * D * 33 // 32
    off = (grads["up.weight"] - grads8["up.weight"]).float().norm() / grads["up.weight"].float().norm()
    assert 0 < off < 0.05 and torch.equal(grads["down.weight"], grads8["down.weight"])
