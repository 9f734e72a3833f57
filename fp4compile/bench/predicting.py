"""A GPT's whole training step by the cost model, beside what the article measured on a B200."""

from __future__ import annotations

from ..kernels.formats import Scheme, TensorFormat
from ..passes import cost
from ..passes.cost import Step
from ..passes.machines import MACHINES, Machine, stored
from ..policy import Policy

# "End-to-End 4-Bit Training" (2026), one B200: 4 blocks, 16 heads, context 256, vocabulary 8192,
# 32,768 tokens; BF16's time over that of the recipe of Thinking Machines, whole step, by width.
ARTICLE = {2048: 1.18, 4096: 1.28, 8192: 1.38}
ARTICLE_STEP = {"layers": 4, "context": 256, "vocabulary": 8192, "tokens": 32768}
SEARCH = "four_over_six"
RECIPES = ("fp8-exact", "thinking-machines")
# Bytes an element of the residual stream (FP32 under autocast, read and written by two norms and
# two additions, and backward), of the logits and of a parameter of AdamW. Counted, not timed.
BLOCK_BYTES, LOGIT_BYTES, ADAMW_BYTES, CAST_BYTES = 96, 20, 28, 12


def low(recipe: str) -> Scheme:
    """The scheme ``low`` of a recipe; ``bf16``: the original precision."""
    return Policy.recipe(recipe).schemes["low"]


def gpt(
    scheme: Scheme, machine: Machine, width: int, layers: int, context: int, vocabulary: int,
    tokens: int,
) -> list[Step]:  # fmt: skip
    """The kernels of one step: ``scheme`` in the MLPs, all else in BF16, AdamW in FP32."""
    original, d, m = Scheme(), width, tokens
    # forward, and backward 2.5 times as much; causal products take half
    attention = 3.5 * 4 * m * context * d / 2
    block = [
        *cost.linear(original, machine, m, d, 3 * d), *cost.linear(original, machine, m, d, d),
        Step("attention", 0.92, 14 * m * d, attention, "bf16"),
        Step("norms, residuals", 0.92, BLOCK_BYTES * m * d),
        *cost.chain((scheme, scheme), machine, m, d, 4 * d, d),
    ]  # fmt: skip
    matrices = 12 * layers * d * d + vocabulary * d
    return [
        *(block * layers),
        *cost.linear(original, machine, m, d, vocabulary),
        Step("loss", 0.92, LOGIT_BYTES * m * vocabulary),
        Step("casts of weights and gradients", 0.92, CAST_BYTES * matrices),
        Step("AdamW", cost.share("optimizer"), ADAMW_BYTES * (matrices + vocabulary * d)),
    ]


def mlp_row(machine: Machine, width: int, tokens: int) -> dict:
    """One MLP d -> 4d -> d, forward and backward: milliseconds by arm."""
    found = {}
    for arm in ("bf16", *RECIPES):
        scheme = low(arm)
        steps = cost.chain((scheme, scheme), machine)
        found[arm] = cost.milliseconds(steps, machine, tokens, width, 4 * width)
    return found


def step_row(machine: Machine, width: int) -> dict:
    """The article's whole step: milliseconds by arm."""
    arms = ("bf16", *RECIPES)
    steps = {arm: gpt(low(arm), machine, width, **ARTICLE_STEP) for arm in arms}
    return {arm: 1e3 * cost.seconds(steps[arm], machine) for arm in arms}


def gelu_quantize(machine: Machine, search: str | None) -> float:
    """Milliseconds of GELU with quantize of 32,768 x 32,768 to codes and scales, row scales."""
    fmt, size = TensorFormat("nvfp4", outer="row", scale_search=search), 32768
    moved = (2 + stored(fmt)) * size * size
    part = cost.share("act_quantize codes", fmt)
    return 1e3 * Step("activation, quantize", part, moved, issue=True).seconds(machine)


def kernel_row(machine: Machine) -> dict:
    """`gelu_quantize` plain and with four over six; the article's kernel took 1.4 ms."""
    found = {"plain": gelu_quantize(machine, None), "four over six": gelu_quantize(machine, SEARCH)}
    return {"machine": machine.name, **found, "article": 1.4 if machine.name == "B200" else None}


def run(widths: tuple[int, ...] = (2048, 4096, 8192), tokens: int = 32768) -> dict:
    """The tables for every machine, as a dict."""
    rows = [
        {"machine": machine.name, "rates": machine.sources, "d": d,
         "mlp_ms": mlp_row(machine, d, tokens), "step_ms": step_row(machine, d),
         "article": ARTICLE.get(d) if machine.name == "B200" else None}
        for machine in MACHINES.values() for d in widths
    ]  # fmt: skip
    quantizers = [kernel_row(machine) for machine in MACHINES.values()]
    return {
        "bench": "predict", "tokens": tokens, "step": ARTICLE_STEP, "rows": rows,
        "gelu_quantize_ms": quantizers,
    }  # fmt: skip
