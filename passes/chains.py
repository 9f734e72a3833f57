"""Form chains: linear -> activation -> linear, and down(act(gate(x)) * up(x)).

A chain is a fact about the user's model. Where something stands between that a fused operator
cannot do, the chain is kept with the reason in `Chain.blocked`: its layers still belong to an MLP
(``chain: mlp`` in a policy), also when only training turns a dropout on, but each is rewritten on
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .activations import Activation, function_of, inputs, pointwise, recognise
from .nodes import CASTS, MODES, RESHAPES, arg, dim, is_tensor, mutated, number, op, shape, value
from .sites import Site

LIMIT = 48  # nodes between two linears
SPLITS = ("chunk", "split", "split_with_sizes", "tensor_split")


@dataclass(eq=False)
class Chain:
    """Two or three linears with an activation between.

    ``first`` is (linear,) or (gate, up), or one linear whose output's halves are gate and up:
    ``swapped`` is then whether up comes first, None otherwise. ``nodes`` are the graph nodes
    between, which the fused operator replaces, in graph order; ``blocked`` says why it cannot.
    """

    first: tuple[Site, ...]
    down: Site
    act: Activation
    nodes: list[Node]
    blocked: str | None = None
    swapped: bool | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """The chain's linears in the order of the operator's arguments."""
        return (*self.first, self.down)


def find_chains(sites: list[Site]) -> list[Chain]:
    """The chains among ``sites``, in graph order; a site may end one and begin the next."""
    plain = [site for site in sites if site.axes == (1, 1)]
    by_node = {site.out: site for site in plain}
    chains = (_chain(site, by_node) for site in plain)
    return [chain for chain in chains if chain is not None]


def _chain(down: Site, by_node: dict[Node, Site]) -> Chain | None:
    """The chain that ends in ``down``, or None."""
    region = _region(down.x, by_node)
    if region is None:
        return None
    nodes, leaves = region
    fused = _fused(leaves, by_node)
    if fused is None and not all(leaf in by_node for leaf in leaves):
        return None
    act = recognise(down.x, leaves)
    if act is None:
        return None
    if fused is not None:
        return _fused_chain(fused, down, act, nodes, leaves)
    chain = Chain(tuple(by_node[leaves[i]] for i in act.gated or (0,)), down, act, nodes)
    if len({_rows(s.x) for s in chain.first}) > 1:
        return None
    chain.blocked = _blocked(chain)
    return chain


def _fused_chain(
    fused: Site, down: Site, act: Activation, nodes: list[Node], leaves: list[Node]
) -> Chain:
    """The chain whose gate and up are one linear: its output's halves, or it stays in two parts."""
    starts = [_start(leaf, fused) for leaf in leaves]
    if set(starts) != {0, fused.out_features // 2}:
        why = "gate and up are one fused linear, and not its halves: no chain"
        return Chain((fused,), down, act, nodes, why)
    splits = {node for leaf in leaves for node in _path(leaf, fused.out)}
    chain = Chain((fused,), down, act, sorted({*nodes, *splits}))
    chain.swapped = starts[act.gated[0]] != 0  # type: ignore[index]
    chain.blocked = _blocked(chain)
    return chain


def _region(end: Node, by_node: dict[Node, Site]) -> tuple[list[Node], list[Node]] | None:
    """The pointwise nodes behind ``end``, in graph order, and the tensors that they read."""
    nodes: set[Node] = set()
    leaves: list[Node] = []
    todo = [end]
    while todo:
        node = todo.pop()
        if node in nodes or node in leaves:
            continue
        if node in by_node or not pointwise(node):
            leaves.append(node)
        else:
            nodes.add(node)
            todo += inputs(node)
        if len(nodes) > LIMIT or len(leaves) > 2:
            return None
    if not nodes or not all(_keeps_rows(node) for node in nodes):
        return None
    return [n for n in end.graph.nodes if n in nodes], sorted(leaves)


def _keeps_rows(node: Node) -> bool:
    """True where row i of the result depends on row i of the inputs alone, element by element."""
    read = inputs(node)
    if op(node) in CASTS | {"dropout"} and value(node).device != value(read[0]).device:
        return False
    if op(node) in RESHAPES:
        return shape(node)[-1:] == shape(read[0])[-1:]
    return all(shape(n) == shape(node) for n in read)


def _fused(leaves: list[Node], by_node: dict[Node, Site]) -> Site | None:
    """The one linear whose output's parts both leaves are (chunk, split or slices)."""
    if len(leaves) != 2:
        return None
    bases = set()
    for leaf in leaves:
        base = leaf
        while op(base) in ("getitem", "narrow", *SPLITS) and base.args:
            base = base.args[0]  # type: ignore[assignment]
        base = _rows(base)
        bases.add(base if base is not leaf else None)
    common = bases.pop() if len(bases) == 1 else None
    return by_node.get(common) if common is not None else None


def _start(leaf: Node, site: Site) -> int | None:
    """Where a half of a linear's features begins; None where a leaf is no half of them."""
    split: Any = leaf.args[0] if op(leaf) == "getitem" and not is_tensor(leaf.args[0]) else leaf
    source: Any = split.args[0]
    half, last = site.out_features // 2, value(source).dim() - 1 if is_tensor(source) else 0
    if _rows(source) is not site.out or half * 2 != site.out_features:
        return None
    if op(leaf) == "narrow":
        along, start = arg(leaf, 1, "dim"), arg(leaf, 2, "start")
    elif op(split) in SPLITS:
        along, start = arg(split, 2, "dim", 0), leaf.args[1] * half  # type: ignore[operator]
    elif op(leaf) == "getitem":
        along, start = _sliced(leaf.args[1], last)
    else:
        return None
    same = isinstance(along, int) and isinstance(start, int) and along in (last, -1)
    exact = same and shape(leaf) == (*shape(source)[:-1], half)
    return start % site.out_features if exact else None


def _path(leaf: Node, out: Node) -> list[Node]:
    """The nodes from a part of a linear's output back to the linear, without it."""
    path = []
    while leaf is not out:
        path.append(leaf)
        leaf = leaf.args[0]  # type: ignore[assignment]
    return path


def _sliced(index: Any, last: int) -> tuple[int | None, int | None]:
    """The axis and the first element of an index that slices the last axis alone."""
    parts = list(index) if isinstance(index, (tuple, list)) else []
    whole = parts[:-1] == [Ellipsis] or parts[:-1] == [slice(None)] * last
    if not whole or not isinstance(parts[-1], slice) or parts[-1].step not in (None, 1):
        return None, None
    return last, parts[-1].start or 0


def _rows(x: Node) -> Node:
    """The node whose rows ``x`` has, before reshapes that keep them."""
    while op(x) in RESHAPES and shape(x)[-1:] == shape(x.args[0])[-1:]:  # type: ignore[arg-type]
        x = x.args[0]  # type: ignore[assignment]
    return x


def _blocked(chain: Chain) -> str | None:
    """Why a chain cannot be one operator; None if it can."""
    for why in CHECKS:
        reason = why(chain)
        if reason:
            return f"{reason}: no chain"
    return None


def _site_refused(chain: Chain) -> str | None:
    refused = [s.name for s in chain.sites if s.refused]
    return f"{refused[0]} cannot be rewritten" if refused else None


def _act_unsupported(chain: Chain) -> str | None:
    return None if chain.act.supported else f"activation {chain.act.name} has no operator"


def _own_backward(chain: Chain) -> str | None:
    own = any(function_of(node) is not None for node in chain.nodes)
    return "the activation is an autograd.Function with a backward of its own" if own else None


def _dropout(chain: Chain) -> str | None:
    for node in chain.nodes:
        if op(node) == "dropout" and arg(node, 2, "training", arg(node, 2, "train", True)):
            p = number(arg(node, 1, "p", 0.5))
            if p != 0:
                return f"dropout p={p:g} between" if p is not None else "dropout between"
    return None


def _outside_users(chain: Chain) -> str | None:
    inside = {*chain.nodes, chain.down.node}
    for node in (*(s.out for s in chain.first), *chain.nodes):
        outside = [user for user in node.users if user not in inside and not reads_size(user)]
        if outside:
            return f"the activation is read outside ({outside[0].name})"
        if any(mutated(user) is node and len(node.users) > 1 for user in node.users):
            return "the activation is changed in place"
    return None


def reads_size(node: Node) -> bool:
    """True for ``x.size(d)``: it needs no element of x."""
    return op(node) in ("size", "sym_size") and isinstance(value(node), (int, torch.SymInt))


def _dtypes(chain: Chain) -> str | None:
    hidden = {s.out_dtype for s in chain.first}
    if len(hidden) > 1:
        return "gate and up have different dtypes"
    allowed = hidden | {torch.float32}
    if any(value(node).dtype not in allowed for node in chain.nodes if is_tensor(node)):
        return "the activation is cast to another dtype"
    return None


def _interrupted(chain: Chain) -> str | None:
    """The chain's first linears move down to its last: nothing between may change their inputs."""
    inside = {*chain.nodes, *(n for s in chain.sites for n in (s.node, s.out))}
    start = min(s.node for s in chain.first)
    node = start
    while node is not chain.down.node:
        if node not in inside and op(node) in MODES:
            return "autocast or grad mode changes between"
        if node not in inside and mutated(node) is not None:
            return f"an in-place operation between ({node.name})"
        node = node.next
    return None


CHECKS = (
    _site_refused, _act_unsupported, _own_backward, _dropout, _outside_users, _dtypes, _interrupted,
)  # fmt: skip


def sizes(node: Node, before: Node) -> list | None:
    """The sizes of ``node`` as arguments of a reshape placed ahead of ``before``.

    A symbolic size becomes -1 if it is the only one, else the graph input that carries it; None
    where no input does.
    """
    dims = list(shape(node))
    if sum(not isinstance(d, int) for d in dims) == 1:
        return [d if isinstance(d, int) else -1 for d in dims]
    found = [size(d, before) for d in dims]
    return None if None in found else found


def size(d: Any, before: Node) -> int | Node | None:
    """A size as an argument of a node placed ahead of ``before``: a number or who carries it."""
    if isinstance(d, int):
        return d
    for node in before.graph.nodes:
        if node is before:
            return None
        if isinstance(value(node), torch.SymInt) and dim(value(node)) == d:
            return node
    return None
