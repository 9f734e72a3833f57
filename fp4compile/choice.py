"""The policy's answer for each linear of a captured graph, by the module that owns its weight."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule

from . import dynamo, report, stamping
from .blocks import find_blocks
from .kernels.formats import GEMMS, Scheme
from .kernels.layer import Layer, acc_dtype
from .notices import warn
from .passes import rewrite
from .passes.nodes import value
from .passes.sites import Site
from .policy import Policy, Resolution
from .roots import entry_root
from .saved import activation_bytes, weight_bytes
from .stamp import Decision, Stamp

_resolved: weakref.WeakKeyDictionary[nn.Module, dict[str, Resolution]] = (
    weakref.WeakKeyDictionary()
)


@dataclass
class _Asked:
    """One call of `Choice`: who asked, and what was answered."""

    site: Site
    owner: dynamo.Owner | None
    stamp: Stamp
    decision: Decision


class Choice:
    """``choice(site, role) -> Decision`` for `passes.rewrite`; guards every stamp that it reads.

    ``root`` is the outermost module of the compiled call; ``complete`` is True where this graph
    holds all of it, False below a graph break.
    """

    def __init__(self, gm: GraphModule, policy: Policy, explicit: bool) -> None:
        self.policy, self.explicit = policy, explicit
        self.frame = dynamo.current_frame()
        self.asked: list[_Asked] = []
        self.complete = False
        self.root: nn.Module | None = self._frame_root(gm)
        self._roots: dict[nn.Module, nn.Module] = {}

    def _frame_root(self, gm: GraphModule) -> nn.Module | None:
        for node in gm.graph.nodes if self.frame else ():
            source = getattr(node.meta.get("grapharg"), "source", None)
            found = dynamo.owner(source, self.frame) if source is not None else None
            if found is not None:
                root = entry_root(found.module, found.root)
                self.complete = root is found.root
                return root
        return None

    def __call__(self, site: Site, role: str | None) -> Decision:
        """The decision for ``site``; ``role`` is "mlp" where it is part of a chain."""
        source = site.source
        found = dynamo.owner(source, self.frame) if source is not None and self.frame else None
        stamp = self._stamp(site, found)
        if found is not None:
            dynamo.guard_stamp(found)
        decision = stamp.decision(role is not None)
        self.asked.append(_Asked(site, found, stamp, decision))
        return decision

    def _stamp(self, site: Site, found: dynamo.Owner | None) -> Stamp:
        if found is None:
            return self.policy.stamp_for(site.name)
        stamped = stamping.stamp_of(found.module)
        if stamped is not None:
            if self.explicit:
                stamping.check_agreement(found.module, self.policy)
            return stamped
        root = self._roots.get(found.root)
        if root is None:
            root = self._roots[found.root] = entry_root(found.module, found.root)
        resolution = self._resolution(root)
        if root is not found.root:
            # Below a graph break one graph serves every block: only stamps keep them apart.
            stamping.stamp_modules(root, resolution, stamping.digest(self.policy))
            stamped = stamping.stamp_of(found.module)
        return stamped or resolution.modules.get(found.module) or self._by_name(site, root)

    def _by_name(self, site: Site, root: nn.Module) -> Stamp:
        blocks = find_blocks(root)
        return self.policy.stamp_for(site.name, blocks.block_of(site.name) if blocks else None)

    def _resolution(self, root: nn.Module) -> Resolution:
        known = _resolved.setdefault(root, {})
        key = stamping.digest(self.policy)
        if key not in known:
            known[key] = self.policy.resolve(root)
            for warning in known[key].warnings:
                warn(warning)
        return known[key]

    def finish(self, rows: list[rewrite.Row]) -> None:
        """Watch the layers that the policy names: they must not run outside of compiled graphs."""
        for asked, row in zip(self.asked, rows):
            if asked.owner is None:
                continue
            module = asked.owner.module
            info = module.__dict__.setdefault(stamping.INFO, {})
            info.setdefault("name", row.fqn)
            info.setdefault("strict", asked.stamp.strict)
            decisions = (asked.stamp.chain, asked.stamp.plain)
            info.setdefault("rules", [(d.scheme_name, d.rule) for d in decisions])
            if row.status == "rewritten":
                stamping.watch(module)
            stamping.seen_in_graph(module, row.status == "rewritten")

    def describe(self, rows: list[rewrite.Row]) -> list[report.Row]:
        """The report's rows."""
        seen: set = set()
        described = []
        last = {row.chain: row for row in rows}
        for asked, row in zip(self.asked, rows, strict=True):
            hidden = row.chain is not None and row is not last[row.chain]
            saved, original = _bytes(asked.site, row, asked.decision.scheme, hidden, seen)
            refused = not asked.decision.scheme.original and row.status != "rewritten"
            name = self._name(asked, row.fqn)
            described.append(
                report.Row(
                    name, row.kind, row.shape, row.scheme, row.scheme_name, row.rule,
                    _engine(asked.site, row, asked.decision.scheme), saved, original, row.status,
                    row.reason, row.chain, refused,
                )  # fmt: skip
            )
        return described

    def _name(self, asked: _Asked, name: str) -> str:
        info = asked.owner.module.__dict__.get(stamping.INFO, {}) if asked.owner else {}
        return info.get("name") or name

    def strictly_refused(self, rows: list[report.Row]) -> list[report.Row]:
        """The rows of layers that a strict policy names and that could not be rewritten."""
        return [row for row, a in zip(rows, self.asked) if a.stamp.strict and row.refused]


def _engine(site: Site, row: rewrite.Row, scheme: Scheme) -> str:
    if row.status != "rewritten":
        return ""
    layer = Layer(scheme, site.out_dtype, value(site.x).device)
    names = [layer.engine(g).name if getattr(scheme, g) else "original" for g in GEMMS]
    return names[0] if len(set(names)) == 1 else "/".join(names)


def _bytes(
    site: Site, row: rewrite.Row, scheme: Scheme, hidden: bool, seen: set
) -> tuple[int, int]:
    """Bytes kept for backward, now and without the rewrite; a shared input counts once.

    ``hidden``: the layer's output is kept as well, for the derivative of a chain's activation.
    """
    x, n, k = value(site.x), site.out_features, site.in_features
    if not torch.is_grad_enabled():
        return 0, 0
    m = math.prod(_hint(d) for d in x.shape[:-1])
    output = m * n * acc_dtype(site.out_dtype).itemsize if hidden else 0
    original = m * k * site.out_dtype.itemsize
    key = (site.x, scheme.fprop and scheme.fprop[0], scheme.wgrad and scheme.wgrad[1])
    fresh, fresh_original = key not in seen, site.x not in seen
    seen.update((key, site.x))
    if row.status != "rewritten":
        return original * fresh_original, original * fresh_original
    saved = activation_bytes(scheme, m, k, site.out_dtype) * fresh + weight_bytes(scheme, n, k)
    return saved + output, original * fresh_original


def _hint(d) -> int:
    return d if isinstance(d, int) else int(d.node.hint or 1)
