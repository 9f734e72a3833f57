"""What `fp4compile verify` checks with: formats, schemes, matrices, and comparing two results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import torch
from torch import Tensor

from .kernels import engines, fallback
from .kernels.errors import FormatError
from .kernels.formats import CHOICES, FORMATS, SEARCHES, Scheme, TensorFormat
from .policy import Policy, recipes

SHAPES = ((37, 17), (70, 144), (130, 272))
LONG = ((5, 4096), (3, 20000))  # rows that the GPU's kernels share in other ways
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


class Wrong(Exception):
    """What differs: the text names the part, the first place, and both values."""


# ---- tables -----------------------------------------------------------------------------------


@cache
def formats() -> tuple[TensorFormat, ...]:
    """Every legal format, by the tables of `kernels.formats`."""
    found = []
    for name in FORMATS:
        keys = CHOICES[name]
        for values in product(*keys.values()):
            for search in (None, *SEARCHES, (1.0, 1.5)):
                try:
                    words = dict(zip(keys, values))
                    found.append(TensorFormat(name, scale_search=search, **words))
                except FormatError:
                    continue
    return tuple(dict.fromkeys(found))


def schemes() -> dict[str, Scheme]:
    """The recipes' schemes, equal ones once."""
    found: dict[Scheme, str] = {}
    for recipe in recipes():
        for name, scheme in Policy.recipe(recipe).schemes.items():
            if scheme.fprop is not None:
                found.setdefault(scheme, f"{recipe} {name}")
    return {name: scheme for scheme, name in found.items()}


def forms(fmt: TensorFormat, device: torch.device) -> list[str]:
    """The forms in which a GEMM of ``device`` reads the format, and "none"."""
    return ["none", engines.choose(fmt, fmt, device).operand]


def kernel(device: torch.device, *found: TensorFormat) -> str:
    """"" where ``device`` has kernels for the formats, else why they are not checked."""
    module = fallback.native_for(device)
    if module is None:
        return "this machine has no kernels for it: the reference serves"
    unknown = [str(fmt) for fmt in found if not module.supports(fmt)]
    return f"no kernel: the reference serves {', '.join(unknown)}" if unknown else ""


# ---- comparing --------------------------------------------------------------------------------


def bits(x: Tensor) -> Tensor:
    """Bit patterns, all NaN alike."""
    if not x.is_floating_point():
        return x
    x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x).contiguous()
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same(parts: dict[str, tuple[Tensor, Tensor]], case: str) -> None:
    """Every part got bit for bit what is wanted.

    Raises:
        Wrong: with the first place that differs.
    """
    for part, (got, want) in parts.items():
        got, want = got.cpu(), want.cpu()
        if got.shape != want.shape or got.dtype != want.dtype:
            kinds = (f"{list(t.shape)} {t.dtype}" for t in (got, want))
            raise Wrong("{}, {}: got {}, want {}".format(case, part, *kinds))
        wrong = bits(got) != bits(want)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise Wrong(
                f"{case}, {part}: {int(wrong.sum())} of {wrong.numel()} differ, first at"
                f" {list(at)}: got {got[at].item()!r}, want {want[at].item()!r}"
            )


def near(parts: dict[str, tuple[Tensor, Tensor]], bound: float, case: str) -> None:
    """Every part is within ``bound`` of what is wanted, by the norm of the difference.

    Raises:
        Wrong: with the error.
    """
    for part, (got, want) in parts.items():
        a, b = got.cpu().double(), want.cpu().double()
        if a.shape != b.shape:
            raise Wrong(f"{case}, {part}: got {list(a.shape)}, want {list(b.shape)}")
        error = float((a - b).norm() / b.norm().clamp_min(1e-300))
        if not error <= bound:
            raise Wrong(f"{case}, {part}: {error:.2e} off, {bound:.0e} is the bound")


def matrix(rows: int, cols: int, dtype: torch.dtype, nonfinite: bool = False) -> Tensor:
    """Gaussian rows of widely different sizes, with ties, zeros of both signs and tiny values."""
    generator = torch.Generator().manual_seed(1000 * rows + cols)
    x = torch.randn(rows, cols, generator=generator)
    x *= torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator).float())
    x.view(-1)[::7] = (x.view(-1)[::7] * 4).round() / 4
    x.view(-1)[3::11] = -0.0
    x[rows // 2] = -0.0
    x[:, cols // 2] *= 1e-30
    if nonfinite:
        x[rows // 3, cols // 2] = float("nan")
        x[2 * rows // 3, cols // 3] = float("-inf")
    return x.to(dtype)


def inputs(device: torch.device, few: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Matrices of every kind of shape and dtype, on the CPU, with a name."""
    shapes = (*SHAPES, *LONG) if device.type == "cuda" and not few else SHAPES
    for i, (rows, cols) in enumerate(shapes[: 2 if few else None]):
        dtype = DTYPES[i % len(DTYPES)]
        yield f"{rows} x {cols} {short(dtype)}", matrix(rows, cols, dtype)
    yield "70 x 144 with NaN and infinity", matrix(70, 144, torch.bfloat16, True)


def short(dtype: torch.dtype) -> str:
    """A dtype's name: bfloat16."""
    return str(dtype).removeprefix("torch.")
