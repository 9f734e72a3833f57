"""docs/hardware.md from the engine table: ``python -m fp4compile.hardware > docs/hardware.md``."""

from __future__ import annotations

from dataclasses import dataclass

from .kernels import block_scaled, cuda_operands, engines
from .kernels.cuda_loader import ARCHITECTURES, architecture
from .kernels.formats import TensorFormat


@dataclass(frozen=True)
class Gpu:
    """``capability`` None: a CPU. ``run``: this project's tests have run there."""

    name: str
    capability: tuple[int, int] | None
    run: bool = False


GPUS = (
    Gpu("A100", (8, 0)),
    Gpu("L40, Ada", (8, 9)),
    Gpu("H200", (9, 0), run=True),
    Gpu("B200", (10, 0)),
    Gpu("B300", (10, 3)),
    Gpu("RTX 50", (12, 0)),
    Gpu("DGX Spark", (12, 1)),
    Gpu("CPU", None, run=True),
)

# What a GEMM multiplies: a title, both formats, whether the right one is saved codes transposed.
GEMMS = (
    ("NVFP4 × NVFP4", "nvfp4:row", "nvfp4:tensor", False),
    ("NVFP4, four over six", "nvfp4:row:four_over_six", "nvfp4:tensor:tile", False),
    ("NVFP4, FP8-exact", "nvfp4:row:fp8_exact", "nvfp4:tensor:fp8_exact", False),
    ("gradient NVFP4 × tiles transposed", "nvfp4:tensor:sr", "nvfp4:tensor:tile", True),
    ("gradient MXFP8 row × FP8-exact transposed", "mxfp8:row:sr", "nvfp4:row:fp8_exact", True),
    ("gradient MXFP8 × FP8-exact transposed", "mxfp8:32:sr", "nvfp4:row:fp8_exact", True),
    ("gradient MXFP8 × tiles transposed", "mxfp8:32:sr", "nvfp4:tensor:tile", True),
    ("MXFP8 row × MXFP8 row", "mxfp8:row", "mxfp8:row", False),
    ("MXFP8 × MXFP8", "mxfp8:32", "mxfp8:32", False),
    ("MXFP4 × MXFP4", "mxfp4", "mxfp4", False),
    ("FP8 1×128 × 128×128", "fp8:128", "fp8:tile", False),
)
WORDS = {
    "fp4": "native", "mxfp8": "native", "fp8_block": "native", "fp8": "exact on FP8",
    "bf16": "exact on BF16", "reference": "reference",
}  # fmt: skip

HEAD = """\
# Hardware

What multiplies which formats where. Written by `python -m fp4compile.hardware`; a test holds this
page to the engine table (`kernels/engines.py`).

- **native**: block-scaled tensor cores read codes and block scales (`kernels/block_scaled.py`),
  through `torch.nn.functional.scaled_mm`; on Hopper cuBLAS's FP8 GEMM with block scales.
- **exact on FP8, exact on BF16**: FP8 or BF16 tensor cores multiply code × block scale, which is a
  number of theirs, with the same result but for the order of sums.
- **reference**: FP32 multiplication of the decoded values.

*run*: tests have run it there. *compiled*: the kernels that quantize were compiled for it, and
what they compute was compared on other hardware; no GEMM has run there. *neither*: no kernel of
this project's is involved (PyTorch quantizes, slowly), and it has not run there. Nothing else is
claimed, no speed; `native` says only that the calls pass PyTorch's checks and that the operands,
read in the layout that NVIDIA documents, decode to the right values. An H100 is an sm_90 as well.
"""
TAIL = """\
On a Blackwell GPU each process multiplies a small matrix by each native engine first and compares
bits; where the library refuses or errs, the GEMM falls back to the engine in the next table, and
`fp4.explain` and `fp4compile doctor` say why.
"""


def engine_of(gpu: Gpu, left: str, right: str, turned: bool, native: bool = True) -> str:
    """The engine's name for two formats on ``gpu``, if its native engines work (or not)."""
    formats = TensorFormat.parse(left), TensorFormat.parse(right)
    return engines.by_capability(*formats, gpu.capability, turned, native).name


def state_of(gpu: Gpu, left: str, right: str) -> str:
    """run, compiled or neither."""
    if gpu.run:
        return "run"
    compiled = gpu.capability is not None and architecture(gpu.capability) in ARCHITECTURES
    formats = TensorFormat.parse(left), TensorFormat.parse(right)
    known = all(cuda_operands.supports(fmt) for fmt in formats)
    return "compiled" if compiled and known else "neither"


def _cell(gpu: Gpu, gemm: tuple[str, str, bool], native: bool) -> str:
    engine = engine_of(gpu, *gemm, native)
    return f"{WORDS[engine]}, {state_of(gpu, *gemm[:2])}"


def _table(gpus: tuple[Gpu, ...], native: bool) -> str:
    names = [
        gpu.name + (f" (sm_{gpu.capability[0]}{gpu.capability[1]})" if gpu.capability else "")
        for gpu in gpus
    ]
    rows = [[gemm[0], *(_cell(gpu, gemm[1:], native) for gpu in gpus)] for gemm in GEMMS]
    head = ["GEMM", *names]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def page() -> str:
    """docs/hardware.md."""
    blackwell = tuple(gpu for gpu in GPUS if gpu.capability in block_scaled.CAPABILITIES)
    older = tuple(gpu for gpu in GPUS if gpu not in blackwell)
    parts = [
        HEAD, "## Blackwell\n", _table(blackwell, True), TAIL,
        "## Blackwell without its native engines\n", _table(blackwell, False),
        "## Older GPUs and CPUs\n", _table(older, True),
    ]  # fmt: skip
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
