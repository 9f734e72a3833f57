"""Elements, rotation and scale layout against ml_dtypes and definitions written out as loops."""

from __future__ import annotations

import independent
import ml_dtypes
import numpy as np
import pytest
import torch
from fp4compile.kernels import elements, layout, nvfp4, rotation
from fp4compile.kernels.philox import random16


def test_every_byte_decodes() -> None:
    byte = np.arange(256, dtype=np.uint8)
    want = {
        elements.E4M3: byte.view(ml_dtypes.float8_e4m3fn),
        elements.E2M1: (byte % 16).view(ml_dtypes.float4_e2m1fn),
    }
    for grid, values in want.items():
        got = elements.decode(torch.from_numpy(byte & (2 * 2**grid.sign - 1)), grid).numpy()
        np.testing.assert_array_equal(got, values.astype(np.float32))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(values.astype(np.float32)))
    e8m0 = byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    e8m0[0] = 2.0**-127
    np.testing.assert_array_equal(elements.e8m0_decode(torch.from_numpy(byte)).numpy(), e8m0)
    int8 = byte.view(np.int8)
    np.testing.assert_array_equal(elements.s2f6_decode(torch.from_numpy(int8)).numpy(), int8 / 64)


@pytest.mark.parametrize("grid", [elements.E2M1, elements.E4M3], ids=["e2m1", "e4m3"])
def test_encode_at_every_tie_and_its_neighbours(grid: elements.Grid) -> None:
    kind = {3: independent.E2M1, 7: independent.E4M3}[grid.sign]
    values = elements.decode(torch.arange(elements.top_code(grid) + 1, dtype=torch.uint8), grid)
    middles = ((values[1:] + values[:-1]) / 2).numpy()
    points = np.concatenate([values.numpy(), middles, [500, 1e30, np.inf, 2.0**-149]])
    points = points.astype(np.float32)
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.inf)]
    )
    points = np.concatenate([points, -points]).astype(np.float32)
    got = elements.encode(torch.from_numpy(points), grid).numpy()
    np.testing.assert_array_equal(got, independent.nearest(points, kind))
    up = elements.encode_up(torch.from_numpy(np.abs(points)), grid)
    reached = elements.decode(up, grid).numpy()
    want = [min((v for v in values.tolist() if v >= p), default=grid.top) for p in np.abs(points)]
    np.testing.assert_array_equal(reached, want)


@pytest.mark.parametrize("top", [448.0, 6.0, 127 / 64])
def test_power_of_two_scales_of_every_exponent(top: float) -> None:
    """Subnormal maxima too; the byte is found by trying all, in double precision."""
    mantissas = [
        0,
        1,
        0x3FFFFF,
        0x400000,
        0x600000,
        0x600001,
        0x7E0000,
        0x7E0001,
        0x7F0000,
        0x7F0001,
    ]
    words = [(e << 23) + m for e in (0, 1, 2, 7, 8, 9, 126, 127, 253, 254) for m in mantissas]
    amax = np.array(words, np.uint32).view(np.float32)
    got = elements.e8m0_encode(torch.from_numpy(amax), top).tolist()
    assert got == [independent.power_of_two_byte(a, top) for a in amax]


def test_random_values_of_far_elements() -> None:
    index = [8 * 2**32 - 1, 8 * 2**32, 2**40 + 5, 2**62 + 3]
    got = random16(torch.tensor(2**33 + 1), 9, torch.tensor(index)).tolist()
    assert got == [independent.philox16(2**33 + 1, 9, i) for i in index]


def test_exact_scales_are_all_that_keep_products_in_e4m3() -> None:
    scales = elements.decode(torch.arange(1, 127, dtype=torch.uint8), elements.E4M3)
    codes = elements.decode(torch.arange(8, dtype=torch.uint8), elements.E2M1)
    products = scales[:, None] * codes
    exact = (products.to(torch.float8_e4m3fn).float() == products).all(1)
    table = elements.decode(nvfp4.exact_scales(torch.device("cpu")), elements.E4M3)
    assert torch.equal(table, scales[exact])


@pytest.mark.parametrize("n", [16, 32])
def test_rotation_is_orthogonal_and_cancels(n: int) -> None:
    a, b = torch.randn(2, 8, 96, generator=torch.Generator().manual_seed(n))
    torch.testing.assert_close(rotation.unrotate(rotation.rotate(a, n), n), a)
    torch.testing.assert_close(rotation.rotate(a, n) @ rotation.rotate(b, n).t(), a @ b.t(),
                               rtol=1e-5, atol=1e-4)  # fmt: skip
    np.testing.assert_array_equal(rotation.rotate(a, n).numpy(), independent.hadamard(a.numpy(), n))


@pytest.mark.parametrize("shape", [(1, 1), (130, 7), (128, 4), (37, 5), (300, 12), (0, 3), (3, 0)])
def test_swizzle(shape: tuple[int, int]) -> None:
    scales = np.random.default_rng(1).integers(1, 255, shape, dtype=np.uint8)
    flat = layout.swizzle(torch.from_numpy(scales))
    np.testing.assert_array_equal(flat.numpy(), independent.swizzle(scales))
    assert int((flat == 0).sum()) == flat.numel() - scales.size  # all padding is zero
    np.testing.assert_array_equal(layout.unswizzle(flat, *shape).numpy(), scales)
