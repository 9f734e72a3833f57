"""The three operators that the passes write into the Dynamo graph.

They are composite: under tracing they open into the primitives of `primitives.py`, forward and
backward. Importing this module registers everything under ``torch.ops.fp4``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import primitives
from .activations import ACTIVATIONS
from .errors import FormatError, InputError
from .formats import Scheme
from .layer import parts

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check(tensors: tuple[Tensor | None, ...], *dtypes: torch.dtype) -> None:
    """Refuse, in one line, what the operators are not defined for.

    ``tensors``: the input, then weights and biases; ``dtypes``: those of the results.

    Raises:
        InputError: for integer, complex or float64 tensors and results, sparse tensors, tensors on
            two devices, an input without axes, and inside a torch.func transform.
    """
    if torch._C._are_functorch_transforms_active():
        raise InputError("fp4: torch.func.grad, vjp and jvp are not supported; use torch.autograd")
    present = [t for t in tensors if t is not None]
    for dtype in (*(t.dtype for t in present), *dtypes):
        if dtype not in _FLOATS:
            raise InputError(f"fp4: {dtype} cannot be quantized; use float32, bfloat16 or float16")
    x = present[0]
    for t in present:
        if t.layout != torch.strided:
            raise InputError(f"fp4: {t.layout} tensors cannot be quantized; use to_dense() first")
        if t.device != x.device:
            raise InputError(f"fp4: the input is on {x.device}, a weight or bias on {t.device}")
    if x.ndim == 0:
        raise InputError("fp4: the input is a scalar; it needs at least one axis")


def check_shapes(k: int, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse a weight that does not take ``k`` columns, or a bias that does not fit the weight.

    Raises:
        InputError: with the shapes, in one line.
    """
    if weight.ndim != 2:
        raise InputError(f"fp4: a weight must be [N, K], this one is {list(weight.shape)}")
    n = weight.shape[0]
    if weight.shape[1] != k:
        shape = list(weight.shape)
        raise InputError(
            f"fp4: the input has {k} columns, the weight [N, K] = {shape} takes {shape[1]}"
        )
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != n):
        raise InputError(f"fp4: a bias of {n} elements is needed, this one is {list(bias.shape)}")


def check_activation(act: str) -> None:
    """Refuse an activation that no chain can fuse, with `FormatError`."""
    if act not in ACTIVATIONS:
        raise FormatError(f"fp4: unknown activation {act!r}; known: {', '.join(ACTIVATIONS)}")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scheme: str, out_dtype: torch.dtype,
    ready: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """x [..., K] weight [N, K]^T + bias [N] in ``out_dtype``, each GEMM as ``scheme`` says.

    ``ready``: the four results of `quantize` of the weight, where they are at hand.
    """
    from .autograd import Linear

    check((x, weight, bias), out_dtype)
    check_shapes(x.shape[-1], weight, bias)
    return Linear.apply(x, weight, bias, scheme, out_dtype, ready)


def linear_act_linear(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None,
    act: str, scheme1: str, scheme2: str, hidden_dtype: torch.dtype, out_dtype: torch.dtype,
    ready: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """act(x weight1^T + bias1) weight2^T + bias2; the hidden tensor is stored as codes only."""
    from .autograd import Chain

    check_activation(act)
    check((x, weight1, bias1, weight2, bias2), hidden_dtype, out_dtype)
    check_shapes(x.shape[-1], weight1, bias1)
    check_shapes(weight1.shape[0], weight2, bias2)
    if fusable(scheme2):
        return Chain.apply(
            x, weight1, bias1, weight2, bias2, act, scheme1, scheme2, hidden_dtype, out_dtype, ready
        )
    ready1, ready2 = parts(ready, 2)
    z = linear(x, weight1, bias1, scheme1, hidden_dtype, ready1)
    return linear(ACTIVATIONS[act].forward(z), weight2, bias2, scheme2, out_dtype, ready2)


def gated_linear(
    x: Tensor, weight_gate: Tensor, bias_gate: Tensor | None, weight_up: Tensor,
    bias_up: Tensor | None, weight_down: Tensor, bias_down: Tensor | None, act: str,
    scheme_gate: str, scheme_up: str, scheme_down: str,
    hidden_dtype: torch.dtype, out_dtype: torch.dtype, ready: list[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """(act(x gate^T) * (x up^T)) down^T with biases; the hidden tensor is stored as codes only."""
    from .autograd import Gated

    check_activation(act)
    tensors = (x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down)
    check(tensors, hidden_dtype, out_dtype)
    for weight, bias in ((weight_gate, bias_gate), (weight_up, bias_up)):
        check_shapes(x.shape[-1], weight, bias)
        check_shapes(weight.shape[0], weight_down, bias_down)
    schemes = (scheme_gate, scheme_up, scheme_down)
    if fusable(scheme_down):
        return Gated.apply(
            x, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down, act, schemes,
            hidden_dtype, out_dtype, ready,
        )  # fmt: skip
    ready_gate, ready_up, ready_down = parts(ready, 3)
    gate = linear(x, weight_gate, bias_gate, scheme_gate, hidden_dtype, ready_gate)
    up = linear(x, weight_up, bias_up, scheme_up, hidden_dtype, ready_up)
    hidden = ACTIVATIONS[act].forward(gate) * up
    return linear(hidden, weight_down, bias_down, scheme_down, out_dtype, ready_down)


def fusable(scheme: str) -> bool:
    """True where the second layer needs its input only as the codes of the forward pass."""
    parsed = Scheme.parse(scheme)
    return bool(parsed.fprop and parsed.wgrad and parsed.wgrad[1].source == "fprop")


_LAYER_OPS = {
    "linear(Tensor x, Tensor weight, Tensor? bias, str scheme, ScalarType out_dtype,"
    " Tensor[]? ready=None) -> Tensor": linear,
    "linear_act_linear(Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2,"
    " str act, str scheme1, str scheme2, ScalarType hidden_dtype, ScalarType out_dtype,"
    " Tensor[]? ready=None) -> Tensor": linear_act_linear,
    "gated_linear(Tensor x, Tensor weight_gate, Tensor? bias_gate, Tensor weight_up,"
    " Tensor? bias_up, Tensor weight_down, Tensor? bias_down, str act, str scheme_gate,"
    " str scheme_up, str scheme_down, ScalarType hidden_dtype, ScalarType out_dtype,"
    " Tensor[]? ready=None) -> Tensor": gated_linear,
}

for _schema, _function in _LAYER_OPS.items():
    primitives.LIBRARY.define(_schema)
    primitives.LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeImplicitAutograd")
