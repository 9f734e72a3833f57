"""Does a calibrated choice of layers beat "the last blocks" at the same budget?

    python examples/calibrate_gpt.py --out docs/results/cpu-calibrate.json

Trains a byte-level GPT in high precision on Python's standard library, then measures the held-out
loss of its 4-bit forward pass, no further training: all MLPs in 4 bits, the last or first blocks in
MXFP8, or the layers that `fp4.calibrate` names with at most as many parameters. Every row is
written when it is there, and a run goes on where the file ends.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
from pathlib import Path

import text_data
import torch
import torch.nn.functional as F
from rich.progress import track
from train_gpt import GPT, learning_rate

import fp4compile as fp4

SIZE = {"layers": 6, "width": 128, "context": 64}
BATCH, LR = 16, 1.2e-3
RECIPES = ("fp8-exact", "thinking-machines")
BUDGETS = (1, 2, 3)  # blocks of SIZE["layers"]
HELD_BATCHES = 96


def loss(model, batch):
    """Mean cross-entropy of a (tokens, targets) batch."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(text, steps: int, seed: int):
    """A model after ``steps`` of AdamW in FP32."""
    draw = torch.Generator().manual_seed(seed)
    model = GPT(**SIZE, draw=draw)
    call = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    for step in track(range(steps), description=f"training, seed {seed}"):
        starts = text_data.random_starts(text, BATCH, SIZE["context"], draw)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, LR)
        loss(call, text_data.windows(text, starts, SIZE["context"], "cpu")).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def held_out(model, batches, policy) -> list[float]:
    """Losses batch by batch under a policy; the original precision for None."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)  # what one policy leaves on it is not the next one's
    options = {"policy": policy, "compiler": "eager"}
    call = model if policy is None else torch.compile(model, backend="fp4", options=options)
    return [float(loss(call, b)) for b in batches]


def blocks(recipe: str, span: str | None) -> fp4.Policy:
    """All MLPs in 4 bits but those of ``span``, in MXFP8."""
    layers = [{"blocks": span, "chain": "mlp", "scheme": "mxfp8"}] if span else []
    layers.append({"chain": "mlp", "scheme": "low"})
    return fp4.Policy.from_dict({"version": 1, "recipe": recipe, "layers": layers})


def choices(model, recipe: str, own, figure: Path | None) -> dict[tuple[int, str], fp4.Policy]:
    """The policies to compare, by budget in blocks and name; a heat map of the smallest budget."""
    found = {(0, "none"): blocks(recipe, None)}
    for n in BUDGETS:
        share = n / SIZE["layers"]
        measured = fp4.calibrate(copy.deepcopy(model), own, recipe=recipe, budget=share, loss=loss)
        found[n, "last blocks"] = blocks(recipe, f"last {n}")
        found[n, "first blocks"] = blocks(recipe, f"first {n}")
        found[n, "calibrated"] = measured.policy
        kept = [f.layer for f in measured.figures if f.kept]
        print(f"{recipe}, {n} of {SIZE['layers']} blocks' parameters, calibrated:", *kept)
        if figure and n == BUDGETS[0]:
            measured.plot(figure)
    return found


def measure(model, recipe: str, own, batches, figure: Path | None) -> list[dict]:
    """Held-out loss above the original precision's, and the standard error of that difference."""
    start = torch.tensor(held_out(model, batches, None))
    rows = []
    for (n, name), policy in choices(model, recipe, own, figure).items():
        gaps = torch.tensor(held_out(model, batches, policy)) - start
        error = float(gaps.std()) / len(gaps) ** 0.5
        row = {"recipe": recipe, "kept": n, "choice": name, "gap": float(gaps.mean())}
        rows.append({**row, "error": error, "loss": float(start.mean())})
        print(f"  {n} kept, {name:13} {row['gap']:+.5f} +- {error:.5f}", flush=True)
    return rows


def summary(rows: list[dict]) -> None:
    """Every choice's gaps, seed by seed."""
    for recipe in RECIPES:
        print(recipe)
        for kept, choice in dict.fromkeys((r["kept"], r["choice"]) for r in rows):
            key = (recipe, kept, choice)
            gaps = [r["gap"] for r in rows if (r["recipe"], r["kept"], r["choice"]) == key]
            name = f"{kept} of {SIZE['layers']} blocks' parameters kept, {choice:13}"
            print(f"  {name}", *(f"{g:+.5f}" for g in gaps))


def main() -> None:
    """Train, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/calibrate.json"))
    parser.add_argument("--figure", type=Path, help="a heat map of seed 0, fp8-exact, as PNG")
    args = parser.parse_args()
    text, held = text_data.load(None, SIZE["context"])
    starts = text_data.spread_starts(held, HELD_BATCHES * BATCH, SIZE["context"])
    batches = list(text_data.batches(held, starts, BATCH, SIZE["context"], "cpu"))
    about = {"torch": torch.__version__, "machine": platform.machine(), "steps": args.steps, **SIZE}
    known = json.loads(args.out.read_text()) if args.out.exists() else {**about, "rows": []}
    rows = known.pop("rows")
    if known != about:
        parser.error(f"{args.out} is of another run: {known}")
    for seed in range(args.seeds):
        left = [r for r in RECIPES if (seed, r) not in {(x["seed"], x["recipe"]) for x in rows}]
        if not left:
            continue
        model = train(text, args.steps, seed)
        draw = torch.Generator().manual_seed(100 + seed)
        starts = text_data.random_starts(text, 8 * BATCH, SIZE["context"], draw)
        own = list(text_data.batches(text, starts, BATCH, SIZE["context"], "cpu"))
        for recipe in left:
            figure = args.figure if (seed, recipe) == (0, "fp8-exact") else None
            rows += [{"seed": seed, **r} for r in measure(model, recipe, own, batches, figure)]
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    summary(rows)


if __name__ == "__main__":
    main()
