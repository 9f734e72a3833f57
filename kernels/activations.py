"""Activations that a chain can fuse, evaluated in FP32, and their derivatives.

An activation is a row of the table `ACTIVATIONS`; the passes and the operators use its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
# PyTorch splits a CPU loop into equal shares, one a thread, from this many elements a share up; the
# last elements of a share that fill no vector register go through scalar code, which rounds exp and
# tanh differently.
SHARE, ALONE = 1 << 15, 1 << 14
QUICK = 1.702  # z * sigmoid(1.702 z) is the sigmoid form of GELU (arXiv 1606.08415), CLIP's


@dataclass(frozen=True)
class Activation:
    """``forward(z)`` is h = act(z); ``backward(g, z)`` is g * act'(z). FP32 in, FP32 out."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _relu_backward(g: Tensor, z: Tensor) -> Tensor:
    # not g * (z > 0): an infinite gradient of a dead unit must stay dead.
    return aten.threshold_backward(g, z, 0)


def _quick_gelu_backward(g: Tensor, z: Tensor) -> Tensor:
    return g * aten.silu_backward(torch.ones_like(z), QUICK * z)


def evaluate(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function`` of FP32 tensors of one shape, elementwise; no thread count changes a bit.

    On the CPU whole shares are evaluated by all threads, the rest in pieces that one thread takes.
    """
    n, first = tensors[0].numel(), tensors[0]
    if first.device.type != "cpu" or n <= ALONE:
        return function(*tensors)
    flat = [t.reshape(-1) for t in tensors]
    whole = n - n % (torch.get_num_threads() * SHARE)
    if whole == n:
        return function(*flat).view(first.shape)
    bounds = [*([0] if whole else []), *range(whole, n, ALONE), n]
    parts = [function(*(t[a:b] for t in flat)) for a, b in zip(bounds, bounds[1:])]
    return torch.cat(parts).view(first.shape)


def affine(acc: Tensor, row: Tensor | None, col: Tensor | None, bias: Tensor | None) -> Tensor:
    """FP32 (acc * row) * col + bias, of factors that broadcast."""
    z = acc.float()
    for factor in (row, col):
        z = z if factor is None else z * factor
    return z if bias is None else z + bias.float()


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(F.gelu, lambda g, z: aten.gelu_backward(g, z)),
    "gelu_tanh": Activation(
        lambda z: F.gelu(z, approximate="tanh"),
        lambda g, z: aten.gelu_backward(g, z, approximate="tanh"),
    ),
    "relu": Activation(F.relu, _relu_backward),
    "relu2": Activation(
        lambda z: F.relu(z).square(), lambda g, z: _relu_backward(g * (2 * F.relu(z)), z)
    ),
    "silu": Activation(F.silu, lambda g, z: aten.silu_backward(g, z)),
    "quick_gelu": Activation(lambda z: z * torch.sigmoid(QUICK * z), _quick_gelu_backward),
}
