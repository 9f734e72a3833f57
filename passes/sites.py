"""Find the linear layers of a captured graph, in every spelling and in every inner graph.

A site computes y[..., N] = x[..., K] w^T (+ bias) with a parameter of the model as w. A product of
two activations is no site. A site that must stay as it is carries the reason in `Site.refused`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import names
from .nodes import (
    CASTS,
    COPIES,
    RESHAPES,
    arg,
    graph_modules,
    is_tensor,
    mutated,
    op,
    shape,
    transposes,
    value,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VIEWS = RESHAPES | {"getitem", "chunk", "split", "split_with_sizes", "tensor_split", "unbind"}
VIEWS |= {"narrow", "select", "slice", "index_select", "transpose", "permute", "t", "T", "mT"}
MATMULS = ("matmul", "mm")
BATCHED = ("bmm", "baddbmm", "_grouped_mm")


class Weight(NamedTuple):
    """What a GEMM's right operand is: the parameter's node, how it is read, why it is refused."""

    node: Node | None
    transposed: bool = False
    refused: str | None = None


@dataclass(eq=False)
class Site:
    """One linear layer in a graph.

    ``node`` multiplies, ``out`` is the node whose value is the layer's output (an addition of the
    bias that follows a matmul belongs to the layer). ``weight`` is the parameter, uncast, [N, K],
    or [K, N] where ``weight_transposed``. ``origins`` are the inputs of the outermost graph that
    the weight stands for: several where one region's body serves several layers.
    """

    gm: GraphModule
    path: str
    node: Node
    kind: str
    x: Node
    weight: Node
    bias: Node | None
    weight_transposed: bool
    out_features: int
    in_features: int
    out: Node
    origins: tuple[Node, ...]
    caller: int = 0
    refused: str | None = None
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.name = names.layer_name(self)

    @property
    def origin(self) -> Node:
        """The outermost graph's input that is this layer's weight."""
        return self.origins[self.caller]

    @property
    def source(self) -> Any | None:
        """The weight's Dynamo source, or None."""
        return names.param_source(self)

    @property
    def module_path(self) -> str | None:
        """The dotted name of the module that computes the layer, from the module stack."""
        return names.module_path(self.node)

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the layer's output, autocast included."""
        return value(self.out).dtype


def find_sites(root: GraphModule) -> list[Site]:
    """All sites of ``root`` and of the graphs inside it, in graph order."""
    calls = names.callers(root)
    sites = []
    for path, gm in graph_modules(root):
        if path and gm not in calls:
            continue
        region = names.foreign_region(gm, calls)
        for node in gm.graph.nodes:
            site = _site(gm, path, node, calls)
            if site and region:
                site.refused = site.refused or f"inside {region}: its body is left as it is"
            sites += [site] if site else []
    return sites


def per_caller(site: Site) -> Iterator[Site]:
    """The site once for each layer that it serves."""
    for i in range(len(site.origins)):
        yield replace(site, caller=i)


class _Call(NamedTuple):
    """A GEMM's operands as its spelling gives them; ``by_rows``: the right operand is [N, K]."""

    kind: str
    x: Any
    weight: Any
    bias: Any = None
    by_rows: bool = True
    refused: str | None = None


def _site(gm: GraphModule, path: str, node: Node, calls: names.Callers) -> Site | None:
    call = _call(node)
    if call is None or not is_tensor(call.x) or not is_tensor(call.weight):
        return None
    weight = weight_of(call.weight, constants=call.kind == "linear")
    if weight.node is None and call.kind != "linear":
        return None
    n, k = (list(shape(call.weight)[-2:]) + [0, 0])[:2]
    source = weight.node or call.weight
    site = Site(
        gm=gm,
        path=path,
        node=node,
        kind=call.kind,
        x=call.x,
        weight=source,
        bias=call.bias if is_tensor(call.bias) else None,
        weight_transposed=weight.transposed is call.by_rows,
        out_features=n if call.by_rows else k,
        in_features=k if call.by_rows else n,
        out=node,
        origins=tuple(names.origins(source, calls)) or (source,),
    )
    site.refused = call.refused or weight.refused or _refusal(site)
    if call.kind in ("matmul", "einsum") and not site.refused:
        _absorb_bias(site)
    return site


def _call(node: Node) -> _Call | None:
    name = op(node)
    if name == "linear":
        bias = arg(node, 2, "bias")
        return _Call("linear", arg(node, 0, "input"), arg(node, 1, "weight"), bias)
    if name == "addmm":
        scaled = any(node.kwargs.get(k, 1) != 1 for k in ("alpha", "beta"))
        refused = "addmm with alpha or beta: not a linear layer" if scaled else None
        operands = (arg(node, 1, "mat1"), arg(node, 2, "mat2"), arg(node, 0, "input"))
        return _Call("addmm", *operands, by_rows=False, refused=refused)
    if name in MATMULS:
        left = arg(node, 0, "input")
        right = arg(node, 1, "other", node.kwargs.get("mat2"))
        return _matmul(left, right)
    if name in BATCHED:
        at = 1 if name == "baddbmm" else 0
        return _batched(node.args[at : at + 2])
    return _einsum(node) if name == "einsum" else None


def _matmul(left: Any, right: Any) -> _Call | None:
    if not (is_tensor(left) and is_tensor(right)):
        return None
    if value(right).dim() > 2:
        return _batched((left, right))
    if value(right).dim() == 2 and weight_of(right).node is not None:
        return _Call("matmul", left, right, by_rows=False)
    if value(left).dim() == 2 and weight_of(left).node is not None:
        why = "the weight is the left operand of a matmul: write F.linear(x, weight)"
        return _Call("matmul", right, left, refused=why)
    return None


def _batched(operands: tuple) -> _Call | None:
    """A product of batches of matrices; reported where one of them is a parameter."""
    for i, node in enumerate(operands):
        if is_tensor(node) and value(node).dim() > 2 and weight_of(node).node is not None:
            why = "the weight is a batch of matrices (experts): only 2-D weights are supported"
            return _Call("batched", operands[1 - i], node, by_rows=False, refused=why)
    return None


def _einsum(node: Node) -> _Call | None:
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
    by_rows = projection(*terms)
    why = None if by_rows is not None else f"einsum '{equation}' is not a plain projection"
    if why and value(operands[1]).dim() == 1:
        return None
    x, weight = operands
    return _Call("einsum", x, weight, by_rows=bool(by_rows), refused=why)


def projection(x: str, weight: str, out: str) -> bool | None:
    """Whether einsum terms are x[..., K] w^T: True for w[N, K], False for w[K, N], None if not."""
    rows = x[:-1]
    letters = x.replace("...", "")
    if len(weight) != 2 or not weight.isalpha() or weight[0] == weight[1]:
        return None
    if not letters.isalpha() or len(set(letters)) != len(letters):
        return None
    for k, n, by_rows in ((weight[1], weight[0], True), (weight[0], weight[1], False)):
        if x[-1] == k and n not in x and out == rows + n:
            return by_rows
    return None


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


def _refusal(site: Site) -> str | None:
    """Why a site stays as it is; None if it can be rewritten."""
    for what, node in (("input", site.x), ("weight", site.weight), ("bias", site.bias)):
        why = _tensor_refusal(what, node) if node is not None else None
        if why:
            return why
    if len(shape(site.weight)) != 2:
        return f"the weight has {len(shape(site.weight))} dimensions, not 2"
    if len(shape(site.x)) < 2:
        return "the input is 1-D: at least 2 dimensions are needed"
    if not (site.in_features and site.out_features):
        return "the weight has no elements"
    if site.bias is not None and shape(site.bias) != (site.out_features,):
        return f"the bias is not a vector of {site.out_features} elements"
    return None


def _tensor_refusal(what: str, node: Node) -> str | None:
    tensor = value(node)
    if is_traceable_wrapper_subclass(tensor):
        return f"the {what} is a tensor subclass ({type(tensor).__name__})"
    if tensor.dtype == torch.float64:
        return f"the {what} is float64, which is not supported: use float32"
    if tensor.dtype not in DTYPES:
        return f"the {what} is {str(tensor.dtype).removeprefix('torch.')}, not a float32/16 tensor"
    return None


def _absorb_bias(site: Site) -> None:
    """Take ``matmul + bias`` as one layer where nothing else reads the matmul."""
    users = list(site.node.users)
    if len(users) != 1 or op(users[0]) != "add" or users[0].kwargs:
        return
    others: list[Any] = [a for a in users[0].args if a is not site.node]
    if len(others) != 1 or not is_tensor(others[0]):
        return
    bias, out = others[0], users[0]
    vector = shape(bias) == (site.out_features,) and weight_of(bias).node is bias
    if vector and value(out).dtype == value(site.node).dtype and not _tensor_refusal("bias", bias):
        site.bias, site.out = bias, out
