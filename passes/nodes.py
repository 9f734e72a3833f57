"""What a node of a captured graph is, whatever its spelling: its op's short name, its arguments.

A Dynamo graph says one thing in many ways: ``torch.relu(x)``, ``F.relu(x)``, ``x.relu()``, and a
graph from export says ``aten.relu.default``. `op` gives all of them one word; an in-place form has
a trailing underscore. The passes' tables are keyed by these words.
"""

from __future__ import annotations

import builtins
from types import MethodDescriptorType
from typing import Any

import torch
from torch.fx import GraphModule, Node

ALIASES = {
    "truediv": "div",
    "divide": "div",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "concat": "cat",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "ipow": "pow_",
    "imatmul": "matmul_",
    "_to_copy": "to",
    "clip": "clamp",
    "numpy_T": "T",
    "special_erf": "erf",
    "special_expit": "sigmoid",
}
CASTS = frozenset({"to", "type", "type_as", "float", "half", "bfloat16"})
# Same rows in the same order, if the last dimension keeps its size.
RESHAPES = frozenset(
    {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"}
)
COPIES = frozenset({"contiguous", "clone"})
INPLACE_KEYWORD = {"dropout": 3, "relu": 1, "silu": 1, "leaky_relu": 2, "elu": 2, "hardswish": 1}
# Nodes that change how the following ones compute.
MODES = (
    "_enter_autocast",
    "_exit_autocast",
    "_set_grad_enabled",
    "_enter_inference_mode",
    "_exit_inference_mode",
)
# torch.func: the nodes between computes on batched or dual tensors.
TRANSFORMS = ("_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting")


def op(node: Node) -> str:
    """The short name of a node's operation ("" for inputs, attributes and foreign callables)."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        name = _function_name(node)
    else:
        return ""
    return ALIASES.get(name, name)


def _function_name(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        space, _, name = target._qualified_op_name.partition("::")
        return name if space == "aten" else f"{space}::{name}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()
    if target is builtins.getattr:
        return str(node.args[1])
    module = (getattr(target, "__module__", None) or "").split(".")[0]
    method = module == "" and isinstance(target, MethodDescriptorType)
    return target.__name__ if module in ("torch", "_operator") or method else ""


def arg(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by keyword."""
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name, default)


def value(node: Any) -> Any:
    """The fake tensor or symbolic number of a node; anything else is returned as it is."""
    if not isinstance(node, Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def is_tensor(node: Any) -> bool:
    """True for a node whose value is one tensor."""
    return isinstance(node, Node) and isinstance(value(node), torch.Tensor)


def number(x: Any) -> float | None:
    """The number that a constant or a node stands for; None if it is not one number.

    A symbolic float (``dynamic=True`` makes them of a module's attributes and of `math.pi`) is
    fixed by a guard. Symbolic integers are sizes and are never fixed.
    """
    x = value(x)
    if isinstance(x, torch.SymFloat):
        return float(x) if x.node.hint is not None else None
    return float(x) if isinstance(x, (int, float)) else None


def dim(size: Any) -> Any:
    """A size as something that compares without adding a guard: an int or a sympy expression."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if expr.is_number else expr
    return size


def shape(node: Node) -> tuple:
    """The sizes of a node's tensor, comparable without guards."""
    return tuple(dim(size) for size in value(node).shape)


def mutated(node: Node) -> Node | None:
    """The input that a node overwrites, or None."""
    name = op(node)
    inplace = name.endswith("_") and not name.startswith("__")
    if not inplace and name in INPLACE_KEYWORD:
        inplace = arg(node, INPLACE_KEYWORD[name], "inplace", False) is True
    if inplace or name == "setitem":
        return node.args[0] if node.args and isinstance(node.args[0], Node) else None
    out = node.kwargs.get("out")
    return out if isinstance(out, Node) else None


def transposes(node: Node) -> bool:
    """True for the transpose of a matrix, in any spelling."""
    name = op(node)
    if not node.args or not is_tensor(node.args[0]) or value(node.args[0]).dim() != 2:
        return False
    if name in ("t", "T", "mT"):
        return True
    if name in ("transpose", "swapaxes", "swapdims"):
        return {int(d) % 2 for d in node.args[1:3] if isinstance(d, int)} == {0, 1}
    if name == "permute":
        dims: Any = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return [int(d) % 2 for d in dims] == [1, 0]
    return False


def graph_modules(gm: GraphModule) -> list[tuple[str, GraphModule]]:
    """Every graph reachable from ``gm`` with its attribute path, the root ("") first."""
    return [(path, m) for path, m in gm.named_modules() if isinstance(m, GraphModule)]


def attribute(gm: GraphModule, target: str) -> Any:
    """What a ``get_attr`` node of ``gm`` reads."""
    found: Any = gm
    for part in target.split("."):
        found = getattr(found, part, None)
    return found


def copy_meta(new: Node, old: Node) -> None:
    """Give ``new`` the value, the module stack and the stack trace of the node it replaces."""
    for key in ("example_value", "nn_module_stack", "source_fn_stack", "stack_trace", "custom"):
        if key in old.meta:
            new.meta[key] = old.meta[key]
