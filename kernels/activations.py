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


@dataclass(frozen=True)
class Activation:
    """``forward(z)`` is h = act(z); ``backward(g, z)`` is g * act'(z). FP32 in, FP32 out."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _relu_backward(g: Tensor, z: Tensor) -> Tensor:
    # not g * (z > 0): an infinite gradient of a dead unit must stay dead.
    return aten.threshold_backward(g, z, 0)


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
}
