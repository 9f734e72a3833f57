"""The block-scaled engines without their tensor cores: all but the GEMM's own arithmetic.

A stand-in that unswizzles, decodes and multiplies takes the place of the GEMM (stand_in.py); PyTorch
checks the calls themselves.
"""

from __future__ import annotations

import block_scaled_cases as cases
import pytest
import stand_in
import torch
from fp4compile.kernels import block_scaled, engines, layout, ops, reference  # noqa: F401
from fp4compile.kernels.formats import TensorFormat
from fp4compile.kernels.layer import Layer
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")
NVFP4, TILE = TensorFormat.parse("nvfp4:row"), TensorFormat.parse("nvfp4:tensor:tile")
EXACT, MX = TensorFormat.parse("nvfp4:row:fp8_exact"), TensorFormat.parse("mxfp8:32")
SIZES = [(37, 72, 176), (1, 1, 16), (128, 16, 64), (300, 260, 48)]  # M, N, K


@pytest.fixture
def stood_in(monkeypatch):
    stand_in.install(monkeypatch)


@pytest.mark.parametrize(("recipe", "name", "forms"), cases.SCHEMES)
def test_layers_have_the_references_bits(monkeypatch, recipe, name, forms) -> None:
    for shape in cases.SHAPES:
        cases.check(monkeypatch, cases.step, recipe, name, shape, torch.float32, CPU, forms)
    rest = (cases.SHAPES[0], torch.bfloat16, CPU, forms)
    cases.check(monkeypatch, cases.step, recipe, name, *rest)
    rest = (cases.SHAPES[0], torch.float32, CPU, forms)
    cases.check(monkeypatch, cases.chain, recipe, name, *rest)


def test_outer_scales_inside_the_call(stood_in) -> None:
    """BF16 results of two tensor-wide formats: FP32 sums times both, rounded once."""
    scheme = "fprop(nvfp4:tensor, nvfp4:tensor:tile) dgrad(original) wgrad(original)"
    x, w = torch.randn(40, 96), torch.randn(24, 96)
    y = torch.ops.fp4.linear(x, w, None, scheme, torch.bfloat16)
    assert stand_in.calls == {"fp4": 1, "outer": 1}
    parts = []
    for t, fmt in ((x, "nvfp4:tensor"), (w, "nvfp4:tensor:tile")):
        codes, scales, outer = reference.quantize(t, TensorFormat.parse(fmt))
        values = reference.values(codes, scales, TensorFormat.parse(fmt)).double()
        parts.append((values, outer))
    (a, outer_a), (b, outer_b) = parts
    want = (a @ b.t() * (outer_a * outer_b)).float().bfloat16()
    assert torch.equal(y, want)


def test_empty_sizes(stood_in) -> None:
    scheme = cases.scheme_of("thinking-machines", "low")
    for m, k, n in ((0, 32, 16), (5, 0, 16), (5, 32, 0)):
        y, dx, dw, db = cases.step(scheme, m, k, n, torch.float32, CPU)
        assert y.shape == (m, n) and dx.shape == (m, k) and dw.shape == (n, k)
        assert not y[:, :0].any() and db.shape == (n,)


@pytest.mark.parametrize("text", ["nvfp4:row", "nvfp4:tensor:tile", "mxfp8:32", "mxfp8:row"])
@pytest.mark.parametrize("form", block_scaled.FORMS)
def test_traces_see_the_shapes_that_runs_have(stood_in, text, form) -> None:
    """Of all that `quantize`, `decode` and the backward primitives give in the engine's forms."""
    fmt = TensorFormat.parse(text)
    if (form == "fp4") != (fmt.format == "nvfp4"):
        pytest.skip("no such operand")
    seed = torch.tensor(1)

    def primitives(x):
        op, found = torch.ops.fp4, []
        for t in (x, x[:, :0], x[:0]):
            codes, scales, factor, place = op.quantize(t, text, form, False)
            found += [codes, scales, factor, place]
            if fmt.block == "tile":
                found.append(op.decode(codes, scales, text, t.shape[1], form, True))
            target = "nvfp4:tensor:sr" if form == "fp4" else text + ":sr"
            rest = (codes, scales, factor, text, t.shape[1], target, form, seed, 0)
            found += op.requantize(*rest)
            found += op.quantize_grad(t, None, target, target, form, form, True, seed, 0)
        return found

    x = torch.randn(37, 80)
    real = primitives(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = primitives(torch.empty(37, 80))
    for i, (a, b) in enumerate(zip(real, fake, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, (i, a.shape, b.shape, a.dtype, b.dtype)


# ---- the calls themselves ---------------------------------------------------------------------


def inputs(form: str, m: int, n: int, k: int, device: str) -> tuple:
    k += -k % block_scaled.BLOCK[form]
    width, blocks = k // block_scaled.ELEMENTS[form], k // block_scaled.BLOCK[form]
    sizes = [(m, width), (n, width)]
    rows = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    scales = tuple(
        torch.zeros(block_scaled.scale_bytes(r, blocks), dtype=torch.uint8, device=device)
        for r in (m, n)
    )
    return *rows, scales


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="PyTorch without CUDA")
@pytest.mark.parametrize("form", block_scaled.FORMS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_calls_pass_pytorchs_checks(monkeypatch, form, out_dtype) -> None:
    """Under FakeTensorMode with a CUDA device; the older operator's checks are stricter."""
    native, seen = block_scaled.native, []

    def both(a, b, scale_a, scale_b, outer, form, out_dtype, out):
        seen.append((a.shape, b.shape))
        element = torch.float4_e2m1fn_x2 if form == "fp4" else torch.float8_e4m3fn
        scale = torch.float8_e4m3fn if form == "fp4" else torch.float8_e8m0fnu
        older = torch._scaled_mm(
            a.view(element), b.view(element).t(), scale_a.view(scale), scale_b.view(scale),
            out_dtype=out_dtype,
        )  # fmt: skip
        newer = native(a, b, scale_a, scale_b, outer, form, out_dtype, out)
        assert older.shape == newer.shape and older.dtype == newer.dtype
        return newer

    monkeypatch.setattr(block_scaled, "native", both)
    with FakeTensorMode():
        for m, n, k in SIZES:
            *operands, scales = inputs(form, m, n, k, "cuda")
            for unit in (False, True):
                given = (None, None) if unit and form == "mx" else scales
                one = torch.empty(1, device="cuda")
                for outer in [(None, None)] + [(one, one)] * (form == "fp4"):
                    got = block_scaled.matmul(*operands, given, outer, (m, n), form, out_dtype)
                    assert got.shape == (m, n) and got.dtype == out_dtype
                    out = None  # 2.11 to 2.13 know no shape of the call that writes into one
                    if torch.__version__ >= "2.14":
                        out = torch.empty(m, n, dtype=out_dtype, device="cuda")
                    engines.matmul(
                        *operands, engines.BLOCK_SCALED[form].name, out_dtype, out, *given, (m, n),
                        outer,
                    )  # fmt: skip
    assert len(seen) == len(SIZES) * 4 * (2 if form == "fp4" else 1)


@pytest.mark.skipif(torch.__version__ < "2.14", reason="the checks run for CPU tensors from 2.14 on")
@pytest.mark.parametrize("form", block_scaled.FORMS)
def test_calls_pass_the_checks_in_cpp(form) -> None:
    """What PyTorch checks of a call before it looks for a device's kernel."""
    one = torch.ones(1)
    for m, n, k in SIZES:
        *operands, scales = inputs(form, m, n, k, "cpu")
        for outer in [(None, None)] + [(one, one)] * (form == "fp4"):
            with pytest.raises(ValueError, match="CPU does not support swizzle"):
                block_scaled.matmul(*operands, scales, outer, (m, n), form, torch.bfloat16)
    a, b, scales = inputs(form, 128, 128, 128, "cpu")
    wrong = (torch.zeros(scales[0].numel() + 512, dtype=torch.uint8), scales[1])
    with pytest.raises(ValueError, match="should have"):
        block_scaled.native(a, b, *wrong, (None, None), form, torch.bfloat16, None)


# ---- which engine -----------------------------------------------------------------------------


def test_only_a_device_that_multiplied_correctly_gets_the_engine(monkeypatch) -> None:
    """A GPU with the tensor cores, by its capability alone, is no proof."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (10, 0))
    answers = {"fp4": "", "mx": "scaled_mm with float32 results: refused"}
    monkeypatch.setattr(block_scaled, "_refusal", lambda form, index: answers[form])
    row = TensorFormat.parse("mxfp8:row:sr")
    assert engines.choose(NVFP4, TILE, device) is engines.FP4
    assert engines.choose(row, EXACT, device, turned=True) is engines.FP8
    assert engines.why_not(row, EXACT, device, turned=True) == answers["mx"]
    assert engines.choose(MX, MX, device) is engines.BF16
    assert engines.why_not(NVFP4, TILE, device) == ""
    why = engines.why_not(NVFP4, EXACT, device, turned=True)
    assert engines.choose(NVFP4, EXACT, device, turned=True) is engines.BF16
    assert why == "no instruction multiplies nvfp4:row and nvfp4:row:fp8_exact transposed"


def test_nothing_is_tried_where_the_tensor_cores_are_not(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    monkeypatch.setattr(block_scaled, "probe", lambda *a: pytest.fail("probed"))
    block_scaled._refusal.cache_clear()
    device = torch.device("cuda", 0)
    assert engines.choose(EXACT, EXACT, device) is engines.FP8
    assert engines.why_not(EXACT, EXACT, device) == ""  # nothing is amiss
    assert block_scaled.refusal("fp4", device) == "sm_90 has no block-scaled tensor cores"
    assert engines.choose(EXACT, EXACT, CPU) is engines.REFERENCE
    block_scaled._refusal.cache_clear()


@pytest.mark.parametrize("form", block_scaled.FORMS)
def test_the_probe_compares_bits(stood_in, monkeypatch, form) -> None:
    assert block_scaled.probe(form, CPU) == ""
    good = block_scaled.native

    def one_off(*arguments):
        result = good(*arguments)
        result[0, 0] *= 1.0078125  # a BF16 step
        return result

    def two_rows_swapped(a, b, scale_a, *rest):
        rows = torch.arange(32)
        rows[0], rows[1] = 1, 0
        return good(a, b, scale_a.view(-1, 32, 16)[:, rows].flatten(), *rest)

    def refused(*arguments):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")

    monkeypatch.setattr(block_scaled, "native", one_off)
    assert "not the exact ones" in block_scaled.probe(form, CPU)
    monkeypatch.setattr(block_scaled, "native", two_rows_swapped)
    assert "not the exact ones" in block_scaled.probe(form, CPU)
    monkeypatch.setattr(block_scaled, "native", refused)
    text = "scaled_mm with float32 results: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED when calling"
    assert block_scaled.probe(form, CPU) == text


def test_operands_are_the_saved_codes(stood_in) -> None:
    """No second copy: the forward GEMM reads the codes, and beside them only their scales."""
    layer = Layer(cases.scheme_of("fp8-exact", "low"), torch.bfloat16, CPU)
    xq = layer.quantize_activation(torch.randn(37, 80))
    assert xq.operand.shape == (block_scaled.scale_bytes(37, 5),)
    rows, scales = block_scaled.beside(EXACT, "fp4", xq.codes, xq.operand)
    assert rows is xq.codes and torch.equal(scales, layout.swizzle(xq.scales))


def test_verify_holds_on_these_engines(monkeypatch) -> None:
    """Its checks of decoded operands and of GEMMs in the forms that these engines read."""
    from fp4compile import verify_checks

    stand_in.install(monkeypatch)
    ran = set()
    for check in verify_checks.all_checks(torch.device("cpu")):
        mine = "fp8-exact low" in check.name or " to mx, transposed" in check.name
        if mine and check.group in ("decode", "engine") and not check.missing:
            check.run()
            ran.add(check.group)
    assert ran == {"decode", "engine"}
