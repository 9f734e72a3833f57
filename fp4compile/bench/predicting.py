"""A GPT's whole training step by the cost model, beside what the article measured on a B200."""

from __future__ import annotations

from ..kernels.formats import Scheme
from ..passes import cost
from ..passes.cost import Step
from ..passes.machines import MACHINES, Machine
from ..policy import Policy

# "End-to-End 4-Bit Training" (2026), one B200: 4 blocks, 16 heads, context 256, vocabulary 8192,
# 32,768 tokens; BF16's time over that of the recipe of Thinking Machines, whole step, by width.
ARTICLE = {2048: 1.18, 4096: 1.28, 8192: 1.38}
ARTICLE_STEP = {"layers": 4, "context": 256, "vocabulary": 8192, "tokens": 32768}
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


def run(widths: tuple[int, ...] = (2048, 4096, 8192), tokens: int = 32768) -> dict:
    """Both tables for every machine, as a dict."""
    rows = [
        {"machine": machine.name, "rates": machine.sources, "d": d,
         "mlp_ms": mlp_row(machine, d, tokens), "step_ms": step_row(machine, d),
         "article": ARTICLE.get(d) if machine.name == "B200" else None}
        for machine in MACHINES.values() for d in widths
    ]  # fmt: skip
    return {"bench": "predict", "tokens": tokens, "step": ARTICLE_STEP, "rows": rows}
