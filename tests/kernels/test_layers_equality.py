"""The operators equal the same layers written out with quantize, dequantize and FP32 matmul.

Everything is FP32. Tolerance: 1e-6 relative in the Frobenius norm, the rounding of sums of at most
100 products; one differing code would show as 1e-4 or more.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from fp4compile.kernels import ops
from fp4compile.kernels.activations import ACTIVATIONS
from fp4compile.kernels.formats import Scheme
from layer_oracle import (
    ARTICLE,
    EXACT,
    LOW,
    NEXT_LAYER,
    Written,
    data,
    decoded,
    every_scheme,
    mixes,
    next_seed,
    off,
)

fp4 = torch.ops.fp4
F32 = torch.float32
TOLERANCE = 1e-6
SCHEMES = every_scheme()
MIXES = list(dict.fromkeys(text for scheme in SCHEMES.values() for text in mixes(scheme)))
FUSABLE = [text for text in MIXES if ops.fusable(text)]
M, K, H, N = 37, 48, 80, 33


def parameter(*shape: int, seed: int, need: bool = True) -> torch.Tensor:
    return data(*shape, seed=seed).requires_grad_(need)


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    distances = {name: off(got[name], want[name]) for name in got}
    assert max(distances.values()) < TOLERANCE, distances


def check_linear(text: str, m: int, k: int, n: int, bias: bool, stream_seed: int = 0) -> None:
    x, w = parameter(m, k, seed=1), parameter(n, k, seed=2)
    b = parameter(n, seed=3) if bias else None
    y = fp4.linear(x, w, b, text, F32)
    torch.manual_seed(stream_seed)
    seed, g = next_seed(), data(m, n, seed=4)
    y.backward(g)
    written = Written(text, x, w, b)
    dx, dw, db = written.backward(g, seed)
    got = {"y": y, "dx": x.grad, "dw": w.grad}
    assert_close(
        got | ({"db": b.grad} if bias else {}), {"y": written.y, "dx": dx, "dw": dw, "db": db}
    )


@pytest.mark.parametrize("text", MIXES)
def test_linear(text: str) -> None:
    for (m, k, n), bias in (((M, K, N), True), ((64, 80, 16), False), ((5, 17, 40), True)):
        check_linear(text, m, k, n, bias)


@pytest.mark.parametrize(
    "text",
    [
        "fprop(nvfp4:row, mxfp8:32) dgrad(mxfp8:128:sr, fprop>mxfp8:row:sr) wgrad(nvfp4:tensor:sr, fprop>mxfp4:sr)",
        "fprop(nvfp4:row, nvfp4:row) dgrad(nvfp4:row, fprop>nvfp4:row) wgrad(nvfp4:row, fprop>nvfp4:row)",
        "fprop(nvfp4:row, nvfp4:tensor) dgrad(mxfp8:32:sr, input>nvfp4:row) wgrad(mxfp8:row, input>nvfp4:row)",
        "fprop(nvfp4:tensor:fp8_exact, nvfp4:tensor:fp8_exact) dgrad(mxfp8:row:sr, fprop) wgrad(mxfp8:row:sr, fprop)",
        "fprop(nvfp4:row:search=1/1.5/0.9, nvfp4:tensor:tile) dgrad(mxfp8:32:sr, fprop>nvfp4:tensor:tile) wgrad(mxfp8:32:sr, fprop>mxfp8:128)",
        "fprop(mxfp8:32, mxfp8:row) dgrad(mxfp8:32:sr:had32, input>mxfp8:32:had32) wgrad(mxfp8:32:sr:had16, input>mxfp4:had16)",
        "fprop(nvfp4:row:had32, nvfp4:tensor:had32) dgrad(nvfp4:tensor:sr:had32, input>nvfp4:tensor:had32) wgrad(nvfp4:tensor:sr:had32, input>nvfp4:tensor:had32)",
        "fprop(s2f6, s2f6) dgrad(s2f6, fprop>mxfp8:32:sr) wgrad(mxfp4:sr, fprop>s2f6)",
    ],
)
def test_schemes_that_no_recipe_uses(text: str) -> None:
    assert str(Scheme.parse(text)) == text
    for m, k, n in ((M, K, N), (40, 33, 70)):
        check_linear(text, m, k, n, True)


@pytest.mark.parametrize("recipe", ["fp8-exact", "thinking-machines", "mxfp8"])
def test_seeds(recipe: str) -> None:
    """Whatever seed the step has, the noise is that of the written-out computation."""
    for seed in (1, 2**40, 12345):
        check_linear(LOW[recipe], M, K, N, True, seed)


def run_chain(first: str, second: str, act: str, bias: bool) -> None:
    x, w1, w2 = parameter(M, K, seed=1), parameter(H, K, seed=2), parameter(N, H, seed=5)
    b1 = parameter(H, seed=3) if bias else None
    b2 = parameter(N, seed=6) if bias else None
    y = fp4.linear_act_linear(x, w1, b1, w2, b2, act, first, second, F32, F32)
    torch.manual_seed(7)
    seed, g, row = next_seed(), data(M, N, seed=4), ACTIVATIONS[act]
    y.backward(g)
    one = Written(first, x, w1, b1)
    two = Written(second, row.forward(one.y), w2, b2)
    dh, dw2, db2 = two.backward(g, seed)
    dx, dw1, db1 = one.backward(row.backward(dh, one.y), seed, NEXT_LAYER)
    got = {"y": y, "dx": x.grad, "dw1": w1.grad, "dw2": w2.grad}
    got |= {"db1": b1.grad, "db2": b2.grad} if bias else {}
    want = {"y": two.y, "dx": dx, "dw1": dw1, "dw2": dw2, "db1": db1, "db2": db2}
    assert_close(got, want)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("text", FUSABLE)
def test_chain(text: str, act: str) -> None:
    """Both layers in one scheme, and the first in its original precision."""
    run_chain(text, text, act, bias=True)
    run_chain("original", text, act, bias=False)


@pytest.mark.parametrize("first", [t for t in MIXES if t not in (EXACT, "original")])
def test_chain_of_two_schemes(first: str) -> None:
    run_chain(first, EXACT, "gelu", bias=True)


def written_gated(schemes: tuple, tensors: list, act: str, g: torch.Tensor, seed: torch.Tensor):
    """y and the gradients of x and all six parameters."""
    x, wg, bg, wu, bu, wd, bd = tensors
    row = ACTIVATIONS[act]
    gate, up = Written(schemes[0], x, wg, bg), Written(schemes[1], x, wu, bu)
    down = Written(schemes[2], row.forward(gate.y) * up.y, wd, bd)
    dh, *d_down = down.backward(g, seed)
    dx_gate, *d_gate = gate.backward(row.backward(dh * up.y, gate.y), seed, NEXT_LAYER)
    dx_up, *d_up = up.backward(dh * row.forward(gate.y), seed, 2 * NEXT_LAYER)
    return down.y, [dx_gate + dx_up, *d_gate, *d_up, *d_down]


def gated_tensors(m: int, k: int, h: int, n: int, bias: bool) -> list[torch.Tensor | None]:
    shapes = [(m, k), (h, k), (h,), (h, k), (h,), (n, h), (n,)]
    return [
        parameter(*shape, seed=i) if bias or i not in (2, 4, 6) else None
        for i, shape in enumerate(shapes)
    ]


def run_gated(schemes: tuple, act: str, bias: bool = True) -> None:
    tensors = gated_tensors(M, K, H, N, bias)
    y = fp4.gated_linear(*tensors, act, *schemes, F32, F32)
    torch.manual_seed(9)
    seed, g = next_seed(), data(M, N, seed=8)
    y.backward(g)
    want_y, wants = written_gated(schemes, tensors, act, g, seed)
    assert off(y, want_y) < TOLERANCE
    for tensor, want in zip(tensors, wants):
        assert tensor is None or off(tensor.grad, want) < TOLERANCE


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("recipe", ["fp8-exact", "thinking-machines", "mxfp8"])
def test_gated(recipe: str, act: str) -> None:
    text = LOW[recipe]
    run_gated((text, text, text), act)
    run_gated((text, text, text), act, bias=False)


@pytest.mark.parametrize(
    "gate,up",
    [
        ("original", EXACT),
        (LOW["nvidia"], LOW["mxfp4"]),
        (ARTICLE, EXACT),
        (EXACT, mixes(EXACT)[1]),
        (mixes(ARTICLE)[2], mixes(LOW["mxfp4"])[1]),
    ],
)
def test_gated_of_three_schemes(gate: str, up: str) -> None:
    run_gated((gate, up, EXACT), "silu")
    run_gated((up, gate, ARTICLE), "gelu_tanh")


@pytest.mark.parametrize("text", [EXACT, ARTICLE], ids=["fp8-exact", "thinking-machines"])
def test_gated_of_any_set_of_gradients(text: str) -> None:
    """Frozen weights, an input without gradient, biases alone: 128 sets, some fused, some not."""
    tensors, g = gated_tensors(5, 17, 20, 9, bias=True), data(5, 9, seed=8)
    torch.manual_seed(9)
    want_y, wants = written_gated((text,) * 3, tensors, "silu", g, next_seed())
    for need in itertools.product((False, True), repeat=7):
        tensors = [t.detach().requires_grad_(n) for t, n in zip(tensors, need)]
        y = fp4.gated_linear(*tensors, "silu", text, text, text, F32, F32)
        assert off(y, want_y) < TOLERANCE and y.requires_grad == any(need)
        torch.manual_seed(9)
        if any(need):
            y.backward(g)
        for tensor, want, needed in zip(tensors, wants, need):
            assert off(tensor.grad, want) < TOLERANCE if needed else tensor.grad is None


@pytest.mark.parametrize("text", [EXACT, ARTICLE, LOW["nvidia"]])
def test_chain_of_any_set_of_gradients(text: str) -> None:
    for need in itertools.product((False, True), repeat=5):
        x, w1, b1, w2, b2 = tensors = [
            parameter(*shape, seed=i, need=need[i])
            for i, shape in enumerate([(5, 17), (20, 17), (20,), (9, 20), (9,)])
        ]
        y = fp4.linear_act_linear(*tensors, "relu2", EXACT, text, F32, F32)
        assert y.requires_grad == any(need)
        every = [t.detach().requires_grad_() for t in tensors]
        whole = fp4.linear_act_linear(*every, "relu2", EXACT, text, F32, F32)
        for out in (y, whole):
            torch.manual_seed(1)
            if out.requires_grad:
                out.sum().backward()
        for part, full in zip(tensors, every):
            if not part.requires_grad:
                assert part.grad is None
            elif text == LOW["nvidia"]:  # two autograd nodes, each with a draw of its own
                assert off(part.grad, full.grad) < 0.5
            else:
                assert off(part.grad, full.grad) < TOLERANCE


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_unfused_chain(act: str) -> None:
    """A second layer that quantizes its input along two axes needs the hidden tensor itself."""
    x, w1, w2 = parameter(M, K, seed=1), parameter(H, K, seed=2), parameter(N, H, seed=5)
    text = LOW["nvidia"]
    y = fp4.linear_act_linear(x, w1, None, w2, None, act, text, text, F32, F32)
    one = Written(text, x, w1, None)
    assert off(y, Written(text, ACTIVATIONS[act].forward(one.y), w2, None).y) < TOLERANCE


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", LOW)
def test_16_bit_result(recipe: str, out: torch.dtype) -> None:
    """Sums unscaled to BF16, then factors and bias in FP32, then the output dtype: bit for bit."""
    x, w, b = data(M, K, seed=1, dtype=out), data(N, K, seed=2), data(N, seed=3)
    written = Written(LOW[recipe], x, w, None)
    left, right = decoded(written.xq), decoded(written.wq)
    acc = (left.values @ right.values.t()).bfloat16().float()
    want = (acc * left.outer * right.outer.t() + b).to(out)
    assert torch.equal(fp4.linear(x, w, b, LOW[recipe], out), want)
