"""What a layer costs: bytes and operations as expressions in M (tokens), K and N (features).

A step of a kernel takes the longer of its bytes over the machine's copy bandwidth, times the share
of it that the kernel reaches, and its operations over the GEMM rate of its engine. Shares and rates
of the H200 are measured (docs/results.md). GEMM rates of the B200 are those of "End-to-End 4-Bit
Training" (12.6, 6.4 and 3.5 ms for 32,768 x 8192 -> 32,768); the others' and bandwidths are
datasheets', with the H200's shares. `predict` is for choosing between precisions, to about 15 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

M, K, N = sympy.symbols("M K N", positive=True)
TERA = 10**12
HIGH = 2  # bytes of a BF16 element
CODES = sympy.Rational(9, 16)  # an NVFP4 element with its share of a block scale


@dataclass(frozen=True)
class Machine:
    """Bytes and operations a second; ``source``: where the rates come from."""

    name: str
    bandwidth: float
    rates: dict[str, float]
    source: str
    shares: dict[str, float] = field(default_factory=dict)


# Percent of the copy bandwidth that kernels reach on an H200, between K = 4096 and 16384.
SHARES = {
    "quantize fp8_exact": 0.75,
    "quantize searched": 0.45,
    "quantize weight": 0.65,
    "act_quantize fp8_exact": 0.55,
    "act_quantize searched": 0.48,
    "decode": 0.62,
    "requantize": 0.335,
    "gradient row": 0.71,
    "gradient blocks": 0.63,
    "act_grad": 0.91,
    "quantize blocks": 0.98,
    "act_quantize blocks": 0.74,
    "gradient fp8": 0.79,
    "requantize blocks": 0.535,
    "pointwise": 0.92,
}
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "H200", 4.28 * TERA,
            {
                "bf16": 710 * TERA, "fp8": 1420 * TERA,
                "fp8_block": 1220 * TERA, "fp8_block wgrad": 885 * TERA,
            },
            "measured",
        ),
        Machine(
            "B200", 8.0 * TERA,
            {"bf16": 1400 * TERA, "fp8": 2750 * TERA, "fp4": 5030 * TERA}, "article",
        ),
        Machine(
            "GB300", 8.0 * TERA,
            {"bf16": 2500 * TERA, "fp8": 5000 * TERA, "fp4": 15000 * TERA}, "datasheet",
        ),
        Machine(
            "RTX 5090", 1.79 * TERA,
            {"bf16": 209 * TERA, "fp8": 419 * TERA, "fp4": 1676 * TERA}, "datasheet",
        ),
    )
}  # fmt: skip
OPERAND = {"bf16": 2, "fp8": 1, "fp4": 0}  # bytes beside the codes that a GEMM of the engine reads


@dataclass(frozen=True)
class Step:
    """One kernel: its name, the share of the bandwidth it reaches, bytes, operations, engine."""

    name: str
    share: str
    bytes: sympy.Expr
    operations: sympy.Expr = sympy.Integer(0)
    engine: str = ""

    def seconds(self, machine: Machine, sizes: dict) -> float:
        """Predicted time on ``machine`` at ``sizes`` ({M: ..., K: ..., N: ...})."""
        share = {**SHARES, **machine.shares}.get(self.share, 1.0)
        moving = float(self.bytes.subs(sizes)) / machine.bandwidth / share
        if not self.engine:
            return moving
        return max(moving, float(self.operations.subs(sizes)) / machine.rates[self.engine])


def _gemm(name: str, rows, cols, depth, engine: str) -> Step:
    element = {"bf16": 2, "fp4": CODES}.get(engine, 1)
    moved = element * (rows * depth + cols * depth) + HIGH * rows * cols
    return Step(f"GEMM {name}", "gemm", sympy.sympify(moved), 2 * rows * cols * depth, engine)


def mlp_bf16() -> list[Step]:
    """K -> N -> K with an activation, forward and backward, in BF16 compiled by Inductor."""
    return [
        _gemm("up", M, N, K, "bf16"),
        Step("activation", "pointwise", 2 * HIGH * M * N),
        _gemm("down", M, K, N, "bf16"),
        _gemm("down wgrad", K, N, M, "bf16"),
        _gemm("down dgrad", M, N, K, "bf16"),
        Step("activation gradient", "pointwise", 3 * HIGH * M * N),
        _gemm("up wgrad", N, K, M, "bf16"),
        _gemm("up dgrad", M, K, N, "bf16"),
    ]


def mlp_fp8_exact(engine: str = "fp8") -> list[Step]:
    """The same under ``fp8-exact``: backward on FP8 operands, exact but for the gradient."""
    made = CODES + OPERAND[engine]
    decoded = CODES + 1
    epilogue = 2 * HIGH
    weights = 2 * (2 * HIGH + made) * K * N
    return [
        Step("quantize x", "quantize fp8_exact", (HIGH + made) * M * K),
        Step("quantize weights", "quantize weight", weights),
        _gemm("up", M, N, K, engine),
        Step("activation, quantize", "act_quantize fp8_exact", (HIGH + made) * M * N),
        _gemm("down", M, K, N, engine),
        Step("factors of y", "pointwise", epilogue * M * K),
        Step("quantize g", "gradient row", (2 * HIGH + 2) * M * K),
        Step("decode h", "decode", decoded * M * N),
        _gemm("down wgrad", K, N, M, "fp8"),
        Step("decode weights", "decode", 2 * decoded * K * N),
        _gemm("down dgrad", M, N, K, "fp8"),
        Step("activation gradient", "act_grad", 3 * HIGH * M * N),
        Step("quantize dz", "gradient row", (HIGH + 2) * M * N),
        Step("decode x", "decode", decoded * M * K),
        _gemm("up wgrad", N, K, M, "fp8"),
        _gemm("up dgrad", M, K, N, "fp8"),
        Step("factors of gradients", "pointwise", epilogue * (M * K + 2 * K * N)),
    ]


def mlp_thinking_machines(forward: str = "bf16", backward: str = "bf16") -> list[Step]:
    """The same under ``thinking-machines``: every backward operand requantized to MXFP8."""
    made = CODES + OPERAND[forward]
    operand = 2 if backward == "bf16" else sympy.Rational(33, 32)
    turned = CODES + operand
    twice = 2 * (HIGH + operand) if backward == "bf16" else HIGH + 2 * operand
    return [
        Step("quantize x", "quantize searched", (HIGH + made) * M * K),
        Step("quantize weights", "quantize weight", 2 * (2 * HIGH + made) * K * N),
        _gemm("up", M, N, K, forward),
        Step("activation, quantize", "act_quantize searched", (HIGH + made) * M * N),
        _gemm("down", M, K, N, forward),
        Step("factors of y", "pointwise", 2 * HIGH * M * K),
        Step("quantize g", "gradient blocks", twice * M * K),
        Step("requantize h", "requantize", turned * M * N),
        _gemm("down wgrad", K, N, M, backward),
        Step("requantize weights", "requantize", 2 * turned * K * N),
        _gemm("down dgrad", M, N, K, backward),
        Step("activation gradient", "act_grad", 3 * HIGH * M * N),
        Step("quantize dz", "gradient blocks", twice * M * N),
        Step("requantize x", "requantize", turned * M * K),
        _gemm("up wgrad", N, K, M, backward),
        _gemm("up dgrad", M, K, N, backward),
    ]


def mlp_fp8_block() -> list[Step]:
    """The same under ``fp8-block``: codes are the operands; two scaled blocks cost WGRAD more."""
    made = 1 + sympy.Rational(4, 128)
    forward, wgrad = "fp8_block", "fp8_block wgrad"
    return [
        Step("quantize x", "quantize blocks", (HIGH + made) * M * K),
        Step("quantize weights", "quantize blocks", 2 * (HIGH + 1) * K * N),
        _gemm("up", M, N, K, forward),
        Step("activation, quantize", "act_quantize blocks", (HIGH + made) * M * N),
        _gemm("down", M, K, N, forward),
        Step("quantize g", "gradient fp8", (HIGH + 2 * made) * M * K),
        Step("requantize h", "requantize blocks", 2 * made * M * N),
        _gemm("down wgrad", K, N, M, wgrad),
        Step("transpose weights", "decode", 2 * 2 * K * N),
        _gemm("down dgrad", M, N, K, forward),
        Step("activation gradient", "act_grad", 3 * HIGH * M * N),
        Step("quantize dz", "gradient fp8", (HIGH + 2 * made) * M * N),
        Step("requantize x", "requantize blocks", 2 * made * M * K),
        _gemm("up wgrad", N, K, M, wgrad),
        _gemm("up dgrad", M, K, N, forward),
    ]


def predict(steps: list[Step], machine: Machine, tokens: int, width: int, hidden: int) -> float:
    """Milliseconds of ``steps`` on ``machine`` for an MLP width -> hidden -> width."""
    sizes = {M: tokens, K: width, N: hidden}
    return 1e3 * sum(step.seconds(machine, sizes) for step in steps)
