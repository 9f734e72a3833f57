"""Does a calibrated choice of layers beat "the last blocks" at the same budget?

    python examples/calibrate_gpt.py --out docs/results/cpu-calibrate.json

Trains a byte-level GPT in high precision on Python's standard library, then measures the held-out
loss of its 4-bit forward pass, no further training: all MLPs in 4 bits, the last or first blocks in
MXFP8, or the layers that `fp4.calibrate` names with the same number of parameters.
"""

from __future__ import annotations

import argparse
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
def held_out(model, batches, policy) -> float:
    """Mean loss under a policy; the original precision for None."""
    torch._dynamo.reset()
    options = {"policy": policy, "compiler": "eager"}
    call = model if policy is None else torch.compile(model, backend="fp4", options=options)
    return sum(float(loss(call, b)) for b in batches) / len(batches)


def blocks(recipe: str, span: str | None) -> fp4.Policy:
    """All MLPs in 4 bits but those of ``span``, in MXFP8."""
    layers = [{"blocks": span, "chain": "mlp", "scheme": "mxfp8"}] if span else []
    layers.append({"chain": "mlp", "scheme": "low"})
    return fp4.Policy.from_dict({"version": 1, "recipe": recipe, "layers": layers})


def measure(model, recipe: str, train_batches, batches) -> list[dict]:
    """Held-out loss above the original precision's, by choice and budget in blocks."""
    start = held_out(model, batches, None)
    none = held_out(model, batches, blocks(recipe, None)) - start
    rows = [{"kept": 0, "choice": "none", "gap": none}]
    for n in (1, 2, 3):
        found = fp4.calibrate(
            model, train_batches, recipe=recipe, budget=n / SIZE["layers"], loss=loss
        )
        choices = {
            "last blocks": blocks(recipe, f"last {n}"),
            "first blocks": blocks(recipe, f"first {n}"),
            "calibrated": found.policy,
        }
        rows += [
            {"kept": n, "choice": name, "gap": held_out(model, batches, policy) - start}
            for name, policy in choices.items()
        ]
    return [{"recipe": recipe, "loss": start, **row} for row in rows]


def main() -> None:
    """Train, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text, held = text_data.load(None, SIZE["context"])
    starts = text_data.spread_starts(held, 96 * BATCH, SIZE["context"])
    batches = list(text_data.batches(held, starts, BATCH, SIZE["context"], "cpu"))
    rows = []
    for seed in range(args.seeds):
        model = train(text, args.steps, seed)
        draw = torch.Generator().manual_seed(100 + seed)
        starts = text_data.random_starts(text, 8 * BATCH, SIZE["context"], draw)
        own = list(text_data.batches(text, starts, BATCH, SIZE["context"], "cpu"))
        for recipe in ("fp8-exact", "thinking-machines"):
            rows += [{"seed": seed, **row} for row in measure(model, recipe, own, batches)]
    for recipe in ("fp8-exact", "thinking-machines"):
        print(recipe)
        for kept, choice in dict.fromkeys((r["kept"], r["choice"]) for r in rows):
            gaps = [
                r["gap"] for r in rows
                if (r["recipe"], r["kept"], r["choice"]) == (recipe, kept, choice)
            ]  # fmt: skip
            name = f"{kept} of 6 blocks' parameters kept, {choice:13}"
            print(f"  {name}", *(f"{g:+.5f}" for g in gaps))
    if args.out:
        about = {"torch": torch.__version__, "machine": platform.machine(), "steps": args.steps}
        args.out.write_text(json.dumps({**about, **SIZE, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
