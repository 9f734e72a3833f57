"""Models of transformers and timm: rewritten as docs/models.md says, and they compute the same."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[models]'")
pytest.importorskip("timm", reason="needs timm: pip install -e '.[models]'")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "passes")]

import models  # noqa: E402
from fp4compile.kernels import fallback, primitives  # noqa: E402
from fp4compile.passes.rewrite import rewrite  # noqa: E402
from model_zoo import MODELS  # noqa: E402
from pass_capture import everything, make_exact  # noqa: E402

import fp4compile as fp4  # noqa: E402

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
FAST = ("GPT-2", "Phi-3", "T5", "CLIP, text", "Mixtral", "ConvNeXt (timm)")
EVERY = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow, id=name) for name in MODELS
]


def page_rows() -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    return {cells[0]: cells for cells in lines if cells[0] not in ("model", "---")}


def page_reasons(name: str) -> list[str]:
    return re.findall(rf"^- {re.escape(name)}: (.*)$", PAGE, re.MULTILINE)


def gradients(task, forward):
    task.model.zero_grad()
    torch.manual_seed(1)
    loss = task.loss(forward(**task.inputs))
    loss.backward()
    grads = {n: p.grad.clone() for n, p in task.model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def test_the_page_has_a_row_for_every_model():
    assert list(page_rows()) == list(MODELS)


@pytest.mark.parametrize("name", EVERY)
def test_the_rewritten_graph_computes_the_same_in_high_precision(name):
    """Operators without rounding in the place of the package's: loss and every gradient."""
    torch._dynamo.reset()
    task, _ = models.load(name)
    want = gradients(task, task.model)

    def backend(gm, inputs):
        inserted.append(rewrite(gm, everything).changed)
        make_exact(gm)
        return gm.forward

    inserted: list[int] = []
    got = gradients(task, torch.compile(task.model, backend=backend))
    assert sum(inserted)
    assert models.difference(got, want) < 1e-5


@pytest.mark.parametrize("name", EVERY)
def test_the_page_says_what_is_rewritten_and_why_not_the_rest(name):
    torch._dynamo.reset()
    task, _ = models.load(name)
    report = fp4.explain(task.model, kwargs=task.inputs, policy=models.ALL)
    assert models.counts(report) == page_rows()[name][3]
    assert models.reasons(report) == page_reasons(name)
    refused = [row for row in report if row.refused]
    assert all("batch of matrices" in row.reason for row in refused)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "ViT (timm)" else pytest.mark.slow) for n in MODELS]
)
def test_inductors_code_gives_eagers_numbers(name):
    task, batches = models.load(name)
    found = models.compare(task, batches, models.ALL)
    assert found.loss < 2e-5
    # T5's large activations: most batches have a value at a boundary between two codes.
    assert found.median < (1e-5 if name == "ViT (timm)" else 2e-3)


PRIMITIVES = (
    "quantize", "act_quantize", "glu_quantize", "decode", "requantize",
    "quantize_grad", "act_grad_quantize", "glu_grad_quantize",
)  # fmt: skip


@contextmanager
def recorded(calls):
    """Append (name, function, arguments, results) of every primitive that runs meanwhile."""

    def recorder(name, function):
        def run(*args):
            args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            out = function(*args)
            results = [out] if isinstance(out, torch.Tensor) else out
            calls.append((name, function, args, [r.clone() for r in results]))
            return out

        return run

    library = torch.library.Library("fp4", "IMPL")
    try:
        for name in PRIMITIVES:
            library.impl(name, recorder(name, getattr(primitives, name)), "CPU")
        yield
    finally:
        library._destroy()


@pytest.mark.parametrize("name", EVERY)
def test_codes_in_bf16_are_the_references_op_by_op(name, monkeypatch):
    """Whatever Inductor hands to an operator: codes, scales, factors, operands and bias gradients."""
    task, batches = models.load(name)
    task = task._replace(model=task.model.bfloat16())
    calls: list = []
    with recorded(calls):
        models.train_steps(task, [models.in_bfloat16(batches[0])], models.ALL)
    assert {"quantize", "quantize_grad"} & {n for n, *_ in calls} and len(calls) >= 6
    monkeypatch.setattr(fallback, "native_for", lambda device: None)
    for primitive, function, args, results in calls:
        again = function(*args)
        again = [again] if isinstance(again, torch.Tensor) else again
        assert len(again) == len(results)
        for i, (got, want) in enumerate(zip(results, again)):
            same = got.dtype == want.dtype and torch.equal(got, want)
            assert same, f"{primitive}, result {i} of {args[0].dtype} {tuple(args[0].shape)}"


def test_differences_are_seen():
    a = {"w": torch.ones(4), "tiny": torch.full((4,), 1e-9)}
    assert models.difference(a, a) == 0
    assert models.difference({**a, "tiny": a["tiny"] * 2}, a) < 1e-5
    assert models.difference({**a, "w": a["w"] * 1.01}, a) == pytest.approx(0.01, rel=0.01)
    assert models.difference({"w": a["w"]}, a) == float("inf")
    assert models.difference({**a, "w": a["w"] * float("nan")}, a) == float("inf")
