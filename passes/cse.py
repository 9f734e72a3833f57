"""Compute once what several fp4 nodes compute alike.

AOTAutograd removes common subexpressions from training graphs only; in a ``no_grad`` graph q, k
and v would each quantize their input. The primitives are functional and take their random bits as
an argument, so equal arguments mean equal results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from .nodes import CASTS, COPIES, RESHAPES, op

# What may stand between two fp4 nodes and is merged with them: views and casts.
PURE = CASTS | COPIES | RESHAPES | {"getitem", "t", "transpose", "permute", "expand", "slice"}
PURE |= {"_unsafe_view", "alias", "prims::convert_element_type"}


def merge_equal(gm: GraphModule) -> int:
    """Merge fp4 nodes with identical targets and arguments; returns how many were removed.

    For functional (post-AOT) graphs. Views and casts that feed them are merged too, uncounted.
    """
    seen: dict[Any, Node] = {}
    merged, changed = 0, False
    for node in list(gm.graph.nodes):
        if not mergeable(node):
            continue
        first = seen.setdefault(_key(node), node)
        if first is node:
            continue
        node.replace_all_uses_with(first)
        gm.graph.erase_node(node)
        merged, changed = merged + op(node).startswith("fp4::"), True
    if changed:
        gm.graph.lint()
        gm.recompile()
    return merged


def mergeable(node: Node) -> bool:
    """True for a functional fp4 operator and for the views and casts around it."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return False
    return op(node).startswith("fp4::") or op(node) in PURE


def _key(node: Node) -> tuple:
    return (node.target, _frozen(node.args), _frozen(dict(node.kwargs)))


def _frozen(a: Any) -> Any:
    """A hashable form of arguments that tells 1, 1.0 and True apart."""
    if isinstance(a, (tuple, list)):
        return ("list", *map(_frozen, a))
    if isinstance(a, dict):
        return ("dict", *sorted((k, _frozen(v)) for k, v in a.items()))
    if isinstance(a, slice):
        return ("slice", _frozen(a.start), _frozen(a.stop), _frozen(a.step))
    return a if isinstance(a, (Node, str, torch.dtype)) else (type(a).__name__, repr(a))
