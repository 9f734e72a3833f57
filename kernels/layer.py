"""What one linear layer does in its three GEMMs: which operands it quantizes, saves and multiplies.

`Layer` holds no tensors, only the scheme and the sizes; its methods build graph nodes, so that a
trace of them shows the primitives. Shapes: x [M, K], w [N, K], y and g [M, N].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import block_scaled, engines
from .formats import BITS, GEMMS, Scheme, TensorFormat

ops = torch.ops.fp4

# Streams of one layer's random bits; the next layer of a chain starts STREAMS higher.
WEIGHT, ACTIVATION, STREAMS = 2, 3, 16  # the gradient's is 0


# An operand, its factor and, where they are not behind its rows, its block scales.
Right = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass
class Quantized:
    """A forward operand: what is saved (codes, scales, factor) and what the GEMM reads."""

    codes: Tensor
    scales: Tensor
    factor: Tensor
    operand: Tensor


@dataclass
class Term:
    """A GEMM's result before its factors: z = (acc * row) * col + bias."""

    acc: Tensor
    row: Tensor | None = None
    col: Tensor | None = None
    bias: Tensor | None = None

    def value(self, dtype: torch.dtype) -> Tensor:
        """z in ``dtype``, as pointwise nodes that Inductor fuses."""
        if self.row is None and self.col is None and self.bias is None:
            return self.acc.to(dtype)
        z = self.acc.float()
        if self.row is not None:
            z = z * self.row[:, None]
        if self.col is not None:
            z = z * self.col
        if self.bias is not None:
            z = z + self.bias
        return z.to(dtype)

    def args(self) -> tuple:
        """The four arguments that fused primitives take for a term."""
        return self.acc, self.row, self.col, self.bias


def parts(ready: list[Tensor] | None, weights: int) -> list[list[Tensor] | None]:
    """``ready`` weight by weight, four tensors each; all or none of an operator's weights are."""
    if ready is None:
        return [None] * weights
    return [ready[4 * i : 4 * i + 4] for i in range(weights)]


def present(fmt: TensorFormat | None, factor: Tensor) -> Tensor | None:
    """The factor of a tensor in ``fmt``; None where the format has none."""
    return factor if fmt is not None and fmt.factor else None


def beside(engine: engines.Engine, fmt: TensorFormat | None, scales: Tensor) -> Tensor | None:
    """Stored scales as ``engine`` reads them beside the operand; None where it reads none."""
    if not engine.scales or fmt is None:
        return None
    return scales if fmt.block == "tile" else scales.t()


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """FP32 results stay FP32; FP16 layers sum to BF16, since unscaled sums can exceed 65504."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


@dataclass(frozen=True)
class Layer:
    """One linear's scheme on one device; ``out_dtype`` is the dtype of y."""

    scheme: Scheme
    out_dtype: torch.dtype
    device: torch.device

    def engine(self, name: str) -> engines.Engine:
        """The engine of GEMM ``name``; the original precision has none."""
        return engines.choose(*self._formats(name), self.device, self._turned(name))

    def why_not(self, name: str) -> str:
        """Why GEMM ``name`` is not on block-scaled tensor cores that the device has; "" else."""
        return engines.why_not(*self._formats(name), self.device, self._turned(name))

    def _formats(self, name: str) -> tuple[TensorFormat, TensorFormat]:
        return self.scheme.format_of(name, 0), self.scheme.format_of(name, 1)

    def _turned(self, name: str) -> bool:
        """True where GEMM ``name`` reads saved forward codes along their other axis."""
        right = getattr(self.scheme, name)[1]
        return right.source == "fprop" and right.format is None

    def why_reference(self) -> str:
        """Why GEMMs on a GPU run in PyTorch's FP32, a line; "" where none does."""
        found = []
        for name in GEMMS:
            if getattr(self.scheme, name):
                found.append(engines.why_reference(*self._formats(name), self.device))
        return next((reason for reason in found if reason), "")

    @property
    def stores_hidden_gradient(self) -> bool:
        """True where g * act'(z) of a chain is stored, in the dtype of g's sums, before rounding.

        It is written over the product that it is made of, and z is freed: backward needs two
        hidden tensors at a time, where rounding it straight away would need three.
        """
        return self.device.type == "cuda"

    @property
    def one_orientation_at_a_time(self) -> bool:
        """True where the two operands of a gradient are as large as itself, and made in turn."""
        forms = {self.engine(g).operand for g in ("dgrad", "wgrad") if getattr(self.scheme, g)}
        return forms == {"bf16"}

    def _backward_engine(self, name: str) -> str:
        engine = self.engine(name)
        return engines.FP8_FAST if engine is engines.FP8 else engine.name

    def same_activation(self, other: Layer) -> bool:
        """True where both layers' forward GEMMs read one and the same operand of a common input."""
        a, b = self.scheme.fprop, other.scheme.fprop
        if a is None or b is None or a[0] != b[0]:
            return False
        return self.engine("fprop").operand == other.engine("fprop").operand

    # forward ------------------------------------------------------------------------------------

    def quantize_activation(self, x: Tensor) -> Quantized | None:
        """x as the forward GEMM's left operand; None where fprop is original."""
        return self._quantize(x, 0)

    def quantize_weight(self, w: Tensor, ready: list[Tensor] | None = None) -> Quantized | None:
        """w as the forward GEMM's right operand, or ``ready``; None where fprop is original."""
        return Quantized(*ready) if ready else self._quantize(w, 1)

    def weight_operand(self) -> tuple[str, str] | None:
        """The format and form of what `quantize_weight` makes; None where fprop is original."""
        if self.scheme.fprop is None:
            return None
        return str(self.scheme.fprop[1].format), self.engine("fprop").operand

    def _quantize(self, t: Tensor, side: int) -> Quantized | None:
        if self.scheme.fprop is None:
            return None
        fmt = self.scheme.fprop[side].format
        return Quantized(*ops.quantize(t, str(fmt), self.engine("fprop").operand, False))

    def fprop(
        self, x: Tensor, xq: Quantized | None, w: Tensor, wq: Quantized | None, bias: Tensor | None
    ) -> Term:
        """The forward GEMM; ``x`` is read only where fprop is original."""
        if self.scheme.fprop is None or xq is None or wq is None:
            dtype = self.out_dtype
            return Term(engines.plain(x.to(dtype), w.to(dtype).t()), bias=bias)
        m, n = xq.codes.shape[0], wq.codes.shape[0]
        engine, dtype = self.engine("fprop"), acc_dtype(self.out_dtype)
        left, right = self._formats("fprop")
        factors = present(left, xq.factor), present(right, wq.factor)
        if engine.operand not in block_scaled.FORMS:
            scales = beside(engine, left, xq.scales), beside(engine, right, wq.scales)
            more = scales if engine.scales else ()
            acc = ops.scaled_mm(xq.operand, wq.operand, engine.name, m, n, dtype, *more)
            return Term(acc, *factors, bias)
        a, scale_a = block_scaled.beside(left, engine.operand, xq.codes, xq.operand)
        b, scale_b = block_scaled.beside(right, engine.operand, wq.codes, wq.operand)
        inside = self._outer_inside(engine, left, right, dtype)
        acc = ops.scaled_mm(
            a, b, engine.name, m, n, dtype, scale_a, scale_b, *(factors if inside else ())
        )
        return Term(acc, *((None, None) if inside else factors), bias)

    @staticmethod
    def _outer_inside(
        engine: engines.Engine, left: TensorFormat, right: TensorFormat, dtype: torch.dtype
    ) -> bool:
        """True where both outer scales are the tensor's, and BF16 results bear their product.

        FP32 results get them one after the other, as specified.
        """
        both = left.outer == right.outer == "tensor"
        return engine is engines.FP4 and both and dtype == torch.bfloat16

    def saved_weight(self, w: Tensor, wq: Quantized | None) -> tuple[Tensor, ...]:
        """What DGRAD needs of the weight."""
        return self._saved("dgrad", w, wq)

    def saved_activation(self, x: Tensor, xq: Quantized | None) -> tuple[Tensor, ...]:
        """What WGRAD needs of the activation."""
        return self._saved("wgrad", x, xq)

    def _saved(self, name: str, t: Tensor, q: Quantized | None) -> tuple[Tensor, ...]:
        gemm = getattr(self.scheme, name)
        if gemm is None:
            return (t,)
        source = gemm[1].source
        if source == "input":
            return tuple(ops.quantize(t, str(gemm[1].format), "none", True)[:3])
        assert q is not None
        return q.codes, q.scales, q.factor

    # backward -----------------------------------------------------------------------------------

    def gradient_formats(self, need_x: bool, need_w: bool) -> tuple[str, str, str, str]:
        """Formats and operand forms of the gradient for DGRAD and WGRAD; "" where not quantized."""
        out = []
        for name, need in (("dgrad", need_x), ("wgrad", need_w)):
            gemm = getattr(self.scheme, name)
            used = need and gemm is not None
            out.append((str(gemm[0].format), self.engine(name).operand) if used else ("", "none"))
        return out[0][0], out[1][0], out[0][1], out[1][1]

    def needs_maxima(self, need_x: bool, need_w: bool) -> bool:
        """True where rounding the gradient needs the maxima of its whole rows or columns."""
        texts = self.gradient_formats(need_x, need_w)[:2]
        return any(t.startswith("mxfp8:row") for t in texts)

    def fold(self, saved_x: tuple[Tensor, ...], need_w: bool) -> Tensor | None:
        """Each token's outer scale, to be folded into its gradient row; 0 where the token is 0.

        A token whose amax is 0 stores an outer scale of 1, which would set the scale of its block.
        """
        gemm = self.scheme.wgrad
        if gemm is None or not gemm[0].fold or not need_w:
            return None
        _, scales, outer = saved_x
        return torch.where((scales != 0).any(1) | outer.isnan(), outer, torch.zeros_like(outer))

    def dgrad(
        self, g: Tensor | None, operand: Tensor, factor: Tensor, saved: tuple[Tensor, ...],
        seed: Tensor | None, stream: int, m: int, k: int, right: Right | None = None,
    ) -> Term:  # fmt: skip
        """dx [M, K] = g[M, N] w[N, K]; ``g`` is read only where dgrad is original."""
        if self.scheme.dgrad is None:
            assert g is not None
            work = self.out_dtype
            return Term(engines.plain(g.to(work), saved[0].to(work)))
        weight, col, scales = right or self.right("dgrad", saved, k, seed, stream)
        engine, both = self._backward_engine("dgrad"), self._both("dgrad", operand, factor, scales)
        acc = ops.scaled_mm(operand, weight, engine, m, k, acc_dtype(self.out_dtype), *both)
        return Term(acc, present(self.scheme.dgrad[0].format, factor), col)

    def wgrad(
        self, g: Tensor | None, operand: Tensor, factor: Tensor, saved: tuple[Tensor, ...],
        seed: Tensor | None, stream: int, n: int, k: int, dtype: torch.dtype,
        right: Right | None = None,
    ) -> Tensor:  # fmt: skip
        """dw [N, K] = g[M, N]^T x[M, K] in the parameter's dtype ``dtype``."""
        if self.scheme.wgrad is None:
            assert g is not None
            work = self.out_dtype
            return engines.plain(g.to(work).t(), saved[0].to(work)).to(dtype)
        x, col, scales = right or self.right("wgrad", saved, k, seed, stream)
        engine, both = self._backward_engine("wgrad"), self._both("wgrad", operand, factor, scales)
        acc = ops.scaled_mm(operand, x, engine, n, k, acc_dtype(dtype), *both)
        return Term(acc, present(self.scheme.wgrad[0].format, factor), col).value(dtype)

    def _both(
        self, name: str, operand: Tensor, factor: Tensor, scales: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`scaled_mm`'s block scales for a gradient and the operand beside it, if it has any."""
        if scales is None:
            return ()
        own = factor if self.engine(name).scales else operand.new_empty(0, dtype=torch.uint8)
        return own, scales

    def right(
        self, name: str, saved: tuple[Tensor, ...], k: int, seed: Tensor | None, stream: int
    ) -> Right:
        """The operand [K, reduced] beside the gradient in a backward GEMM; see `Right`."""
        stream += WEIGHT if name == "dgrad" else ACTIVATION
        gradient, op = getattr(self.scheme, name)
        engine = self.engine(name)
        form = engine.operand
        codes, scales, factor = saved
        fmt = self.scheme.format_of(name, 1)
        if op.source == "input":
            # quantized along the reduction axis already: codes are [K, reduced]
            if form in block_scaled.FORMS and block_scaled.in_place(fmt, form) != "values":
                swizzled = block_scaled.place_of(fmt, form, scales)
                return codes, present(fmt, factor), swizzled
            reduced = codes.shape[1] * 8 // BITS[fmt.format]
            operand = codes if engine.scales else (
                ops.decode(codes, scales, str(fmt), reduced, form, False)
            )  # fmt: skip
            return operand, present(fmt, factor), beside(engine, fmt, scales)
        if op.format is None:
            operand = ops.decode(codes, scales, str(fmt), k, form, True)
            turned = scales.t() if engine.scales else None  # of tiles
            return operand, None if gradient.fold else present(fmt, factor), turned
        assert self.scheme.fprop is not None
        source = self.scheme.fprop[1 if name == "dgrad" else 0].format
        operand, factor = ops.requantize(
            codes, scales, factor, str(source), k, str(fmt), form, seed, stream
        )
        return operand, present(fmt, factor), factor if engine.scales else None

    def needs_seed(self, need_x: bool, need_w: bool) -> bool:
        """True where a backward operand that is needed is rounded stochastically."""
        gemms = (self.scheme.dgrad if need_x else None, self.scheme.wgrad if need_w else None)
        return any(o.format is not None and o.format.stochastic for g in gemms if g for o in g)
