"""What one quantization did to a tensor: figures of some rows, made on its device, not waited for.

`quantizations` reads the arguments and results of a primitive (`observing.py`). It recomputes no
tensor: rows at even distances are decoded and compared with the rows that were quantized; where
these are never stored (a hidden activation, a hidden gradient), these rows alone are made again.
Rows that are not finite are counted over the whole tensor, from its factors, scales or, for
gradients in blocks of 32, the first value of every block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import reference, rotation
from .activations import ACTIVATIONS, evaluate
from .elements import E4M3, decode, e8m0_decode
from .formats import BLOCK, TensorFormat

# Beyond the last code by half a step: with one code more it would have been rounded to that.
BEYOND = {"nvfp4": 7.0, "mxfp4": 7.0, "mxfp8": 464.0, "s2f6": 127.5 / 64}
SUMS = ("off", "size", "zeros", "saturated", "amax", "nan_rows")


@dataclass(eq=False)
class Quantization:
    """One quantized tensor; ``side``: "forward", or the GEMM ("dgrad", "wgrad") of a gradient.

    ``source``, ``codes`` and ``operand`` are addresses, 0 where there is no such tensor, ``node``
    what the two orientations of one gradient share. ``sums``: FP32 [6] in the order of `SUMS`
    (norms of the error and of the tensor, counts, the largest magnitude), None if not sampled;
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
    sums: Tensor | None = None
    sampled: int = 0
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """Which rows are looked at: about ``n`` at even distances, the first one ``turn`` further."""

    n: int
    turn: int = 0

    def of(self, rows: int) -> slice:
        """A slice of ``rows`` rows."""
        step = max(rows // self.n, 1)
        return slice(self.turn % step, min(rows, self.turn % step + step * self.n), step)


def address(t: Tensor | None) -> int:
    """Of the first element; 0 for None and for tensors without elements."""
    return 0 if t is None or t.numel() == 0 else t.data_ptr()


@torch.no_grad()
def quantizations(name: str, args: tuple, out: Any, rows: Rows | None) -> list[Quantization]:
    """What the primitive ``name`` quantized; figures for ``rows``, if any. [] for the others."""
    reader = _READERS.get(name)
    return reader(args, out, rows) if reader is not None else []


# Forward operands ---------------------------------------------------------------------------------


def _quantize(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    x, fmt, _, transpose = args
    matrix = x.t() if transpose else x
    made = _forward(matrix.shape, fmt, out, rows, lambda at: matrix[at])
    made.source, made.transposed = address(x), transpose
    return [made]


def _act_quantize(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    *term, act, fmt, _ = args
    forward = ACTIVATIONS[act].forward
    return [
        _forward(
            term[0].shape, fmt, out, rows, lambda at: evaluate(forward, _affine(_cut(term, at)))
        )
    ]


def _glu_quantize(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    gate, up, (act, fmt, _) = args[:4], args[4:8], args[8:]

    def hidden(at: slice) -> Tensor:
        return evaluate(ACTIVATIONS[act].forward, _affine(_cut(gate, at))) * _affine(_cut(up, at))

    return [_forward(gate[0].shape, fmt, out, rows, hidden)]


def _forward(
    shape: Any, text: str, out: tuple, rows: Rows | None, take: Callable[[slice], Tensor]
) -> Quantization:
    """Of codes, scales, factor and operand; ``take`` gives rows of what was quantized."""
    codes, scales, factor, operand = out
    fmt = TensorFormat.parse(text)
    m, n = shape
    made = Quantization("forward", text, m, n, 0, address(codes), address(operand))
    if rows is None or 0 in shape:
        return made
    at = rows.of(m)
    some = scales[at]
    decoded = reference.values(codes[at], some, fmt)
    if fmt.format == "nvfp4":
        outer = factor[at][:, None] if fmt.factor == "row" else factor
        decoded, limit = decoded * outer, decode(some, E4M3) * outer
    else:
        limit = e8m0_decode(some)
    limit = torch.where(some == 0, torch.inf, limit * BEYOND[fmt.format])
    bad = _bad_rows(fmt, factor, lambda: scales == 255, m)
    _fill(made, _prepared(take(at), fmt, decoded.shape[1]), decoded, limit, bad)
    return made


# Gradients ----------------------------------------------------------------------------------------


def _quantize_grad(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    g, fold, *rest = args[:9]

    def take(i: slice, j: slice) -> Tensor:
        return g[i, j]

    return _gradient(g.shape, take, fold, tuple(rest), out, rows, address(g))


def _act_grad_quantize(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    g, z, act, fold, rest = (*args[:3], None), args[3:7], args[7], args[8], args[9:16]

    def take(i: slice, j: slice) -> Tensor:
        return evaluate(ACTIVATIONS[act].backward, *(_affine(_cut(t, i, j)) for t in (g, z)))

    return _gradient(z[0].shape, take, fold, rest, out, rows)


def _glu_grad_quantize(args: tuple, out: tuple, rows: Rows | None) -> list[Quantization]:
    g, gate, up, act = (*args[:3], None), args[3:7], args[7:11], args[11]
    folds, formats, forms = args[12:14], args[14:18], args[18:22]
    sums, seed = args[22:24], args[24:26]
    row = ACTIVATIONS[act]

    def of_gate(i: slice, j: slice) -> Tensor:
        dh, a, b = (_affine(_cut(t, i, j)) for t in (g, gate, up))
        return evaluate(row.backward, dh * b, a)

    def of_up(i: slice, j: slice) -> Tensor:
        return _affine(_cut(g, i, j)) * evaluate(row.forward, _affine(_cut(gate, i, j)))

    found = []
    for k, take in enumerate((of_gate, of_up)):
        rest = (*formats[2 * k : 2 * k + 2], *forms[2 * k : 2 * k + 2], sums[k], *seed)
        found += _gradient(gate[0].shape, take, folds[k], rest, out[5 * k : 5 * k + 5], rows)
    return found


def _gradient(
    shape: Any, take: Callable[[slice, slice], Tensor], fold: Tensor | None, rest: tuple,
    out: tuple, rows: Rows | None, source: int = 0,
) -> list[Quantization]:  # fmt: skip
    """Both orientations of a gradient [M, N]; ``take`` gives rows and columns of it."""
    dgrad, wgrad, form_d, form_w, _, seed, stream = rest
    m, n = shape
    every = slice(None)

    def transposed(at: slice) -> Tensor:
        part = take(every, at).float()
        return (part if fold is None else part * fold[:, None]).t()

    node = (source, address(seed), stream)
    sides = (
        ("dgrad", dgrad, form_d, (m, n), lambda at: take(at, every), out[:2]),
        ("wgrad", wgrad, form_w, (n, m), transposed, out[2:4]),
    )
    found = []
    for side, text, form, size, rows_of, (operand, factor) in sides:
        if text:
            made = Quantization(side, text, size[0], size[1], 0, 0, address(operand), node=node)
            if rows is not None and 0 not in size:
                _sample_operand(made, operand, factor, form, rows.of(size[0]), rows_of)
            found.append(made)
    return found


def _sample_operand(
    made: Quantization, operand: Tensor, factor: Tensor, form: str, at: slice,
    take: Callable[[slice], Tensor],
) -> None:  # fmt: skip
    fmt = TensorFormat.parse(made.format)
    values = operand.view(torch.float8_e4m3fn) if form == "e4m3" else operand
    decoded = values[at].float()
    if factor.numel():
        decoded = decoded * (factor[at][:, None] if factor.numel() == made.rows else factor)
    bad = _bad_rows(fmt, factor, lambda: values[:, :: BLOCK[fmt.format]].isnan(), made.rows)
    _fill(made, _prepared(take(at), fmt, decoded.shape[1]), decoded, None, bad)


# Figures ------------------------------------------------------------------------------------------


def _cut(term: Any, rows: slice, columns: slice = slice(None)) -> tuple:
    """The affine term of some rows and columns."""
    acc, row, col, bias = term
    row = row[rows] if row is not None and row.numel() == acc.shape[0] else row
    col = col[columns] if col is not None and col.numel() == acc.shape[1] else col
    return acc[rows, columns], row, col, bias[columns] if bias is not None else None


def _affine(term: tuple) -> Tensor:
    from .primitives import affine

    return affine(*term)


def _prepared(x: Tensor, fmt: TensorFormat, columns: int) -> Tensor:
    """FP32 x as its codes mean it: padded and rotated."""
    x = pad(x.detach().float(), (0, columns - x.shape[1]))
    return rotation.rotate(x, fmt.rotation) if fmt.rotation else x


def _bad_rows(
    fmt: TensorFormat, factor: Tensor, blocks: Callable[[], Tensor], rows: int
) -> Tensor:
    """How many of ``rows`` rows decode to NaN; ``blocks`` gives [rows, ...]: which blocks do."""
    if fmt.factor is None:
        return blocks().any(1).sum()
    bad = factor.isnan().sum()
    return bad if factor.numel() == rows else bad * rows


def _fill(
    made: Quantization, x: Tensor, decoded: Tensor, limit: Tensor | None, bad: Tensor
) -> None:
    """The sums over rows x and what they were decoded to; ``limit`` [rows, blocks]."""
    finite = decoded.isfinite()
    x, decoded = torch.where(finite, x, 0), torch.where(finite, decoded, 0)
    beyond = bad.new_zeros(())
    if limit is not None:
        beyond = (x.abs().unflatten(1, (limit.shape[1], -1)) > limit[..., None]).sum()
    zeros = ((decoded == 0) & (x != 0)).sum()
    norm = torch.linalg.vector_norm
    parts = (norm(decoded - x), norm(x), zeros, beyond, norm(x, torch.inf), bad)
    made.sums = torch.stack([p.float() for p in parts])
    made.sampled = x.shape[0] * made.columns


_READERS = {
    "quantize": _quantize,
    "act_quantize": _act_quantize,
    "glu_quantize": _glu_quantize,
    "quantize_grad": _quantize_grad,
    "act_grad_quantize": _act_grad_quantize,
    "glu_grad_quantize": _glu_grad_quantize,
}
