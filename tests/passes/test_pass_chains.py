"""Which linears form a chain, and why others do not."""

import pytest
import torch
import torch.nn.functional as F
from fp4compile.passes.chains import find_chains
from fp4compile.passes.sites import find_sites
from pass_capture import by_name, compiled, everything, same_as_eager
from pass_models import ACTS, GPT2MLP, MLP, FusedGated, Gated
from torch import nn

X = torch.randn(2, 5, 32)


def found(model, *args, **options):
    """The chains that `find_chains` returns for a model's graph."""
    chains = []
    compiled(model, *args, inspect=lambda gm: chains.extend(find_chains(find_sites(gm))), **options)
    return chains


def reasons(run):
    return [row.reason for row in run.rows]


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h.contiguous(),
        lambda h: h.to(torch.float32),
        lambda h: h.view(10, 64),
        lambda h: h.reshape(-1, 64).clone(),
        lambda h: h.flatten(0, 1),
        lambda h: h.unsqueeze(0),
        lambda h: h.view(5, 2, 64),
        lambda h: F.dropout(h, 0.3, training=False),
    ],
)
def test_what_may_stand_between(between):
    run = same_as_eager(MLP(between=between), X)
    assert run.counts == {"linear_act_linear": 1}


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h.transpose(0, 1),
        lambda h: h.view(2, 10, 32).repeat(1, 1, 2),
        lambda h: h.detach(),
        lambda h: F.layer_norm(h, (64,)),
        lambda h: h + 1,
        lambda h: h.flip(-1),
        lambda h: h.view(2, 64, 5).view(2, 5, 64),
    ],
)
def test_what_may_not_stand_between(between):
    run = same_as_eager(MLP(between=between), X)
    assert run.counts == {"linear": 2}
    assert reasons(run) == ["", ""] and {row.rule for row in run.rows} == {"default"}


def test_training_dropout_keeps_the_role_and_separates_the_layers():
    model = MLP(p=0.1)
    run = same_as_eager(model, X)
    assert run.counts == {"linear": 2}
    assert reasons(run) == ["dropout p=0.1 between: no chain"] * 2
    assert {row.rule for row in run.rows} == {"chain: mlp"}, "the same precision as in evaluation"
    run = compiled(model.eval(), X)
    assert run.counts == {"linear_act_linear": 1} and reasons(run) == ["", ""]


def test_dropout_of_a_dynamic_graph():
    run = compiled(MLP(p=0.1), X, dynamic=True)
    assert reasons(run) == ["dropout p=0.1 between: no chain"] * 2
    assert compiled(MLP(p=0.0), X, dynamic=True).counts == {"linear_act_linear": 1}


HALVES = {
    "chunk": lambda z: z.chunk(2, dim=-1),
    "up first": lambda z: reversed(z.chunk(2, dim=-1)),
    "split": lambda z: z.split(64, -1),
    "split sizes": lambda z: torch.split(z, [64, 64], dim=2),
    "tensor_split": lambda z: z.tensor_split(2, dim=-1),
    "slices": lambda z: (z[..., :64], z[..., 64:]),
    "slices of all axes": lambda z: (z[:, :, 64:], z[:, :, :64]),
    "negative": lambda z: (z[..., :-64], z[..., -64:]),
    "narrow": lambda z: (z.narrow(-1, 64, 64), z.narrow(2, 0, 64)),
}


@pytest.mark.parametrize("halves", HALVES)
def test_halves_of_one_linear_are_gate_and_up(halves):
    run = same_as_eager(FusedGated(HALVES[halves], F.gelu, bias=True), X)
    assert run.counts == {"gated_linear": 1}
    assert [(row.fqn, row.shape, row.chain, row.reason) for row in run.rows] == [
        ("gate_up", "128×32", 0, ""),
        ("down", "32×64", 0, ""),
    ]
    assert " linear(" not in run.after[0] and "split(" not in run.after[0]


def test_halves_of_a_transposed_weight_and_without_bias():
    slices = HALVES["slices"]
    assert same_as_eager(FusedGated(conv1d=True), X, dynamic=True).counts == {"gated_linear": 1}
    assert same_as_eager(FusedGated(slices), X, dynamic=True).counts == {"gated_linear": 1}
    assert same_as_eager(FusedGated().bfloat16(), X.bfloat16(), atol=3e-2).counts == {
        "gated_linear": 1
    }


@pytest.mark.parametrize(
    "halves",
    [
        lambda z: (z[..., ::2], z[..., 1::2]),
        lambda z: (z[..., :64], z[..., 32:96]),
        lambda z: (z[..., :64], z[..., :64] * 1),
        lambda z: (z.chunk(4, -1)[0].repeat(1, 1, 2), z[..., 64:]),
        lambda z: (z.view(2, 5, 64, 2).unbind(-1)),
    ],
)
def test_other_parts_of_one_linear_are_no_chain(halves):
    assert same_as_eager(FusedGated(halves), X).counts == {"linear": 2}


def test_interleaved_gate_and_up_have_the_role():
    run = same_as_eager(FusedGated(lambda z: (z[..., ::2], z[..., 1::2])), X)
    assert reasons(run) == ["gate and up are one fused linear, and not its halves: no chain"] * 2


def test_a_fused_linear_that_is_read_outside():
    class Read(FusedGated):
        def forward(self, x):
            z = self.gate_up(x)
            gate, up = z.chunk(2, -1)
            return self.down(F.silu(gate) * up) + z.mean() + gate.mean()

    run = same_as_eager(Read(), X)
    assert run.counts == {"linear": 2}
    assert reasons(run)[0].startswith("the activation is read outside")


class Custom(nn.Module):
    """An MLP whose forward is given."""

    def __init__(self, forward):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.third = nn.Linear(32, 32)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def read_outside(m, x):
    h = F.gelu(m.up(x))
    return m.down(h) + h.mean()


def linear_read_outside(m, x):
    z = m.up(x)
    return m.down(F.gelu(z)) + z.mean()


def input_changed(m, x):
    x = x * 1
    h = F.linear(x, m.up.weight.requires_grad_(False), m.up.bias)
    x.add_(1)
    return m.down(F.gelu(h)) + x


def no_grad_first(m, x):
    with torch.no_grad():
        h = m.up(x)
    return m.down(F.gelu(h))


def autocast_first(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.up(x)
    return m.down(F.gelu(h.float()))


def two_readers(m, x):
    h = F.gelu(m.up(x))
    return m.down(h) + F.linear(h, m.down.weight)


def rounded(m, x):
    return m.down(F.gelu(m.up(x).bfloat16()).float())


@pytest.mark.parametrize(
    "function, why",
    [
        (read_outside, "the activation is read outside (mean): no chain"),
        (linear_read_outside, "the activation is read outside (mean): no chain"),
        (input_changed, "an in-place operation between (add_): no chain"),
        (no_grad_first, "autocast or grad mode changes between: no chain"),
        (autocast_first, "autocast or grad mode changes between: no chain"),
        (rounded, "the activation is cast to another dtype: no chain"),
    ],
)
def test_blocked_with_a_reason(function, why):
    run = same_as_eager(Custom(function), X, atol=2e-2 if "auto" in function.__name__ else 2e-5)
    assert run.counts == {"linear": 2}
    assert reasons(run) == [why] * 2
    assert {row.rule for row in run.rows} == {"chain: mlp"}


class OwnBackward(torch.autograd.Function):
    """BLOOM's and Megatron's way to write an activation."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * (1 - t * t) * (0.79788456 + 0.1070322243 * x * x) + 0.5 * (1 + t)
        return g * slope


class StraightThrough(torch.autograd.Function):
    """The forward is GELU's, the backward is not its derivative: it must stay."""

    @staticmethod
    def forward(ctx, x):
        return x * 0.5 * (1.0 + torch.erf(x * 0.7071067811865476))

    @staticmethod
    def backward(ctx, g):
        return g


class Doubled(torch.autograd.Function):
    """No activation of the table."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@pytest.mark.parametrize("function", [OwnBackward, StraightThrough, Doubled])
def test_an_autograd_function_keeps_its_backward(function):
    run = same_as_eager(MLP(between=lambda h: function.apply(h), act=nn.Identity()), X)
    assert run.counts == {"linear": 2}
    known = function is not Doubled
    why = "the activation is an autograd.Function with a backward of its own: no chain"
    assert reasons(run) == [why if known else ""] * 2
    assert {row.rule for row in run.rows} == {"chain: mlp" if known else "default"}


def test_a_hidden_tensor_with_two_linears():
    run = same_as_eager(Custom(two_readers), X)
    assert run.counts == {"linear": 3}
    assert reasons(run)[0].startswith("the activation is read outside")


def test_three_linears_make_one_chain_and_a_layer():
    model = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)
    )
    run = same_as_eager(model, X)
    assert run.counts == {"linear_act_linear": 1, "linear": 1}
    assert [row.chain for row in run.rows] == [0, 0, None]
    assert reasons(run) == ["", "", "2 ends another chain: no chain"]
    late = by_name({"0": "original", "2": "low", "4": "low"})
    run = same_as_eager(model, X, decide=late)
    assert run.counts == {"linear_act_linear": 1, "left": 1}
    assert [row.chain for row in run.rows] == [None, 0, 0]


def test_consecutive_mlps():
    run = same_as_eager(nn.Sequential(MLP(), MLP(), Gated()), X)
    assert run.counts == {"linear_act_linear": 2, "gated_linear": 1}
    assert [row.chain for row in run.rows] == [0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("left", ["up", "down"])
def test_one_original_layer(left):
    decide = by_name({left: "original"}, default="low")
    run = same_as_eager(MLP(), X, decide=decide)
    other = {"up": "down", "down": "up"}[left]
    assert run.counts == {"linear": 1, "left": 1}
    assert run.row(other).reason == f"{left} stays as it is: no chain"
    assert (run.row(left).status, run.row(left).reason) == ("left", f"match: {left}")


def test_two_schemes_in_one_chain():
    run = same_as_eager(MLP(), X, decide=by_name({"up": "low", "down": "mxfp8"}))
    assert run.counts == {"linear_act_linear": 1}
    assert "'gelu', $0, $1, f32, f32)" in run.after[0]


def test_refused_layer_blocks_its_chain():
    class View(MLP):
        def forward(self, x):
            return self.down(F.gelu(F.linear(x, self.up.weight[:64])))

    run = same_as_eager(View(), X)
    assert run.counts == {"linear": 1, "left": 1}
    assert run.row("down").reason == "up cannot be rewritten: no chain"


@pytest.mark.parametrize("which", [0, 1])
def test_gated_inputs_must_be_one(which):
    class Two(Gated):
        def forward(self, x):
            a, b = (x, x * 2) if which else (x.view(10, 32), x.reshape(10, 32))
            return self.down(F.silu(self.gate(a)) * self.up(b))

    run = same_as_eager(Two(), X)
    assert run.counts == ({"linear": 3} if which else {"gated_linear": 1})


def test_broadcast_gate_is_no_chain():
    class Broadcast(Gated):
        def forward(self, x):
            return self.down(F.silu(self.gate(x[:, :1])) * self.up(x[:, :1]).expand(2, 5, 64))

    assert same_as_eager(Broadcast(), X).counts == {"linear": 3}


def test_low_rank_pair_is_no_chain():
    """LoRA: two linears without an activation between."""
    model = nn.Sequential(nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False))
    run = same_as_eager(model, X)
    assert run.counts == {"linear": 2} and {row.rule for row in run.rows} == {"default"}


@pytest.mark.parametrize(
    "view, dynamic_sizes",
    [
        (lambda h: h.flatten(0, 1), "[-1, 32]"),
        (lambda h: h.view(h.shape[1], h.shape[0], 64), "[%3, %2, 32]"),
        (lambda h: h.reshape(h.shape[0] * h.shape[1], 1, h.size(-1)), "[-1, 1, 32]"),
    ],
)
def test_reshape_of_symbolic_sizes(view, dynamic_sizes):
    run = same_as_eager(MLP(between=view), X, dynamic=True)
    assert run.counts == {"linear_act_linear": 1}
    assert (
        f"= reshape(%9, {dynamic_sizes})" in run.after[0] or f", {dynamic_sizes})" in run.after[0]
    )


def test_find_chains_returns_every_chain():
    (chain,) = found(GPT2MLP(), X)
    assert chain.act.name == "gelu_tanh" and chain.blocked is None
    assert [site.name for site in chain.sites] == ["c_fc", "c_proj"]
    (chain,) = found(Gated(order="up*gate"), X)
    assert [site.name for site in chain.sites] == ["gate", "up", "down"]
    (chain,) = found(FusedGated(), X)
    assert [site.name for site in chain.sites] == ["gate_up", "down"] and chain.swapped is False
    assert len(found(nn.Sequential(MLP(), MLP(p=0.5), MLP()), X)) == 3


@pytest.mark.parametrize("act", ACTS)
def test_bfloat16_and_float16(act):
    for dtype in (torch.bfloat16, torch.float16):
        run = same_as_eager(MLP(act=act).to(dtype), X.to(dtype), atol=3e-2)
        assert run.counts == {"linear_act_linear": 1}
        name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
        assert f"$0, $0, {name}, {name})" in run.after[0]


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_gives_the_output_its_dtype(inside):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = MLP()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                return self.mlp(x)

    model = Inside()
    with torch.autocast("cpu", torch.bfloat16, enabled=True):
        want = model.mlp(X) if not inside else model(X)
        run = compiled(model.mlp if not inside else model, X, decide=everything)
    assert run.counts == {"linear_act_linear": 1}
    assert "$0, $0, bf16, bf16)" in run.after[0] and run.out.dtype == torch.bfloat16
    torch.testing.assert_close(run.out, want, atol=3e-2, rtol=3e-2)
