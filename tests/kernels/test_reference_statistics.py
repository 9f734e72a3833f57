"""What rounding does on average: Gaussian error figures, and stochastic rounding without bias.

Bounds are stated where they are used; all draws are fixed, so no test can fail by chance.
"""

from __future__ import annotations

import math

import pytest
import torch
from fp4compile.kernels import elements, reference
from fp4compile.kernels.formats import TensorFormat
from fp4compile.kernels.philox import random16

# Relative root-mean-square error on Gaussian data and what a draw of it may differ by. Rows of 2048:
# the FP8-exact figure depends a little on how a row's maximum lies to the scales.
FIGURES = {
    "nvfp4:row": (0.095, 0.0005),
    "nvfp4:tensor": (0.095, 0.0005),
    "nvfp4:row:four_over_six": (0.087, 0.0005),
    "nvfp4:row:fp8_exact": (0.092, 0.0005),
    "nvfp4:row:fp8_exact:half": (0.092, 0.0005),
    "nvfp4:tensor:fp8_exact": (0.0907, 0.0005),
    "nvfp4:tensor:fp8_exact:half": (0.0907, 0.0005),
    "nvfp4:tensor:tile": (0.111, 0.0007),
    "nvfp4:tensor:sr": (0.149, 0.0010),
    "mxfp8:32": (0.0265, 0.0001),
    "mxfp8:32:sr": (0.0375, 0.0002),
    "mxfp8:row:sr": (0.0375, 0.0002),
    "fp8:128": (0.0257, 0.0001),
    "fp8:tile": (0.0265, 0.0002),
    "fp8:128:sr": (0.0364, 0.0002),
}


def gaussian(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def draw(x: torch.Tensor, text: str, seed: int, stream: int = 0) -> torch.Tensor:
    fmt = TensorFormat.parse(text)
    return reference.dequantize(
        *reference.quantize(x, fmt, torch.tensor(seed), stream), fmt, x.shape[1]
    )


def relative(error: torch.Tensor, x: torch.Tensor) -> float:
    return (error.norm() / x.norm()).item()


@pytest.mark.parametrize("text", FIGURES)
def test_gaussian_error(text: str) -> None:
    x = gaussian(256, 2048)
    want, tolerance = FIGURES[text]
    assert relative(draw(x, text, 1) - x, x) == pytest.approx(want, abs=tolerance)


@pytest.mark.parametrize("text", ["nvfp4:tensor:sr", "mxfp8:32:sr", "mxfp4:sr", "fp8:128:sr"])
def test_mean_of_draws_falls_as_the_square_root(text: str) -> None:
    x = gaussian(128, 256, 1)
    one = relative(draw(x, text, 0) - x, x)
    total = torch.zeros_like(x)
    for n in range(1, 65):
        total += draw(x, text, n)
        if n in (4, 16, 64):
            assert relative(total / n - x, x) == pytest.approx(one / math.sqrt(n), rel=0.03)


@pytest.mark.parametrize("grid", [elements.E2M1, elements.E4M3], ids=["e2m1", "e4m3"])
def test_stochastic_rounding_is_unbiased(grid: elements.Grid) -> None:
    """Over all 65,536 draws the mean is x within 2^-16 of a step; neighbours are the only values."""
    values = elements.decode(torch.arange(elements.top_code(grid) + 1, dtype=torch.uint8), grid)
    bits = torch.arange(65536, dtype=torch.int32)
    for low, high in zip(values[:-1].tolist(), values[1:].tolist()):
        for part in (0.0, 2.0**-18, 0.0123, 0.5, 0.97):
            y = torch.tensor(-(low + (high - low) * part))
            got = elements.decode(elements.encode_stochastic(y.expand(65536), bits, grid), grid)
            assert set(got.unique().tolist()) <= {-low, -high}
            assert abs(got.double().mean() - y) <= (high - low) * 2.0**-16


def test_zero_and_grid_values_do_not_move() -> None:
    for grid in (elements.E2M1, elements.E4M3):
        codes = torch.arange(elements.top_code(grid) + 1, dtype=torch.uint8)
        codes = torch.cat([codes, codes | (1 << grid.sign)])
        for bits in (0, 65535):
            random = torch.full(codes.shape, bits, dtype=torch.int32)
            y = elements.decode(codes, grid)
            assert torch.equal(elements.encode_stochastic(y, random, grid), codes)


@pytest.mark.parametrize("text", ["nvfp4:tensor:sr", "mxfp8:32:sr"])
def test_tiles_draw_independently(text: str) -> None:
    """Up/down patterns of 16 x 16 tiles of one repeated value agree in half of the places.

    256 fair coins agree in 128 +- 5 sigma (40) places; repeated bits would agree in 256.
    """
    x = torch.full((64, 64), 0.266)
    x[:, ::16] = 6.0 if text.startswith("nvfp4") else 448.0
    up = (draw(x, text, 5) > x)[:, torch.arange(64) % 16 != 0]
    tiles = up.reshape(4, 16, 4, 15).transpose(1, 2).reshape(16, -1).float()
    assert 0.3 < tiles.mean() < 0.7
    signs = 2 * tiles - 1
    signs = signs - signs.mean()
    agree = signs @ signs.t() / signs.square().sum(1)
    agree.fill_diagonal_(0)
    assert agree.abs().max() < 5 / math.sqrt(240)


def test_streams_and_seeds_draw_differently() -> None:
    x = gaussian(32, 64, 2)
    draws = [
        draw(x, "mxfp8:32:sr", seed, stream)
        for seed, stream in ((1, 0), (1, 1), (2, 0), (2**32 + 1, 0), (-1, 0))
    ]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            errors = torch.stack([(a - x).flatten(), (b - x).flatten()])
            assert abs(torch.corrcoef(errors)[0, 1]) < 5 / math.sqrt(x.numel())
    assert torch.equal(draws[0], draw(x, "mxfp8:32:sr", 1, 0))


def test_random_bits_are_uniform() -> None:
    """Each of the 16 bits is set in half of 80,000 values, and the lanes do not correlate: 5 sigma."""
    values = random16(torch.tensor(2**40 + 3), 7, 80000)
    assert values.dtype == torch.int32 and values.min() >= 0 and values.max() < 65536
    bits = (values[:, None] >> torch.arange(16)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(80000)
    lanes = torch.corrcoef(values.reshape(-1, 8).t().double()) - torch.eye(8)
    assert lanes.abs().max() < 5 / math.sqrt(10000)
