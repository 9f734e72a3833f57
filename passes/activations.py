"""Recognise the activation between two linears by what it computes, not by how it is written.

The nodes between the linears are evaluated in double precision at sample points and compared with
the table of activations: ``F.gelu``, the six nodes of GPT-2's NewGELU and any other spelling are
one case. Pointwise functions that agree to 2e-6 at all points (the nearest pair of the table, the
two GELUs, differs by 5e-4) are the same activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from .nodes import CASTS, COPIES, MODES, RESHAPES, arg, attribute, is_tensor, number, op

Function = Callable[..., float]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _gelu(x: float, approximate: str = "none") -> float:
    if approximate == "tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


# Activations that the operators know, and others that are recognised to be reported by name.
SUPPORTED: dict[str, Function] = {
    "gelu": _gelu,
    "gelu_tanh": lambda x: _gelu(x, "tanh"),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "silu": lambda x: x * _sigmoid(x),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
}
UNSUPPORTED: dict[str, Function] = {
    "relu6": lambda x: min(max(x, 0.0), 6.0),
    "leaky_relu": lambda x: x if x > 0 else 0.01 * x,
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
    "hardswish": lambda x: x * min(max(x + 3, 0.0), 6.0) / 6,
}
ACTIVATIONS = SUPPORTED | UNSUPPORTED

# Pointwise operations by `nodes.op` name, over floats; keyword arguments as the op names them.
POINTWISE: dict[str, Function] = {
    "add": lambda a, b, alpha=1: a + alpha * b,
    "sub": lambda a, b, alpha=1: a - alpha * b,
    "rsub": lambda a, b, alpha=1: b - alpha * a,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "pow": lambda a, b=None, exponent=None: a ** (exponent if b is None else b),
    "square": lambda a: a * a,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": _sigmoid,
    "gelu": _gelu,
    "relu": lambda x, inplace=False: SUPPORTED["relu"](x),
    "silu": lambda x, inplace=False: SUPPORTED["silu"](x),
    "clamp": lambda x, min=-math.inf, max=math.inf: _clamp(x, min, max),
    "clamp_min": lambda x, min: _clamp(x, min, math.inf),
    "relu6": lambda x, inplace=False: UNSUPPORTED["relu6"](x),
    "leaky_relu": lambda x, slope=0.01, inplace=False, negative_slope=0.01: (
        x if x > 0 else x * (slope if slope != 0.01 else negative_slope)
    ),
    "elu": lambda x, alpha=1.0, inplace=False: x if x > 0 else alpha * math.expm1(x),
    "mish": lambda x, inplace=False: UNSUPPORTED["mish"](x),
    "hardswish": lambda x, inplace=False: UNSUPPORTED["hardswish"](x),
}
PASS_THROUGH = CASTS | COPIES | RESHAPES | {"dropout", "identity"}

_POINTS = [i * 0.173 - 7.9 for i in range(92)] + [0.0]
_TOLERANCE = 2e-6


class Activation(NamedTuple):
    """A recognised activation; ``gated`` lists (gate, up) in the order of the arguments given."""

    name: str
    gated: tuple[int, int] | None = None

    @property
    def supported(self) -> bool:
        """True where the operators compute it."""
        return self.name in SUPPORTED


def pointwise(node: Node) -> bool:
    """True for an operation that this module can evaluate element by element."""
    return _word(node) in POINTWISE or op(node) in PASS_THROUGH or function_of(node) is not None


def function_of(node: Node) -> Graph | None:
    """The forward of the elementwise `torch.autograd.Function` whose result a node is, or None."""
    call = node.args[0] if op(node) == "getitem" and node.args[1] == 0 else None
    if not isinstance(call, Node) or op(call) != "autograd_function_apply":
        return None
    gm: Any = call.graph.owning_module
    forward: Any = call.args[0]
    body = attribute(gm, forward.target).graph
    inside = [n for n in body.nodes if n.op not in ("placeholder", "output")]
    known = all(op(n) in MODES or pointwise(n) for n in inside)
    return body if known and len(call.args) == 3 else None


def inputs(node: Node) -> list[Node]:
    """The tensors that a pointwise node is computed from."""
    call: Any = node.args[0] if function_of(node) is not None else node
    return [n for n in call.all_input_nodes if is_tensor(n)]


def _word(node: Node) -> str:
    return op(node).removesuffix("_")


def recognise(out: Node, inputs: list[Node]) -> Activation | None:
    """The activation that ``out`` is of one input, or of two, act(gate) * up; None if unknown."""
    if len(inputs) == 1:
        return _recognise_one(out, inputs[0])
    return _recognise_gated(out, inputs) if len(inputs) == 2 else None


def _recognise_one(out: Node, x: Node) -> Activation | None:
    got = [_evaluate(out, {x: p}) for p in _POINTS]
    for name, act in ACTIVATIONS.items():
        if all(_close(y, act(p), p) for y, p in zip(got, _POINTS)):
            return Activation(name)
    return None


def _recognise_gated(out: Node, inputs: list[Node]) -> Activation | None:
    ups = [1.0 + 0.5 * math.cos(3 * i) for i in range(len(_POINTS))]
    for gate, up in ((0, 1), (1, 0)):
        pairs = list(zip(_POINTS, ups))
        got = [_evaluate(out, {inputs[gate]: g, inputs[up]: u}) for g, u in pairs]
        for name, act in ACTIVATIONS.items():
            if all(_close(y, act(g) * u, g) for y, (g, u) in zip(got, pairs)):
                return Activation(name, gated=(gate, up))
    return None


def _close(got: float | None, want: float, x: float) -> bool:
    return got is not None and abs(got - want) <= _TOLERANCE * (1 + abs(x))


def _evaluate(out: Node, values: Mapping[Node, float]) -> float | None:
    """The value of ``out`` for given values of the nodes it depends on; None where undefined."""
    memo: dict[Node, Any] = dict(values)

    def of(a: Any) -> Any:
        if not isinstance(a, Node):
            return a
        if a not in memo:
            memo[a] = visit(a) if is_tensor(a) else number(a)
        return memo[a]

    def visit(node: Node) -> float:
        if op(node) in PASS_THROUGH:
            return of(node.args[0] if node.args else arg(node, 0, "input"))
        body = function_of(node)
        if body is not None:
            return of_function(body, *(of(n) for n in inputs(node)))
        args = [of(a) for a in node.args]
        kwargs = {k: of(v) for k, v in node.kwargs.items() if k not in ("input", "dtype")}
        args = [of(node.kwargs["input"]), *args] if "input" in node.kwargs else args
        return POINTWISE[_word(node)](*args, **kwargs)

    def of_function(body: Graph, x: float) -> float:
        memo[next(iter(body.nodes))] = x
        result: Any = body.output_node().args[0]
        while isinstance(result, (tuple, list)):
            result = result[0]
        return of(result)

    try:
        got = of(out)
    except (ArithmeticError, ValueError, TypeError, KeyError):
        return None
    return got if isinstance(got, (int, float)) and math.isfinite(got) else None


def _clamp(x: float, low: float | None, high: float | None) -> float:
    low = -math.inf if low is None else low
    return min(max(x, low), math.inf if high is None else high)
