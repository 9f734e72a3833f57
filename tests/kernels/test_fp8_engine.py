"""Engine fp8_block without its GPU: what the layers hand to the GEMM, and what PyTorch's checks say."""

from __future__ import annotations

import pytest
import torch
from fp4compile.kernels import block_scaled, engines, ops  # noqa: F401 - defines torch.ops.fp4
from fp4compile.kernels.elements import E4M3, decode
from fp4compile.kernels.formats import TensorFormat
from layer_oracle import LOW, data
from torch._subclasses.fake_tensor import FakeTensorMode

fp4 = torch.ops.fp4
F32 = torch.float32
SCHEME = LOW["fp8-block"]
FROM_INPUT = (
    "fprop(fp8:128, fp8:tile) dgrad(fp8:128:sr, input>fp8:tile) wgrad(fp8:128, input>fp8:128)"
)
BLOCKS, TILES = TensorFormat.parse("fp8:128"), TensorFormat.parse("fp8:tile")
CUDA = torch.device("cuda", 0)


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decoded, from the shapes that the GEMM is documented to take."""
    rows, blocks = codes.shape[0], codes.shape[1] // 128
    if scales.shape != (blocks, rows):
        assert scales.shape == (-(-rows // 128), blocks)
        scales = scales.repeat_interleave(128, 0)[:rows].t()
    return decode(codes, E4M3) * scales.t().repeat_interleave(128, 1)


def stand_in(a, b, scale_a, scale_b, out_dtype, out):
    result = (values(a, scale_a) @ values(b, scale_b).t()).to(out_dtype)
    return result if out is None else out.copy_(result)


@pytest.fixture
def blocks(monkeypatch):
    """Every GEMM by the engine, whose product is written out."""
    monkeypatch.setattr(engines, "choose", lambda *a: engines.FP8_BLOCK)
    monkeypatch.setitem(engines.SCALED, "fp8_block", stand_in)


def leaves(d: int, hidden: int) -> list[torch.Tensor]:
    shapes = ((37, d), (hidden, d), (hidden,), (hidden, d), (hidden,), (33, hidden), (33,))
    return [data(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


def step(kind: str, text: str, d: int, hidden: int) -> list[torch.Tensor]:
    x, w1, b1, wu, bu, w2, b2 = leaves(d, hidden)
    torch.manual_seed(0)
    if kind == "linear":
        used = [x, w1, b1]
        y = fp4.linear(*used, text, F32)
    elif kind == "chain":
        used = [x, w1, b1, w2, b2]
        y = fp4.linear_act_linear(*used, "gelu", text, text, F32, F32)
    else:
        used = [x, w1, b1, wu, bu, w2, b2]
        y = fp4.gated_linear(*used, "silu", text, text, text, F32, F32)
    return [y.detach(), *torch.autograd.grad(y, used, data(*y.shape, seed=9))]


@pytest.mark.parametrize("text", [SCHEME, FROM_INPUT], ids=["fprop", "input"])
@pytest.mark.parametrize("kind", ["linear", "chain", "gated"])
def test_operands_and_scales_are_those_of_the_reference(kind: str, text: str, monkeypatch) -> None:
    """Sizes that no block divides; the same FP32 products of the same values."""
    want = step(kind, text, 200, 300)
    monkeypatch.setattr(engines, "choose", lambda *a: engines.FP8_BLOCK)
    monkeypatch.setitem(engines.SCALED, "fp8_block", stand_in)
    for got, exact in zip(step(kind, text, 200, 300), want):
        assert torch.equal(got, exact)


def test_compiled(blocks) -> None:
    """Inductor's own buffers, saved scales in the engine's memory order, weights kept ready."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(200, 300), torch.nn.GELU(), torch.nn.Linear(300, 200)
    )
    x, found = data(37, 200), []
    high = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    aot = {"compiler": "aot_eager", "cache_weights": True}
    for options in ({"compiler": "eager"}, {}, aot):
        torch._dynamo.reset()
        model.zero_grad()
        policy = {"version": 1, "recipe": "fp8-block"}
        call = torch.compile(model, backend="fp4", options={"policy": policy, **options})
        call(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for grads in found[1:]:
        for a, b in zip(grads, found[0]):
            assert (a - b).norm() <= 1e-5 * b.norm()
    for a, b in zip(found[0], high):
        assert 1e-3 < (a - b).norm() / b.norm() < 0.2  # quantized, and near


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch is built without CUDA")
@pytest.mark.parametrize("right", [BLOCKS, TILES], ids=str)
@pytest.mark.parametrize("out", [False, True])
def test_pytorch_takes_the_call(right: TensorFormat, out: bool, monkeypatch) -> None:
    """PyTorch's checks of shapes and strides for a CUDA tensor, ragged in M, N and K."""
    seen = []
    plain = torch._scaled_mm_v2

    def spy(*args, **keys):
        seen.append(args)
        return plain(*args) if "out" not in keys else keys["out"].copy_(plain(*args))

    monkeypatch.setattr(torch, "_scaled_mm_v2", spy)
    with FakeTensorMode():
        for m, n, k in ((1, 1, 1), (37, 33, 200), (128, 256, 384), (131, 272, 130), (4, 130, 1000)):
            a, b = (torch.empty(r, k, device=CUDA) for r in (m, n))
            left = fp4.quantize(a, "fp8:128", "e4m3", False)
            other = fp4.quantize(b, str(right), "e4m3", False)
            scales = left[1].t(), other[1] if right == TILES else other[1].t()
            result = torch.empty(m, n, device=CUDA, dtype=torch.bfloat16) if out else None
            y = engines.matmul(left[3], other[3], "fp8_block", torch.bfloat16, result, *scales)
            assert y.shape == (m, n) and y.device == CUDA and y.dtype == torch.bfloat16
            (wide, _, (scale_a,), _, _, (scale_b,), *_), tiles = seen[-1], right == TILES
            assert wide.shape[0] % 4 == 0 and scale_a.shape == (wide.shape[0], wide.shape[1] // 128)
            assert scale_b.stride(0) == 1 and (scale_b.shape[0] % 4 == 0 or not tiles)
    assert len(seen) == 5


def test_nothing_to_multiply() -> None:
    for m, n, k in ((0, 3, 128), (3, 0, 128), (2, 3, 0)):
        a, b = (torch.zeros(r, k, dtype=torch.uint8) for r in (m, n))
        scales = [torch.zeros(k // 128, r) for r in (m, n)]
        y = engines.matmul(a, b, "fp8_block", F32, None, *scales)
        assert y.shape == (m, n) and not y.any()


@pytest.mark.parametrize(
    ("capability", "cuda", "engine", "why"),
    [
        ((9, 0), "13.0", "fp8_block", ""),
        ((9, 0), "12.8", "reference", "fp8_block needs CUDA 12.9 in PyTorch, not 12.8"),
        ((8, 9), "13.0", "reference", "fp8_block needs compute capability 9.0, not 8.9"),
        ((10, 0), "13.0", "reference", "fp8_block needs compute capability 9.0, not 10.0"),
    ],
)
def test_choice(capability, cuda, engine: str, why: str, monkeypatch) -> None:
    """Never the bf16 engine: FP32 scales do not fit into its operand."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(block_scaled, "refusal", lambda form, device: "no")
    for right in (BLOCKS, TILES):
        assert engines.choose(BLOCKS, right, CUDA).name == engine
        assert engines.why_reference(BLOCKS, right, CUDA) == why
    mixed = TensorFormat.parse("mxfp8:row")
    assert engines.choose(BLOCKS, mixed, CUDA) is engines.REFERENCE
    assert engines.why_reference(BLOCKS, mixed, CUDA) == "no engine multiplies fp8 with mxfp8"
    assert engines.choose(mixed, mixed, CUDA).name == "fp8" and capability >= (8, 9)
    assert engines.why_reference(mixed, mixed, CUDA) == ""


def test_a_layer_says_why() -> None:
    from fp4compile.kernels.formats import Scheme
    from fp4compile.kernels.layer import Layer

    scheme = Scheme.parse(SCHEME)
    assert Layer(scheme, F32, torch.device("cpu")).why_reference() == ""
    mixed = Scheme.parse("fprop(fp8:128, mxfp8:32)")
    assert "no engine multiplies fp8 with mxfp8" in Layer(mixed, F32, CUDA).why_reference()
