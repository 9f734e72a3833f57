"""What the passes did to a model, layer by layer: the table that `fp4.explain` returns."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import nn

from .passes.machines import Machine
from .tables import Notes, paragraph, table, terminal_width


@dataclass(frozen=True)
class Row:
    """One linear layer.

    ``fqn`` dotted name; ``kind`` its spelling in the graph; ``shape`` out x in features; ``scheme``
    canonical text; ``scheme_name`` its name in the policy; ``rule`` what chose it; ``engine`` of
    fprop, dgrad and wgrad (one word where they agree); ``saved_bytes`` kept from forward to
    backward, by a fused chain's activation too; ``original_bytes`` the same where plain
    `torch.compile` runs the layer; ``status`` "rewritten", "left" or "not compiled"; ``reason``
    why; ``chain`` a number that the layers of one fused chain share; ``refused``: the policy names
    the layer and the pass could not rewrite it; ``predicted_ms`` and ``original_ms``: by the cost
    model, as it runs and in plain `torch.compile`, 0 where no machine is known.
    """

    fqn: str
    kind: str
    shape: str
    scheme: str
    scheme_name: str
    rule: str
    engine: str
    saved_bytes: int
    original_bytes: int
    status: str
    reason: str
    chain: int | None = None
    refused: bool = False
    predicted_ms: float = 0.0
    original_ms: float = 0.0


COLUMNS = ("layer", "shape", "scheme", "chain", "engine", "kept", "ms", "status", "why")


@dataclass
class Report:
    """Rows in the order of the graphs; ``str(report)`` is a table as wide as the terminal."""

    policy: str = ""
    rows: list[Row] = field(default_factory=list)
    graphs: int = 0
    noticed: bool = False
    machine: str = ""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, fqn: str) -> Row:
        """The row of the layer ``fqn``; KeyError where there is none."""
        for row in self.rows:
            if row.fqn == fqn:
                return row
        raise KeyError(fqn)

    @property
    def rewritten(self) -> list[Row]:
        """The rows of layers that run in the policy's precision."""
        return [row for row in self.rows if row.status == "rewritten"]

    @property
    def saved_bytes(self) -> int:
        """Bytes that the rewritten layers keep from forward to backward."""
        return sum(row.saved_bytes for row in self.rewritten)

    @property
    def original_bytes(self) -> int:
        """What the same layers keep in plain `torch.compile`."""
        return sum(row.original_bytes for row in self.rewritten)

    def name_machine(self, machine: Machine | None) -> None:
        """What the predicted times are for, with the sources of its rates."""
        if machine is not None:
            self.machine = f"{machine.name} ({machine.sources})"

    def add(self, rows: list[Row], training: bool = True) -> None:
        """Add a graph's rows; a layer compiled again replaces its row.

        A graph without gradients says nothing new about a layer that is known already.
        """
        self.graphs += 1
        known = {row.fqn for row in self.rows}
        offset = 1 + max((r.chain for r in self.rows if r.chain is not None), default=-1)
        fresh: dict[str, list[Row]] = {}
        for row in rows:
            if row.chain is not None:
                row = replace(row, chain=offset + row.chain)
            if training or row.fqn not in known:
                fresh.setdefault(row.fqn, []).append(row)
        self.replace(fresh)

    def replace(self, fresh: dict[str, list[Row]]) -> None:
        """Put rows in the place of those of the same layers; new layers come last."""
        rows: dict[str, list[Row]] = {}
        for row in self.rows:
            rows.setdefault(row.fqn, []).append(row)
        self.rows = [row for group in {**rows, **fresh}.values() for row in group]
        self._number_chains()

    def _number_chains(self) -> None:
        numbers = dict.fromkeys(r.chain for r in self.rows if r.chain is not None)
        dense = {old: new for new, old in enumerate(numbers)}
        self.rows = [
            r if r.chain is None else replace(r, chain=dense[r.chain]) for r in self.rows
        ]

    def nothing(self) -> str:
        """One line that says why nothing was rewritten.

        The commonest reason; those of layers that a rule asks to quantize come before others.
        """
        if not self.rows:
            return f"policy {self.policy}: nothing was rewritten, no graph holds a linear layer"
        asked = [row for row in self.rows if row.refused]
        reasons = Counter(row.reason for row in asked or self.rows)
        most, count = reasons.most_common(1)[0]
        return (
            f"policy {self.policy}: nothing was rewritten, {len(self.rows)} linear layers were"
            f" left ({count} of them: {most}); see fp4.explain"
        )

    def as_dicts(self) -> list[dict]:
        """The rows as plain dicts, for JSON."""
        return [asdict(row) for row in self.rows]

    def summary(self) -> str:
        """One line: how many layers of how many, and the bytes kept for backward."""
        chains = len({row.chain for row in self.rows if row.chain is not None})
        line = (
            f"{len(self.rewritten)} of {len(self.rows)} linear layers rewritten, {chains} fused"
            f" chain{'s' * (chains != 1)}"
        )
        if not self.rewritten:
            return line
        saved, before = human(self.saved_bytes), human(self.original_bytes)
        return f"{line}; these layers keep {saved} for backward, {before} in high precision"

    def prediction(self) -> str:
        """One line: the predicted time of all layers; "" where no machine is known."""
        now, before = (
            sum(getattr(row, name) for row in self.rows) for name in ("predicted_ms", "original_ms")
        )
        if not (now and self.machine):
            return ""
        return (
            f"predicted on {self.machine}: these GEMMs and what is around them take {now:.3g} ms,"
            f" {before:.3g} in high precision ({now / before:.2f} x)"
        )

    def __str__(self) -> str:
        return render(self, terminal_width())


def human(n: float) -> str:
    """Bytes for a person, in three digits or four: 1536 -> "1.5 KiB", 131072 -> "128 KiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    i = 0
    while n >= 1024 and i < len(units) - 1:
        n, i = n / 1024, i + 1
    return f"{n:.0f} {units[i]}" if i == 0 or n >= 100 else f"{n:.1f} {units[i]}"


def predicted(row: Row) -> str:
    """The predicted milliseconds, and their ratio to the original's where that differs."""
    if not row.predicted_ms:
        return ""
    ratio = row.predicted_ms / row.original_ms
    text = f"{row.predicted_ms:.3g}"
    return text if row.predicted_ms == row.original_ms else f"{text}, {ratio:.2f} x"


def cells(row: Row, notes: Notes, engine: bool) -> tuple[str, ...]:
    """A row's texts in the order of `COLUMNS`; its rule and its reason become ``notes``."""
    return (
        row.fqn or "(the model)", row.shape, row.scheme_name,
        "" if row.chain is None else str(row.chain), row.engine if engine else "",
        human(row.saved_bytes) if row.saved_bytes else "", predicted(row), row.status,
        notes.refer((row.rule, row.reason)),
    )  # fmt: skip


def render(report: Report, width: int) -> str:
    """The report in plain text: a table, then rules and reasons by number, then the schemes.

    An engine that all layers share is named below instead of in a column.
    """
    notes, engines = Notes(), {row.engine for row in report.rewritten}
    rows = [cells(row, notes, len(engines) > 1) for row in report.rows]
    lines = table(COLUMNS, rows, width, flexible=("layer", "scheme", "engine"))
    lines += ["", *paragraph("", report.summary(), width)]
    if report.prediction():
        lines += paragraph("", report.prediction(), width)
    if len(engines) == 1:
        lines.append(f"engine: {engines.pop()}")
    if report.rows:
        lines += ["", "why:", *notes.lines(width)]
    schemes = {row.scheme_name: row.scheme for row in report.rows if row.scheme != "original"}
    for name, text in schemes.items():
        lines += ["", f"{name}:", *paragraph("  ", text, width)] if text else []
    return "\n".join(lines)


@dataclass
class _Record:
    """A model's report, and what each layer's row is under every stamp that was compiled.

    ``shared``: rows of graphs that serve other layers as well, by what these have in common.
    ``chains``: how many chains all graphs have; the rows' numbers here differ from graph to graph.
    """

    report: Report
    variants: dict[tuple[str, str], list[Row]] = field(default_factory=dict)
    shared: dict[tuple, Row] = field(default_factory=dict)
    chains: int = 0

    def number_chains(self, rows: list[Row]) -> list[Row]:
        """A graph's rows with numbers that no other graph's chains have."""
        offset = self.chains
        self.chains += 1 + max((r.chain for r in rows if r.chain is not None), default=-1)
        return [r if r.chain is None else replace(r, chain=offset + r.chain) for r in rows]


class Reports:
    """The reports of every model compiled in this process, by its outermost module."""

    def __init__(self) -> None:
        self._by_root: weakref.WeakKeyDictionary[nn.Module, _Record] = weakref.WeakKeyDictionary()

    def record(
        self,
        root: nn.Module | None,
        policy: str,
        rows: list[Row],
        stamps: Sequence[str] = (),
        shared: Sequence[tuple | None] = (),
        machine: Machine | None = None,
    ) -> Report:
        """Add a graph's rows to the report of ``root``; a new policy starts a new report.

        ``stamps`` and ``shared`` belong to the rows, one each.
        """
        record = self._by_root.get(root) if root is not None else None
        if record is None or record.report.policy != policy:
            record = _Record(Report(policy))
            if root is not None:
                self._by_root[root] = record
        record.report.name_machine(machine)
        record.report.add(rows, torch.is_grad_enabled())
        rows = record.number_chains(rows)
        variants: dict[tuple[str, str], list[Row]] = {}
        for row, stamp in zip(rows, stamps):
            variants.setdefault((row.fqn, stamp), []).append(row)
        if torch.is_grad_enabled():
            record.variants.update(variants)
        record.shared.update({key: row for row, key in zip(rows, shared) if key is not None})
        return record.report

    def of(self, root: nn.Module) -> Report | None:
        """What was recorded for ``root``, or None."""
        record = self._by_root.get(root)
        return record.report if record is not None else None

    def variant(self, root: nn.Module, fqn: str, stamp: str) -> list[Row] | None:
        """The rows of a layer in the graphs that were compiled for ``stamp``."""
        return self._by_root[root].variants.get((fqn, stamp))

    def shared(self, root: nn.Module, key: tuple) -> Row | None:
        """The row of a layer whose graph serves the layer that ``key`` describes."""
        return self._by_root[root].shared.get(key)


reports = Reports()
