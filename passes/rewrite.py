"""Replace the linears and chains that a policy names by fp4 operators, and say what was done.

    rewrite(gm, decide) -> Result

``decide(site, role)`` is the policy: ``role`` is "mlp" for the linears of a chain, else None; the
answer has ``scheme`` (`formats.Scheme`), ``scheme_name`` and ``rule`` (the text that chose it).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from fp4compile.kernels.formats import Scheme
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .chains import Chain, find_chains, reads_size, size, sizes
from .nodes import CASTS, COPIES, copy_meta, dim, graph_modules, op, shape, transposes, value
from .sites import Site, find_sites, per_caller


class Decision(Protocol):
    """What a policy says about one layer."""

    @property
    def scheme(self) -> Scheme:
        """The operands of its three GEMMs."""

    @property
    def scheme_name(self) -> str:
        """The scheme's name in the policy."""

    @property
    def rule(self) -> str:
        """The text that chose it."""


Decide = Callable[[Site, "str | None"], Decision]


@dataclass(frozen=True)
class Row:
    """One layer in the report. ``status`` is "rewritten" or "left"; ``chain`` numbers the chains.

    ``reason`` says why a layer was left, or why a rewritten one is in no chain ("" otherwise).
    """

    fqn: str
    kind: str
    shape: str
    scheme: str
    scheme_name: str
    rule: str
    status: str
    reason: str
    chain: int | None = None


@dataclass
class Result:
    """The rows of all sites in graph order, and how many of each operator were inserted.

    ``counts`` has "linear", "linear_act_linear", "gated_linear" (operators) and "left" (layers);
    ``reasons`` counts the reasons of the rows that have one.
    """

    rows: list[Row] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def changed(self) -> int:
        """The number of operators inserted."""
        return sum(n for name, n in self.counts.items() if name != "left")

    @property
    def reasons(self) -> Counter[str]:
        """How often each reason occurs."""
        return Counter(row.reason for row in self.rows if row.reason)


@dataclass
class _Plan:
    """A site with everything that was decided about it."""

    site: Site
    decisions: list[Decision]
    reason: str = ""
    number: int | None = None

    @property
    def scheme(self) -> Scheme:
        return self.decisions[0].scheme

    @property
    def wanted(self) -> bool:
        """True where the policy asks for another precision than the original and gets it."""
        return not (self.scheme.original or self.site.refused)


def rewrite(gm: GraphModule, decide: Decide) -> Result:
    """Rewrite ``gm`` and every graph inside it in place; returns rows and counts."""
    from fp4compile.kernels import ops  # noqa: F401 - defines torch.ops.fp4

    sites = find_sites(gm)
    chains = find_chains(sites)
    plans = _plans(sites, chains, decide)
    fused = _fused(chains, plans)
    result = Result()
    # From the last layer to the first: a layer's input is still the node that was found.
    for plan in reversed(plans.values()):
        if plan.wanted and plan.number is None:
            result.counts[_insert_linear(plan)] += 1
        elif plan.wanted and plan.site is fused[plan.number].down:  # type: ignore[index]
            result.counts[_insert_chain(fused[plan.number], plans)] += 1  # type: ignore[index]
    result.rows = [row for plan in plans.values() for row in _rows(plan)]
    result.counts["left"] = sum(row.status == "left" for row in result.rows)
    _finish(gm, {plan.site.gm for plan in plans.values() if plan.wanted})
    return result


def _plans(sites: list[Site], chains: list[Chain], decide: Decide) -> dict[Site, _Plan]:
    members = {site for chain in chains for site in chain.sites}
    plans = {}
    for site in sites:
        role = "mlp" if site in members else None
        plan = plans[site] = _Plan(site, [decide(s, role) for s in per_caller(site)])
        if len({d.scheme for d in plan.decisions}) > 1:
            layers = ", ".join(s.name for s in per_caller(site))
            why = f"one compiled region serves {layers}, whose schemes differ"
            site.refused = f"{why}: give them one scheme"
    return plans


def _fused(chains: list[Chain], plans: dict[Site, _Plan]) -> list[Chain]:
    """The chains that become one operator, numbered in their plans; the others get the reason."""
    fused: list[Chain] = []
    for chain in chains:
        why = chain.blocked or _unfused(chain, plans)
        for site in chain.sites:
            plan = plans[site]
            plan.reason = plan.reason or why
            plan.number = plan.number if why else len(fused)
        fused += [] if why else [chain]
    return fused


def _unfused(chain: Chain, plans: dict[Site, _Plan]) -> str:
    """Why the policy, a neighbour or a reshape keeps a chain's layers apart; "" if nothing does."""
    for site in chain.sites:
        if not plans[site].wanted:
            return f"{site.name} stays as it is: no chain"
        if plans[site].number is not None:
            return f"{site.name} ends another chain: no chain"
    if _sizes(chain) is None or _readers(chain) is None:
        return "a reshape between has sizes that are no inputs of the graph: no chain"
    return ""


def _rows(plan: _Plan) -> list[Row]:
    """One row for each layer that a site serves."""
    rows = []
    for site, decision in zip(per_caller(plan.site), plan.decisions):
        reason = plan.reason if plan.number is None else ""
        if decision.scheme.original:
            reason = decision.rule or "policy: original"
        elif site.refused:
            reason = site.refused
        nk = f"{site.out_features}×{site.in_features}"
        status = "rewritten" if plan.wanted else "left"
        scheme = (str(decision.scheme), decision.scheme_name, decision.rule)
        rows.append(Row(site.name, site.kind, nk, *scheme, status, reason, plan.number))
    return rows


def _insert_linear(plan: _Plan) -> str:
    """Put ``fp4::linear`` in the place of a layer; returns "linear"."""
    site = plan.site
    with site.gm.graph.inserting_before(site.node):
        x = _view(site.x, value(site.x).flatten(-site.axes[1]), "flatten", -site.axes[1])
        args = (x, _weight(site), site.bias, str(plan.scheme), site.out_dtype)
        new = site.gm.graph.call_function(torch.ops.fp4.linear.default, args)
        copy_meta(new, site.node)
        new.meta["example_value"] = value(site.out).flatten(-site.axes[0])
        out = _view(new, value(site.out), "unflatten", -1, shape(site.out)[-site.axes[0] :])
    site.out.replace_all_uses_with(out)
    _erase([site.node, site.out])
    return "linear"


def _insert_chain(chain: Chain, plans: dict[Site, _Plan]) -> str:
    """Put one operator in the place of a chain; returns the operator's name."""
    down, graph, lead = chain.down, chain.down.gm.graph, chain.first[0]
    final, readers = _sizes(chain), _readers(chain)
    with graph.inserting_before(down.node):
        parts = [part for site in chain.first for part in _parts(site, chain)]
        operands: list[Any] = [lead.x, *parts, _weight(down), down.bias]
        schemes = [str(plans[site].scheme) for site in chain.sites]
        schemes = schemes if chain.swapped is None else [schemes[0], *schemes]
        operands += [chain.act.name, *schemes, lead.out_dtype, down.out_dtype]
        name = "gated_linear" if len(schemes) == 3 else "linear_act_linear"
        target = getattr(torch.ops.fp4, name).default
        new = out = graph.call_function(target, tuple(operands))
        copy_meta(new, down.node)
        new.meta["example_value"] = value(down.out)
        if final:
            leading = value(lead.x).shape[:-1]
            new.meta["example_value"] = value(down.out).new_empty(*leading, down.out_features)
            out = graph.call_method("reshape", (new, final))
            copy_meta(out, down.out)
    down.out.replace_all_uses_with(out)
    for reader, carrier in (readers or {}).items():
        _substitute(reader, carrier)
    inner = [n for site in chain.sites for n in (site.node, site.out)]
    _erase([*(readers or {}), *chain.nodes, *inner])
    return name


def _parts(site: Site, chain: Chain) -> list[Node | None]:
    """Weight and bias of a chain's first linear; of gate and up, where it computes both."""
    weight, bias = _weight(site), site.bias
    if chain.swapped is None:
        return [weight, bias]
    weights, biases = _halves(weight), _halves(bias) if bias is not None else [None, None]
    order = (1, 0) if chain.swapped else (0, 1)
    return [part for i in order for part in (weights[i], biases[i])]


def _halves(node: Node) -> list[Node]:
    """The two halves of a parameter's rows; one concatenation gives back its gradient."""
    graph, values = node.graph, value(node).chunk(2)
    both = graph.call_function(torch.chunk, (node, 2))
    both.meta["example_value"] = values
    halves = [graph.call_function(operator.getitem, (both, i)) for i in (0, 1)]
    for half, known in zip(halves, values):
        half.meta["example_value"] = known
    return halves


def _weight(site: Site) -> Node:
    """The weight as [N, K], at the current point of insertion."""
    sizes = (site.out_features, site.in_features)
    sizes = sizes[::-1] if site.weight_transposed else sizes
    weight = _view(site.weight, value(site.weight).reshape(sizes), "reshape", *sizes)
    if not site.weight_transposed:
        return weight
    new = site.gm.graph.call_method("t", (weight,))
    copy_meta(new, site.node)
    new.meta["example_value"] = value(weight).t()
    return new


def _view(node: Node, as_value: torch.Tensor, method: str, *args: Any) -> Node:
    """A node seen with other axes, of the value given; the node itself where it has them."""
    if value(node).dim() == as_value.dim():
        return node
    new = node.graph.call_method(method, (node, *args))
    copy_meta(new, node)
    new.meta["example_value"] = as_value
    return new


def _sizes(chain: Chain) -> list | None:
    """The sizes to view the operator's result with; [] if it has the shape already."""
    leading = shape(chain.first[0].x)[:-1]
    if leading == shape(chain.down.out)[:-1]:
        return []
    return sizes(chain.down.out, chain.down.node)


def _readers(chain: Chain) -> dict[Node, Any] | None:
    """Nodes that read a size of a tensor that the chain removes, with what replaces them."""
    found: dict[Node, Any] = {}
    removed = [*(site.out for site in chain.first), *chain.nodes]
    for user in {u for node in removed for u in node.users if reads_size(u)}:
        found[user] = size(dim(value(user)), chain.first[0].node)
        if found[user] is None:
            return None
    return found


def _substitute(node: Node, by: Any) -> None:
    """Replace the uses of a node by another node or by a number."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda n: by if n is node else n)
        user.kwargs = map_arg(user.kwargs, lambda n: by if n is node else n)


def _erase(nodes: list[Node]) -> None:
    """Erase nodes and the casts and transposes that only they read."""
    todo = sorted(set(nodes))
    while todo:
        node = todo.pop()
        if node.users or node._erased:
            continue
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        todo += [n for n in inputs if op(n) in CASTS | COPIES or transposes(n)]
        todo = sorted(set(todo))


def _finish(root: GraphModule, changed: set[GraphModule]) -> None:
    for _, gm in graph_modules(root):
        if gm in changed:
            gm.graph.lint()
            gm.recompile()
