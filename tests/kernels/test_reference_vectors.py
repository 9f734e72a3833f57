"""Every vector of tests/data/vectors.npz, made by an independent implementation, bit for bit.

The vectors' names are `<input>/<case>/<part>`; cases, inputs and parts are read from the file, and
the last test asserts that no array of the file was left unread.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from fp4compile.kernels import layout, reference, rotation
from fp4compile.kernels.elements import E4M3, encode
from fp4compile.kernels.formats import TensorFormat
from fp4compile.kernels.philox import random16
from vector_cases import CASES, VECTORS

SPECIAL = ("hadamard16", "hadamard32", "random16", "swizzle", "scaleup")


def quantized_cases() -> list[str]:
    names = {key.rsplit("/", 1)[0] for key in VECTORS.files if key.count("/") == 2}
    return sorted(n for n in names if n.split("/")[0] not in SPECIAL)


def source(name: str) -> torch.Tensor:
    x = VECTORS[f"{name}/x"]
    return torch.from_numpy(x).view(torch.bfloat16) if x.dtype == np.uint16 else torch.from_numpy(x)


def seed_stream(key: str = "seed_stream", more: int = 0) -> tuple[torch.Tensor, int]:
    seed, stream = VECTORS[f"random16/{key}"].tolist()
    return torch.tensor(seed + more), stream + more


def run(x: torch.Tensor, case: str) -> tuple[TensorFormat, dict[str, torch.Tensor]]:
    text, more = CASES[case]
    fmt = TensorFormat.parse(text)
    seed, stream = (None, 0) if more is None else seed_stream(more=more)
    codes, scales, outer = reference.quantize(x, fmt, seed, stream)
    return fmt, {"codes": codes, "scales": scales, "outer": outer}


def same(got: torch.Tensor, want: np.ndarray) -> None:
    assert tuple(got.shape) == want.shape
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("name", quantized_cases())
def test_quantized(name: str) -> None:
    tensor, case = name.split("/")
    fmt, got = run(source(tensor), case)
    got["e4m3"] = encode(reference.values(got["codes"], got["scales"], fmt), E4M3)
    parts = [key.rsplit("/", 1)[1] for key in VECTORS.files if key.startswith(name + "/")]
    for part in parts:
        want = VECTORS[f"{name}/{part}"]
        if part == "codes_sha256":
            assert hashlib.sha256(got["codes"].numpy().tobytes()).digest() == want.tobytes()
        else:
            same(got[part], want)


def test_each_row_alone_rounds_the_block_scale_up() -> None:
    name = "scaleup/nvfp4_sr_each_row_alone"
    rows = [run(row[None], "nvfp4_sr")[1] for row in source("scaleup")]
    for part in ("codes", "scales"):
        same(torch.cat([row[part] for row in rows]), VECTORS[f"{name}/{part}"])


@pytest.mark.parametrize("n", [16, 32])
def test_hadamard(n: int) -> None:
    x = torch.from_numpy(VECTORS[f"hadamard{n}/x"])
    same(rotation.signs(n, x.device), VECTORS[f"hadamard{n}/signs"])
    same(rotation.rotate(x, n), VECTORS[f"hadamard{n}/y"])


@pytest.mark.parametrize(("key", "values"), [("seed_stream", "values"), ("big_seed", "big_values")])
def test_random16(key: str, values: str) -> None:
    want = VECTORS[f"random16/{values}"]
    seed, stream = seed_stream(key)
    np.testing.assert_array_equal(random16(seed, stream, want.size).numpy(), want)
    index = torch.arange(want.size).flip(0)
    np.testing.assert_array_equal(random16(seed, stream, index).numpy(), want[::-1])


def test_swizzle() -> None:
    scales = torch.from_numpy(VECTORS["swizzle/scales"])
    same(layout.swizzle(scales), VECTORS["swizzle/flat"])
    same(layout.unswizzle(torch.from_numpy(VECTORS["swizzle/flat"]), *scales.shape), scales.numpy())


def test_no_vector_is_left_out() -> None:
    """The keys that the tests above read, by construction of their parameters, are all keys."""
    read = {
        key for name in quantized_cases() for key in VECTORS.files if key.startswith(name + "/")
    }
    read |= {f"{name.split('/')[0]}/x" for name in quantized_cases()}
    read |= {f"hadamard{n}/{part}" for n in (16, 32) for part in ("signs", "x", "y")}
    read |= {f"random16/{k}" for k in ("seed_stream", "values", "big_seed", "big_values")}
    read |= {"swizzle/scales", "swizzle/flat", "scaleup/x"}
    read |= {f"scaleup/nvfp4_sr_each_row_alone/{part}" for part in ("codes", "scales")}
    assert read == set(VECTORS.files)
    assert {name.split("/")[1] for name in quantized_cases()} == set(CASES)
