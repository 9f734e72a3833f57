"""The rewritten layers written out with `fp4compile.quantize(...).dequantize()` and FP32 matmul.

Nothing of the operators, of autograd or of the engines is used. Only the gradient's copy that
WGRAD reads needs the reference: it is rounded with the transposed bits of the gradient's elements.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from fp4compile.kernels import reference
from fp4compile.kernels.formats import BLOCK, Operand, Scheme, TensorFormat
from fp4compile.kernels.philox import random16
from fp4compile.kernels.quantized import QuantizedTensor, quantize
from torch import Tensor
from torch.nn.functional import pad

from fp4compile.policy import Policy

RECIPES = ("fp8-exact", "thinking-machines", "mxfp8", "nvidia", "mxfp4", "fp8-block")
LOW = {r: str(Policy.recipe(r).schemes["low"]) for r in RECIPES}
EXACT, ARTICLE = LOW["fp8-exact"], LOW["thinking-machines"]
WEIGHT, ACTIVATION, ROTATED, NEXT_LAYER = 2, 3, 8, 16  # streams; the gradient's is 0


def every_scheme() -> dict[str, str]:
    """The text of every scheme of the six recipes, once each, under the first name it has."""
    names: dict[str, str] = {}
    for recipe in RECIPES:
        for name, scheme in Policy.recipe(recipe).schemes.items():
            names.setdefault(str(scheme), f"{recipe}/{name}")
    return {name: text for text, name in names.items()}


def mixes(text: str) -> list[str]:
    """``text`` and its legal variants with one or two GEMMs in the original precision."""
    scheme, found = Scheme.parse(text), [text]
    for gemms in (("fprop",), ("dgrad",), ("wgrad",), ("dgrad", "wgrad"), ("fprop", "dgrad")):
        changes = dict.fromkeys(gemms)
        kept = [op for gemm in ("dgrad", "wgrad") if gemm not in gemms
                for op in getattr(scheme, gemm) or ()]  # fmt: skip
        if "fprop" not in gemms or all(op.source != "fprop" for op in kept):
            found.append(str(replace(scheme, **changes)))
    return list(dict.fromkeys(found))


def data(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian numbers that depend on nothing but the arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(got: Tensor, want: Tensor) -> float:
    """Relative distance |got - want| / |want|, Frobenius norms in FP64."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape
    return float((got - want).norm() / want.norm().clamp(min=1e-300))


def next_seed() -> Tensor:
    """The seed that the next backward node will draw; the generator's state is put back."""
    state = torch.get_rng_state()
    seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64)
    torch.set_rng_state(state)
    return seed


def quantized(
    x: Tensor, fmt: TensorFormat, seed: Tensor | None = None, stream: int = 0
) -> QuantizedTensor:
    """x in ``fmt`` through the public function."""
    keys = {f.name: getattr(fmt, f.name) for f in fields(fmt)}
    return quantize(x, keys.pop("format"), **keys, seed=seed, stream=stream)


@dataclass
class Decoded:
    """code x block scale [R, Cp], padding included (a rotation spreads errors onto it), and outer
    scales [R or 1, 1]. Two of them are multiplied as (values' product x left outer) x right outer,
    so that what follows in a chain sees the bits that the operator sees."""

    values: Tensor
    outer: Tensor

    def times(self, other: Decoded) -> Tensor:
        """self [R, K] other [S, K]^T, FP32 [R, S]."""
        columns = max(self.values.shape[1], other.values.shape[1])
        a, b = (pad(d.values, (0, columns - d.values.shape[1])) for d in (self, other))
        return (a @ b.t()) * self.outer * other.outer.t()


def decoded(q: QuantizedTensor) -> Decoded:
    """A quantized matrix as `Decoded`, through the public `dequantize`."""
    shape = torch.Size((q.shape[0], reference.padded(q.shape[1], q.format)))
    if q.outer.numel() == 0:
        return Decoded(replace(q, shape=shape).dequantize(), torch.ones(1, 1))
    ones = torch.ones_like(q.outer)
    return Decoded(replace(q, shape=shape, outer=ones).dequantize(), q.outer.reshape(-1, 1))


def transposed_gradient(g: Tensor, fmt: TensorFormat, seed: Tensor | None, stream: int) -> Decoded:
    """g^T [N, M] in ``fmt``; without rotation, element (n, m) takes the bits of g's (m, n)."""
    if fmt.rotation or not fmt.stochastic:
        return decoded(quantized(g.t(), fmt, seed, stream + ROTATED))
    assert seed is not None
    m, n = g.shape
    width = -(-n // BLOCK[fmt.format]) * BLOCK[fmt.format]
    index = torch.arange(m)[:, None] * width + torch.arange(n)
    bits = random16(seed, stream, index).t().contiguous()
    codes, scales, outer = reference.quantize(g.t().contiguous(), fmt, bits=bits)
    return decoded(QuantizedTensor(codes, scales, outer, fmt, torch.Size((n, m))))


class Written:
    """One linear in FP32: y = x w^T + b, then its gradients; x [M, K], w [N, K]."""

    def __init__(self, text: str, x: Tensor, w: Tensor, b: Tensor | None) -> None:
        self.scheme, self.x, self.w = Scheme.parse(text), x.detach().float(), w.detach().float()
        self.y = self._y() if b is None else self._y() + b.detach().float()

    def _y(self) -> Tensor:
        if self.scheme.fprop is None:
            return self.x @ self.w.t()
        left, right = (op.format for op in self.scheme.fprop)
        self.xq, self.wq = quantized(self.x, left), quantized(self.w, right)
        return decoded(self.xq).times(decoded(self.wq))

    def backward(self, g: Tensor, seed: Tensor | None, stream: int = 0) -> tuple[Tensor, ...]:
        """dx, dw, db in FP32 for g [M, N]."""
        g = g.detach().float()
        return self._dx(g, seed, stream), self._dw(g, seed, stream), g.double().sum(0).float()

    def _dx(self, g: Tensor, seed: Tensor | None, stream: int) -> Tensor:
        if self.scheme.dgrad is None:
            return g @ self.w
        left, right = self.scheme.dgrad
        saved = self.wq if right.source == "fprop" else None
        other = self._other(right, saved, self.w, seed, stream + WEIGHT)
        return decoded(quantized(g, left.format, seed, stream)).times(other)

    def _dw(self, g: Tensor, seed: Tensor | None, stream: int) -> Tensor:
        if self.scheme.wgrad is None:
            return g.t() @ self.x
        left, right = self.scheme.wgrad
        saved = self.xq if right.source == "fprop" else None
        other = self._other(right, saved, self.x, seed, stream + ACTIVATION)
        if left.fold:
            tokens = decoded(self.xq)
            other = Decoded(tokens.values[:, : self.x.shape[1]].t(), torch.ones(1, 1))
            g = torch.where((self.x == 0).all(1, keepdim=True), g * 0, g * tokens.outer)
        return transposed_gradient(g, left.format, seed, stream).times(other)

    @staticmethod
    def _other(
        op: Operand, saved: QuantizedTensor | None, t: Tensor, seed: Tensor | None, stream: int
    ) -> Decoded:
        """The backward operand beside the gradient, [K, reduced axis]."""
        if saved is None:
            return decoded(quantized(t.t(), op.format))
        if op.format is None:  # exact along the other axis; a row scale would have to be folded
            weight = decoded(saved)
            return Decoded(weight.values[:, : t.shape[1]].t(), weight.outer)
        return decoded(quantized(saved.dequantize().t(), op.format, seed, stream))
