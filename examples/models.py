"""Other people's models under the backend: what is rewritten, what is fused, and why not the rest.

    python examples/models.py                           # every model
    python examples/models.py "GPT-2" "ViT (timm)"      # these only
    python examples/models.py --write docs/models.md    # the page

Needs ``pip install -e '.[models]'``. Weights are random, from a configuration; nothing is
downloaded. Two policies are tried on each: the recipe fp8-exact with its own rules, and the same
with every linear named. With the latter, loss and gradients of training steps by Inductor's code
are compared with those of the same rewritten graphs run eagerly, in FP32 and in BF16.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from model_zoo import MODELS, Task
from torch import Tensor

import fp4compile as fp4
from fp4compile.blocks import linears
from fp4compile.report import Report, Row

RULES = "fp8-exact"
ALL = {"version": 1, "recipe": "fp8-exact", "layers": [{"match": "*", "scheme": "low"}]}
# Inductor rounds and draws random numbers as eager does: what is left is the order of sums.
LIKE_EAGER = {"fallback_random": True, "emulate_precision_casts": True}
ORDER = ("rewritten", "left", "not compiled")
BATCHES = 5


class Step(NamedTuple):
    """A training step's loss and its gradients by name."""

    loss: Tensor
    grads: dict[str, Tensor]


def train_steps(task: Task, batches: list[dict], policy: Any, **options: Any) -> list[Step]:
    """A step on each batch, compiled anew; each has the same random numbers every time."""
    torch._dynamo.reset()
    compiled = torch.compile(task.model, backend="fp4", options={"policy": policy, **options})
    steps = []
    for seed, inputs in enumerate(batches):
        task.model.zero_grad()
        torch.manual_seed(seed)
        loss = task.loss(compiled(**inputs))
        loss.backward()
        parameters = [(n, p.grad) for n, p in task.model.named_parameters()]
        steps.append(Step(loss.detach(), {n: g.clone() for n, g in parameters if g is not None}))
    return steps


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative difference of a gradient; those near zero count against the whole.

    Infinite where a gradient is missing or not finite.
    """
    if a.keys() != b.keys() or not all(g.isfinite().all() for g in (*a.values(), *b.values())):
        return float("inf")
    whole = torch.stack([g.float().norm() for g in b.values()]).norm()
    parts = ((a[n] - b[n]).float().norm() / (b[n].float().norm() + 1e-3 * whole) for n in b)
    return max(float(part) for part in parts)


def named(report: Report) -> list[Row]:
    """The layers that the policy asks to run in its own precision."""
    return [row for row in report if row.scheme_name not in ("", "original")]


def counts(report: Report) -> str:
    """For the table: layers named / rewritten / chains fused."""
    chains = {row.chain for row in report if row.chain is not None}
    return f"{len(named(report))} / {len(report.rewritten)} / {len(chains)}"


def reasons(report: Report) -> list[str]:
    """Why named layers were left or are in no chain, each with how many."""
    found = Counter((row.status, row.reason) for row in named(report) if row.reason)
    ranked = sorted(found.items(), key=lambda item: ORDER.index(item[0][0]))
    return [f"{n} {status}: {reason}" for (status, reason), n in ranked]


class Differences(NamedTuple):
    """Relative differences of batches: the loss's largest, the gradients' median and largest."""

    loss: float
    median: float
    largest: float


def compare(task: Task, batches: list[dict], policy: Any) -> Differences:
    """Inductor's code against the rewritten graphs run eagerly, batch by batch."""
    ours = train_steps(task, batches, policy, **LIKE_EAGER)
    eager = train_steps(task, batches, policy, compiler="aot_eager")
    loss = [difference({"loss": a.loss}, {"loss": b.loss}) for a, b in zip(ours, eager)]
    grads = [difference(a.grads, b.grads) for a, b in zip(ours, eager)]
    return Differences(max(loss), median(grads), max(grads))


@dataclass
class Line:
    """A row of the table; the numbers are those with every linear named."""

    name: str
    layers: int
    rules: Report
    every: Report
    fp32: Differences
    bf16: Differences

    def cells(self) -> list[str]:
        """The texts of the columns."""
        graphs = max(self.rules.graphs, self.every.graphs)
        both = counts(self.rules), counts(self.every)
        numbers = [cell for d in (self.fp32, self.bf16) for cell in _cells(d)]
        return [self.name, str(self.layers), *both, str(graphs), *numbers]


def _cells(found: Differences) -> tuple[str, str]:
    loss, middle, largest = (f"{x:.0e}" if x else "0" for x in found)
    return loss, f"{middle} / {largest}"


def load(name: str) -> tuple[Task, list[dict]]:
    """A model in training mode and batches; the same weights and numbers every time."""
    tasks = []
    for seed in range(BATCHES):
        torch.manual_seed(seed)
        tasks.append(MODELS[name]())
    tasks[0].model.train()
    return tasks[0], [task.inputs for task in tasks]


def measure(name: str) -> Line:
    """One model: what both policies do; the numbers with every linear named."""
    task, batches = load(name)
    rules, every = (fp4.explain(task.model, kwargs=task.inputs, policy=p) for p in (RULES, ALL))
    layers, fp32 = len(linears(task.model)), compare(task, batches, ALL)
    low = task._replace(model=copy.deepcopy(task.model).bfloat16())
    bf16 = compare(low, [in_bfloat16(batch) for batch in batches], ALL)
    return Line(name, layers, rules, every, fp32, bf16)


def in_bfloat16(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with its floating-point tensors in BF16."""
    return {k: v.bfloat16() if _is_float(v) else v for k, v in batch.items()}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


COLUMNS = (
    "model", "linears", "by its rules", "every linear named", "graphs",
    "loss, FP32", "gradients, FP32", "loss, BF16", "gradients, BF16",
)  # fmt: skip


def table(lines: list[Line]) -> str:
    """The table in Markdown."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(line.cells() for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def remarks(lines: list[Line]) -> str:
    """What is not fused or not rewritten, by model, with every linear named."""
    found = [(line.name, reason) for line in lines for reason in reasons(line.every)]
    return "\n".join(f"- {name}: {reason}" for name, reason in found) or "None."


PAGE = """# Models

Real architectures in small with random weights (`examples/model_zoo.py`), in training with dropout
as their configurations have it. Written by `python examples/models.py --write
docs/models.md` with {versions}.

"By its rules" is the recipe `fp8-exact`; "every linear named" adds `match: "*"`. Both columns count
layers that the policy names / layers rewritten / chains fused; a chain has two layers, three if
gate and up are two. "Linears" counts modules: a policy also names matrices that are no module's
weight, such as a router's or the experts'.

The last four columns compare training steps on five batches, every linear named, by Inductor's code
with the same rewritten graphs run eagerly with the same random numbers: the largest relative
difference of the loss, and the median and the largest of the gradient that differs most. In FP32
the two differ by the order of sums, 1e-7; where that moves a value over a boundary between two
codes, or a maximum over a power of two, some gradients of that step differ by roundings, up to a
few percent. In BF16 every step has such places: the plain models' own differences, 1e-2 to 2e-2 in
T5, come out about ten times as large, and the loss is a BF16 number itself.

{table}

## What is not fused or not rewritten, with every linear named

{remarks}

## What to do about it

A layer that is rewritten but in no chain runs in the policy's precision; its activation is stored.

- *dropout between*: dropout 0 there makes the chain; in evaluation it is one.
- *activation ... has no operator*: a chain has GELU (exact, tanh or quick), ReLU, ReLU² or SiLU.
- *autograd.Function*: a chain computes the derivative itself; `F.gelu` in its place makes one.
- *batch of matrices (experts)*: they stay in the model's precision, an error under `strict: true`.
  A `ModuleList` of linears is rewritten; a rule with `scheme: original` says that it is meant.
"""


def versions() -> str:
    """The packages that the page was made with."""
    import timm
    import transformers

    found = {m.__name__: m.__version__.split("+")[0] for m in (torch, transformers, timm)}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", help="names as in the table; default: all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page")
    args = parser.parse_args()
    if unknown := [name for name in args.models if name not in MODELS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    warnings.simplefilter("ignore")
    lines = []
    for name in args.models or MODELS:
        lines.append(measure(name))
        print(f"| {' | '.join(lines[-1].cells())} |", file=sys.stderr, flush=True)
    text = PAGE.format(versions=versions(), table=table(lines), remarks=remarks(lines))
    if args.write:
        args.write.write_text(text, encoding="utf-8")
    else:
        print(table(lines), remarks(lines), sep="\n\n")


if __name__ == "__main__":
    main()
