"""Writes half_search.npz: inputs and results of the FP8-exact search in FP16 arithmetic.

    python tests/data/make_half_search.py

The results are those of tests/kernels/independent.py, numpy's float16 arithmetic in loops. Inputs are
those of vectors.npz, read by name, and the three made here. Names are `<input>/<outer>/<part>`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from fp4compile.kernels.formats import TensorFormat

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "kernels"))
import independent  # noqa: E402

SHARED = ("gauss", "heavy", "ties", "zeros", "range", "fp32", "allzero", "nonfinite", "edges")
FORMATS = {
    outer: TensorFormat.parse(f"nvfp4:{outer}:fp8_exact:half") for outer in ("row", "tensor")
}
F32 = np.float32


def thresholds() -> np.ndarray:
    """Rows with S = 1 whose blocks' maxima are 6 s of every scale s, then an ulp above and below."""
    rng = np.random.default_rng(1)
    top = 6 * np.array([64.0, *independent.EXACT], F32)
    rows = np.stack([top, np.nextafter(top, F32(np.inf)), np.nextafter(top, F32(0))])
    rows[:, 0] = 384.0
    rows = np.minimum(rows, F32(384))
    blocks = rng.uniform(-1, 1, (3, 41, 16)).astype(F32) * rows[..., None]
    blocks[..., 5] = rows * np.where(np.arange(41) % 2, F32(1), F32(-1))
    return blocks.reshape(3, -1)


def small() -> np.ndarray:
    """A row with S = 1 whose elements reach FP16's subnormal numbers and below, in every block."""
    rng = np.random.default_rng(2)
    top = 6 * np.array([64.0, *independent.EXACT], F32)
    blocks = rng.uniform(-1, 1, (4, 41, 16)) * 2.0 ** -rng.integers(0, 30, (4, 41, 16))
    blocks[..., 3] = 1.0
    return (blocks * top[:, None]).astype(F32).reshape(4, -1)


def magnitudes() -> np.ndarray:
    """Rows whose largest element is 1e-39 to 3e38."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((14, 64))
    top = 10.0 ** np.array([-45, -42, -39, -38, -37, -30, -10, -3, 0, 3, 10, 30, 38, 38.5])
    return (x / np.abs(x).max(1, keepdims=True) * top[:, None]).astype(F32)


def inputs() -> dict[str, np.ndarray]:
    """Every input by name."""
    shared = np.load(HERE / "vectors.npz")
    x = {name: shared[f"{name}/x"] for name in SHARED}
    return x | {f.__name__: f() for f in (thresholds, small, magnitudes)}


def results() -> dict[str, np.ndarray]:
    """The arrays of the file."""
    out = {}
    for name, x in inputs().items():
        if name not in SHARED:
            out[f"{name}/x"] = x
        for outer, fmt in FORMATS.items():
            parts = zip(("codes", "scales", "outer"), independent.quantize(x, fmt))
            out |= {f"{name}/{outer}/{part}": value for part, value in parts}
    return out


if __name__ == "__main__":
    np.savez_compressed(HERE / "half_search.npz", **results())
