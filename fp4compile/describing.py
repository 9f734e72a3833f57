"""The report's rows from what the passes did: engines, bytes kept for backward, reasons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node

from . import predicting, report
from .blocks import weight_shape
from .choice import Choice
from .kernels.formats import GEMMS, Scheme
from .kernels.layer import Layer, acc_dtype
from .passes import rewrite
from .passes.machines import Machine
from .passes.nodes import graph_modules, transposes, value
from .passes.sites import Site
from .predicting import Times
from .predicting import dtype_of as _dtype
from .predicting import tokens as _tokens
from .roots import Place
from .saved import activation_bytes, format_bytes, weight_bytes
from .stamp import Stamp
from .stamping import name_of

CUT = "DDP put the chain's other layers into another bucket: no chain"


@dataclass
class Described:
    """A row and whose it is."""

    row: report.Row
    place: Place | None
    stamp: Stamp

    @property
    def model(self) -> nn.Module | None:
        """The model that the layer is reported with."""
        return self.place.model if self.place is not None else None

    @property
    def title(self) -> str:
        """The layer's name for a message: in the model that was stamped, if one was."""
        stamped = name_of(self.place.owner.module) if self.place is not None else ""
        return stamped or self.row.fqn

    @property
    def part(self) -> bool:
        """True where the model that is compiled is only a part of the one that was stamped."""
        return self.title != self.row.fqn

    @property
    def shared(self) -> tuple | None:
        """Equal for the layers that one graph below a graph break may serve."""
        if self.place is None or not self.place.below_break:
            return None
        return type(self.place.owner.root), self.place.relative, str(self.stamp)


def describe(choice: Choice, rows: list[rewrite.Row], gm: GraphModule) -> list[Described]:
    """One row for each question that the passes asked, and for layers inside other operations."""
    sizes = _all_bytes(choice, rows, gm)
    times = _all_times(choice, rows)
    described = []
    for asked, row, (saved, original), (now, before) in zip(
        choice.asked, rows, sizes, times, strict=True
    ):
        scheme = asked.decision.scheme
        reason = CUT if asked.cut and not row.reason else row.reason
        reason = "; ".join(filter(None, (reason, _other_engine(asked.site, row, scheme))))
        full = report.Row(
            asked.place.name if asked.place is not None else row.fqn,
            row.kind, row.shape, row.scheme, row.scheme_name, row.rule,
            _engine(asked.site, row, scheme), saved, original, row.status, reason, row.chain,
            refused=not scheme.original and row.status != "rewritten",
            predicted_ms=now, original_ms=before,
        )  # fmt: skip
        described.append(Described(full, asked.place, asked.stamp))
    return described + [_inside(*reader) for reader in choice.other_readers(gm)]


def _inside(place: Place, stamp: Stamp, operation: str) -> Described:
    """The row of a layer whose weight another operation reads."""
    decision, cases = stamp.plain, (stamp.chain, stamp.plain)
    reason = f"inside {operation}, which is one operation"
    row = report.Row(
        place.name, operation, weight_shape(place.owner.module),
        str(decision.scheme), decision.scheme_name, decision.rule, "", 0, 0, "left", reason,
        refused=not any(case.scheme.original for case in cases),
    )  # fmt: skip
    return Described(row, place, stamp)


def _layer(site: Site, scheme: Scheme) -> Layer:
    return Layer(scheme, _dtype(site), value(site.x).device)


def _engine(site: Site, row: rewrite.Row, scheme: Scheme) -> str:
    if row.status != "rewritten":
        return ""
    layer = _layer(site, scheme)
    names = [layer.engine(g).name if getattr(scheme, g) else "original" for g in GEMMS]
    return names[0] if len(set(names)) == 1 else "/".join(names)


def _other_engine(site: Site, row: rewrite.Row, scheme: Scheme) -> str:
    """Which GEMMs of a GPU do not run on the tensor cores that their formats are for, and why."""
    if row.status != "rewritten":
        return ""
    layer = _layer(site, scheme)
    if missing := layer.why_reference():
        return missing
    why = {name: layer.why_not(name) for name in GEMMS if getattr(scheme, name)}
    notes = [f"{name} by {layer.engine(name).name}: {text}" for name, text in why.items() if text]
    return "; ".join(notes)


def _all_bytes(
    choice: Choice, rows: list[rewrite.Row], gm: GraphModule
) -> list[tuple[int, int]]:
    """Bytes of every row: now and without the rewrite.

    Layers that stay come first: an input that one of them keeps as it is counts there.
    """
    if not torch.is_grad_enabled():
        return [(0, 0)] * len(rows)
    last = {row.chain: row for row in rows}
    results = _kept_as_results(gm)
    found, seen = [(0, 0)] * len(rows), set[tuple]()
    for i in sorted(range(len(rows)), key=lambda i: rows[i].status == "rewritten"):
        asked, row = choice.asked[i], rows[i]
        found[i] = _bytes(asked.site, row, asked.decision.scheme, seen)
        site = asked.site
        flows = value(site.x).requires_grad or value(site.weight).requires_grad
        if row.chain is not None and row is not last[row.chain] and flows:
            saved, original = _hidden_bytes(asked.site, asked.decision.scheme)
            kept = 0 if asked.site.weight in results else original
            found[i] = found[i][0] + saved, found[i][1] + kept
    return found


def _bytes(site: Site, row: rewrite.Row, scheme: Scheme, seen: set[tuple]) -> tuple[int, int]:
    """Bytes kept for backward, now and without the rewrite; a shared input counts once."""
    k, dtype, m = site.in_features, _dtype(site), _tokens(site)
    same = row.status != "rewritten"
    form = () if same or not scheme.wgrad else (scheme.fprop and scheme.fprop[0], scheme.wgrad[1])
    now, before = (site.x, "now", *form), (site.x, "before")
    weighs, flows = value(site.weight).requires_grad, value(site.x).requires_grad
    original = m * k * dtype.itemsize * weighs  # WGRAD alone reads x, DGRAD the weight
    saved = original if same else activation_bytes(scheme, m, k, dtype) * weighs
    saved, original = saved * (now not in seen), original * (before not in seen)
    if weighs:
        seen.update((now, before))
    return saved if same else saved + weight_bytes(scheme, site.out_features, k) * flows, original


def _hidden_bytes(site: Site, scheme: Scheme) -> tuple[int, int]:
    """A chain's pre-activation, kept for the activation's derivative: now and originally."""
    elements, dtype = _tokens(site) * site.out_features, _dtype(site)
    if scheme.preactivation:
        now = format_bytes(scheme.preactivation, _tokens(site), site.out_features)
        return now, elements * dtype.itemsize
    return elements * acc_dtype(dtype).itemsize, elements * dtype.itemsize


def _kept_as_results(gm: GraphModule) -> set[Node]:
    """First weights of the chains that originally keep no pre-activation.

    relu's derivative needs only its result, which the second layer keeps anyway.
    """
    chain = torch.ops.fp4.linear_act_linear.default
    nodes = [n for _, graph in graph_modules(gm) for n in graph.graph.nodes if n.target is chain]
    weights = [n.args[1] for n in nodes if "relu" in n.args]
    return {w.args[0] if transposes(w) else w for w in weights}


def machine_of(choice: Choice) -> Machine | None:
    """The machine that times are predicted for: the one asked for, else the present GPU."""
    if choice.machine is not None or not choice.asked:
        return choice.machine
    return predicting.present(value(choice.asked[0].site.x).device)


def _all_times(choice: Choice, rows: list[rewrite.Row]) -> list[Times]:
    """Predicted times of every row, a training graph's with its backward; 0 where no machine is."""
    machine, forward = machine_of(choice), not torch.is_grad_enabled()
    if machine is None:
        return [(0.0, 0.0)] * len(rows)
    found: list[Times] = []
    for asked, row in zip(choice.asked, rows):
        scheme = asked.decision.scheme
        scheme = scheme if row.status == "rewritten" else Scheme()
        found.append(predicting.layer_times(asked.site, scheme, machine, forward))
    chains: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.chain is not None:
            chains.setdefault(row.chain, []).append(i)
    for members in chains.values():
        of = [choice.asked[i] for i in members]
        schemes = [asked.decision.scheme for asked in of]
        times = predicting.chain_times([asked.site for asked in of], schemes, machine, forward)
        for i, pair in zip(members, times):
            found[i] = pair
    return found
