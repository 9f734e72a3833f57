"""The three operators that the passes write into the Dynamo graph.

They are composite: under tracing they open into the primitives of `primitives.py`, forward and
backward. Importing this module registers everything under ``torch.ops.fp4``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import primitives
from .activations import ACTIVATIONS
from .errors import InputError
from .formats import Scheme

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check(x: Tensor, *weights: Tensor | None) -> None:
    """Refuse dtypes that the formats are not defined for, by name.

    Raises:
        InputError: for integer, complex or float64 tensors.
    """
    for t in (x, *weights):
        if t is not None and t.dtype not in _FLOATS:
            raise InputError(f"fp4: {t.dtype} cannot be quantized; use float32, bfloat16 or float16")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scheme: str, out_dtype: torch.dtype
) -> Tensor:
    """x [..., K] weight [N, K]^T + bias [N] in ``out_dtype``, each GEMM as ``scheme`` says."""
    from .autograd import Linear

    check(x, weight, bias)
    return Linear.apply(x, weight, bias, scheme, out_dtype)


def linear_act_linear(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None,
    act: str, scheme1: str, scheme2: str, hidden_dtype: torch.dtype, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """act(x weight1^T + bias1) weight2^T + bias2; the hidden tensor is stored as codes only."""
    from .autograd import Chain

    check(x, weight1, bias1, weight2, bias2)
    if fusable(scheme2):
        return Chain.apply(
            x, weight1, bias1, weight2, bias2, act, scheme1, scheme2, hidden_dtype, out_dtype
        )
    z = linear(x, weight1, bias1, scheme1, hidden_dtype)
    return linear(ACTIVATIONS[act].forward(z), weight2, bias2, scheme2, out_dtype)


def gated_linear(
    x: Tensor, weight_gate: Tensor, bias_gate: Tensor | None, weight_up: Tensor,
    bias_up: Tensor | None, weight_down: Tensor, bias_down: Tensor | None, act: str,
    scheme_gate: str, scheme_up: str, scheme_down: str,
    hidden_dtype: torch.dtype, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """(act(x gate^T) * (x up^T)) down^T with biases; the hidden tensor is stored as codes only."""
    from .autograd import Gated

    check(x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down)
    schemes = (scheme_gate, scheme_up, scheme_down)
    if fusable(scheme_down):
        return Gated.apply(
            x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down, act, schemes,
            hidden_dtype, out_dtype,
        )  # fmt: skip
    gate = linear(x, weight_gate, bias_gate, scheme_gate, hidden_dtype)
    up = linear(x, weight_up, bias_up, scheme_up, hidden_dtype)
    return linear(ACTIVATIONS[act].forward(gate) * up, weight_down, bias_down, scheme_down, out_dtype)


def fusable(scheme: str) -> bool:
    """True where the second layer needs its input only as the codes of the forward pass."""
    parsed = Scheme.parse(scheme)
    return bool(parsed.fprop and parsed.wgrad and parsed.wgrad[1].source == "fprop")


_LAYER_OPS = {
    "linear(Tensor x, Tensor weight, Tensor? bias, str scheme, ScalarType out_dtype) -> Tensor": linear,
    "linear_act_linear(Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2,"
    " str act, str scheme1, str scheme2, ScalarType hidden_dtype, ScalarType out_dtype)"
    " -> Tensor": linear_act_linear,
    "gated_linear(Tensor x, Tensor weight_gate, Tensor? bias_gate, Tensor weight_up,"
    " Tensor? bias_up, Tensor weight_down, Tensor? bias_down, str act, str scheme_gate,"
    " str scheme_up, str scheme_down, ScalarType hidden_dtype, ScalarType out_dtype)"
    " -> Tensor": gated_linear,
}

for _schema, _function in _LAYER_OPS.items():
    primitives.LIBRARY.define(_schema)
    primitives.LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeImplicitAutograd")
