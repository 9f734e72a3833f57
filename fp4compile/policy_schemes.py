"""Schemes out of a policy file, and what a phase does to a scheme."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .kernels.errors import FormatError
from .kernels.formats import GEMMS, Gemm, Operand, Scheme, TensorFormat
from .policy_model import AUTO, ORIGINAL, OperandEntry, PhaseEntry, SchemeEntry
from .policy_yaml import KeyPath, Source
from .words import unknown

BUILT_IN = {name: Scheme() for name in ORIGINAL}


def scheme_of(entry: SchemeEntry, source: Source, path: KeyPath) -> Scheme:
    """The scheme of a file's entry at ``path``; illegal operands are errors with their line."""
    gemms = {}
    for gemm, roles in GEMMS.items():
        value = getattr(entry, gemm)
        if not isinstance(value, str):
            gemms[gemm] = tuple(
                _operand(getattr(value, role), source, (*path, gemm, role)) for role in roles
            )
    try:
        return Scheme(**gemms)  # type: ignore[arg-type]
    except FormatError as exc:
        where = re.match(r"(fprop|dgrad|wgrad)(?:\.(\w+))?: ", str(exc))
        keys = tuple(k for k in where.groups() if k) if where else ()
        message = str(exc)[where.end() :] if where else str(exc)
        raise source.error((*path, *keys), message) from None


def _operand(entry: OperandEntry, source: Source, path: KeyPath) -> Operand:
    keys = entry.model_dump(exclude_none=True, exclude={"source", "fold"})
    if keys and "format" not in keys:
        raise source.error(path, f"{next(iter(keys))} without a format")
    if not keys and entry.source is None:
        raise source.error(path, "'format' is missing")
    try:
        stored = TensorFormat(**keys) if keys else None
    except FormatError as exc:
        raise source.error(path, str(exc)) from None
    return Operand(stored, entry.source or "own", entry.fold)


@dataclass(frozen=True)
class Phase:
    """What changes from ``from_step`` on: GEMM -> name of the scheme it is taken from.

    ``from_step``: a step, or a text such as "82%" until `Policy.for_steps` says of how many.
    """

    from_step: int | str
    gemms: Mapping[str, str]
    whole: str | None
    where: str

    def __str__(self) -> str:
        changes = [f"scheme {self.whole}"] if self.whole else []
        changes += [f"{gemm} {name}" for gemm, name in self.gemms.items()]
        return ", ".join(changes)

    @property
    def share(self) -> float | None:
        """The share of training of a phase that is not given in steps."""
        return float(self.from_step[:-1]) / 100 if isinstance(self.from_step, str) else None

    def apply(self, scheme: Scheme, schemes: Mapping[str, Scheme]) -> Scheme:
        """``scheme`` in this phase; a layer in its original precision stays there.

        Where the phase takes the forward codes away, or leaves such as a backward GEMM cannot read,
        a backward operand ``from: fprop`` becomes ``from: input``: the high-precision tensor in the
        same format, along the axis that the backward GEMM reduces, rounded to nearest because that
        happens in the forward pass.
        """
        if scheme.original:
            return scheme
        if self.whole:
            return schemes[self.whole]
        origin = {gemm: schemes.get(self.gemms.get(gemm, ""), scheme) for gemm in GEMMS}
        gemms = {gemm: getattr(origin[gemm], gemm) for gemm in GEMMS}
        for gemm in ("dgrad", "wgrad"):
            if "fprop" in self.gemms and not _reads(gemm, gemms):
                gemms[gemm] = _from_input(gemm, gemms[gemm], origin[gemm].fprop)
        kept = scheme.preactivation if any(gemms.values()) else None
        return Scheme(**gemms, preactivation=kept)


def _reads(gemm: str, gemms: Mapping[str, Gemm | None]) -> bool:
    """Whether a backward GEMM can read the codes of this forward pass."""
    if gemms["fprop"] is None:
        return False
    try:
        dgrad, wgrad = (gemms[name] if name == gemm else None for name in ("dgrad", "wgrad"))
        Scheme(gemms["fprop"], dgrad, wgrad)
    except FormatError:
        return False
    return True


def _from_input(gemm: str, operands: Gemm | None, fprop: Gemm | None) -> Gemm | None:
    """A backward GEMM's operands without the forward codes; nothing is left to fold."""
    if operands is None or operands[1].source != "fprop":
        return operands
    gradient, other = operands
    assert fprop is not None
    saved = fprop[1 if gemm == "dgrad" else 0].format
    stored = other.format or saved
    assert stored is not None
    outer = "tensor" if stored.outer == "row" else stored.outer
    stored = replace(stored, outer=outer, rounding="nearest")
    return replace(gradient, fold=None), Operand(stored, "input")


def phase_of(
    entry: PhaseEntry, source: Source, index: int, schemes: Mapping[str, Scheme], label: str
) -> Phase:
    """The phase of a file's entry; its scheme names must be known."""
    path: KeyPath = ("phases", index)
    named = {key: getattr(entry, key) for key in (*GEMMS, "all", "scheme")}
    named = {key: name for key, name in named.items() if name is not None}
    for key, name in named.items():
        if name == AUTO:
            raise source.error((*path, key), "auto is for layers and default, not for phases")
        if name not in schemes:
            raise source.error((*path, key), unknown("scheme", name, schemes))
    whole = [key for key in ("all", "scheme") if key in named]
    if not named:
        raise source.error(path, "says no change (fprop, dgrad, wgrad, all or scheme)")
    if whole and len(named) > 1:
        raise source.error((*path, whole[0]), f"{whole[0]} replaces every GEMM and stands alone")
    gemms = {} if whole else named
    where = f"{label}:{source.line(path)}"
    return Phase(entry.from_step, gemms, named[whole[0]] if whole else None, where)


def phases_of(
    entries: list[PhaseEntry], source: Source, schemes: Mapping[str, Scheme], label: str
) -> tuple[Phase, ...]:
    """The phases of a file, in ascending order of their first steps."""
    phases = [phase_of(e, source, i, schemes, label) for i, e in enumerate(entries)]
    for i, phase in enumerate(phases):
        where: KeyPath = ("phases", i, "from_step")
        if phase.share is not None and phase.share > 1:
            raise source.error(where, f"{phase.from_step} is more than 100%")
        if i == 0:
            continue
        before = phases[i - 1]
        if (phase.share is None) != (before.share is None):
            raise source.error(where, "steps and shares of training cannot be mixed")
        if _start(phase) <= _start(before):
            raise source.error(where, f"{phase.from_step} does not come after {before.from_step}")
    return tuple(phases)


def _start(phase: Phase) -> float:
    return phase.share if phase.share is not None else float(phase.from_step)


def check_phase(
    phase: Phase, index: int, used: Iterable[str], schemes: Mapping[str, Scheme], source: Source
) -> None:
    """Every scheme named in ``used`` must be legal in ``phase``."""
    for name in used:
        try:
            phase.apply(schemes[name], schemes)
        except FormatError as exc:
            raise source.error(("phases", index), f"scheme {name}: {exc}") from None
