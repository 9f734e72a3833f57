"""What `fp4compile verify` times: the article's table on this GPU, beside its figures for a B200.

"End-to-End 4-Bit Training" (2026): GEMMs and quantize kernels at 32,768 x 8192 -> 32,768, one MLP
layer of width 8192, whole steps at three widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from .bench import kernels, predicting
from .bench.arms import MLP_ONLY, Arm, bf16, fp4
from .bench.timing import median_ms
from .bench.training import gpt_step, measure, mlp_parts
from .kernels.formats import Scheme
from .kernels.layer import Layer
from .passes import cost, machines
from .passes.machines import Machine
from .verify_cases import schemes

TOKENS, WIDTH, HIDDEN = 32768, 8192, 32768
ARTICLE_GEMM = {"BF16": 12.6, "fp8": 6.4, "mxfp8": 6.4, "fp4": 3.5}  # ms by engine
ARTICLE_KERNELS = {"GELU": 1.2, "gelu_tanh + quantize, plain, no factors": 1.4}
ARTICLE_MLP = {"bf16": (28.0, 55.0), "thinking-machines": (11.0, 31.0)}  # forward, backward
RECIPES = ("fp8-exact", "thinking-machines")


def arms() -> dict[str, Arm]:
    """BF16 first: the others are compared with it."""
    return {"bf16": bf16, **{name: fp4(name, MLP_ONLY) for name in RECIPES}}


def row(
    what: str, ms: float | None, article: float | None = None, predicted: float | None = None,
    **more: object,
) -> dict:  # fmt: skip
    """One line of the table."""
    found = {"what": what, "ms": ms, "article_ms": article, "predicted_ms": predicted, **more}
    return {
        key: round(value, 3) if isinstance(value, float) else value
        for key, value in found.items() if value is not None
    }  # fmt: skip


def machine() -> Machine | None:
    """This GPU in the cost model."""
    return machines.of_device(torch.cuda.get_device_name())


def gemms(tokens: int = TOKENS, width: int = WIDTH, hidden: int = HIDDEN) -> Iterator[dict]:
    """x [tokens, width] times w [hidden, width]: BF16, and each engine that a recipe takes here."""
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(hidden, width, device="cuda", dtype=torch.bfloat16)
    work = 2 * tokens * width * hidden

    def timed(what: str, ms: float, engine: str) -> dict:
        tflops = round(work / ms / 1e9)
        return row(f"GEMM {what}", ms, ARTICLE_GEMM.get(engine), None, tflops=tflops)

    yield timed("BF16", median_ms(lambda: x @ w.t()), "BF16")
    seen = set()
    for scheme in schemes().values():
        layer = Layer(Scheme(fprop=scheme.fprop), torch.bfloat16, x.device)
        name = layer.engine("fprop").name
        if name in seen:
            continue
        seen.add(name)
        xq, wq = layer.quantize_activation(x), layer.quantize_weight(w)
        ms = median_ms(partial(layer.fprop, x, xq, w, wq, None))
        yield timed(f"engine {name}", ms, name)


def quantizers(tokens: int = TOKENS, hidden: int = HIDDEN) -> Iterator[dict]:
    """GELU alone and GELU with quantize, of [tokens, hidden]."""
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    yield row("GELU", median_ms(lambda: F.gelu(x, approximate="tanh")), ARTICLE_KERNELS["GELU"])
    here = machine()
    factors = torch.rand(tokens, device="cuda") + 0.5, torch.ones(1, device="cuda")
    for name, call, moved in kernels.activations(x, *factors):
        ms = median_ms(call)
        gbs = round(moved * x.numel() / ms / 1e6)
        predicted = None
        if here is not None and "no factors" not in name:
            predicted = predicting.gelu_quantize(
                here, predicting.SEARCH if "four over six" in name else None
            )
        yield row(name, ms, ARTICLE_KERNELS.get(name), predicted, gb_s=gbs)


def mlp(tokens: int = TOKENS, width: int = WIDTH) -> Iterator[dict]:
    """One MLP layer by arm: forward alone, and backward as the rest of the step."""
    here = machine()
    for name, arm in arms().items():
        forward, step = mlp_parts(width, tokens, arm)
        step()
        step()
        first, whole = median_ms(forward), median_ms(step)
        known = ARTICLE_MLP.get(name, (None, None)) if width == WIDTH else (None, None)
        predicted: tuple[float | None, float | None] = (None, None)
        if here is not None:
            steps = cost.chain((predicting.low(name),) * 2, here, tokens, width, 4 * width, width)
            parts = ([s for s in steps if s.backward is late] for late in (False, True))
            predicted = tuple(1e3 * cost.seconds(p, here) for p in parts)  # type: ignore[assignment]
        for i, (what, ms) in enumerate((("forward", first), ("backward", whole - first))):
            yield row(f"MLP {width}, {what}, {name}", ms, known[i], predicted[i])
        del forward, step
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def steps(widths: tuple[int, ...] = tuple(predicting.ARTICLE)) -> Iterator[dict]:
    """The article's whole step by arm: milliseconds, and BF16's time over it."""
    here, sizes = machine(), predicting.ARTICLE_STEP
    for width in widths:
        base: float | None = None
        for name, arm in arms().items():
            shape = (width, sizes["layers"], sizes["context"], sizes["tokens"], 16)
            found = measure(partial(gpt_step, arm, *shape, sizes["vocabulary"]))
            ms = found.get("ms")
            base = ms if name == "bf16" else base
            predicted = None
            if here is not None:
                kernels_of = predicting.gpt(predicting.low(name), here, width, **sizes)
                predicted = 1e3 * cost.seconds(kernels_of, here)
            more: dict[str, object] = {k: v for k, v in found.items() if k != "ms"}
            if ms and base and name != "bf16":
                more["speed"] = round(base / ms, 3)
                if name == "thinking-machines" and width in predicting.ARTICLE:
                    more["article_speed"] = predicting.ARTICLE[width]
            yield row(f"step, width {width}, {name}", ms, None, predicted, **more)


TABLES: dict[str, Callable[[], Iterator[dict]]] = {
    "gemms": gemms, "quantize": quantizers, "mlp": mlp, "steps": steps,
}  # fmt: skip
