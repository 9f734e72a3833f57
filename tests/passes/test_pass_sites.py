"""Linears are found in every spelling; what is no linear is not; refusals say why."""

import pytest
import torch
import torch.nn.functional as F
from pass_capture import by_name, compiled, everything, same_as_eager
from torch import nn
from torch.utils.checkpoint import checkpoint


class Weights(nn.Module):
    """x[2, 5, 32] with a [48, 32] weight, a [32, 48] one, a bias and a function over them."""

    def __init__(self, function):
        super().__init__()
        self.nk = nn.Parameter(torch.randn(48, 32) / 8)
        self.kn = nn.Parameter(torch.randn(32, 48) / 8)
        self.b = nn.Parameter(torch.randn(48))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


LINEARS = {
    "F.linear": (lambda m, x: F.linear(x, m.nk), "linear"),
    "positional bias": (lambda m, x: F.linear(x, m.nk, m.b), "linear"),
    "keywords": (lambda m, x: F.linear(input=x, bias=m.b, weight=m.nk), "linear"),
    "bias None": (lambda m, x: F.linear(x, m.nk, bias=None), "linear"),
    "transposed weight": (lambda m, x: F.linear(x, m.kn.t(), m.b), "linear"),
    "cast weight": (lambda m, x: F.linear(x.bfloat16(), m.nk.to(torch.bfloat16)), "linear"),
    "x @ w.t()": (lambda m, x: x @ m.nk.t(), "matmul"),
    "x @ w.T + b": (lambda m, x: x @ m.nk.T + m.b, "matmul"),
    "b + x @ w.mT": (lambda m, x: m.b + x @ m.nk.mT, "matmul"),
    "torch.matmul": (lambda m, x: torch.matmul(x, m.nk.transpose(0, 1)), "matmul"),
    "x.matmul": (lambda m, x: x.matmul(m.nk.transpose(-1, -2)), "matmul"),
    "permute": (lambda m, x: x @ m.nk.permute(1, 0), "matmul"),
    "swapaxes": (lambda m, x: x @ m.nk.swapaxes(0, 1), "matmul"),
    "x @ [K, N]": (lambda m, x: x @ m.kn, "matmul"),
    "twice transposed": (lambda m, x: x @ m.kn.t().t(), "matmul"),
    "cast and transposed": (lambda m, x: x.half() @ m.nk.half().t(), "matmul"),
    "mm": (lambda m, x: torch.mm(x[0], m.nk.t()), "matmul"),
    "addmm": (lambda m, x: torch.addmm(m.b, x.view(-1, 32), m.kn), "addmm"),
    "addmm with w.t()": (lambda m, x: torch.addmm(m.b, x[0], m.nk.t()), "addmm"),
    "x.new_*.addmm": (lambda m, x: m.b.addmm(x[1], m.kn), "addmm"),
    "einsum ...k,nk": (lambda m, x: torch.einsum("...k,nk->...n", x, m.nk), "einsum"),
    "einsum btk,kn": (lambda m, x: torch.einsum("b t k, k n -> b t n", x, m.kn), "einsum"),
    "einsum kn,btk": (lambda m, x: torch.einsum("kn,btk->btn", m.kn, x), "einsum"),
    "einsum + b": (lambda m, x: torch.einsum("btd,fd->btf", x, m.nk) + m.b, "einsum"),
}


class Heads(nn.Module):
    """Weights with an axis for heads: [32, 4, 12] from the model's features, or back to them."""

    def __init__(self, equation, weight, bias=()):
        super().__init__()
        self.w = nn.Parameter(torch.randn(weight) / 8)
        self.b = nn.Parameter(torch.randn(bias)) if bias else None
        self.equation = equation

    def forward(self, x):
        y = torch.einsum(self.equation, x, self.w)
        return y if self.b is None else y + self.b


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "equation, weight, x, shape",
    [
        ("ibh,hnd->ibnd", (32, 4, 12), (2, 5, 32), "48×32"),
        ("...d,nhd->...nh", (4, 12, 32), (2, 5, 32), "48×32"),
        ("ibnd,hnd->ibh", (32, 4, 12), (2, 5, 4, 12), "32×48"),
        ("btnd,ndh->bth", (4, 12, 32), (2, 5, 4, 12), "32×48"),
        ("tnd,ndhk->thk", (4, 8, 3, 16), (5, 4, 8), "48×32"),
    ],
)
def test_einsum_with_several_axes(equation, weight, x, shape, dynamic):
    model = Heads(equation, weight, bias=weight[1:] if "->ibnd" in equation else ())
    run = same_as_eager(model, torch.randn(x), dynamic=dynamic)
    assert run.counts == {"linear": 1} and "einsum" not in run.after[0]
    (row,) = run.rows
    assert (row.fqn, row.kind, row.shape, row.status) == ("w", "einsum", shape, "rewritten")


@pytest.mark.parametrize(
    "equation, weight, x",
    [
        ("ibnd,hnd->ibnh", (32, 4, 12), (2, 5, 4, 12)),
        ("ibnd,hdn->ibh", (32, 12, 4), (2, 5, 4, 12)),
        ("ibh,nhd->ibnd", (4, 32, 12), (2, 5, 32)),
        ("ibh,hnd->ibdn", (32, 4, 12), (2, 5, 32)),
        ("ibh,hnd->inbd", (32, 4, 12), (2, 5, 32)),
        ("bhi,hnd->bind", (32, 4, 12), (2, 32, 5)),
    ],
)
def test_other_einsums_stay(equation, weight, x):
    run = same_as_eager(Heads(equation, weight), torch.randn(x))
    assert run.before == run.after
    assert run.rows[0].reason == f"einsum '{equation}' is not a plain projection"


@pytest.mark.parametrize("spelling", LINEARS)
def test_spelling_is_rewritten(spelling):
    function, kind = LINEARS[spelling]
    low = any(word in spelling for word in ("cast",))
    run = same_as_eager(Weights(function), torch.randn(2, 5, 32), atol=2e-2 if low else 2e-5)
    assert run.counts == {"linear": 1}
    (row,) = run.rows
    assert (row.kind, row.shape, row.status, row.reason) == (kind, "48×32", "rewritten", "")
    assert row.fqn in ("nk", "kn")
    assert run.after[0].count("fp4::linear") == 1
    for gone in (" linear(", "matmul(", "mm(", "einsum(", "to(%"):
        assert gone not in run.after[0]


def test_the_parameter_itself_is_the_operand():
    """A cast of the weight is bypassed: FP32 masters are quantized directly."""
    run = compiled(Weights(LINEARS["cast weight"][0]), torch.randn(2, 5, 32))
    line = next(line for line in run.after[0].splitlines() if "fp4::" in line)
    assert line.startswith("%3: bf16[2, 5, 48] = fp4::linear(%2, %1,") and "bf16)" in line
    assert "%1: f32[48, 32]  nk" in run.after[0]


NOT_SITES = {
    "activations": lambda m, x: x @ x.transpose(-1, -2),
    "two activations 2-D": lambda m, x: x[0] @ x[1].t(),
    "attention einsum": lambda m, x: torch.einsum("bqd,bkd->bqk", x, x),
    "vector": lambda m, x: x[..., :1] * m.b @ m.b,
    "elementwise": lambda m, x: x[..., :1] * m.b,
}


@pytest.mark.parametrize("spelling", NOT_SITES)
def test_not_a_site(spelling):
    function = NOT_SITES[spelling]
    model = Weights(lambda m, x: function(m, x) * m.b.sum())
    run = same_as_eager(model, torch.randn(2, 5, 32))
    assert run.rows == []
    assert run.before == run.after


class Batch(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 32, 16))

    def forward(self, x):
        return torch.bmm(x, self.experts)


REFUSED = {
    "chunk": (
        lambda m, x: F.linear(x, m.nk.chunk(3, 0)[1]),
        "the weight is a view of a parameter (getitem)",
    ),
    "slice": (
        lambda m, x: x @ m.nk[:8].t(),
        "the weight is a view of a parameter (getitem)",
    ),
    "computed": (
        lambda m, x: F.linear(x, m.nk * 2),
        "the weight is computed in the graph (mul)",
    ),
    "left operand": (
        lambda m, x: (m.nk @ x[0].t()).t(),
        "the weight is the left operand of a matmul: write F.linear(x, weight)",
    ),
    "1-D input": (
        lambda m, x: F.linear(x[0, 0], m.nk),
        "the input is 1-D: at least 2 dimensions are needed",
    ),
    "1-D weight": (lambda m, x: F.linear(x[..., :48], m.b[:32]), None),
    "broadcast bias": (
        lambda m, x: torch.addmm(m.b[:1], x[0], m.kn),
        "the bias is not a vector of 48 elements",
    ),
    "alpha": (
        lambda m, x: torch.addmm(m.b, x[0], m.kn, alpha=2),
        "addmm with alpha or beta: not a linear layer",
    ),
    "einsum over rows": (
        lambda m, x: torch.einsum("bkt,nk->bnt", x.transpose(1, 2), m.nk),
        "einsum 'bkt,nk->bnt' is not a plain projection",
    ),
}


@pytest.mark.parametrize("spelling", REFUSED)
def test_refused_with_a_reason(spelling):
    function, why = REFUSED[spelling]
    run = same_as_eager(Weights(function), torch.randn(2, 5, 32))
    assert run.before == run.after and run.results[0].changed == 0
    (row,) = run.rows
    assert row.status == "left"
    assert row.reason == (why or "the weight is a view of a parameter (getitem)")


def test_batched_weights_are_reported():
    run = same_as_eager(Batch(), torch.randn(2, 5, 32))
    (row,) = run.rows
    assert (row.fqn, row.kind, row.shape, row.status) == ("experts", "batched", "16×32", "left")
    assert row.reason == (
        "the weight is a batch of matrices (experts): only 2-D weights are supported"
    )


@torch.library.custom_op("fp4_tests::grouped_mm", mutates_args=())
def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """A library's own operator for groups of rows, each with a matrix of its own."""
    groups = zip(x.tensor_split(offs[:-1].tolist()), weight)
    return torch.cat([rows @ w for rows, w in groups])


@grouped_mm.register_fake
def _(x, weight, offs):
    return x.new_empty(x.shape[0], weight.shape[-1])


@pytest.mark.parametrize("keywords", [False, True])
def test_experts_in_a_librarys_operator_are_reported(keywords):
    class Experts(Batch):
        def forward(self, x):
            offs, weight = torch.tensor([3, 10], dtype=torch.int32), self.experts.transpose(-2, -1)
            weight = weight.transpose(-2, -1)
            if keywords:
                return torch.ops.fp4_tests.grouped_mm(x=x, weight=weight, offs=offs)
            return torch.ops.fp4_tests.grouped_mm(x, weight, offs)

    with torch.no_grad():
        run = compiled(Experts(), torch.randn(10, 32))
    (row,) = run.rows
    assert (row.fqn, row.kind, row.shape, row.status) == ("experts", "batched", "16×32", "left")
    assert "batch of matrices" in row.reason and run.before == run.after


@pytest.mark.parametrize(
    "dtype, why",
    [
        (torch.float64, "the input is float64, which is not supported: use float32"),
        (torch.complex64, "the input is complex64: float32, bfloat16 or float16 is needed"),
    ],
)
def test_dtype_is_refused(dtype, why):
    model = nn.Linear(32, 48).to(dtype)
    run = compiled(model, torch.randn(4, 32, dtype=dtype))
    (row,) = run.rows
    assert (row.status, row.reason) == ("left", why)
    assert run.out.dtype == dtype
    assert run.before == run.after


def test_weight_changed_in_place_is_refused():
    def direct(m, x):
        with torch.no_grad():
            m.nk.mul_(2)
        return F.linear(x, m.nk)

    run = compiled(Weights(direct), torch.randn(2, 5, 32))
    assert run.rows[0].reason == "the weight is changed in place in the same graph"


def test_tensor_subclass_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(32, 48)
    w = model.weight.detach()
    model.weight = nn.Parameter(TwoTensor(w, w.clone()))
    model.bias = nn.Parameter(TwoTensor(model.bias.detach(), model.bias.detach()))
    run = compiled(model, torch.randn(4, 32))
    (row,) = run.rows
    assert (row.status, row.reason) == ("left", "the weight is a tensor subclass (TwoTensor)")


def test_a_buffer_is_a_weight_of_a_linear_only():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("w", torch.randn(48, 32))

        def forward(self, x):
            return F.linear(x, self.w) + x @ self.w.t()

    run = compiled(Frozen(), torch.randn(4, 32))
    assert [(row.fqn, row.kind) for row in run.rows] == [("w", "linear")]


def test_tied_weight_serves_both_uses():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 32)

        def forward(self, ids):
            return self.embed(ids) @ self.embed.weight.t()

    run = compiled(Tied(), torch.arange(6).view(2, 3))
    assert [(row.fqn, row.shape, row.status) for row in run.rows] == [
        ("embed", "50×32", "rewritten")
    ]


def test_layers_that_the_policy_leaves_say_the_rule():
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    run = same_as_eager(model, torch.randn(4, 32), decide=by_name({"0": "mxfp8"}))
    assert run.counts == {"linear": 1, "left": 1}
    assert (run.row("0").status, run.row("0").scheme_name) == ("rewritten", "mxfp8")
    assert (run.row("2").status, run.row("2").reason) == ("left", "match: 2")
    assert run.results[0].reasons == {"match: 2": 1}


class Dtypes(nn.Module):
    """A linear whose input, weight and bias have dtypes of their own; autocast within or not."""

    def __init__(self, weight, bias=None, inside=None):
        super().__init__()
        self.w = nn.Parameter(torch.randn(48, 32, dtype=weight))
        self.b = nn.Parameter(torch.randn(48, dtype=bias)) if bias else None
        self.inside = inside

    def forward(self, x):
        if self.inside is None:
            return F.linear(x, self.w, self.b)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside):
            return F.linear(x, self.w, self.b)


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    "x, weight, bias", [(BF16, F32, None), (F32, BF16, BF16), (F16, BF16, None), (BF16, BF16, F32)]
)
@pytest.mark.parametrize("inside", [None, False])
def test_different_dtypes_are_left_to_torchs_error(x, weight, bias, inside):
    seen = []

    def decide(site, role):
        seen.append(site)
        return everything(site, role)

    with pytest.raises(RuntimeError, match="same dtype"):
        compiled(Dtypes(weight, bias, inside), torch.randn(4, 32, dtype=x), decide=decide)
    (site,) = seen
    names = [str(dtype).removeprefix("torch.") for dtype in (x, weight, bias) if dtype]
    words = ", ".join(f"{a} {b}" for a, b in zip(("input", "weight", "bias"), names))
    assert site.refused == f"different dtypes outside of autocast ({words}): torch refuses them"


@pytest.mark.parametrize("inside", [None, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_different_dtypes_are_rewritten_under_autocast(inside, checkpointed):
    model = Dtypes(F32, F32, inside)
    call = (lambda x: checkpoint(model, x, use_reentrant=False)) if checkpointed else model
    with torch.autocast("cpu", torch.bfloat16, enabled=inside is None):
        run = compiled(call, torch.randn(4, 32, dtype=BF16))
    assert [row.status for row in run.rows] == ["rewritten"] and run.out.dtype == BF16


def test_autocast_of_another_device_or_left_again_casts_nothing():
    def forward(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, m.nk)
            with torch.autocast("cuda", torch.float16, enabled=False):
                y = y + F.linear(x, m.nk)
        return y + F.linear(x, m.nk.to(x.dtype)) + F.linear(x, m.nk)

    reasons = []

    def decide(site, role):
        reasons.append(bool(site.refused))
        return everything(site, role)

    with pytest.raises(RuntimeError, match="same dtype"):
        compiled(Weights(forward), torch.randn(4, 32, dtype=BF16), decide=decide)
    assert reasons == [False, False, False, True]
