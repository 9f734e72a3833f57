"""Dtypes of results and gradients, autocast, and what the operators refuse, each in one line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fp4compile.kernels import ops  # noqa: F401 - defines torch.ops.fp4
from fp4compile.kernels.errors import FormatError, InputError
from fp4compile.kernels.formats import Scheme
from layer_oracle import (
    ARTICLE,
    EXACT,
    LOW,
    Written,
    data,
    every_scheme,
    mixes,
    next_seed,
    off,
)

fp4 = torch.ops.fp4
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SCHEMES = every_scheme()
MIXES = list(dict.fromkeys(text for scheme in SCHEMES.values() for text in mixes(scheme)))
# dtypes of the input, the parameters and the result: plain models, then autocast over FP32 masters
KINDS = [
    (F32, F32, F32), (BF16, BF16, BF16), (F16, F16, F16),
    (F32, F32, BF16), (BF16, F32, BF16), (F16, F32, F16), (F32, F32, F16), (F32, BF16, F32),
]  # fmt: skip
# FP32: sums in another order. Else: BF16 sums, factors and operands of the original GEMMs.
TOLERANCE = {F32: 1e-6, BF16: 6e-3, F16: 6e-3}


def leaf(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return data(*shape, seed=seed, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("text,kind", [
    (text, kind) for text in MIXES for kind in KINDS if text in SCHEMES.values() or kind[1] != kind[2]
])  # fmt: skip
def test_linear(text: str, kind: tuple) -> None:
    x_dtype, p_dtype, out = kind
    x, w = leaf(37, 48, seed=1, dtype=x_dtype), leaf(33, 48, seed=2, dtype=p_dtype)
    b, g = leaf(33, seed=3, dtype=p_dtype), data(37, 33, seed=4, dtype=out)
    y = fp4.linear(x, w, b, text, out)
    torch.manual_seed(0)
    seed = next_seed()
    y.backward(g)
    assert (y.dtype, x.grad.dtype, w.grad.dtype, b.grad.dtype) == (out, x_dtype, p_dtype, p_dtype)
    written = Written(text, x, w, b)
    tolerance = max(TOLERANCE[d] for d in kind)
    assert off(y, written.y) < tolerance
    for grad, want in zip((x.grad, w.grad, b.grad), written.backward(g, seed)):
        assert off(grad, want) < tolerance


def test_weight_gradients_of_fp32_masters_are_fp32_sums() -> None:
    """A BF16 result must not cost the master's gradient its last 16 bits."""
    for text in (EXACT, ARTICLE, LOW["mxfp8"]):
        x, w = leaf(64, 48, seed=1, dtype=BF16), leaf(33, 48, seed=2, dtype=F32)
        torch.manual_seed(0)
        seed, g = next_seed(), data(64, 33, seed=4, dtype=BF16)
        fp4.linear(x, w, None, text, BF16).backward(g)
        assert off(w.grad, Written(text, x, w, None).backward(g, seed)[1]) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", [EXACT, ARTICLE, LOW["nvidia"], mixes(EXACT)[1], mixes(ARTICLE)[3]]
)
def test_chain_and_gated(text: str, kind: tuple) -> None:
    x_dtype, p_dtype, out = kind
    x, g = leaf(2, 20, 48, seed=1, dtype=x_dtype), data(2, 20, 33, seed=9, dtype=out)
    w1, wu, w2 = (leaf(n, k, seed=n + k, dtype=p_dtype) for n, k in ((40, 48), (40, 48), (33, 40)))
    b1, bu, b2 = (leaf(n, seed=n, dtype=p_dtype) for n in (40, 40, 33))
    reference = [t.detach().float() for t in (x, w1, b1, wu, bu, w2, b2)]
    rx, rw1, rb1, rwu, rbu, rw2, rb2 = reference
    hidden = F.silu(F.linear(rx, rw1, rb1))
    chain = fp4.linear_act_linear(x, w1, b1, w2, b2, "silu", text, text, out, out)
    gated = fp4.gated_linear(x, w1, b1, wu, bu, w2, b2, "silu", text, text, text, out, out)
    assert chain.dtype == gated.dtype == out and chain.shape == gated.shape == (2, 20, 33)
    assert off(chain, F.linear(hidden, rw2, rb2)) < 0.25
    assert off(gated, F.linear(hidden * F.linear(rx, rwu, rbu), rw2, rb2)) < 0.25
    (chain + gated).backward(g)
    for leaves in (x, w1, b1, wu, bu, w2, b2):
        assert leaves.grad.dtype == leaves.dtype and leaves.grad.shape == leaves.shape
        assert leaves.grad.isfinite().all() and leaves.grad.any()


def test_hidden_dtype_is_that_of_the_first_layer() -> None:
    """The first layer's sums are BF16 under autocast, and the activation reads them unrounded."""
    x, w1, w2 = data(37, 48), data(80, 48, seed=1), data(33, 80, seed=2)
    run = [fp4.linear_act_linear(x, w1, None, w2, None, "gelu", EXACT, EXACT, hidden, F32)
           for hidden in (F32, BF16, F16)]  # fmt: skip
    assert torch.equal(run[1], run[2]) and 1e-4 < off(run[0], run[1]) < 0.1


@pytest.mark.parametrize("text,ambient", [*((text, BF16) for text in MIXES), (EXACT, F16)])
def test_ambient_autocast_changes_no_bit(text: str, ambient: torch.dtype) -> None:
    """The graph says the dtypes; an eager call inside autocast must not cast its GEMMs."""

    def step(enabled: bool) -> list[torch.Tensor]:
        x, w = leaf(40, 48, seed=1, dtype=F32), leaf(33, 48, seed=2, dtype=F32)
        with torch.autocast("cpu", ambient, enabled=enabled):
            y = fp4.linear(x, w, None, text, F32)
            torch.manual_seed(0)
            y.backward(data(40, 33, seed=3))
        return [y.detach(), x.grad, w.grad]

    assert all(torch.equal(a, b) for a, b in zip(step(True), step(False)))


@pytest.mark.parametrize("default", [F32, BF16, F16])
def test_default_dtype_changes_no_bit(default: torch.dtype) -> None:
    x, w = leaf(40, 48, seed=1, dtype=F32), leaf(33, 48, seed=2, dtype=F32)
    runs = []
    for dtype in (default, F32):
        torch.set_default_dtype(dtype)
        try:
            torch.manual_seed(0)
            y = fp4.linear(x, w, None, LOW["nvidia"], F32)
            runs.append((y, *torch.autograd.grad(y.sum(), (x, w))))
        finally:
            torch.set_default_dtype(F32)
    assert all(torch.equal(a, b) for a, b in zip(*runs))


# ---- refusals --------------------------------------------------------------------------------


def layers(x=None, w=None, b=None, out=F32, text=EXACT) -> list:
    """The three operators as calls, with one of their arguments replaced."""
    x = data(8, 32) if x is None else x
    w = data(16, 32, seed=1) if w is None else w
    square = data(16, 16, seed=2)
    return [
        lambda: fp4.linear(x, w, b, text, out),
        lambda: fp4.linear_act_linear(x, w, b, square, None, "gelu", text, text, out, out),
        lambda: fp4.gated_linear(
            x, w, b, data(16, 32), None, square, None, "silu", text, text, text, out, out
        ),
    ]


def assert_refused(calls: list, *words: str, error: type = InputError) -> None:
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message and len(message) < 160
        assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float64, torch.complex64,
     torch.float8_e4m3fn],
)  # fmt: skip
@pytest.mark.parametrize("text", [EXACT, "original"])
def test_dtypes_that_are_refused(dtype: torch.dtype, text: str) -> None:
    words = (str(dtype), "use float32, bfloat16 or float16")
    assert_refused(layers(x=torch.ones(8, 32).to(dtype), text=text), *words)
    assert_refused(layers(w=torch.ones(16, 32).to(dtype), text=text), *words)
    assert_refused(layers(b=torch.ones(16).to(dtype), text=text), *words)
    assert_refused(layers(out=dtype, text=text), *words)


def test_shapes_that_do_not_fit() -> None:
    assert_refused(layers(w=data(16, 48)), "the input has 32 columns", "[16, 48]")
    assert_refused(layers(x=data(8, 31)), "the input has 31 columns", "[16, 32]")
    assert_refused(layers(b=data(17)), "16 elements", "[17]")
    assert_refused(layers(b=data(1)), "16 elements", "[1]")
    assert_refused(layers(b=data(8, 16)), "16 elements", "[8, 16]")
    assert_refused(layers(w=data(32)), "[N, K]", "[32]")
    assert_refused(layers(w=data(2, 16, 32)), "[N, K]", "[2, 16, 32]")
    assert_refused(layers(x=torch.tensor(1.0)), "scalar")
    x, w = data(8, 32), data(16, 32)
    chain, gated = fp4.linear_act_linear, fp4.gated_linear
    hidden = (EXACT, EXACT, F32, F32)
    assert_refused([lambda: chain(x, w, None, data(4, 17), None, "relu", *hidden)], "16 columns")
    assert_refused([lambda: chain(x, w, None, data(4, 16), w, "relu", *hidden)], "4 elements")
    down = (data(4, 16), None, "relu", EXACT, *hidden)
    assert_refused([lambda: gated(x, w, None, data(15, 32), None, *down)], "15 columns", "[4, 16]")
    assert_refused([lambda: gated(x, w, None, data(16, 31), None, *down)], "32 columns", "[16, 31]")


def test_devices_and_layouts() -> None:
    meta = torch.device("meta")
    assert_refused(layers(w=data(16, 32).to(meta)), "input is on cpu", "meta")
    assert_refused(layers(b=data(16).to(meta)), "input is on cpu", "meta")
    assert_refused(layers(x=data(8, 32).to_sparse()), "sparse_coo", "to_dense")


def test_words_that_do_not_exist() -> None:
    x, w = data(8, 32), data(32, 32)
    call = lambda: fp4.linear_act_linear(x, w, None, w, None, "tanh", EXACT, EXACT, F32, F32)  # noqa: E731
    assert_refused([call], "'tanh'", "gelu_tanh", error=FormatError)
    for text in ("", "low", "fprop(nvfp4:tensor)", "fprop(nvfp4:row, nvfp5:tensor)",
                 "fprop(nvfp4:row, nvfp4:tensor, nvfp4:tensor)", "fprop(mxfp8:32, mxfp8:search=a)",
                 "dgrad(mxfp8:32:sr, fprop)", "fprop(mxfp8:32, mxfp8:32) fprop(mxfp4, mxfp4)"):  # fmt: skip
        assert_refused(layers(text=text), error=FormatError)


def test_rotated_codes_serve_one_gemm_only() -> None:
    """Reused along another axis they would stay rotated: gradients 150 % off, without a word."""
    for reuse in ("fprop", "fprop>mxfp8:32:sr"):
        fold = ":fold" if reuse == "fprop" else ""
        rotated = "fprop(nvfp4:row:fp8_exact:had16, nvfp4:tensor:fp8_exact:had16)"
        for backward in (f"dgrad(mxfp8:row:sr, {reuse})", f"wgrad(mxfp8:row:sr{fold}, {reuse})"):
            with pytest.raises(FormatError, match="rotated") as error:
                Scheme.parse(f"{rotated} {backward}")
            assert "\n" not in str(error.value)
    Scheme.parse(f"{rotated} dgrad(mxfp8:32:sr, input>mxfp8:32)")


@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
def test_double_backward_is_refused(text: str) -> None:
    x, w = leaf(8, 32, seed=1, dtype=F32), leaf(32, 32, seed=2, dtype=F32)
    calls = {
        "linear": lambda: fp4.linear(x, w, None, text, F32),
        "chain": lambda: fp4.linear_act_linear(x, w, None, w, None, "gelu", text, text, F32, F32),
        "gated": lambda: fp4.gated_linear(
            x, w, None, w, None, w, None, "silu", text, text, text, F32, F32
        ),
    }
    for call in calls.values():
        dx, dw = torch.autograd.grad(call().square().sum(), (x, w), create_graph=True)
        second = [lambda dx=dx: dx.sum().backward(), lambda dw=dw: torch.autograd.grad(dw.sum(), x)]
        assert_refused(second, "no double backward")
    runs = []
    for create_graph in (False, True):
        torch.manual_seed(0)
        loss = calls["linear"]().square().sum()
        runs.append(torch.autograd.grad(loss, (x, w), create_graph=create_graph))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_function_transforms() -> None:
    """torch.func.grad and jvp are refused by name; vmap works, one sample after another."""
    x, w, b = data(3, 8, 32), data(16, 32, seed=1), data(16, seed=2)
    one = lambda x: fp4.linear(x, w, b, EXACT, F32)  # noqa: E731
    calls = [lambda: torch.func.grad(lambda x: one(x).sum())(x), lambda: torch.func.vjp(one, x),
             lambda: torch.func.jvp(one, (x,), (x,)),
             lambda: torch.func.vmap(torch.func.grad(lambda x: one(x).sum()))(x)]  # fmt: skip
    assert_refused(calls, "torch.func", "torch.autograd")
    assert torch.equal(torch.func.vmap(one)(x), one(x))
    x.requires_grad_()
    torch.func.vmap(one)(x).sum().backward()
    assert off(x.grad, torch.ones(3, 8, 16) @ w) < 0.2
