"""Draw the figures of the docs from the JSON files in docs/results.

    python examples/reproduce/figures.py [NAME ...]     # of `DRAWN`; default: all that have results

Each PNG carries the digest of its JSON file, so that a figure of other numbers is noticed.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from loss_plot import COLOURS  # noqa: E402

FIGURES, RESULTS = ROOT / "docs" / "figures", ROOT / "docs" / "results"
COLORS = {
    "bf16": "#3c3c3c",
    "torchao tensorwise": "#9a9a9a",
    "thinking-machines": "#e69f00",
    "thinking-machines, nearest": "#cc79a7",
    "fp8": "#009e73",
    "fp8-exact": "#0072b2",
}
MLP_ARMS = ("torchao tensorwise", "thinking-machines", "fp8-exact")


def mlp(result: dict, figure: Any) -> None:
    """Time of one MLP step as a fraction of BF16 compile's, by width and arm."""
    base = {row["d"]: row["ms"] for row in result["rows"] if row["arm"] == "bf16"}
    ratio = {(row["d"], row["arm"]): row["ms"] / base[row["d"]] for row in result["rows"]}
    widths = sorted({d for d, _ in ratio})
    axes = figure.subplots()
    for i, arm in enumerate(MLP_ARMS):
        at = [x + (i - 1) * 0.27 for x in range(len(widths))]
        bars = axes.bar(at, [ratio[d, arm] for d in widths], 0.25, color=COLORS[arm], label=arm)
        label = {"color": "white", "weight": "bold", "fontsize": 9}
        axes.bar_label(bars, fmt="%.2f", label_type="center", **label)  # far from the line at 1
    axes.axhline(1, color="black", linewidth=1)
    axes.text(len(widths) - 0.5, 1.02, "BF16 torch.compile", ha="right", fontsize=9)
    axes.set_xticks(range(len(widths)), [f"d = {d}" for d in widths])
    axes.set_ylim(0, 1.3)
    axes.set_ylabel("time / BF16 compile")
    axes.set_title(
        f"One MLP d → 4d → d, {result['tokens']:,} tokens, forward and backward\n"
        f"{result['gpu']}, torch {result['torch'].split('+')[0]}, {result['date']}",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="upper left", fontsize=9)


def training(result: dict, figure: Any) -> None:
    """Held-out loss by step and by seconds, a line a run."""
    sides = figure.subplots(1, 2, sharey=True)
    for row in result["rows"]:
        steps = sorted(int(step) for step in row["held_out"])
        losses = [row["held_out"][str(step)] for step in steps]
        each = row["train_seconds"] / row["steps"]
        look: dict = {"color": COLORS[row["arm"]], "lw": 1.4, "alpha": 1 - 0.5 * row["seed"]}
        label = row["arm"] if row["seed"] == 0 else None
        sides[0].plot(steps, losses, label=label, **look)
        sides[1].plot([step * each for step in steps], losses, **look)
    for axes, name in zip(sides, ("step", "seconds of training")):
        axes.set_xlabel(name)
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    sides[0].set_ylabel("held-out loss, nats a byte")
    sides[0].legend(frameon=False, fontsize=8)
    size = result["size"]
    figure.suptitle(
        f"GPT of {result['parameters'] / 1e6:.0f} M parameters, {size['layers']} blocks,"
        f" width {size['width']}, {size['batch'] * size['context']:,} tokens a step\n"
        f"{result['machine']}, torch {result['torch']}, {result['date']}",
        fontsize=10,
    )


def ablation(result: dict, figure: Any) -> None:
    """Gap of the held-out loss to high precision's by step: mean and range over seeds."""
    groups: dict[str, list[str]] = {}
    for row in result["rows"]:
        groups.setdefault(row["group"], []).append(row["arm"])
    all_axes = figure.subplots(2, 2, sharex=True).flat
    base = result["held_out"]["high precision"]
    for axes, (group, arms) in zip(all_axes, groups.items()):
        of = group.partition("late switch of ")[2]  # an arm of another group, to start from
        for arm, color in zip([of] * bool(of) + arms, COLOURS):
            runs = result["held_out"][arm]
            steps = sorted(int(step) for step in next(iter(runs.values())))
            steps = [step for step in steps if 3 * step >= result["config"]["steps"]]
            gaps = [
                [1000 * (run[str(step)] - base[seed][str(step)]) for seed, run in runs.items()]
                for step in steps
            ]
            axes.plot(steps, [statistics.fmean(g) for g in gaps], color=color, lw=1.7, label=arm)
            low, high = ([f(g) for g in gaps] for f in (min, max))
            axes.fill_between(steps, low, high, color=color, alpha=0.13, lw=0)
        axes.axhline(0, color="black", lw=1)
        axes.set_title(group, fontsize=10, loc="left")
        axes.set_ylim(-25, 105)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7.5, ncols=2)
    config, seeds = result["config"], len(base)
    figure.supxlabel("step", fontsize=9)
    figure.suptitle(
        f"Held-out loss above high precision's, nats × 1000; mean and range of {seeds} seeds\n"
        f"GPT of {config['layers']} blocks of width {config['width']},"
        f" {config['batch'] * config['context']:,} bytes a step, {config['device']},"
        f" torch {config['torch'].split('+')[0]}",
        fontsize=10,
    )


def late_switch(result: dict, figure: Any) -> None:
    """Gaps before the switch and at the end, a line a seed."""
    axes = figure.subplots()
    rows = [row for row in result["rows"] if row["before"]]
    for i, row in enumerate(rows):
        for before, after in zip(row["before"], row["gaps"]):
            axes.plot([i - 0.2, i + 0.2], [1000 * before, 1000 * after], "o-", color=COLOURS[1])
        axes.text(i - 0.2, -1.2, "before", ha="center", fontsize=8)
        axes.text(i + 0.2, -1.2, "end", ha="center", fontsize=8)
    axes.set_xticks(range(len(rows)), [row["arm"] for row in rows], fontsize=9)
    axes.tick_params(axis="x", length=0, pad=10)
    axes.set_ylim(-2, None)
    axes.axhline(0, color="black", lw=1)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    config = result["config"]
    axes.set_title(
        f"Held-out loss above high precision's, nats × 1000, a line a seed\nGPT of"
        f" {config['layers']} blocks of width {config['width']}, {config['steps']} steps, CPU",
        fontsize=10,
    )


def calibrated(result: dict, figure: Any) -> None:
    """Gap by the number of blocks' parameters that stay in 8 bits, for each way to choose them."""
    recipes = list(dict.fromkeys(row["recipe"] for row in result["rows"]))
    looks = {"last blocks": ":", "first blocks": "--", "calibrated": "-"}
    for axes, recipe in zip(figure.subplots(1, len(recipes), sharey=True), recipes):
        mine = [row for row in result["rows"] if row["recipe"] == recipe]
        for color, (choice, style) in zip(COLOURS, looks.items()):
            by_kept: dict[int, list[float]] = {}
            for row in mine:
                if row["choice"] in (choice, "none"):
                    by_kept.setdefault(row["kept"], []).append(1000 * row["gap"])
            means = [statistics.fmean(gaps) for gaps in by_kept.values()]
            axes.plot(list(by_kept), means, style, marker="o", color=color, label=choice)
        axes.set_title(recipe, fontsize=10, loc="left")
        axes.set_xticks(range(4))
        axes.set_xlabel(f"kept in MXFP8, of {result['layers']} blocks' parameters")
        axes.set_ylim(0, None)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    seeds = len({row["seed"] for row in result["rows"]})
    figure.suptitle(
        f"Held-out loss above FP32's, nats × 1000, mean of {seeds} seeds: GPT of width"
        f" {result['width']}, 4-bit forward after training",
        fontsize=10,
    )


# A figure's name: its JSON file, how it is drawn, its size in inches.
DRAWN: dict[str, tuple[str, Callable[[dict, Any], None], tuple[float, float]]] = {
    "h200-mlp": ("h200-mlp", mlp, (7.5, 3.6)),
    "training": ("reproduce-train", training, (9, 4)),
    "h200-ablation": ("h200-ablation", ablation, (10, 7)),
    "cpu-late-switch": ("cpu-late-switch", late_switch, (7.5, 3.6)),
    "cpu-calibrate": ("cpu-calibrate", calibrated, (9, 3.6)),
}


def digest(name: str) -> str:
    """Of the JSON file that a figure shows."""
    return hashlib.sha256((RESULTS / f"{DRAWN[name][0]}.json").read_bytes()).hexdigest()


def draw(name: str) -> None:
    """Write the PNG ``name``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    file, paint, size = DRAWN[name]
    figure = plt.figure(figsize=size, layout="constrained")
    paint(json.loads((RESULTS / f"{file}.json").read_text()), figure)
    figure.savefig(FIGURES / f"{name}.png", dpi=150, metadata={"Source": digest(name)})
    plt.close(figure)


def main() -> None:
    """The command line."""
    names = sys.argv[1:] or [n for n in DRAWN if (RESULTS / f"{DRAWN[n][0]}.json").exists()]
    for name in names:
        if name not in DRAWN:
            sys.exit(f"figures: no figure {name!r}; there are {', '.join(DRAWN)}")
        draw(name)


if __name__ == "__main__":
    main()
