"""The FP8-exact search in FP16 arithmetic: reference and CPU kernels against an independent one and
the vectors of half_search.npz, and what the search is for."""

from __future__ import annotations

import sys
from pathlib import Path

import independent
import numpy as np
import pytest
import torch
from fp4compile.kernels import native, reference
from fp4compile.kernels.formats import TensorFormat
from value_kinds import KINDS, SHAPES

DATA = Path(__file__).parent.parent / "data"
sys.path.insert(0, str(DATA))
import make_half_search  # noqa: E402

VECTORS = np.load(DATA / "half_search.npz")
INPUTS = make_half_search.inputs()
OUTERS = ("row", "tensor")
HALF = {outer: TensorFormat.parse(f"nvfp4:{outer}:fp8_exact:half") for outer in OUTERS}
FULL = {outer: TensorFormat.parse(f"nvfp4:{outer}:fp8_exact") for outer in OUTERS}
MAKERS = {"reference": reference.quantize}
if native.available()[0]:
    MAKERS["native"] = lambda x, fmt: native.quantize(x, fmt)[:3]


def assert_parts(got, want) -> None:
    for name, a, b in zip(("codes", "scales", "outer"), got, want):
        assert a.shape == b.shape, name
        np.testing.assert_array_equal(a.numpy(), b, err_msg=name)


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("maker", MAKERS)
def test_vectors(maker: str, name: str, outer: str) -> None:
    x = torch.from_numpy(INPUTS[name])
    want = [VECTORS[f"{name}/{outer}/{part}"] for part in ("codes", "scales", "outer")]
    assert_parts(MAKERS[maker](x, HALF[outer]), want)


def test_vectors_are_what_the_independent_implementation_makes() -> None:
    made = make_half_search.results()
    assert set(made) == set(VECTORS.files)
    for name, value in made.items():
        np.testing.assert_array_equal(VECTORS[name], value, err_msg=name)


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_as_independent(kind: str, outer: str) -> None:
    for seed in range(8):
        rng = np.random.default_rng((seed, len(kind)))
        x = KINDS[kind](rng, SHAPES[seed % len(SHAPES)])
        want = independent.quantize(x, HALF[outer])
        for make in MAKERS.values():
            assert_parts(make(torch.from_numpy(x), HALF[outer]), want)


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.skipif("native" not in MAKERS, reason=native.available()[1])
def test_native_has_the_bits_of_the_reference(outer: str) -> None:
    """300,000 elements, their sizes within a block spread by up to 2^24."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(300, 1008, generator=generator)
    spread = torch.randint(0, 24, (300, 1), generator=generator)
    x *= torch.exp2(-spread * torch.rand(x.shape, generator=generator))
    for y in (x, x.to(torch.bfloat16)):
        want = [part.numpy() for part in reference.quantize(y, HALF[outer])]
        assert_parts(MAKERS["native"](y, HALF[outer]), want)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_later_candidate_must_be_strictly_better(maker: str) -> None:
    """A block below FP16's range has no error with any scale: the first of them stays."""
    x = torch.zeros(1, 64)
    x[0, :16:2], x[0, 16:32], x[0, 32:48], x[0, 48:] = 384.0, 6.0, 0.0, -1e-20
    codes, scales, outer = MAKERS[maker](x, HALF["row"])
    assert outer.item() == 1.0
    assert scales.view(torch.float8_e4m3fn).tolist() == [[64.0, 1.0, 0.0, 2.0**-8]]
    assert codes[0, 24:].tolist() == [0x88] * 8


@pytest.mark.parametrize("maker", MAKERS)
def test_signs_survive(maker: str) -> None:
    """Zeros and vanishing elements keep their sign, but not in a block of zeros."""
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([384.0, -384.0, -0.0, 0.0, -1e-30, 1e-30])
    x[0, 16:] = -0.0
    codes, scales, _ = MAKERS[maker](x, HALF["row"])
    assert codes[0, :3].tolist() == [0xF7, 0x08, 0x08] and codes[0, 8:].tolist() == [0] * 8
    assert scales[0, 1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_e4m3_numbers(kind: str) -> None:
    x = torch.from_numpy(KINDS[kind](np.random.default_rng(8), (64, 96)))
    for outer in OUTERS:
        codes, scales, _ = reference.quantize(x, HALF[outer])
        values = reference.values(codes, scales, HALF[outer])
        assert torch.equal(values.to(torch.float8_e4m3fn).float(), values)
        if native.available()[0]:
            got = native.quantize(x, HALF[outer], values=True)[3]
            assert torch.equal(got, values)
            assert torch.equal(native.decode(codes, scales, HALF[outer], 96), values)


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("data", ["gauss", "laplace", "gelu"])
def test_error_is_that_of_the_search_in_fp32(data: str, outer: str) -> None:
    """Within 0.02 percentage points; scales differ in one or two blocks of a thousand."""
    x = torch.randn(128, 2048, generator=torch.Generator().manual_seed(7))
    if data == "laplace":
        x = x.sign() * -torch.special.erfc(x.abs() / 2**0.5).log()
    if data == "gelu":
        x = torch.nn.functional.gelu(x)
    errors, scales = [], []
    for fmt in (HALF[outer], FULL[outer]):
        parts = reference.quantize(x, fmt)
        errors.append(((reference.dequantize(*parts, fmt, 2048) - x).norm() / x.norm()).item())
        scales.append(parts[1])
    assert 0.09 < errors[1] < 0.1 and abs(errors[0] - errors[1]) < 2e-4
    assert (scales[0] != scales[1]).float().mean() < 0.005
