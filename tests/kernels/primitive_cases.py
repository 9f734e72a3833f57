"""Arguments for every primitive operator, shared by the tests of all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from fp4compile.kernels import ops  # noqa: F401 - defines torch.ops.fp4
from layer_oracle import data
from torch import Tensor

fp4 = torch.ops.fp4
Case = tuple[str, tuple]
SEED, STREAM = torch.tensor([0x1234_5678_9ABC]), 5

FORWARD = (
    "nvfp4:row:fp8_exact", "nvfp4:tensor:fp8_exact", "nvfp4:row:four_over_six", "nvfp4:tensor",
    "nvfp4:tensor:tile", "nvfp4:row:search=1/1.5/0.9", "nvfp4:tensor:had16", "nvfp4:row:had32",
    "mxfp8:32", "mxfp8:128", "mxfp8:row", "mxfp8:32:had32", "mxfp4", "mxfp4:had32", "s2f6",
    "fp8:128", "fp8:tile", "fp8:128:had16",
)  # fmt: skip
GRADIENTS = (
    ("mxfp8:row:sr", "mxfp8:row:sr"), ("mxfp8:32:sr", "mxfp8:32:sr"), ("mxfp8:128:sr", "mxfp4:sr"),
    ("nvfp4:tensor:sr", "nvfp4:tensor:sr:had16"), ("mxfp4:sr", "mxfp4:sr:had32"), ("mxfp8:32", ""),
    ("", "mxfp8:row:sr"), ("nvfp4:tensor:sr", "mxfp8:row:sr"), ("", ""), ("mxfp8:32:sr:had32", "s2f6"),
    ("fp8:128", "fp8:128"), ("fp8:128:sr", "fp8:128:sr"), ("", "fp8:128"),
)  # fmt: skip
BACKWARD = (
    "mxfp8:32:sr",
    "mxfp8:row:sr",
    "mxfp4:sr",
    "nvfp4:tensor:sr",
    "nvfp4:tensor:tile",
    "mxfp8:128",
    "fp8:128",
)
FP8 = ("fp8:128", "fp8:tile", "fp8:128:had16")  # as an engine that reads scales takes it
ACTS = ("gelu", "gelu_tanh", "relu", "relu2", "silu", "quick_gelu")


class Tensors:
    """The tensors of a layer of m tokens and n columns, with zeros, both signs of it, NaN and Inf."""

    def __init__(self, m: int, n: int, seed: int = 0, rough: bool = False) -> None:
        self.m, self.n = m, n
        self.acc, self.up, self.g = (data(m, n, seed=seed + i) for i in range(3))
        if rough and m > 2 and n > 2:
            self.acc[1] = -0.0
            self.acc[:, 1] *= 1e-30
            self.acc[2] *= 1e4
            self.g[0, 2], self.up[m - 1, 0] = float("inf"), float("nan")
            self.g[:, n // 2] *= 1e-3
        self.row, self.col = data(m, seed=seed + 3).abs(), torch.tensor([0.5])
        self.bias, self.wide = data(n, seed=seed + 4), data(n, seed=seed + 5).abs()

    @property
    def terms(self) -> list[tuple]:
        """Affine terms with and without factors and bias, in FP32 and BF16."""
        return [
            (self.acc.bfloat16(), self.row, self.col, self.bias), (self.acc, None, self.wide, None),
            (self.up, None, None, self.bias.bfloat16()), (self.acc.half(), None, None, None),
        ]  # fmt: skip


def form(text: str) -> str:
    return "f32" if text else "none"


def forward_cases(t: Tensors, forms: tuple[str, ...] = ("f32", "bf16", "none")) -> Iterator[Case]:
    for i, fmt in enumerate(FORWARD):
        for transpose in (False, True):
            for x in (t.acc, t.acc.bfloat16(), t.g.t().contiguous().t()):
                yield "quantize", (x, fmt, forms[i % len(forms)], transpose)
        act, term = ACTS[i % len(ACTS)], t.terms[i % 4]
        yield "act_quantize", (*term, act, fmt, forms[0])
        yield "glu_quantize", (*term, *t.terms[(i + 1) % 4], act, fmt, forms[0])
    for fmt in ("nvfp4:row:fp8_exact", "nvfp4:tensor:fp8_exact", "mxfp8:row", *FP8):
        yield "quantize", (t.acc, fmt, "e4m3", False)


def saved_cases(t: Tensors) -> Iterator[Case]:
    for fmt in FORWARD:
        codes, scales, factor, _ = fp4.quantize(t.acc, fmt, "none", False)
        for transpose in (False, True):
            yield "decode", (codes, scales, fmt, t.n, "f32", transpose)
        for target in BACKWARD if "had" not in fmt else ():
            yield "requantize", (codes, scales, factor, fmt, t.n, target, "f32", SEED, STREAM)


def gradient_cases(t: Tensors) -> Iterator[Case]:
    for i, (d, w) in enumerate(GRADIENTS):
        act, term, folds = ACTS[i % len(ACTS)], t.terms[i % 4], (None, t.row)
        for fold, sums in zip(folds, (True, False)):
            rest = (d, w, form(d), form(w), sums, SEED, STREAM)
            yield "quantize_grad", (t.g.bfloat16() if sums else t.g, fold, *rest)
            yield "act_grad_quantize", (t.g, t.row, t.col, *term, act, fold, *rest)
            yield "act_grad", (t.g, t.row, t.col, *term, act, fold, sums)
        forms = (form(d), form(w)) * 2
        both = (*term, *t.terms[(i + 1) % 4], act, None, t.row, d, w, d, w, *forms, True, True)
        yield "glu_grad_quantize", (t.g, None, t.wide, *both, SEED, STREAM)
        yield "glu_grad", (t.g, None, t.wide, *both[:11], i % 2 == 0)


def fp8_cases(t: Tensors) -> Iterator[Case]:
    """Operands of an engine that reads scales beside them, which come in the factor's place."""
    for fmt in FP8:
        codes, scales, factor, _ = fp4.quantize(t.acc, fmt, "none", False)
        for transpose in (False, True):
            yield "decode", (codes, scales, fmt, t.n, "e4m3", transpose)
        if "had" not in fmt:
            target = ("fp8:128:sr", "e4m3", SEED, STREAM)
            yield "requantize", (codes, scales, factor, fmt, t.n, *target)
    for d, w in (("fp8:128", "fp8:128:sr"), ("fp8:128:sr", ""), ("", "fp8:128")):
        forms = ("e4m3" if d else "none", "e4m3" if w else "none")
        rest = (None, d, w, *forms, True, SEED, STREAM)
        yield "quantize_grad", (t.g, *rest)
        yield "act_grad_quantize", (t.g, t.row, t.col, *t.terms[0], "gelu", *rest)


def product_cases(t: Tensors) -> Iterator[Case]:
    for out in (torch.float32, torch.bfloat16):
        other = data(9, t.n + 16, seed=8)
        yield "scaled_mm", (t.up.nan_to_num(), other, "reference", t.m, 9, out)
        yield "scaled_mm", (t.up.nan_to_num().bfloat16(), other, "reference", t.m, 9, out)


def every_case(t: Tensors) -> list[Case]:
    """Every primitive over every kind of format."""
    makers = (forward_cases, saved_cases, gradient_cases, fp8_cases, product_cases)
    return [case for maker in makers for case in maker(t)]


def results(case: Case) -> list[Tensor]:
    out = getattr(fp4, case[0])(*case[1])
    return list(out) if isinstance(out, (tuple, list)) else [out]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Shape, dtype and every bit alike, all NaN counted as one."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        a, b = (torch.where(t.isnan(), float("nan"), t).contiguous() for t in (a, b))
        word = torch.int32 if a.dtype == torch.float32 else torch.int16
        a, b = a.view(word), b.view(word)
    return torch.equal(a, b)
