"""Print an FX graph so that the same computation prints alike on every supported torch version.

    %0: f32[s0, 32]  x
    %1: f32[64, 32]  up.weight
    %2: f32[s0, 64] = fp4::linear(%0, %1, None, $0, bf16)
    return %2

    $0 = 'fprop(nvfp4:row, nvfp4:tensor) ...'

Nodes are numbered in order of appearance, symbolic sizes are s0, s1, ... in order of appearance,
operations have their short names (`nodes.op`), arguments that say nothing are left out, and long
texts (schemes) are written once, below the graph.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import GraphModule, Node

from .names import dotted, source_name, source_of
from .nodes import attribute, op, value

DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "u8",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}
# Names that differ between torch versions or levels for one operation.
SYNONYMS = {
    "_unsafe_view": "view",
    "prims::convert_element_type": "to",
    "native_dropout": "dropout",
    "_native_dropout": "dropout",
    "sym_size": "size",
    "_sym_sqrt": "sqrt",
}
LONG = 24  # letters of a text that is written in its place
NOISE = {"pin_memory", "layout", "memory_format", "device", "non_blocking", "copy"}


class Saved(NamedTuple):
    """A tensor that the forward graph keeps for the backward graph."""

    name: str
    dtype: torch.dtype
    shape: tuple
    nbytes: int | None

    def __str__(self) -> str:
        size = "symbolic size" if self.nbytes is None else f"{self.nbytes:,} B"
        return f"{self.name}: {_dtype(self.dtype)}[{', '.join(map(str, self.shape))}] {size}"


def print_graph(gm: GraphModule, only: str | None = None) -> str:
    """The text of a graph and of the graphs inside it.

    ``only="fp4"`` shows the fp4 operators, the nodes next to them, inputs and outputs; a value that
    is not shown is written as ``<op>``.
    """
    return "\n".join(_Printer(gm, only).lines())


def saved_for_backward(forward: GraphModule, backward: GraphModule) -> list[Saved]:
    """What AOT's forward graph saves: the backward graph's inputs but the gradients.

    A name is the input's (``primals_3``) or the operation's, with the number of the output where
    an operation has several (``fp4::quantize.0``).
    """
    made = {node.name: node for node in forward.graph.nodes}
    symbols = _Symbols()
    saved = []
    for node in backward.graph.nodes:
        tensor = value(node)
        gradient = node.name.startswith("tangents")
        if node.op != "placeholder" or gradient or not isinstance(tensor, torch.Tensor):
            continue
        sizes = tuple(symbols.text(d) for d in tensor.shape)
        count = math.prod(tensor.shape) * tensor.dtype.itemsize
        nbytes = count if isinstance(count, int) else None
        saved.append(Saved(_origin(made.get(node.name, node)), tensor.dtype, sizes, nbytes))
    return saved


def print_saved(forward: GraphModule, backward: GraphModule) -> str:
    """The list of `saved_for_backward` as text, with the sum of its bytes."""
    saved = saved_for_backward(forward, backward)
    total = sum(s.nbytes or 0 for s in saved)
    head = f"saved for backward: {len(saved)} tensors, {total:,} B"
    return "\n".join([head, *(f"  {s}" for s in saved)])


def _origin(node: Node) -> str:
    node = _same(node)
    if node.op == "placeholder":
        return node.name
    if op(node) == "getitem" and isinstance(node.args[0], Node):
        return f"{_name(node.args[0])}.{node.args[1]}"
    return _name(node)


def _same(node: Node) -> Node:
    """The node without the aliases that AOTAutograd of some versions puts around saved tensors."""
    while isinstance(node.target, torch._ops.OpOverload) and op(node) in ("detach", "alias"):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _name(node: Node) -> str:
    name = op(node) or getattr(node.target, "__name__", str(node.target))
    return SYNONYMS.get(name, name)


def _dtype(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


class _Symbols:
    """Symbolic sizes renamed s0, s1, ... in order of appearance."""

    def __init__(self) -> None:
        self.names: dict[sympy.Symbol, sympy.Symbol] = {}

    def text(self, size: Any) -> str:
        if isinstance(size, (torch.SymFloat, torch.SymBool)):
            return "float" if isinstance(size, torch.SymFloat) else "bool"
        if not isinstance(size, torch.SymInt):
            return str(size)
        expr = sympy.sympify(size.node.expr)
        for symbol in sorted(expr.free_symbols, key=_age):
            new = sympy.Symbol(f"s{len(self.names)}", integer=True)
            self.names.setdefault(symbol, new)
        return str(expr.xreplace(self.names))


def _age(symbol: sympy.Symbol) -> tuple:
    return (len(symbol.name), symbol.name)


class _Printer:
    """The state of one printing: node numbers, symbols, inner graphs still to print."""

    def __init__(self, gm: GraphModule, only: str | None) -> None:
        self.gm, self.only = gm, only
        self.symbols = _Symbols()
        self.numbers: dict[Node, int] = {}
        self.bodies: dict[str, GraphModule] = {}
        self.texts: dict[str, str] = {}

    def lines(self) -> list[str]:
        text = self._graph(self.gm)
        done = 0
        while done < len(self.bodies):
            name, body = list(self.bodies.items())[done]
            text += [f"{name}:", *("  " + line for line in self._graph(body))]
            done += 1
        return text + [f"{name} = {content!r}" for content, name in self.texts.items()]

    def _graph(self, gm: GraphModule) -> list[str]:
        shown = self._shown(gm)
        text = []
        for node in gm.graph.nodes:
            hidden = self._body(gm, node) or _same(node) is not node
            if hidden or (node not in shown and node.op != "output"):
                continue
            if node.op == "output":
                outs = node.args[0]
                single = isinstance(outs, (tuple, list)) and len(outs) == 1
                text.append(f"return {self._arg(outs[0] if single else outs)}")  # type: ignore
            else:
                text.append(self._line(node))
        return text

    def _shown(self, gm: GraphModule) -> set[Node]:
        nodes = list(gm.graph.nodes)
        if self.only is None:
            return set(nodes)
        found = {n for n in nodes if op(n).startswith(self.only + "::")}
        near = {m for n in found for m in (*n.all_input_nodes, *n.users) if m.op != "output"}
        near |= {m for n in near if op(n) == "getitem" for m in n.users if m.op != "output"}
        return found | near | {n for n in nodes if n.op == "placeholder"}

    def _body(self, gm: GraphModule, node: Node) -> bool:
        """True for the reference to an inner graph, which is printed below under its own name."""
        inner = attribute(gm, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(inner, GraphModule):
            return False
        self.bodies.setdefault(self._body_name(inner), inner)
        return True

    def _body_name(self, inner: GraphModule) -> str:
        known = [name for name, body in self.bodies.items() if body is inner]
        return known[0] if known else f"body{len(self.bodies)}"

    def _line(self, node: Node) -> str:
        self.numbers[node] = len(self.numbers)
        head = f"%{self.numbers[node]}: {self._value(node)}"
        if node.op == "placeholder":
            return f"{head}  {_label(node)}".rstrip()
        if node.op == "get_attr":
            return f"{head} = attribute {node.target}"
        args = [self._arg(a) for a in node.args]
        kwargs = {k: v for k, v in node.kwargs.items() if k not in NOISE and v is not None}
        args += [f"{k}={self._arg(v)}" for k, v in kwargs.items()]
        return f"{head} = {_name(node)}({', '.join(args)})"

    def _value(self, node: Node) -> str:
        val = value(node)
        if isinstance(val, torch.Tensor):
            sizes = ", ".join(self.symbols.text(d) for d in val.shape)
            return f"{_dtype(val.dtype)}[{sizes}]"
        if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.symbols.text(val)
        return "tuple" if isinstance(val, (tuple, list)) else "-"

    def _arg(self, a: Any) -> str:
        if isinstance(a, Node):
            return self._reference(a)
        if isinstance(a, (tuple, list)):
            left, right = "()" if isinstance(a, tuple) else "[]"
            return left + ", ".join(map(self._arg, a)) + right
        if isinstance(a, torch.dtype):
            return _dtype(a)
        if isinstance(a, str) and len(a) > LONG:
            return self.texts.setdefault(a, f"${len(self.texts)}")
        symbolic = isinstance(a, (torch.SymInt, torch.SymFloat))
        return self.symbols.text(a) if symbolic else repr(a)

    def _reference(self, node: Node) -> str:
        node = _same(node)
        if node.op == "get_attr" and isinstance(node.graph.owning_module, GraphModule):
            inner = attribute(node.graph.owning_module, str(node.target))
            if isinstance(inner, GraphModule):
                return self._body_name(inner)
        number = self.numbers.get(node)
        return f"<{_name(node)}>" if number is None else f"%{number}"


def _label(node: Node) -> str:
    """A name for an input that does not depend on the torch version: the model's own."""
    source = source_of(node)
    if source is not None:
        expression = source_name(source)
        return dotted(expression) or expression.removeprefix("L['").removesuffix("']")
    return node.name if node.name.startswith(("primals", "tangents")) else ""
