"""Find the linear layers of a captured graph, in every spelling and in every inner graph.

A site computes y[..., N] = x[..., K] w^T (+ bias) with a parameter of the model as w. A product of
two activations is no site. A site that must stay as it is carries the reason in `Site.refused`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import names, spellings
from .autocast import autocast_at
from .nodes import TRANSFORMS, graph_modules, is_tensor, op, shape, value
from .weights import DTYPES, weight_of


@dataclass(eq=False)
class Site:
    """One linear layer in a graph.

    ``node`` multiplies, ``out`` is the node whose value is the layer's output (an addition of the
    bias that follows a matmul belongs to the layer). ``weight`` is the parameter, uncast, [N, K],
    or [K, N] where ``weight_transposed``. ``origins`` are the inputs of the outermost graph that
    the weight stands for: several where one region's body serves several layers. ``axes``: how many
    axes of the weight are N and K, more than one in einsum; x ends in K's axes, the output in N's.
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
    axes: tuple[int, int] = (1, 1)
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
        sites += _sites_of(gm, path, calls)
    return sites


def _sites_of(gm: GraphModule, path: str, calls: names.Callers) -> list[Site]:
    region = names.foreign_region(gm, calls)
    sites, depth = [], 0
    for node in gm.graph.nodes:
        depth += (op(node) in TRANSFORMS) - op(node).endswith("_decrement_nesting")
        for call in spellings.calls(node):
            site = _site(gm, path, node, call, calls)
            if site is None:
                continue
            if depth:
                site.refused = "inside a torch.func transform, which the operators do not support"
            elif region:
                site.refused = f"inside {region}: its body is left as it is"
            sites.append(site)
    return sites


def per_caller(site: Site) -> Iterator[Site]:
    """The site once for each layer that it serves."""
    for i in range(len(site.origins)):
        yield replace(site, caller=i)


def _site(
    gm: GraphModule, path: str, node: Node, call: spellings.Call, calls: names.Callers
) -> Site | None:
    weight = weight_of(call.weight, constants=call.kind == "linear")
    if weight.node is None and call.kind != "linear":
        return None
    origins = tuple(names.origins(weight.node or call.weight, calls))
    if not origins and names.foreign_region(gm, calls):
        return None
    n, k = _features(call)
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
        out_features=n,
        in_features=k,
        out=node,
        origins=origins or (source,),
        axes=call.axes,
    )
    refused = call.refused or weight.refused or _refusal(site)
    site.refused = refused or _mixed_dtypes(node, call, calls)
    if call.kind in ("matmul", "einsum") and call.axes == (1, 1) and not site.refused:
        _absorb_bias(site)
    return site


def _features(call: spellings.Call) -> tuple[Any, Any]:
    """N and K of a product; those of one matrix where the weight is a batch of them."""
    sizes = list(shape(call.weight))
    if call.axes == (1, 1):
        sizes = (sizes[-2:] + [0, 0])[:2]
    at = call.axes[not call.by_rows]
    rows, columns = math.prod(sizes[:at]), math.prod(sizes[at:])
    return (rows, columns) if call.by_rows else (columns, rows)


def _refusal(site: Site) -> str | None:
    """Why a site stays as it is; None if it can be rewritten."""
    for what, node in (("input", site.x), ("weight", site.weight), ("bias", site.bias)):
        why = _tensor_refusal(what, node) if node is not None else None
        if why:
            return why
    if len(shape(site.weight)) != sum(site.axes):
        return f"the weight has {len(shape(site.weight))} dimensions, not 2"
    if len(shape(site.x)) <= site.axes[1]:
        return "the input is 1-D: at least 2 dimensions are needed"
    if not (site.in_features and site.out_features):
        return "the weight has no elements"
    if site.bias is not None and shape(site.bias) != (site.out_features,):
        return f"the bias is not a vector of {site.out_features} elements"
    return None


def _mixed_dtypes(node: Node, call: spellings.Call, calls: names.Callers) -> str | None:
    """Outside of autocast torch refuses operands of different dtypes: its error must appear."""
    operands = {"input": call.x, "weight": call.weight, "bias": call.bias}
    dtypes = {what: value(n).dtype for what, n in operands.items() if is_tensor(n)}
    if len(set(dtypes.values())) == 1 or autocast_at(node, value(call.x).device.type, calls):
        return None
    words = [f"{what} {str(dtype).removeprefix('torch.')}" for what, dtype in dtypes.items()]
    return f"different dtypes outside of autocast ({', '.join(words)}): torch refuses them"


def _tensor_refusal(what: str, node: Node) -> str | None:
    tensor = value(node)
    if is_traceable_wrapper_subclass(tensor):
        return f"the {what} is a tensor subclass ({type(tensor).__name__})"
    if tensor.dtype == torch.float64:
        return f"the {what} is float64, which is not supported: use float32"
    if tensor.dtype not in DTYPES:
        name = str(tensor.dtype).removeprefix("torch.")
        return f"the {what} is {name}: float32, bfloat16 or float16 is needed"
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
