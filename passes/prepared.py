"""Weights quantized outside of the graph: four more inputs each, what `quantize` returns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from .nodes import is_tensor, transposes, value
from .weights import is_parameter

# Operators, and where their arguments hold weights and schemes; `ready` is the last argument.
OPERATORS = {
    "linear": ((1,), (3,)),
    "linear_act_linear": ((1, 3), (6, 7)),
    "gated_linear": ((1, 3, 5), (8, 9, 10)),
}


@dataclass(frozen=True)
class Prepared:
    """A weight as a graph needs it: the number of its input, and how `quantize` is to be called."""

    position: int
    transposed: bool
    format: str
    operand: str


# The format and the operand form of a weight under a scheme on a device; None: not quantized.
Operand = Callable[[str, torch.device], "tuple[str, str] | None"]


def prepare_weights(captured: GraphModule, operand: Operand) -> tuple[GraphModule, list[Prepared]]:
    """Let the operators of the outermost graph read quantized weights from new inputs.

    Returns a copy (Dynamo still reads its own graph's inputs) and one entry for every four inputs
    that were added after the others, in order. Weights that are no whole parameters of the model,
    and those in the bodies of regions, stay as they are.
    """
    gm = _copy(captured)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    known: dict[Prepared, list[Node]] = {}
    for node in list(gm.graph.nodes):
        name = getattr(node.target, "_opname", "")
        if node.op != "call_function" or name not in OPERATORS:
            continue
        wanted = [_prepared(node, *at, inputs, operand) for at in zip(*OPERATORS[name])]
        if not all(wanted) or not is_tensor(node.args[0]):
            continue
        ready: list[Node] = []
        for each in wanted:
            assert each is not None
            if each not in known:
                known[each] = _add_inputs(gm, inputs, each)
            ready += known[each]
        node.args = (*node.args, ready)
    if known:
        gm.graph.lint()
        gm.recompile()
    return gm, list(known)


def _copy(gm: GraphModule) -> GraphModule:
    """With what Dynamo left on the graph for AOTAutograd."""
    new = GraphModule(gm, copy.deepcopy(gm.graph))
    new.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        new._param_name_to_source = gm._param_name_to_source
    for old, node in zip(gm.graph.nodes, new.graph.nodes):
        if hasattr(old, "_dynamo_source"):
            node._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    return new


def _prepared(
    node: Node, weight: int, scheme: int, inputs: list[Node], operand: Operand
) -> Prepared | None:
    source, transposed = node.args[weight], False
    if isinstance(source, Node) and transposes(source):
        source, transposed = source.args[0], True
    if not isinstance(source, Node) or source not in inputs or not is_parameter(source):
        return None
    how = operand(str(node.args[scheme]), value(source).device)
    return Prepared(inputs.index(source), transposed, *how) if how else None


def _add_inputs(gm: GraphModule, inputs: list[Node], each: Prepared) -> list[Node]:
    """Four inputs at the end, as AOTAutograd expects them; CUDA graphs do not copy them."""
    weight = value(inputs[each.position])
    like = weight.t() if each.transposed else weight
    results = torch.ops.fp4.quantize(like.detach(), each.format, each.operand, False)
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    added: list[Node] = []
    for part, result in zip(("codes", "scales", "factor", "operand"), results):
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"{inputs[each.position].name}_{part}")
        static = {"_dynamo_static_input_type": "unguarded"}
        last.meta = {"example_value": result, "tensor_dict": static}
        last._dynamo_source = None  # type: ignore[attr-defined]
        added.append(last)
    return added
