"""Draw docs/figures/h200-mlp.png from docs/results/h200-mlp.json (`fp4compile bench mlp`)."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
COLORS = {
    "torchao tensorwise": "#9a9a9a",
    "thinking-machines": "#e69f00",
    "fp8-exact": "#0072b2",
}


def main() -> None:
    """Time of one MLP step as a fraction of BF16 compile's, by width and arm."""
    result = json.loads((HERE.parent / "results" / "h200-mlp.json").read_text())
    ratio = {(row["d"], row["arm"]): row["time_ratio"] for row in result["rows"]}
    widths = sorted({d for d, _ in ratio})
    figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    for i, (arm, color) in enumerate(COLORS.items()):
        at = [x + (i - 1) * 0.27 for x in range(len(widths))]
        bars = axes.bar(at, [ratio[d, arm] for d in widths], 0.25, color=color, label=arm)
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
    figure.savefig(HERE / "h200-mlp.png", dpi=150)


if __name__ == "__main__":
    main()
