"""Machines that the cost model knows, and the engines that multiply two formats on each.

Every rate says where it is from: "measured" (docs/results.md), "article" ("End-to-End 4-Bit
Training", one B200: 12.6, 6.4 and 3.5 ms for 32,768 x 8192 -> 32,768 in BF16, FP8 and NVFP4),
"datasheet" (dense, boost clocks: no GEMM reaches it) or "assumed".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fp4compile.kernels import engines
from fp4compile.kernels.errors import InputError
from fp4compile.kernels.formats import BITS, BLOCK, TensorFormat

TERA = 10.0**12


@dataclass(frozen=True)
class Rate:
    """Bytes or operations a second, and where the number is from."""

    value: float
    source: str


def _rates(source: str, **tera: float) -> dict[str, Rate]:
    return {name: Rate(value * TERA, source) for name, value in tera.items()}


@dataclass(frozen=True)
class Machine:
    """A GPU: copy bandwidth, GEMM rates and compute capability, which says its engines.

    ``device``: words of which one is in the name that its driver gives. ``issue``: instructions of
    single threads a second. ``launch``: seconds that the smallest kernel takes in a CUDA graph.
    """

    name: str
    device: tuple[str, ...]
    capability: tuple[int, int]
    bandwidth: Rate
    issue: Rate
    rates: dict[str, Rate] = field(hash=False)
    launch: Rate = Rate(1.6e-6, "assumed")

    @property
    def sources(self) -> str:
        """Where the rates are from, each word once."""
        every = (self.bandwidth, self.issue, *self.rates.values())
        return ", ".join(dict.fromkeys(rate.source for rate in every))


def _issue(multiprocessors: int, gigahertz: float) -> Rate:
    """128 lanes a multiprocessor at its boost clock."""
    return Rate(multiprocessors * 128 * gigahertz * 1e9, "datasheet")


MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "H200", ("H200",), (9, 0), Rate(4.28 * TERA, "measured"),
            _issue(132, 1.98),
            {
                **_rates("measured", bf16=710, fp8=1420, fp8_block=1220, fp8_blocks=885),
                **_rates("datasheet", fp32=67),
            },
            Rate(1.6e-6, "measured"),
        ),
        Machine(
            "B200", ("B200",), (10, 0), Rate(8.0 * TERA, "datasheet"), _issue(148, 1.965),
            {**_rates("article", bf16=1400, fp8=2750, fp4=5030), **_rates("datasheet", fp32=75)},
        ),
        Machine(
            "GB300", ("GB300", "B300"), (10, 3), Rate(8.0 * TERA, "datasheet"),
            _issue(160, 1.92), _rates("datasheet", bf16=2500, fp8=5000, fp4=15000, fp32=75),
        ),
        Machine(
            "RTX 5090", ("RTX 5090",), (12, 0), Rate(1.79 * TERA, "datasheet"),
            _issue(170, 2.407), _rates("datasheet", bf16=209, fp8=419, fp4=1676, fp32=105),
        ),
    )
}  # fmt: skip


def named(name: str) -> Machine:
    """The machine of a name, in any case; `InputError` with the known ones."""
    for machine in MACHINES.values():
        if machine.name.lower() == name.strip().lower():
            return machine
    raise InputError(f"unknown machine {name!r} (known: {', '.join(MACHINES)})")


def of_device(name: str) -> Machine | None:
    """The machine by its driver's name of the GPU ("NVIDIA H200"); None where it is not known."""
    found = (m for m in MACHINES.values() if any(word in name for word in m.device))
    return next(found, None)


# ---- engines ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """What an engine of `kernels.engines` costs: the name of its rate, and bytes an element.

    ``beside(fmt)``: what quantizing writes beside the codes; ``operand(fmt)``: what a GEMM reads.
    """

    rate: str
    beside: Callable[[TensorFormat], float]
    operand: Callable[[TensorFormat], float]


def stored(fmt: TensorFormat) -> float:
    """Bytes an element of codes and block scales."""
    return BITS[fmt.format] / 8 + scale_bytes(fmt)


def scale_bytes(fmt: TensorFormat) -> float:
    """Bytes an element of block scales: a byte each, or FP32, of a tile once."""
    if not fmt.float_scales:
        return 1 / BLOCK[fmt.format]
    return 4 / BLOCK[fmt.format] ** (2 if fmt.block == "tile" else 1)


def _own(fmt: TensorFormat, scales: float) -> float:
    """Beside the codes: scales again, as tensor cores read them, or E4M3 values of its own."""
    return scales if fmt.format in ("mxfp8", "fp8") else 1.0


ENGINES: dict[str, Engine] = {
    "fp4": Engine("fp4", scale_bytes, stored),
    "mxfp8": Engine(
        "fp8",
        lambda fmt: _own(fmt, 0.0 if fmt.block == "row" else scale_bytes(fmt)),
        lambda fmt: 1.0 + (0.0 if fmt.exact_in_fp8 else scale_bytes(fmt)),
    ),
    "fp8": Engine("fp8", lambda fmt: _own(fmt, 0.0), lambda fmt: 1.0),
    "fp8_block": Engine("fp8_block", lambda fmt: 0.0, stored),
    "bf16": Engine("bf16", lambda fmt: 2.0, lambda fmt: 2.0),
    "reference": Engine("fp32", lambda fmt: 4.0, lambda fmt: 4.0),
}


def choose(left: TensorFormat, right: TensorFormat, machine: Machine, turned: bool = False) -> str:
    """The engine of ``machine`` for two formats, if its software has it, as `engines.choose`."""
    return engines.by_capability(left, right, machine.capability, turned).name


def rate_of(engine: str, right: TensorFormat) -> str:
    """The rate of a GEMM: fp8_block is slower where both operands are in blocks of 1x128."""
    rate = ENGINES[engine].rate
    return "fp8_blocks" if rate == "fp8_block" and right.block != "tile" else rate
