"""The report's rows from what the passes did: engines, bytes kept for backward, reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule

from . import report
from .blocks import weight_shape
from .choice import Choice
from .kernels.formats import GEMMS, Scheme
from .kernels.layer import Layer, acc_dtype
from .passes import rewrite
from .passes.nodes import is_tensor, value
from .passes.sites import Site
from .roots import Place
from .saved import activation_bytes, weight_bytes
from .stamp import Stamp
from .stamping import name_of


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
    def shared(self) -> tuple | None:
        """Equal for the layers that one graph below a graph break may serve."""
        if self.place is None or not self.place.below_break:
            return None
        return type(self.place.owner.root), self.place.relative, str(self.stamp)


def describe(choice: Choice, rows: list[rewrite.Row], gm: GraphModule) -> list[Described]:
    """One row for each question that the passes asked, and for layers inside other operations."""
    seen: set = set()
    described = []
    last = {row.chain: row for row in rows}
    for asked, row in zip(choice.asked, rows, strict=True):
        scheme = asked.decision.scheme
        hidden = row.chain is not None and row is not last[row.chain]
        saved, original = _bytes(asked.site, row, scheme, hidden, seen)
        full = report.Row(
            asked.place.name if asked.place is not None else row.fqn,
            row.kind, row.shape, row.scheme, row.scheme_name, row.rule,
            _engine(asked.site, row, scheme), saved, original, row.status, row.reason, row.chain,
            refused=not scheme.original and row.status != "rewritten",
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


def _dtype(site: Site) -> torch.dtype:
    """The dtype of a layer's output; its input's inside a larger operation."""
    return value(site.out if is_tensor(site.out) else site.x).dtype


def _engine(site: Site, row: rewrite.Row, scheme: Scheme) -> str:
    if row.status != "rewritten":
        return ""
    layer = Layer(scheme, _dtype(site), value(site.x).device)
    names = [layer.engine(g).name if getattr(scheme, g) else "original" for g in GEMMS]
    return names[0] if len(set(names)) == 1 else "/".join(names)


def _bytes(
    site: Site, row: rewrite.Row, scheme: Scheme, hidden: bool, seen: set
) -> tuple[int, int]:
    """Bytes kept for backward, now and without the rewrite; a shared input counts once.

    ``hidden``: the layer's output is kept as well, for the derivative of a chain's activation.
    """
    x, n, k, dtype = value(site.x), site.out_features, site.in_features, _dtype(site)
    if not torch.is_grad_enabled():
        return 0, 0
    m = math.prod(_hint(d) for d in x.shape[:-1])
    output = m * n * acc_dtype(dtype).itemsize if hidden else 0
    original = m * k * dtype.itemsize
    key = (site.x, scheme.fprop and scheme.fprop[0], scheme.wgrad and scheme.wgrad[1])
    fresh, fresh_original = key not in seen, site.x not in seen
    seen.update((key, site.x))
    if row.status != "rewritten":
        return original * fresh_original, original * fresh_original
    saved = activation_bytes(scheme, m, k, dtype) * fresh + weight_bytes(scheme, n, k)
    return saved + output, original * fresh_original


def _hint(d) -> int:
    return d if isinstance(d, int) else int(d.node.hint or 1)
