"""Which parameter of the model a GEMM's operand is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from . import names
from .nodes import CASTS, COPIES, RESHAPES, is_tensor, mutated, op, shape, transposes, value

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VIEWS = RESHAPES | {"getitem", "chunk", "split", "split_with_sizes", "tensor_split", "unbind"}
VIEWS |= {"narrow", "select", "slice", "index_select", "transpose", "permute", "t", "T", "mT"}


class Weight(NamedTuple):
    """What a GEMM's right operand is: the parameter's node, how it is read, why it is refused."""

    node: Node | None
    transposed: bool = False
    refused: str | None = None


def weight_of(node: Node, constants: bool = False) -> Weight:
    """Follow a weight back to its parameter through casts and transposes of the whole matrix.

    ``constants``: buffers and constants of the graph count as well (weights of a frozen layer).
    """
    transposed = False
    while node.op not in ("placeholder", "get_attr"):
        inner = node.args[0] if node.args else None
        if transposes(node):
            transposed = not transposed
        elif not _keeps(node, inner):
            return _computed(node)
        node = inner  # type: ignore[assignment]
    if not (is_parameter(node) or constants and is_constant(node)):
        return Weight(None, refused="the weight is not a parameter of the model")
    changed = any(mutated(user) is node for user in node.users)
    why = "the weight is changed in place in the same graph" if changed else None
    return Weight(node, transposed, why)


def _keeps(node: Node, inner: Any) -> bool:
    """True where a node's value is its input's, in another float dtype at most."""
    if not is_tensor(inner) or not is_tensor(node) or mutated(node) is not None:
        return False
    if op(node) in CASTS:
        same = value(node).device == value(inner).device
        return same and value(node).dtype in DTYPES and value(inner).dtype in DTYPES
    return op(node) in COPIES | RESHAPES and shape(node) == shape(inner)


def _computed(node: Node) -> Weight:
    """The refusal of a weight that is no whole parameter."""
    base = node
    while op(base) in VIEWS | CASTS and base.args and isinstance(base.args[0], Node):
        base = base.args[0]
    if is_parameter(base):
        return Weight(base, refused=f"the weight is a view of a parameter ({op(node)})")
    return Weight(None, refused=f"the weight is computed in the graph ({op(base) or base.target})")


def is_parameter(node: Node) -> bool:
    """True for a graph input or attribute that is a module's parameter."""
    if not is_tensor(node) or node.op not in ("placeholder", "get_attr"):
        return False
    return isinstance(value(node), torch.nn.Parameter) or "._parameters[" in _expression(node)


def is_constant(node: Node) -> bool:
    """True for a module's buffer and for a constant of the graph."""
    return is_tensor(node) and (node.op == "get_attr" or "._buffers[" in _expression(node))


def _expression(node: Node) -> str:
    source = names.source_of(node)
    return names.source_name(source) if source is not None else ""
