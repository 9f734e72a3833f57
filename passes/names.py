"""Where a parameter comes from: its Dynamo source, and its layer's dotted name in the model.

Dynamo lifts parameters to graph inputs and keeps in ``meta["grapharg"]`` (during the backend call
only) the source expression, such as ``L['self']._modules['mlp']._modules['up']._parameters
['weight']``. In the body of a checkpoint or another region the input is followed to the argument
of the outer call. `nn_module_stack` is the fallback.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from .nodes import attribute, graph_modules, op

if TYPE_CHECKING:
    from .sites import Site

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Regions whose body computes what the same lines would compute outside.
TRANSPARENT = (
    "wrap",
    "tag_activation_checkpoint",
    "wrap_activation_checkpoint",
    "invoke_subgraph",
    "dynamo_bypassing_wrapper",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
)
_TOKEN = re.compile(
    r"\._(?:modules|parameters|buffers)\['([^']*)'\]|\.(\w+)(\(\))?|\['([^']*)'\]|\[(-?\d+)\]"
)

Callers = dict[GraphModule, list[tuple[GraphModule, Node, Node]]]


def strip_wrappers(name: str) -> str:
    """A dotted name without the prefixes of DDP, FSDP, checkpoint wrappers and torch.compile."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def source_name(source: Any) -> str:
    """The expression of a Dynamo source (``name`` is a method in some torch versions)."""
    name = source.name
    return name() if callable(name) else name


def dotted(expression: str) -> str:
    """``L['self']._modules['mlp']._parameters['weight']`` -> ``mlp.weight``, without the root."""
    root = re.match(r"[A-Za-z_]\w*(\['[^']*'\])?", expression)
    tokens = _TOKEN.finditer(expression, root.end() if root else 0)
    words = [next(word for word in t.groups() if word and word != "()") for t in tokens]
    return strip_wrappers(".".join(words))


def module_path(node: Node) -> str | None:
    """The dotted name of the module whose forward made ``node``; None outside every submodule."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    return dotted(list(stack.values())[-1][0]) or None


def module_id(node: Node) -> int | None:
    """``id()`` of the module whose forward made ``node``, as Dynamo recorded it."""
    stack = node.meta.get("nn_module_stack")
    last = str(list(stack)[-1]).split("@")[0] if stack else ""
    return int(last) if last.isdigit() else None


def callers(root: GraphModule) -> Callers:
    """For each inner graph, the calls of it: (outer graph, get_attr node, call node)."""
    found: Callers = {}
    for _, gm in graph_modules(root):
        for node in gm.graph.nodes:
            inner = attribute(gm, node.target) if node.op == "get_attr" else None
            if isinstance(inner, GraphModule):
                calls = [(gm, node, user) for user in node.users]
                found.setdefault(inner, []).extend(calls)
    return found


def foreign_region(gm: GraphModule, calls: Callers) -> str | None:
    """The name of an enclosing region whose body must stay as it is (`torch.cond`, ...)."""
    for outer, _, call in calls.get(gm, []):
        name = op(call)
        if name not in TRANSPARENT:
            return name or str(call.target)
        above = foreign_region(outer, calls)
        if above:
            return above
    return None


def origins(node: Node, calls: Callers) -> list[Node]:
    """The outermost nodes that an input of an inner graph stands for, one per call."""
    gm = node.graph.owning_module
    if node.op != "placeholder" or gm not in calls:
        return [node]
    index = [n for n in node.graph.nodes if n.op == "placeholder"].index(node)
    found = []
    for outer, ref, call in calls[gm]:
        argument = _operand(outer, ref, call, index, node.graph)
        found += origins(argument, calls) if argument is not None else []
    return found


def _operand(outer: GraphModule, ref: Node, call: Node, index: int, body: Any) -> Node | None:
    """Argument ``index`` of a region's body; None where the call's layout is not a plain list."""
    operands: list = []
    for a in call.args[call.args.index(ref) + 1 :] if ref in call.args else ():
        operands += a if isinstance(a, (tuple, list)) else [a]
    operands = [a for a in operands if not isinstance(a, str) and not _is_graph(outer, a)]
    inputs = sum(n.op == "placeholder" for n in body.nodes)
    argument = operands[index] if len(operands) == inputs else None
    return argument if isinstance(argument, Node) else None


def _is_graph(outer: GraphModule, a: Any) -> bool:
    is_attr = isinstance(a, Node) and a.op == "get_attr"
    return is_attr and isinstance(attribute(outer, a.target), GraphModule)


def source_of(node: Node) -> Any | None:
    """The Dynamo source of a root graph's input; None if there is none (any more)."""
    graph_arg = node.meta.get("grapharg")
    return getattr(graph_arg, "source", None)


def param_source(site: Site) -> Any | None:
    """The Dynamo source of a site's weight, or None."""
    return source_of(site.origin)


def layer_name(site: Site) -> str:
    """The dotted name of the layer that owns a site's weight, relative to the compiled module.

    ``mlp.up`` for ``mlp.up.weight``; the parameter's own name if it is not called ``weight``.
    Falls back on the module stack, then on the weight node's name.
    """
    source = param_source(site)
    if source is not None:
        name = dotted(source_name(source))
        return name.removesuffix(".weight")
    path = module_path(site.node)
    return path or strip_wrappers(str(site.origin.target))
