"""The CPU kernels give the bits of the vectors and of the PyTorch reference, whatever the shape,
the strides, the dtype and the number of threads."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from fp4compile.kernels import cache, cuda_kernels, native, native_library, reference
from fp4compile.kernels.errors import InputError
from fp4compile.kernels.formats import BLOCK, TensorFormat
from vector_cases import CASES as VECTOR_CASES
from vector_cases import VECTORS

CASES = {name: case for name, case in VECTOR_CASES.items() if name != "s2f6"}
FORMATS = [text for text, _ in CASES.values()] + [
    "nvfp4:row:fp8_exact:half",
    "nvfp4:tensor:fp8_exact:half",
    "nvfp4:row:search=1/1.25/1.5/0.9",
    "nvfp4:tensor:search=0.75/1",
    "nvfp4:row:sr",
    "nvfp4:tensor:tile:sr",
    "mxfp8:128",
    "mxfp8:row",
    "mxfp4:sr",
]
GRADIENTS = [
    "mxfp8:row:sr",
    "mxfp8:32:sr",
    "mxfp8:128:sr",
    "mxfp4:sr",
    "mxfp8:row",
    "nvfp4:tensor:sr",
]
SHAPES = [(m, k) for m in (0, 1, 37) for k in (1, 15, 16, 17, 48, 80, 144)] + [(33, 0), (70, 333)]
SEED = torch.tensor(0x1234_5678_9ABC)
STREAM = 5

needs_native = pytest.mark.skipif(not native.available()[0], reason=native.available()[1])
pytestmark = needs_native


def matrix(rows: int, cols: int, kind: str = "mixed", dtype=torch.float32, seed=0) -> torch.Tensor:
    """Gaussian rows of widely different sizes, with ties, zeros of both signs and tiny values."""
    generator = torch.Generator().manual_seed(seed + 1000 * rows + cols)
    x = torch.randn(rows, cols, generator=generator)
    if kind == "mixed" and x.numel():
        x *= torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator).float())
        x.view(-1)[::7] = (x.view(-1)[::7] * 4).round() / 4
        x.view(-1)[3::11] = -0.0
        x.view(-1)[5::13] *= 1e-3
        x[rows // 2] = -0.0
        x[:, cols // 2] *= 1e-30
    if kind == "nonfinite" and x.numel():
        x[rows // 3, cols // 2] = float("nan")
        x[rows // 2, cols // 3] = float("-inf")
    return x.to(dtype)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, all NaN alike."""
    if x.dtype != torch.float32:
        return x
    return torch.where(x.isnan(), torch.tensor(float("nan")), x).contiguous().view(torch.int32)


def assert_same(got, want) -> None:
    assert len(got) == len(want)
    for part, (a, b) in enumerate(zip(got, want)):
        assert a.shape == b.shape and a.dtype == b.dtype, part
        assert torch.equal(bits_of(a), bits_of(b)), f"part {part}"


def by_reference(x: torch.Tensor, fmt: TensorFormat, bits=None):
    codes, scales, outer = reference.quantize(x, fmt, SEED, STREAM, bits)
    return codes, scales, outer, reference.split(codes, scales, outer, fmt)[0]


def vector_cases() -> list[str]:
    names = {key.rsplit("/", 1)[0] for key in VECTORS.files if key.count("/") == 2}
    return sorted(n for n in names if n.split("/")[1] in CASES)


@pytest.mark.parametrize("name", vector_cases())
def test_vectors(name: str) -> None:
    tensor, case = name.split("/")
    x = torch.from_numpy(VECTORS[f"{tensor}/x"])
    x = x.view(torch.bfloat16) if x.dtype == torch.uint16 else x
    text, more = CASES[case]
    seed, stream = (VECTORS["random16/seed_stream"] + (more or 0)).tolist()
    fmt = TensorFormat.parse(text)
    codes, scales, outer, values = native.quantize(x, fmt, torch.tensor(seed), stream, values=True)
    got = {"codes": codes, "scales": scales, "outer": outer}
    got["e4m3"] = values.to(torch.float8_e4m3fn).view(torch.uint8)
    for key in VECTORS.files:
        part = key.rsplit("/", 1)[1]
        if not key.startswith(name + "/"):
            continue
        if part == "codes_sha256":
            assert hashlib.sha256(codes.numpy().tobytes()).digest() == VECTORS[key].tobytes()
        else:
            np.testing.assert_array_equal(got[part].numpy(), VECTORS[key])


@pytest.mark.parametrize("text", FORMATS)
def test_shapes(text: str) -> None:
    fmt = TensorFormat.parse(text)
    for rows, cols in SHAPES:
        x = matrix(rows, cols)
        assert_same(native.quantize(x, fmt, SEED, STREAM, values=True), by_reference(x, fmt))


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("kind", ["nonfinite", "bfloat16", "float16", "float64"])
def test_dtypes_and_rows_that_are_not_finite(text: str, kind: str) -> None:
    fmt = TensorFormat.parse(text)
    dtype = torch.float32 if kind == "nonfinite" else getattr(torch, kind)
    x = matrix(37, 144, "nonfinite" if kind == "nonfinite" else "mixed", dtype)
    if kind == "float16":
        x[1] = torch.arange(144).view(torch.int64).to(torch.int16).view(torch.float16)
    assert_same(native.quantize(x, fmt, SEED, STREAM, values=True), by_reference(x, fmt))


@pytest.mark.parametrize("text", FORMATS)
def test_sizes_of_values(text: str) -> None:
    """From FP32's denormals to its largest numbers."""
    fmt = TensorFormat.parse(text)
    for exponent in (-148, -140, -126, -100, -60, 60, 100, 120, 126):
        x = torch.randn(17, 96, generator=torch.Generator().manual_seed(exponent)).clamp(-3, 3)
        x = (x.double() * 2.0**exponent).float()
        assert_same(native.quantize(x, fmt, SEED, STREAM, values=True), by_reference(x, fmt))


@pytest.mark.parametrize("text", FORMATS)
def test_threads_and_strides(text: str) -> None:
    fmt = TensorFormat.parse(text)
    x = matrix(517, 272, dtype=torch.bfloat16)
    want = by_reference(x, fmt)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_same(native.quantize(x, fmt, SEED, STREAM, values=True), want)
    for strided in (
        x.t().contiguous().t(),
        torch.cat((x, x), 1)[:, 272:],
        x.repeat_interleave(2, 1)[:, ::2],
        x.repeat_interleave(2, 0)[::2],
    ):
        assert torch.equal(strided, x) and strided.stride() != x.stride()
        assert_same(native.quantize(strided, fmt, SEED, STREAM, values=True), want)
    expanded = x[:1].expand(40, 272)
    assert_same(
        native.quantize(expanded, fmt, SEED, STREAM, values=True), by_reference(expanded, fmt)
    )


@pytest.mark.parametrize("text", FORMATS)
def test_transpose(text: str) -> None:
    fmt = TensorFormat.parse(text)
    for rows, cols in (*SHAPES, (100, 70)):
        x = matrix(rows, cols)
        for y in (x, x.t().contiguous().t()):
            got = native.quantize(y, fmt, SEED, STREAM, values=True, transpose=True)
            assert_same(got, by_reference(x.t(), fmt))


@pytest.mark.parametrize("text", [t for t in FORMATS if t.endswith("sr")])
def test_shared_and_given_bits(text: str) -> None:
    fmt = TensorFormat.parse(text)
    for rows, cols in ((37, 17), (100, 70), (1, 144), (64, 96)):
        x = matrix(rows, cols)
        bits = reference.random_bits(SEED, STREAM, rows, cols, BLOCK[fmt.format])
        want = by_reference(x.t(), fmt, bits[:, :cols].t())
        shared = {"values": True, "transpose": True, "shared_bits": True}
        assert_same(native.quantize(x, fmt, SEED, STREAM, **shared), want)
        given = native.quantize(x, fmt, bits=bits[:, :cols].t(), values=True, transpose=True)
        assert_same(given, want)
        assert_same(
            native.quantize(x, fmt, SEED, STREAM, values=True, shared_bits=True),
            by_reference(x, fmt, bits),
        )


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("kind", ["mixed", "nonfinite"])
def test_decode(text: str, kind: str) -> None:
    fmt = TensorFormat.parse(text)
    for rows, cols in (*SHAPES, (300, 400)):
        codes, scales, outer, values = by_reference(matrix(rows, cols, kind), fmt)
        assert_same([native.decode(codes, scales, fmt, cols)], [values])
        padding = (0, -rows % BLOCK[fmt.format])
        want = torch.nn.functional.pad(values[:, :cols].t(), padding).contiguous()
        assert_same([native.decode(codes, scales, fmt, cols, transpose=True)], [want])


def gradient_by_reference(g, fold, dgrad, wgrad):
    nothing = torch.empty(0)
    parts = []
    folded = g.float() if fold is None else g.float() * fold[:, None]
    for text, x, transpose in ((dgrad, g.float(), False), (wgrad, folded, True)):
        if text is None:
            parts += [nothing, nothing]
            continue
        fmt = TensorFormat.parse(text)
        bits = reference.random_bits(SEED, STREAM, *g.shape, BLOCK[fmt.format])[:, : g.shape[1]]
        x, bits = (x.t(), bits.t()) if transpose else (x, bits)
        parts += reference.split(*reference.quantize(x, fmt, bits=bits.contiguous()), fmt)
    return parts


@pytest.mark.parametrize("wgrad", [*GRADIENTS, None])
@pytest.mark.parametrize("dgrad", [*GRADIENTS, None])
def test_gradient(dgrad: str | None, wgrad: str | None) -> None:
    formats = [t and TensorFormat.parse(t) for t in (dgrad, wgrad)]
    for (rows, cols), kind in (((37, 17), "mixed"), ((0, 48), "mixed"), ((130, 144), "nonfinite")):
        g = matrix(rows, cols, kind, torch.bfloat16)
        fold = matrix(rows, 1, seed=1)[:, 0].abs()
        for f in (fold, None):
            got = native.quantize_grad(g, f, *formats, SEED, STREAM)
            assert_same(got[:4], gradient_by_reference(g, f, dgrad, wgrad))
            torch.testing.assert_close(
                got[4], g.float().sum(0), equal_nan=True, rtol=1e-4, atol=1e-2
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_does_not_depend_on_threads_or_strides(dtype: torch.dtype) -> None:
    fmt = TensorFormat.parse("mxfp8:row:sr")
    g, fold = matrix(1030, 272, "gauss", dtype), matrix(1030, 1, "gauss")[:, 0]
    torch.set_num_threads(1)
    want = native.quantize_grad(g, fold, fmt, fmt, SEED, STREAM)
    assert_same(want[:4], gradient_by_reference(g, fold, str(fmt), str(fmt)))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_same(native.quantize_grad(g, fold, fmt, fmt, SEED, STREAM), want)
        assert_same(
            native.quantize_grad(g.t().contiguous().t(), fold, fmt, fmt, SEED, STREAM), want
        )
    ones = torch.ones(1, 1, dtype=dtype).expand(50, 70)
    assert_same(native.quantize_grad(ones, None, fmt, fmt, SEED, STREAM)[:4],
                gradient_by_reference(ones, None, str(fmt), str(fmt)))  # fmt: skip


def test_denormals_are_kept_when_the_process_flushes_them() -> None:
    fmt = TensorFormat.parse("mxfp8:32")
    x = matrix(600, 96, "gauss") * 1e-39
    want = native.quantize(x, fmt)
    assert (want[0] & 0x7F).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_same(native.quantize(x, fmt)[:3], want[:3])
        flushed = torch.tensor([1e-39]) * 1.0
        assert flushed.item() == 0.0, "the caller's own state must be put back"
    finally:
        torch.set_flush_denormal(False)


def test_formats_left_to_the_reference() -> None:
    refused = ("s2f6", "mxfp8:32:had16", "nvfp4:tensor:had16")
    assert all(not native.supports(TensorFormat.parse(t)) for t in refused)
    assert all(native.supports(TensorFormat.parse(t)) for t in FORMATS)
    other = copy.copy(TensorFormat.parse("nvfp4:row:fp8_exact"))
    assert native.supports(other) and cuda_kernels.supports(other)
    object.__setattr__(other, "scale_search", "a search that came later")
    assert not native.supports(other) and not cuda_kernels.supports(other)


def test_seeds_are_tensors() -> None:
    fmt = TensorFormat.parse("mxfp8:32:sr")
    for seed in (None, torch.tensor(1.0), torch.tensor([1, 2])):
        with pytest.raises(InputError, match="seed"):
            native.quantize(torch.ones(2, 32), fmt, seed)
    negative = torch.tensor(-7)
    want = reference.quantize(torch.full((3, 40), 1.03), fmt, negative, 1)
    assert_same(native.quantize(torch.full((3, 40), 1.03), fmt, negative, 1)[:3], want)


# ---- building -------------------------------------------------------------------------------


def reason(monkeypatch, **env: str) -> str:
    """Why there is no library in a process that starts with these variables."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    library, text = native_library.load.__wrapped__()
    assert library is None
    return text


def test_no_compiler_is_one_line(monkeypatch) -> None:
    text = reason(monkeypatch, CXX="/nowhere/c++", FP4COMPILE_CACHE_DIR="/nowhere")
    assert text.startswith("no C++ compiler") and "\n" not in text


def test_a_compiler_that_fails_is_one_line(tmp_path: Path, monkeypatch) -> None:
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho 'x.cpp:1: error: broken toolchain' >&2\nexit 1\n")
    fake.chmod(0o755)
    text = reason(monkeypatch, CXX=str(fake), FP4COMPILE_CACHE_DIR=str(tmp_path / "cache"))
    assert "broken toolchain" in text and "\n" not in text


def test_a_damaged_library_is_built_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FP4COMPILE_CACHE_DIR", str(tmp_path))
    built = []

    def build() -> bytes:
        built.append(1)
        return b"payload" * 100

    path = cache.fetch("entry", build)
    assert cache.fetch("entry", build) == path and len(built) == 1
    path.write_bytes(path.read_bytes()[:-40])
    assert cache.read(cache.fetch("entry", build)) == b"payload" * 100 and len(built) == 2
    cache.fetch("entry", build, force=True)
    assert len(built) == 3 and [p.name for p in tmp_path.iterdir()] == ["entry"]


def test_an_intact_library_that_does_not_load_is_built_again(tmp_path: Path, monkeypatch) -> None:
    """Here with the last flags, for any processor: the same bits."""
    monkeypatch.setenv("FP4COMPILE_CACHE_DIR", str(tmp_path))
    portable = native_library.FLAGS.replace("-O3", "-O0")
    monkeypatch.setattr(native_library, "FLAG_SETS", ("-no-such-flag", portable))
    cache.write("native-test.so", b"not a library")
    library = native_library.open_library("native-test.so", native_library.compiler())
    assert isinstance(library, ctypes.CDLL)
    monkeypatch.setattr(native, "_library", lambda: library)
    x = matrix(37, 144)
    for text in FORMATS:
        fmt = TensorFormat.parse(text)
        assert_same(native.quantize(x, fmt, SEED, STREAM, values=True), by_reference(x, fmt))
    fmt = TensorFormat.parse("mxfp8:32:sr")
    got = native.quantize_grad(x, None, fmt, fmt, SEED, STREAM)
    assert_same(got[:4], gradient_by_reference(x, None, str(fmt), str(fmt)))


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FP4COMPILE_CACHE_DIR", str(blocked / "cache"))
    path = cache.fetch("entry", lambda: b"payload")
    assert cache.read(path) == b"payload" and path.parent == cache.private_directory()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
