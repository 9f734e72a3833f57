"""`fp4compile.quantize`: shapes, dtypes, strides, sizes in bytes, and refusals in one line."""

from __future__ import annotations

import pytest
import torch
from fp4compile.kernels import native, reference
from fp4compile.kernels.errors import FormatError, InputError
from fp4compile.kernels.formats import TensorFormat
from fp4compile.kernels.quantized import quantize


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "mxfp4", "s2f6", "fp8"])
@pytest.mark.parametrize(
    "shape", [(50,), (3, 50), (2, 3, 50), (2, 2, 3, 50), (0, 50), (2, 0), (2, 0, 16)]
)
def test_shapes(format: str, shape: tuple[int, ...]) -> None:
    x = data(*shape)
    q = quantize(x, format)
    block, per_byte = {"nvfp4": (16, 2), "mxfp4": (32, 2), "fp8": (128, 1)}.get(format, (32, 1))
    wide = -(-shape[-1] // block) * block
    assert q.codes.shape == (*shape[:-1], wide // per_byte)
    assert q.scales.shape == (*shape[:-1], wide // block)
    assert q.codes.dtype == (torch.int8 if format == "s2f6" else torch.uint8)
    assert q.outer.shape == (() if format == "nvfp4" else (0,))
    assert q.shape == x.shape and q.dequantize().shape == x.shape
    one = 4 if format == "fp8" else 1
    assert q.scales.dtype == (torch.float32 if format == "fp8" else torch.uint8)
    assert q.nbytes == q.codes.numel() + one * q.scales.numel() + 4 * q.outer.numel()
    want = reference.quantize(x.flatten(0, -2) if x.ndim > 1 else x[None], q.format)
    if x.numel():
        assert torch.equal(q.codes.flatten(), want[0].flatten())
        assert (q.dequantize() - x).norm() < 0.13 * x.norm()


@pytest.mark.parametrize("shape", [(50,), (2, 100, 150), (0, 16), (4, 0)])
def test_fp8_tiles_have_one_scale(shape: tuple[int, ...]) -> None:
    """Over all leading axes: 200 rows of two matrices are two rows of tiles."""
    x = data(*shape)
    q = quantize(x, "fp8", block="tile")
    rows = x[..., 0].numel() if shape[-1] else 4
    assert q.scales.shape == (-(-rows // 128), -(-shape[-1] // 128))
    assert q.nbytes == q.codes.numel() + 4 * q.scales.numel()
    assert q.dequantize().shape == shape
    assert x.numel() == 0 or (q.dequantize() - x).norm() < 0.03 * x.norm()


@pytest.mark.parametrize("shape", [(50,), (2, 3, 50), (0, 16), (4, 0)])
def test_row_outer_keeps_leading_axes(shape: tuple[int, ...]) -> None:
    q = quantize(data(*shape), "nvfp4", outer="row", block_scales="fp8_exact")
    assert q.outer.shape == shape[:-1]
    assert q.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert str(q.format) == "nvfp4:row:fp8_exact"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_strides_and_dtypes_do_not_matter(dtype: torch.dtype) -> None:
    x = data(24, 6, 40).to(dtype)
    views = [x.transpose(0, 1), x[::2, 1:, 3:], x.permute(2, 0, 1), x[:1].expand(5, 6, 40)]
    for view in views:
        got, want = (
            quantize(view, "nvfp4", outer="row"),
            quantize(view.contiguous().float(), "nvfp4", outer="row"),
        )
        assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
        assert torch.equal(got.outer, want.outer)
    broadcast = quantize(torch.ones((), dtype=dtype).expand(3, 32), "mxfp8")
    assert torch.equal(broadcast.dequantize(), torch.ones(3, 32))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "mxfp4", "s2f6"])
@pytest.mark.parametrize("n", [16, 32])
def test_rotation_is_undone(format: str, n: int) -> None:
    x = data(7, 50)
    q = quantize(x, format, rotation=n)
    assert (q.dequantize() - x).norm() < 0.13 * x.norm()
    assert not torch.equal(q.codes, quantize(torch.nn.functional.pad(x, (0, 14)), format).codes)


def test_defaults_are_those_of_the_format() -> None:
    x = data(4, 32)
    assert quantize(x, "nvfp4").format == TensorFormat("nvfp4", "tensor", "1x16", "e4m3")
    assert quantize(x, "mxfp8").format == TensorFormat("mxfp8", block=32)
    assert quantize(x, "nvfp4", scale_search=[1, 1.5]).format.scale_search == (1.0, 1.5)


def test_seed_as_number_or_tensor() -> None:
    x = data(4, 64)
    keys = {"rounding": "stochastic", "stream": 3}
    one = quantize(x, "mxfp8", seed=5, **keys)
    for seed in (torch.tensor(5), torch.tensor([5])):
        assert torch.equal(one.codes, quantize(x, "mxfp8", seed=seed, **keys).codes)
    assert not torch.equal(one.codes, quantize(x, "mxfp8", seed=6, **keys).codes)
    quantize(x, "nvfp4", rounding="stochastic", seed=-(2**63))


def test_a_tensor_that_requires_grad_is_only_read() -> None:
    x = data(4, 32).requires_grad_()
    q = quantize(x, "nvfp4")
    assert not q.outer.requires_grad and not q.dequantize().requires_grad


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.float64, torch.complex64]
)
def test_dtypes_that_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=f"{dtype}.*convert") as error:
        quantize(torch.ones(2, 16, dtype=dtype), "nvfp4")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", [None, 2**63, 1.5, torch.tensor(1.0), torch.tensor([1, 2]),
                                  torch.tensor(1, dtype=torch.int32),
                                  torch.zeros(1, dtype=torch.int64, device="meta")])  # fmt: skip
def test_seeds_that_are_refused(seed: object) -> None:
    with pytest.raises(InputError, match="seed") as error:
        quantize(data(2, 32), "mxfp8", rounding="stochastic", seed=seed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("x", [torch.tensor(1.0), [1.0, 2.0], torch.eye(16).to_sparse()])
def test_inputs_that_are_refused(x: object) -> None:
    with pytest.raises(InputError) as error:
        quantize(x, "nvfp4")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keys", [{"format": "nvfp5"}, {"format": "mxfp8", "outer": "row"},
                                  {"format": "nvfp4", "rounding": "up"}, {"format": "mxfp4", "block": 128},
                                  {"format": "nvfp4", "scale_search": "all"}])  # fmt: skip
def test_formats_that_do_not_exist(keys: dict) -> None:
    with pytest.raises(FormatError):
        quantize(data(2, 32), **keys)


@pytest.mark.parametrize("text", ["nvfp4:row:fp8_exact:half", "nvfp4:row:four_over_six", "mxfp8:row"])
def test_process_defaults_change_nothing(text: str) -> None:
    fmt, x = TensorFormat.parse(text), torch.randn(5, 48)
    want = [reference.quantize(x, fmt), native.quantize(x, fmt)[:3]]
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        got = [reference.quantize(x, fmt), native.quantize(x, fmt)[:3]]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for a, b in zip(got, want):
        assert all(torch.equal(p, q) for p, q in zip(a, b))
