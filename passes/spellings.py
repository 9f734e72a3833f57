"""How a node spells the product x w^T: linear, addmm, matmul and einsum in all their forms."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch.fx import Node

from .nodes import arg, is_tensor, op, value
from .weights import weight_of

MATMULS = ("matmul", "mm")
BATCHED = ("bmm", "baddbmm")


class Call(NamedTuple):
    """A GEMM's operands as its spelling gives them; ``by_rows``: the right operand is [N, K].

    ``axes``: how many of the right operand's axes are N and how many are K, in einsum.
    """

    kind: str
    x: Any
    weight: Any
    bias: Any = None
    by_rows: bool = True
    refused: str | None = None
    axes: tuple[int, int] = (1, 1)


def calls(node: Node) -> list[Call]:
    """The products with a parameter that a node computes; usually none or one."""
    if op(node) == "multi_head_attention_forward":
        return _attention(node)
    call = _call(node)
    found = call is not None and is_tensor(call.x) and is_tensor(call.weight)
    return [call] if call and found else []


def _attention(node: Node) -> list[Call]:
    """The two projections inside one attention operation, for the report."""
    why = "inside F.multi_head_attention_forward, which is one operation: use separate linears"
    packed = (arg(node, 5, "in_proj_weight"), arg(node, 11, "out_proj_weight"))
    x = arg(node, 0, "query")
    return [Call("attention", x, w, refused=why) for w in packed if is_tensor(w)]


def _call(node: Node) -> Call | None:
    name = op(node)
    if name == "linear":
        bias = arg(node, 2, "bias")
        return Call("linear", arg(node, 0, "input"), arg(node, 1, "weight"), bias)
    if name == "addmm":
        scaled = any(node.kwargs.get(k, 1) != 1 for k in ("alpha", "beta"))
        refused = "addmm with alpha or beta: not a linear layer" if scaled else None
        operands = (arg(node, 1, "mat1"), arg(node, 2, "mat2"), arg(node, 0, "input"))
        return Call("addmm", *operands, by_rows=False, refused=refused)
    if name in MATMULS:
        left = arg(node, 0, "input")
        right = arg(node, 1, "other", node.kwargs.get("mat2"))
        return _matmul(left, right)
    if name in BATCHED or "grouped_mm" in name:
        at = 1 if name == "baddbmm" else 0
        return _batched((*node.args, *node.kwargs.values())[at : at + 2])
    return _einsum(node) if name == "einsum" else None


def _matmul(left: Any, right: Any) -> Call | None:
    if not (is_tensor(left) and is_tensor(right)):
        return None
    if value(right).dim() > 2:
        return _batched((left, right))
    if value(right).dim() == 2 and weight_of(right).node is not None:
        return Call("matmul", left, right, by_rows=False)
    if value(left).dim() == 2 and weight_of(left).node is not None:
        why = "the weight is the left operand of a matmul: write F.linear(x, weight)"
        return Call("matmul", right, left, refused=why)
    return None


def _batched(operands: tuple) -> Call | None:
    """A product of batches of matrices; reported where one of them is a parameter.

    Libraries have operators of their own for groups of rows: ``transformers::grouped_mm...``.
    """
    for i, node in enumerate(operands):
        if is_tensor(node) and value(node).dim() > 2 and weight_of(node).node is not None:
            why = "the weight is a batch of matrices (experts): only 2-D weights are supported"
            return Call("batched", operands[1 - i], node, by_rows=False, refused=why)
    return None


def _einsum(node: Node) -> Call | None:
    operands: list[Any] = list(node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if len(operands) != 2 or not all(is_tensor(n) for n in operands):
        return None
    equation = str(node.args[0]).replace(" ", "")
    found = re.fullmatch(r"([^,]*),([^,>]*)->(.*)", equation)
    terms = list(found.groups()) if found else ["", "", ""]
    if weight_of(operands[1]).node is None:
        operands.reverse()
        terms[:2] = terms[1::-1]
    plain = projection(*terms)
    why = None if plain else f"einsum '{equation}' is not a plain projection"
    if why and value(operands[1]).dim() == 1:
        return None
    x, weight = operands
    by_rows, *axes = plain or (False, 1, 1)
    return Call("einsum", x, weight, by_rows=by_rows, refused=why, axes=(axes[0], axes[1]))


def projection(x: str, weight: str, out: str) -> tuple[bool, int, int] | None:
    """Whether einsum terms are x[..., K] w^T; N and K may have several axes each.

    (True, axes of N, axes of K) for w[N, K], (False, ...) for w[K, N]; None if they are not.
    """
    letters = x.replace("...", "")
    if not all(term.isalpha() and len(set(term)) == len(term) for term in (letters, weight)):
        return None
    for i in range(1, len(weight)):
        for k, n, by_rows in ((weight[i:], weight[:i], True), (weight[:i], weight[i:], False)):
            rows = x.removesuffix(k)
            if x.endswith(k) and not set(n) & set(x) and out == rows + n:
                return by_rows, len(n), len(k)
    return None
