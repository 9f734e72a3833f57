"""Inputs and formats of the numerical tests: each kind stresses another part of the arithmetic."""

from __future__ import annotations

import numpy as np

F32 = np.float32


def gauss(rng, shape):
    return rng.standard_normal(shape).astype(F32)


def heavy(rng, shape):
    return rng.standard_t(1.5, shape).astype(F32)


def ties(rng, shape):
    """Multiples of 1/8 up to 6, in blocks that hold 6: with power-of-two scales half are ties."""
    x = rng.integers(-48, 49, shape) / 8
    x[..., ::8] = 6
    return x.astype(F32)


def mixed(rng, shape):
    """Rows from 2^-140 to 2^125 and a spread of 2^24 inside a row."""
    row = 2.0 ** rng.integers(-140, 126, (*shape[:-1], 1))
    inside = 2.0 ** -rng.integers(0, 24, shape)
    return (np.clip(rng.standard_normal(shape), -3, 3) * row * inside).astype(F32)


def zeros(rng, shape):
    """Zero rows, zero blocks, zeros of both signs among values."""
    x = gauss(rng, shape)
    x[rng.random(shape) < 0.3] = 0.0
    x[rng.random(shape) < 0.1] = -0.0
    x[::3] *= F32(-0.0)
    x[..., :32] *= rng.integers(0, 2, (*shape[:-1], 1)).astype(F32)
    return x


KINDS = {"gauss": gauss, "heavy": heavy, "ties": ties, "mixed": mixed, "zeros": zeros}
SHAPES = [(5, 48), (3, 37), (18, 33), (1, 112), (7, 16), (2, 200)]
FORMATS = (
    "nvfp4:tensor",
    "nvfp4:row",
    "nvfp4:tensor:tile",
    "nvfp4:tensor:four_over_six",
    "nvfp4:row:four_over_six",
    "nvfp4:row:search=1/1.5/0.75/1.25",
    "nvfp4:tensor:search=0.9/1",
    "nvfp4:row:search=1/2",
    "nvfp4:tensor:fp8_exact",
    "nvfp4:row:fp8_exact",
    "nvfp4:tensor:fp8_exact:half",
    "nvfp4:row:fp8_exact:half",
    "nvfp4:tensor:sr",
    "nvfp4:row:sr",
    "nvfp4:tensor:tile:sr",
    "nvfp4:tensor:sr:had16",
    "nvfp4:row:had32",
    "nvfp4:row:fp8_exact:had16",
    "nvfp4:row:fp8_exact:half:had32",
    "mxfp8:32",
    "mxfp8:128",
    "mxfp8:row",
    "mxfp8:32:sr",
    "mxfp8:128:sr",
    "mxfp8:row:sr",
    "mxfp8:32:had32",
    "mxfp4",
    "mxfp4:sr",
    "mxfp4:sr:had16",
    "s2f6",
    "s2f6:had32",
    "fp8:128",
    "fp8:tile",
    "fp8:128:sr",
    "fp8:tile:sr",
    "fp8:128:had16",
)
