"""The reference against an independent implementation, and against what its users may rely on."""

from __future__ import annotations

import zlib

import independent
import numpy as np
import pytest
import torch
from fp4compile.kernels import elements, fp8, reference, rotation
from fp4compile.kernels.errors import FormatError, InputError
from fp4compile.kernels.formats import BLOCK, TensorFormat
from torch._subclasses.fake_tensor import FakeTensorMode
from value_kinds import FORMATS, KINDS, SHAPES

SEEDS = (1, -3, 2**32 + 7, -(2**63), 2**63 - 1)


def assert_same(x: np.ndarray, text: str, seed: int = 0, stream: int = 0) -> None:
    fmt = TensorFormat.parse(text)
    got = reference.quantize(torch.from_numpy(x), fmt, torch.tensor(seed), stream)
    want = independent.quantize(x, fmt, seed, stream)
    for name, a, b in zip(
        ("scales", "outer", "codes"), (got[1], got[2], got[0]), (*want[1:], want[0])
    ):
        assert a.shape == b.shape, name
        np.testing.assert_array_equal(a.numpy(), b, err_msg=name)


def roundtrip(x: torch.Tensor, text: str) -> torch.Tensor:
    fmt = TensorFormat.parse(text)
    return reference.dequantize(*reference.quantize(x, fmt), fmt, x.shape[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", FORMATS)
def test_same_bits_as_independent(text: str, kind: str) -> None:
    number = zlib.crc32(f"{text} {kind}".encode())
    rng = np.random.default_rng(number)
    for i in range(2):
        x = KINDS[kind](rng, SHAPES[(number + i) % len(SHAPES)])
        assert_same(x, text, SEEDS[(number + i) % len(SEEDS)], number % 1000)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("amax", [1e-39, 1e4, 6e4, 3e38])
def test_extreme_magnitudes(text: str, amax: float) -> None:
    x = np.random.default_rng(2).standard_normal((3, 40)).astype(np.float32)
    x = (x / np.abs(x).max() * np.float32(amax)).astype(np.float32)
    assert_same(x, text, 11, 2)
    if "had" in text and amax == 3e38:
        return  # the sums of a rotation overflow: the group is NaN
    scales = reference.quantize(torch.from_numpy(x), TensorFormat.parse(text), torch.tensor(11))[1]
    assert scales.isfinite().all()
    assert scales.is_floating_point() or not bool((scales == (0x7F if text.startswith("nvfp4") else 255)).any())


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("shape", [(0, 48), (3, 0), (0, 0), (1, 1)])
def test_empty_and_single(text: str, shape: tuple[int, int]) -> None:
    x = np.full(shape, 3.0, np.float32)
    assert_same(x, text)
    if text.startswith("nvfp4:row") and shape == (3, 0):
        outer = reference.quantize(torch.from_numpy(x), TensorFormat.parse(text), torch.tensor(0))[
            2
        ]
        assert outer.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("cols", [16, 48, 80, 96, 112, 144, 1, 17, 31, 100])
@pytest.mark.parametrize("rows", [1, 37])
def test_sizes_that_do_not_divide(rows: int, cols: int) -> None:
    x = np.random.default_rng(cols).standard_normal((rows, cols)).astype(np.float32)
    text = FORMATS[cols % len(FORMATS)]
    assert_same(x[: 37 if cols < 50 else 2], text, 5, 1)
    wide = reference.quantize(torch.from_numpy(x), TensorFormat.parse("nvfp4:row"))
    padded = np.pad(x, ((0, 0), (0, -cols % 16)))
    for a, b in zip(
        wide, reference.quantize(torch.from_numpy(padded), TensorFormat.parse("nvfp4:row"))
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("text", ["nvfp4:row", "nvfp4:row:four_over_six", "nvfp4:row:fp8_exact",
                                  "nvfp4:row:fp8_exact:half", "nvfp4:tensor:tile", "mxfp8:32",
                                  "mxfp8:128", "mxfp8:row", "mxfp4", "s2f6", "fp8:128"])  # fmt: skip
def test_not_finite_stays_in_its_group(text: str, bad: float) -> None:
    x = np.random.default_rng(3).standard_normal((20, 256)).astype(np.float32)
    clean = roundtrip(torch.from_numpy(x), text)
    x[7, 130] = bad
    assert_same(x, text)
    lost = torch.isnan(roundtrip(torch.from_numpy(x), text))
    row = {"nvfp4:row": 256, "mxfp8:row": 256, "mxfp8:128": 128, "fp8:128": 128}.get(
        ":".join(text.split(":")[:2]), 32
    )
    if text == "nvfp4:tensor:tile":
        assert lost.all()
        return
    start = 130 // row * row
    assert lost[7, start : start + row].all() and lost.sum() == row
    assert torch.equal(roundtrip(torch.from_numpy(x), text)[~lost], clean[~lost])


@pytest.mark.parametrize(("text", "top"), [("mxfp8:32", 448.0), ("mxfp4", 6.0), ("s2f6", 127 / 64)])
def test_mx_scale_one_ulp_around_a_power_of_two(text: str, top: float) -> None:
    """The byte changes exactly above top * 2^k; the largest element never saturates."""
    k = torch.arange(-126, 119)
    edge = torch.tensor(top) * torch.exp2(k.float())
    for amax, more in ((edge, 0), (torch.nextafter(edge, torch.tensor(0.0)), 0),
                       (torch.nextafter(edge, torch.tensor(torch.inf)), 1)):  # fmt: skip
        x = torch.zeros(k.numel(), 32)
        x[:, 5] = amax
        scales = reference.quantize(x, TensorFormat.parse(text))[1][:, 0]
        assert torch.equal(scales.int(), (k + 127 + more).clamp(min=0).int())
        error = (roundtrip(x, text)[:, 5] - amax).abs() / amax
        assert error.max() <= 1 / 16 or text == "mxfp4"


def test_block_maximum_error_of_mxfp8() -> None:
    x = torch.from_numpy(KINDS["mixed"](np.random.default_rng(5), (400, 32)))
    x = x[x.abs().amax(1) > 1e-36]
    at = x.abs().argmax(1, keepdim=True)
    error = (roundtrip(x, "mxfp8:32") - x).gather(1, at).abs() / x.gather(1, at).abs()
    assert error.max() <= 0.0625


@pytest.mark.parametrize("k", [1.0, 0.37, 3e-5])
@pytest.mark.parametrize("level", [6, 4])
@pytest.mark.parametrize("ulp", [0, 1, -1])
def test_four_over_six_near_ties(k: float, level: int, ulp: int) -> None:
    """Blocks of +-6k or 4k (both scales fit), also with one element an ulp away."""
    x = np.full((4, 64), level * k, np.float32) * np.where(np.arange(64) % 2, -1, 1).astype(
        np.float32
    )
    x[0, 0] = 6 * k
    x[:, 3] = np.nextafter(x[:, 3], np.float32(ulp * 1e9)) if ulp else x[:, 3]
    assert_same(x, "nvfp4:row:four_over_six")
    assert_same(x, "nvfp4:tensor:four_over_six")
    error = np.abs(roundtrip(torch.from_numpy(x), "nvfp4:row:four_over_six").numpy() - x)
    assert (error <= np.abs(x) * 0.0626).all()


def test_search_of_one_factor_is_the_plain_format() -> None:
    x = torch.from_numpy(KINDS["heavy"](np.random.default_rng(6), (40, 80)))
    plain = reference.quantize(x, TensorFormat.parse("nvfp4:row"))
    for a, b in zip(plain, reference.quantize(x, TensorFormat.parse("nvfp4:row:search=1"))):
        assert torch.equal(a, b)
    four = reference.quantize(x, TensorFormat.parse("nvfp4:row:four_over_six"))
    for a, b in zip(four, reference.quantize(x, TensorFormat.parse("nvfp4:row:search=1/1.5"))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_values_are_e4m3_numbers(kind: str) -> None:
    x = torch.from_numpy(KINDS[kind](np.random.default_rng(8), (64, 96)))
    for text in ("nvfp4:row:fp8_exact", "nvfp4:tensor:fp8_exact"):
        fmt = TensorFormat.parse(text)
        codes, scales, _ = reference.quantize(x, fmt)
        values = reference.values(codes, scales, fmt)
        assert torch.equal(values.to(torch.float8_e4m3fn).float(), values)
        assert torch.equal(values.to(torch.bfloat16).float(), values)


def test_fp8s_cast_on_the_cpu_has_the_bits_of_encode() -> None:
    """All BF16 numbers, all E4M3 numbers, their midpoints and an ulp beside these."""
    y = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.arange(256, dtype=torch.uint8)
    grid = elements.decode(codes[:0x7F], elements.E4M3)
    ties = (grid[1:] + grid[:-1]) / 2
    beside = [torch.nextafter(ties, torch.tensor(v)) for v in (0.0, 1e9)]
    for part in (y[y.isfinite()], grid, ties, *beside):
        for signed in (part, -part):
            assert torch.equal(fp8.nearest(signed), elements.encode(signed, elements.E4M3))
    want = elements.decode(codes, elements.E4M3)
    assert torch.equal(fp8.elements(codes).nan_to_num(9e9), want.nan_to_num(9e9))
    assert torch.equal(torch.signbit(fp8.elements(codes)), torch.signbit(want))


def test_fp8_tiles() -> None:
    """A weight and its transpose have the same codes and scales; NaN takes its tile alone."""
    x, fmt = torch.randn(200, 300), TensorFormat.parse("fp8:tile")
    (codes, scales, _), (turned, turned_scales, _) = (
        reference.quantize(t, fmt) for t in (x, x.t())
    )
    assert torch.equal(codes[:, :300], turned[:, :200].t())
    assert torch.equal(scales, turned_scales.t()) and scales.shape == (2, 3)
    assert (codes & 127).amax() == 0x7E and ((codes & 127) < 0x7F).all()
    x[150, 130] = float("nan")
    lost = roundtrip(x, "fp8:tile").isnan()
    assert lost[128:, 128:256].all() and lost.sum() == 72 * 128


def test_tiles_are_the_same_transposed() -> None:
    x = torch.from_numpy(KINDS["heavy"](np.random.default_rng(9), (48, 80)))
    fmt = TensorFormat.parse("nvfp4:tensor:tile")
    one, other = reference.quantize(x, fmt), reference.quantize(x.t(), fmt)
    assert torch.equal(elements.unpack(one[0]), elements.unpack(other[0]).t())


@pytest.mark.parametrize("text", ["nvfp4:tensor:sr", "mxfp8:32:sr", "mxfp4:sr", "fp8:128:sr"])
def test_transposed_copy_uses_the_elements_own_bits(text: str) -> None:
    fmt, (m, n) = TensorFormat.parse(text), (37, 50)
    x = KINDS["gauss"](np.random.default_rng(10), (m, n))
    block = BLOCK[fmt.format]
    bits = reference.random_bits(torch.tensor(99), 4, m, n, block)
    want = independent.random_bits(99, 4, m, -(-n // block) * block)
    np.testing.assert_array_equal(bits.numpy(), want)
    got = reference.quantize(torch.from_numpy(x).t(), fmt, bits=bits[:, :n].t())
    padded = np.pad(want[:, :n].T, ((0, 0), (0, -m % block)))
    for a, b in zip(got, independent.quantize(np.ascontiguousarray(x.T), fmt, bits=padded)):
        np.testing.assert_array_equal(a.numpy(), b)


@pytest.mark.parametrize("text", FORMATS)
def test_split_multiplies_to_dequantize(text: str) -> None:
    fmt = TensorFormat.parse(text)
    x = torch.from_numpy(KINDS["heavy"](np.random.default_rng(12), (9, 50)))
    x[4, 7] = float("nan") if text == "mxfp8:row" else 1.0
    q = reference.quantize(x, fmt, torch.tensor(3), 1)
    values, factor = reference.split(*q, fmt)
    whole = values if factor.numel() == 0 else values * factor[:, None]
    if fmt.rotation:
        whole = rotation.unrotate(whole, fmt.rotation)
    decoded = reference.dequantize(*q, fmt, 50)
    assert torch.equal(whole[:, :50].nan_to_num(7e9), decoded.nan_to_num(7e9))
    assert factor.shape == ((9,) if ":row" in text else (1,) if ":tensor" in text else (0,))
    assert torch.equal(reference.dequantize(*q, fmt, 50, torch.bfloat16).nan_to_num(0.0),
                       decoded.to(torch.bfloat16).nan_to_num(0.0))  # fmt: skip


@pytest.mark.parametrize("text", FORMATS)
def test_no_value_is_read_on_the_host(text: str) -> None:
    fmt = TensorFormat.parse(text)
    with FakeTensorMode():
        x, seed = torch.randn(5, 40), torch.zeros(1, dtype=torch.int64)
        q = reference.quantize(x, fmt, seed, 1)
        assert reference.dequantize(*q, fmt, 40).shape == (5, 40)


def test_undefined_combinations_are_refused() -> None:
    x = torch.ones(2, 16)
    for keys in ({"block_scales": "fp8_exact", "block": "tile"}, {"outer": "row", "block": "tile"},
                 {"block_scales": "fp8_exact", "rounding": "stochastic"}):  # fmt: skip
        with pytest.raises(FormatError):
            reference.quantize(x, TensorFormat("nvfp4", **keys), torch.tensor(1))
    with pytest.raises(InputError, match="seed"):
        reference.quantize(x, TensorFormat.parse("mxfp8:32:sr"))
