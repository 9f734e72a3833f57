"""The reference on a GPU: the same bits as on the CPU, and nothing read by the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fp4compile.kernels import layout, reference
from fp4compile.kernels.formats import TensorFormat
from value_kinds import FORMATS, KINDS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    np.testing.assert_array_equal(one.cpu().numpy(), other.numpy())


@pytest.fixture
def no_sync():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", FORMATS)
def test_same_bits_as_on_the_cpu(text: str, kind: str, no_sync: None) -> None:
    fmt = TensorFormat.parse(text)
    x = torch.from_numpy(KINDS[kind](np.random.default_rng(4), (67, 400)))
    x[5, 17] = float("nan")
    seed = torch.tensor(2**35 - 9)
    on_gpu, seed_gpu = x.cuda(non_blocking=True), seed.cuda(non_blocking=True)
    got = reference.quantize(on_gpu, fmt, seed_gpu, 3)
    decoded = reference.dequantize(*got, fmt, 400)
    torch.cuda.set_sync_debug_mode("default")
    want = reference.quantize(x, fmt, seed, 3)
    for a, b in zip(got, want):
        same(a, b)
    same(decoded, reference.dequantize(*want, fmt, 400))


def test_quantize_can_be_captured() -> None:
    """A CUDA graph's replay follows the seed: its bits are those of the new seed."""
    fmt = TensorFormat.parse("nvfp4:tensor:sr")
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    on_gpu, seed = x.cuda(), torch.zeros((), dtype=torch.int64, device="cuda")
    reference.quantize(on_gpu, fmt, seed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes = reference.quantize(on_gpu, fmt, seed)[0]
    for value in (1, 2):
        seed.fill_(value)
        graph.replay()
        same(codes, reference.quantize(x, fmt, torch.tensor(value))[0])


def test_swizzle_pads_with_zeros_in_a_poisoned_pool() -> None:
    for rows, cols in ((1, 1), (130, 7), (37, 5)):
        torch.full((1 << 20,), 255, dtype=torch.uint8, device="cuda")  # freed at once, reused
        scales = torch.full((rows, cols), 7, dtype=torch.uint8)
        same(layout.swizzle(scales.cuda()), layout.swizzle(scales))
