"""What one quantization did to a tensor, from some of its rows; nothing waits for the device.

`quantizations` reads the arguments and results of a primitive (`observing.py`) and copies rows at
even distances of what was quantized and of what became of it; where the former is never stored (a
hidden activation, a hidden gradient), these rows alone are made again. `measure` compares all
copies of a step at its end, those of equal shape and format together: a few kernels each. Rows that
are not finite are counted over the whole tensor, from its factors or scales or, for gradients in
blocks of 32, from the first value of every block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import block_scaled, fp8, layout, reference, rotation
from .activations import ACTIVATIONS, affine, evaluate
from .elements import e8m0_decode
from .formats import BLOCK, TensorFormat

# Beyond the last code by half a step: with one code more it would have been rounded to that.
BEYOND = {"nvfp4": 7.0, "mxfp4": 7.0, "mxfp8": 464.0, "s2f6": 127.5 / 64}
SUMS = ("off", "size", "zeros", "saturated", "amax", "nan_rows")


Term = tuple[Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]


@dataclass(eq=False)
class Origin:
    """Copies of n rows of what was quantized: of ``terms``, from which ``rule`` makes them.

    A term is acc [n, C], two factors and a bias, each None or of a shape that acc's broadcasts
    (`activations.affine`); ``fold``: what multiplies the made rows, likewise.
    """

    rule: tuple[str, str]  # of `_RULES`, and the activation
    terms: tuple[Term, ...]
    fold: Tensor | None = None

    def tensors(self) -> list[Tensor | None]:
        """All of them, always in the same places."""
        return [t for term in self.terms for t in term] + [self.fold]


@dataclass(eq=False)
class Kept:
    """Copies of n rows: of ``x``, its ``operand`` or (form "none") ``codes``, and ``scales``.

    ``factor`` is the whole one; ``bad`` the number of rows that are not finite, where the factor
    does not tell it. All are copies: compiled code may use the memory again before the step ends.
    """

    x: Origin
    at: Tensor
    form: str
    factor: Tensor
    operand: Tensor | None = None
    codes: Tensor | None = None
    scales: Tensor | None = None
    bad: Tensor | None = None

    def like(self) -> tuple:
        """Equal for copies that can be compared together."""
        tensors = (*self.x.tensors(), self.operand, self.codes, self.scales, self.factor)
        shapes = [(t.shape, t.dtype) if t is not None else None for t in tensors]
        return self.form, self.x.rule, self.at.device, self.bad is None, *shapes


@dataclass(eq=False)
class Quantization:
    """One quantized tensor; ``side``: "forward", or the GEMM ("dgrad", "wgrad") of a gradient.

    ``source``, ``codes`` and ``operand`` are addresses, 0 where there is no such tensor, ``node``
    what the two orientations of one gradient share. ``sums``: FP32 [6] in the order of `SUMS`
    (norms of the error and of the tensor, counts, the largest magnitude) once `measure` was here;
    ``rows`` and ``columns`` those of the quantized tensor, ``sampled`` the number of elements that
    the sums are over.
    """

    side: str
    format: str
    rows: int
    columns: int
    source: int = 0
    codes: int = 0
    operand: int = 0
    transposed: bool = False
    node: Any = None
    kept: Kept | None = None
    sums: Tensor | None = None
    sampled: int = 0
    names: list[str] = field(default_factory=list)


class Rows:
    """Which rows are looked at: about ``n`` at even distances, the first one ``turn`` further."""

    def __init__(self, n: int, turn: int = 0) -> None:
        self.n, self.turn = n, turn
        self._known: dict[tuple, Tensor] = {}

    def of(self, rows: int, device: torch.device) -> Tensor:
        """Numbers of rows out of ``rows``, int64."""
        if (rows, device) not in self._known:
            step = max(rows // self.n, 1)
            first = self.turn % step
            last = min(rows, first + step * self.n)
            self._known[rows, device] = torch.arange(first, last, step, device=device)
        return self._known[rows, device]


def address(t: Tensor | None) -> int:
    """Of the first element; 0 for None and for tensors without elements."""
    return 0 if t is None or t.numel() == 0 else t.data_ptr()


@torch.no_grad()
def quantizations(name: str, args: tuple, out: Any, rows: Rows | None) -> list[Quantization]:
    """What the primitive ``name`` quantized, with copies of ``rows``, if any. [] for the others."""
    reader = _READERS.get(name)
    return reader(args, out, rows) if reader is not None else []


# Forward operands ---------------------------------------------------------------------------------


def _quantize(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    x, fmt, form, transpose = args
    shape = (x.shape[1], x.shape[0]) if transpose else x.shape
    made = _forward(
        shape, fmt, form, out, rows, lambda at: Origin(("plain", ""), (_plain(x, at, transpose),))
    )
    made.source, made.transposed = address(x), transpose
    return [made]


def _act_quantize(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    *term, act, fmt, form = args

    def hidden(at: Tensor) -> Origin:
        return Origin(("act", act), (_cut(term, at),))

    return [_forward(term[0].shape, fmt, form, out, rows, hidden)]


def _glu_quantize(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    gate, up, (act, fmt, form) = args[:4], args[4:8], args[8:]

    def hidden(at: Tensor) -> Origin:
        return Origin(("glu", act), (_cut(gate, at), _cut(up, at)))

    return [_forward(gate[0].shape, fmt, form, out, rows, hidden)]


def _forward(
    shape: Any, text: str, form: str, out: tuple, rows: Rows | None,
    take: Callable[[Tensor], Origin],
) -> Quantization:  # fmt: skip
    """Of codes, scales, factor and operand; ``take`` gives rows of what was quantized."""
    codes, scales, factor, operand = out
    (m, n), fmt = shape, TensorFormat.parse(text)
    if form in block_scaled.FORMS and block_scaled.in_place(fmt, form) != "values":
        operand = codes  # is what the GEMM reads
    made = Quantization("forward", text, m, n, 0, address(codes), address(operand))
    if form in block_scaled.FORMS or fmt.float_scales:
        form = "none"  # the codes are the same numbers
    if fmt.float_scales:
        scales = fp8.per_row(scales, m, fmt)
    if rows is None or 0 in shape:
        return made
    at = rows.of(m, codes.device)
    made.kept = kept = Kept(take(at), at, form, factor.clone(), scales=scales.index_select(0, at))
    if form == "none":
        kept.codes = codes.index_select(0, at)
    else:
        kept.operand = operand.index_select(0, at)
    if fmt.factor is None:
        kept.bad = (scales.isnan() if fmt.float_scales else scales == 255).any(1).sum()
    return made


# Gradients ----------------------------------------------------------------------------------------


def _quantize_grad(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    g, fold, *rest = args[:9]

    def take(at: Tensor, columns: bool) -> Origin:
        return Origin(("plain", ""), (_plain(g, at, columns),))

    return _gradient(g.shape, take, fold, tuple(rest), out, rows, address(g))


def _act_grad_quantize(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    g, z, act, fold, rest = (*args[:3], None), args[3:7], args[7], args[8], args[9:16]

    def take(at: Tensor, columns: bool) -> Origin:
        return Origin(("act_grad", act), (_cut(g, at, columns), _cut(z, at, columns)))

    return _gradient(z[0].shape, take, fold, rest, out, rows)


def _glu_grad_quantize(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    g, gate, up, act = (*args[:3], None), args[3:7], args[7:11], args[11]
    folds, formats, forms = args[12:14], args[14:18], args[18:22]
    sums, seed = args[22:24], args[24:26]

    def of_gate(at: Tensor, columns: bool) -> Origin:
        return Origin(("gate_grad", act), tuple(_cut(t, at, columns) for t in (g, gate, up)))

    def of_up(at: Tensor, columns: bool) -> Origin:
        return Origin(("up_grad", act), tuple(_cut(t, at, columns) for t in (g, gate)))

    found = []
    for k, take in enumerate((of_gate, of_up)):
        rest = (*formats[2 * k : 2 * k + 2], *forms[2 * k : 2 * k + 2], sums[k], *seed)
        found += _gradient(gate[0].shape, take, folds[k], rest, out[5 * k : 5 * k + 5], rows)
    return found


def _gradient(
    shape: Any, take: Callable[[Tensor, bool], Origin], fold: Tensor | None, rest: tuple,
    out: tuple, rows: Rows | None, source: int = 0,
) -> list[Quantization]:  # fmt: skip
    """Both orientations of a gradient [M, N]; ``take`` gives rows or columns of it."""
    dgrad, wgrad, form_d, form_w, _, seed, stream = rest
    m, n = shape

    def folded(at: Tensor) -> Origin:
        part = take(at, True)
        return part if fold is None else replace(part, fold=fold.clone()[None, :])

    node = (source, address(seed), stream)
    sides = (
        ("dgrad", dgrad, form_d, (m, n), lambda at: take(at, False), out[:2]),
        ("wgrad", wgrad, form_w, (n, m), folded, out[2:4]),
    )
    found = []
    for side, text, form, size, rows_of, (operand, factor) in sides:
        if not text:
            continue
        made = Quantization(side, text, size[0], size[1], 0, 0, address(operand), node=node)
        if rows is not None and 0 not in size:
            at, fmt = rows.of(size[0], operand.device), TensorFormat.parse(text)
            made.kept = _of_gradient(rows_of(at), at, fmt, form, size[0], operand, factor)
        found.append(made)
    return found


def _of_gradient(
    x: Origin, at: Tensor, fmt: TensorFormat, form: str, rows: int, operand: Tensor, factor: Tensor
) -> Kept:
    """Copies of one orientation: values that need scales beside them are decoded here."""
    if fmt.float_scales and form == "e4m3":
        codes, scales = operand.index_select(0, at), factor.t()
        values = reference.values(codes, scales.index_select(0, at), fmt)
        bad = scales.isnan().any(1).sum()
        return Kept(x, at, "f32", factor.new_empty(0), values, bad=bad)
    if block_scaled.has_tail(fmt, form):
        codes, flat = block_scaled.parts(operand, None, rows, form)
        width = codes.shape[1] * block_scaled.ELEMENTS[form]
        scales = layout.unswizzle(flat, rows, width // BLOCK[fmt.format])
        values = reference.values(codes.index_select(0, at), scales.index_select(0, at), fmt)
        spoilt = None if fmt.factor else (scales == 255).any(1).sum()
        return Kept(x, at, "f32", factor.clone(), values, bad=spoilt)
    form = "e4m3" if form in block_scaled.FORMS else form
    kept = Kept(x, at, form, factor.clone(), operand.index_select(0, at))
    if fmt.factor is None:
        kept.bad = operand[:, :: BLOCK[fmt.format]].isnan().any(1).sum()
    return kept


def _plain(x: Tensor, at: Tensor, columns: bool) -> Term:
    """Rows of a tensor, or columns as rows, as a term."""
    part = x.index_select(1, at).t() if columns else x.index_select(0, at)
    return part, None, None, None


def _cut(term: Any, at: Tensor, columns: bool = False) -> Term:
    """The affine term of some rows, or of some columns, which become rows."""
    acc, row, col, bias = term
    m, n = acc.shape
    part, *_ = _plain(acc, at, columns)

    def spread(t: Tensor | None, size: int, axis: int) -> Tensor | None:
        if t is None:
            return None
        axis = 1 - axis if columns else axis  # along which its values are alike
        own = t.index_select(0, at) if axis and t.numel() == size else t.clone()
        return own.unsqueeze(axis)

    return part, spread(row, m, 1), spread(col, n, 0), spread(bias, n, 0)


# Figures ------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(made: Iterable[Quantization]) -> None:
    """Turn the copies into ``sums``."""
    groups: dict[tuple, list[Quantization]] = {}
    for each in dict.fromkeys(made):
        if each.kept is not None:
            key = (each.format, each.rows, each.columns, *each.kept.like())
            groups.setdefault(key, []).append(each)
    for group in groups.values():
        together = [q.kept for q in group if q.kept is not None]
        sums = _sums(TensorFormat.parse(group[0].format), group[0].rows, together)
        for each, values in zip(group, sums.unbind()):
            assert each.kept is not None
            each.sums, each.sampled = values, len(each.kept.at) * each.columns
            each.kept = None


def _sums(fmt: TensorFormat, rows: int, kept: list[Kept]) -> Tensor:
    """FP32 [copies, 6] of copies that are alike."""
    first, n = kept[0], len(kept)
    factors = torch.stack([k.factor for k in kept])
    outer = None
    if factors.numel():
        some = factors[:, first.at] if factors.shape[1] == rows else factors
        outer = some.expand(n, len(first.at)).reshape(-1, 1)
    scales = _joined([k.scales for k in kept])
    decoded = _decoded(fmt, kept, scales, outer)
    x = _made([k.x for k in kept])
    if decoded.shape[1] > x.shape[1]:
        x = pad(x, (0, decoded.shape[1] - x.shape[1]))
    x = rotation.rotate(x, fmt.rotation) if fmt.rotation else x
    finite = decoded - decoded == 0
    x, decoded = (torch.where(finite, t, 0).view(n, -1) for t in (x, decoded))
    norm = torch.linalg.vector_norm
    zeros = x.count_nonzero(1) - decoded.count_nonzero(1)  # what is 0 stays 0
    beyond = _beyond(fmt, x, scales, outer) if scales is not None else zeros
    if first.bad is not None:
        bad = torch.stack([k.bad for k in kept if k.bad is not None])
    else:
        bad = factors.isnan().sum(1) * (1 if factors.shape[1] == rows else rows)
    parts = (norm(decoded - x, dim=1), norm(x, dim=1), zeros, beyond, norm(x, torch.inf, 1), bad)
    return torch.stack([p.float() for p in parts], 1)


def _made(all_rows: list[Origin]) -> Tensor:
    """FP32 rows of all copies, one after the other."""
    rule, act = all_rows[0].rule
    terms = []
    for copies in zip(*(rows.terms for rows in all_rows)):
        acc, *rest = (_stacked(parts) for parts in zip(*copies))
        assert acc is not None
        terms.append(affine(acc, *rest))
    made = _RULES[rule](ACTIVATIONS.get(act), *terms)
    fold = _stacked([rows.fold for rows in all_rows])
    return (made if fold is None else made * fold).flatten(0, 1)


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Of all copies; None where they have none."""
    there = [part for part in parts if part is not None]
    return torch.stack(there) if there else None


def _joined(parts: list) -> Any:
    """Rows of all copies, one after the other; None where they have none."""
    return None if parts[0] is None else torch.cat(parts)


def _decoded(fmt: TensorFormat, kept: list[Kept], scales: Any, outer: Tensor | None) -> Tensor:
    """FP32 values of all rows."""
    form = kept[0].form
    if form == "none":
        if fmt.float_scales:  # `_forward` gives each row its own
            fmt = replace(fmt, block=fp8.BLOCK)
        values = reference.values(_joined([k.codes for k in kept]), scales, fmt)
        return values * outer if fmt.format == "nvfp4" and outer is not None else values
    values = _joined([k.operand for k in kept])
    values = (values.view(torch.float8_e4m3fn) if form == "e4m3" else values).float()
    return values if outer is None else values * outer


def _beyond(fmt: TensorFormat, x: Tensor, scales: Tensor, outer: Tensor | None) -> Tensor:
    """How many values of each copy are beyond the last code; x [copies, rows x columns].

    None in FP8, whose scales put the largest value on the last code.
    """
    if fmt.float_scales:
        return x.new_zeros(len(x))
    if fmt.format == "nvfp4":
        assert outer is not None
        size = scales.view(torch.float8_e4m3fn).float() * outer
    else:
        size = e8m0_decode(scales)
    limit = torch.where(scales == 0, torch.inf, size * BEYOND[fmt.format])
    return (x.abs().view(*limit.shape, -1) > limit[..., None]).view(len(x), -1).sum(1)


# Of a row of `ACTIVATIONS` and FP32 terms: what the primitives quantize.
_RULES: dict[str, Callable[..., Tensor]] = {
    "plain": lambda row, x: x,
    "act": lambda row, z: evaluate(row.forward, z),
    "glu": lambda row, gate, up: evaluate(row.forward, gate) * up,
    "act_grad": lambda row, g, z: evaluate(row.backward, g, z),
    "gate_grad": lambda row, dh, gate, up: evaluate(row.backward, dh * up, gate),
    "up_grad": lambda row, dh, gate: dh * evaluate(row.forward, gate),
}
_READERS = {
    "quantize": _quantize,
    "act_quantize": _act_quantize,
    "glu_quantize": _glu_quantize,
    "quantize_grad": _quantize_grad,
    "act_grad_quantize": _act_grad_quantize,
    "glu_grad_quantize": _glu_grad_quantize,
}
