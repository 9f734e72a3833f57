"""What is kept from forward to backward: codes, scales and factors, and no tensor in high precision
beside what an activation's derivative or an original GEMM reads."""

from __future__ import annotations

import weakref

import pytest
import torch
from fp4compile.kernels import autograd, ops, reference  # noqa: F401 - defines torch.ops.fp4
from fp4compile.kernels.errors import FormatError
from fp4compile.kernels.formats import Operand, Scheme, TensorFormat
from fp4compile.kernels.layer import Layer
from layer_oracle import ARTICLE, EXACT, LOW, data, mixes

fp4 = torch.ops.fp4
F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
M, K, H, N = 37, 48, 80, 33
Shape = tuple[torch.dtype, tuple[int, ...]]


def saved(function, *parameters: torch.Tensor) -> list[Shape]:
    """dtype and shape of every tensor saved by the call, the model's own parameters left out."""
    own = {p.data_ptr() for p in parameters}
    kept: list[Shape] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() not in own or t.numel() == 0:
            kept.append((t.dtype, tuple(t.shape)))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function().sum().backward()
    return kept


def nvfp4(rows: int, cols: int, outer: int) -> list[Shape]:
    """Two codes a byte, a scale for 16, ``outer`` FP32 factors."""
    wide = -(-cols // 16) * 16
    return [(U8, (rows, wide // 2)), (U8, (rows, wide // 16)), (F32, (outer,))]


def mx(rows: int, cols: int, bits: int, factor: int = 0) -> list[Shape]:
    wide = -(-cols // 32) * 32
    return [(U8, (rows, wide * bits // 8)), (U8, (rows, wide // 32)), (F32, (factor,))]


def fp8(rows: int, cols: int, scales: int) -> list[Shape]:
    blocks = -(-cols // 128)
    return [(U8, (rows, 128 * blocks)), (F32, (scales, blocks)), (F32, (0,))]


def leaf(*shape: int, dtype=F32, need: bool = True) -> torch.Tensor:
    return data(*shape, dtype=dtype).requires_grad_(need)


LINEAR = {
    EXACT: [*nvfp4(M, K, M), *nvfp4(N, K, 1)],
    ARTICLE: [*nvfp4(M, K, M), *nvfp4(N, K, 1)],
    LOW["mxfp8"]: [*mx(M, K, 8), *mx(N, K, 8)],
    # quantized along tokens for WGRAD, the tile-quantized weight for DGRAD
    LOW["nvidia"]: [*nvfp4(K, M, 1), *nvfp4(N, K, 1)],
    LOW["mxfp4"]: [*mx(K, M, 4), *mx(K, N, 4)],
    # scales in FP32: one for 128 of a row, one for a tile of the weight
    LOW["fp8-block"]: [*fp8(M, K, M), *fp8(N, K, -(-N // 128))],
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("text", LINEAR)
def test_linear(text: str, dtype: torch.dtype) -> None:
    x, w, b = leaf(M, K, dtype=dtype), leaf(N, K, dtype=dtype), leaf(N, dtype=dtype)
    assert saved(lambda: fp4.linear(x, w, b, text, dtype), w, b) == LINEAR[text]


@pytest.mark.parametrize("text", LINEAR)
def test_only_what_a_needed_gradient_reads(text: str) -> None:
    activation, weight = LINEAR[text][:3], LINEAR[text][3:]
    for need_x, need_w in ((True, False), (False, True), (False, False)):
        x, w, b = leaf(M, K, need=need_x), leaf(N, K, need=need_w), leaf(N)
        want = (activation if need_w else []) + (weight if need_x else [])
        assert saved(lambda x=x, w=w, b=b: fp4.linear(x, w, b, text, F32), w, b) == want


def test_original_gemms_keep_what_they_read() -> None:
    x, w = leaf(M, K), leaf(N, K)
    texts = {
        mixes(EXACT)[1]: nvfp4(M, K, M),  # dgrad original: the weight itself
        mixes(EXACT)[2]: [(F32, (M, K)), *nvfp4(N, K, 1)],  # wgrad original: the input itself
        mixes(EXACT)[3]: [(F32, (M, K))],
        mixes(LOW["mxfp4"])[1]: LINEAR[LOW["mxfp4"]],  # fprop original
        "original": [(F32, (M, K))],
    }
    for text, want in texts.items():
        assert saved(lambda text=text: fp4.linear(x, w, None, text, F32), w) == want, text


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("text", [EXACT, ARTICLE])
@pytest.mark.parametrize("bias", [False, True])
def test_chain(text: str, bias: bool, dtype: torch.dtype) -> None:
    """The hidden tensor as codes; of the pre-activation the unscaled sums and their factors."""
    x, w1, w2 = leaf(M, K, dtype=dtype), leaf(H, K, dtype=dtype), leaf(N, H, dtype=dtype)
    b1, b2 = (leaf(H, dtype=dtype), leaf(N, dtype=dtype)) if bias else (None, None)
    parameters = [p for p in (w1, b1, w2, b2) if p is not None]
    call = lambda: fp4.linear_act_linear(  # noqa: E731
        x, w1, b1, w2, b2, "gelu", text, text, dtype, dtype
    )
    assert saved(call, *parameters) == [
        *nvfp4(M, K, M), *nvfp4(H, K, 1), (dtype, (M, H)), (F32, (M,)), (F32, (1,)),
        *nvfp4(M, H, M), *nvfp4(N, H, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("text", [EXACT, ARTICLE])
def test_gated(text: str) -> None:
    """One set of codes of the input serves gate and up."""
    x, wg, wu, wd = leaf(M, K), leaf(H, K), leaf(H, K), leaf(N, H)
    call = lambda: fp4.gated_linear(  # noqa: E731
        x, wg, None, wu, None, wd, None, "silu", text, text, text, BF16, BF16
    )
    sums = [(BF16, (M, H)), (F32, (M,)), (F32, (1,))]
    assert saved(call, wg, wu, wd) == [
        *nvfp4(M, K, M), *nvfp4(M, K, M), *nvfp4(H, K, 1), *nvfp4(H, K, 1), *sums, *sums,
        *nvfp4(M, H, M), *nvfp4(N, H, 1),
    ]  # fmt: skip
    pointers = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: pointers.append(t.data_ptr()) or t, lambda t: t
    ):
        call()
    assert pointers[:3] == pointers[3:6], "the input's codes are kept twice"


@pytest.mark.parametrize("text", [*LOW.values()])
def test_nothing_else_stays_alive(text: str) -> None:
    """No attribute of the node holds the input, the decoded operands or the hidden tensor."""
    w, w2 = leaf(H, K), leaf(N, H)
    x = leaf(M, K)
    inner = x * 2
    watched = weakref.ref(inner)
    y = fp4.linear(inner, w, None, text, F32)
    y2 = fp4.linear_act_linear(x * 2, w, None, w2, None, "gelu", text, text, F32, F32)
    del inner
    assert watched() is None, "the high-precision input is kept"
    for out in (y, y2):
        node = out.grad_fn
        held = (
            [v for v in vars(node).values() if isinstance(v, torch.Tensor)]
            if hasattr(node, "__dict__")
            else []
        )
        assert not held


def test_bytes_against_bf16() -> None:
    """x [M, K] in BF16 is 2 M K bytes; its codes, scales and factors are 9/32 of it and 4 a row."""
    m, k, n = 256, 256, 256
    x, w = leaf(m, k, dtype=BF16), leaf(n, k, dtype=BF16)
    kept = saved(lambda: fp4.linear(x, w, None, EXACT, BF16), w)
    size = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in kept)
    assert size == (m * k + n * k) * 9 // 16 + 4 * (m + 1)


def test_no_grad_saves_nothing() -> None:
    x, w = leaf(M, K), leaf(N, K)
    kept = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        fp4.linear(x, w, None, EXACT, F32)
    assert not kept


def test_gate_and_up_share_codes_only_in_one_form(monkeypatch) -> None:
    """On a GPU the engine follows both operands: E4M3 bytes for one layer, BF16 for the other."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    scheme = Scheme.parse(EXACT)
    weight = Operand(TensorFormat.parse("nvfp4:tensor"))
    plain = Scheme((scheme.fprop[0], weight), None, scheme.wgrad)
    schemes = [scheme, plain, Scheme.parse(ARTICLE), Scheme()]
    for device, alike in ((torch.device("cuda"), False), (torch.device("cpu"), True)):
        exact, other, article, original = (Layer(s, BF16, device) for s in schemes)
        assert exact.same_activation(exact) and exact.same_activation(other) == alike
        assert not exact.same_activation(article) and not exact.same_activation(original)


KEPT = " preactivation(mxfp8:32)"


def chains(text: str, dtype: torch.dtype, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs and gradients of a chain and of a gated chain."""
    x, w1, b1, wu, w2 = tensors
    results = []
    for y in (
        fp4.linear_act_linear(x, w1, b1, w2, None, "gelu_tanh", text, text, dtype, dtype),
        fp4.gated_linear(x, w1, b1, wu, None, w2, None, "silu", text, text, text, dtype, dtype),
    ):
        torch.manual_seed(5)
        used = [t for t in tensors if t is not wu or len(results)]
        results += [y.detach(), *torch.autograd.grad(y, used, data(*y.shape, seed=9).to(dtype))]
    return results


@pytest.mark.parametrize("text", [EXACT, ARTICLE])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_a_preactivation_in_8_bits(text: str, dtype: torch.dtype, monkeypatch) -> None:
    """The gradients are those of the rounded values; the forward and the last weight's are as ever."""
    assert str(Scheme.parse(text + KEPT)) == text + KEPT
    tensors = [
        leaf(*s, dtype=dtype) for s in ((40, 48), (70, 48), (70,), (70, 48), (33, 70))
    ]
    plain, got = chains(text, dtype, tensors), chains(text + KEPT, dtype, tensors)

    def rounded(layer, z):
        codes, scales, _, _ = fp4.quantize(z.acc, "mxfp8:32", "none", False)
        values = reference.values(codes, scales, TensorFormat.parse("mxfp8:32"), z.acc.shape[1])
        return values.to(z.acc.dtype), *z.args()[1:]

    monkeypatch.setattr(autograd, "save_term", rounded)
    want = chains(text, dtype, tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    for i in (0, 4, 5, 10):  # y and the last weight's gradient, of both
        assert torch.equal(got[i], plain[i])
    off = (got[1].float() - plain[1].float()).norm() / plain[1].float().norm()
    assert 0 < off < 0.05


def test_a_preactivation_in_8_bits_is_kept_as_codes() -> None:
    x, w1, w2 = (leaf(*s, dtype=BF16) for s in ((64, 80), (96, 80), (48, 96)))
    shapes = {}
    for text in (EXACT, EXACT + KEPT):
        shapes[text] = saved(
            lambda text=text: fp4.linear_act_linear(
                x, w1, None, w2, None, "gelu", text, text, BF16, BF16
            ),
            x, w1, w2,
        )  # fmt: skip
    gone = [s for s in shapes[EXACT] if s not in shapes[EXACT + KEPT]]
    new = [s for s in shapes[EXACT + KEPT] if s not in shapes[EXACT]]
    assert gone == [(BF16, (64, 96))] and new == [(U8, (64, 96)), (U8, (64, 3))]


@pytest.mark.parametrize("kept", ["mxfp8:row", "mxfp8:32:sr", "nvfp4:row"])
def test_preactivations_in_other_formats_are_refused(kept: str) -> None:
    with pytest.raises(FormatError, match="preactivation: .* is not mxfp8:32"):
        Scheme.parse(f"{EXACT} preactivation({kept})")
