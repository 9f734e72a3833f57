"""The demo's picture: loss of every arm above, its gap to the first arm below, larger."""

from __future__ import annotations

import math
from pathlib import Path

# Okabe and Ito's colours, told apart by colour-blind eyes; the first arm is grey.
COLOURS = ("#3C3C3C", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
NOTE = {"loc": "left", "fontsize": 10.5, "color": "#555555"}
TARGET = 0.02  # nats: the band in which a gap is called small


def smooth(values: list[float], window: int) -> list[float]:
    """Mean over the last ``window`` values, fewer at the start."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    starts = [max(i - window, 0) for i in range(1, len(sums))]
    return [(sums[i] - sums[a]) / (i - a) for i, a in zip(range(1, len(sums)), starts)]


def draw(rows: list[dict], subtitle: str, path: Path) -> None:
    """Write the PNG. A row: ``arm``, ``train_loss`` of each step, ``held_out`` {step: loss}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#E4E4E4", "axes.edgecolor": "#888888", "axes.axisbelow": True,
    }  # fmt: skip
    with plt.rc_context(style):
        fig, (top, low) = plt.subplots(2, 1, figsize=(11, 8.5), sharex=True, height_ratios=(2, 3))
        fig.subplots_adjust(left=0.08, right=0.75, top=0.86, bottom=0.08, hspace=0.2)
        _losses(top, rows)
        _gaps(low, rows)
        fig.text(0.08, 0.945, headline(rows), fontsize=16, weight="bold")
        fig.text(0.08, 0.91, subtitle, fontsize=11, color="#555555")
        fig.savefig(path, dpi=150)
        plt.close(fig)


def headline(rows: list[dict]) -> str:
    """The result in one line."""
    step = len(rows[0]["train_loss"])
    gaps = [abs(row["held_out"][step] - rows[0]["held_out"][step]) for row in rows[1:]]
    within = math.ceil(1000 * max(gaps) - 1e-6) / 1000  # rounded up: it is a bound
    return f"After {step} steps every arm is within {within:.3f} nats of {rows[0]['arm']}"


def _losses(axes, rows: list[dict]) -> None:
    """Curves that coincide: the first is a wide pale line, the others are its dashes in turn."""
    count = len(rows[0]["train_loss"])
    window, dash, others = max(count // 25, 1), 5, len(rows) - 1
    curves = [smooth(row["train_loss"], window) for row in rows]
    steps = range(1, count + 1)
    axes.plot(steps, curves[0], color=COLOURS[0], alpha=0.3, lw=6)
    for i in range(1, len(rows)):
        turn = (dash * (others - i + 1), (dash, dash * (others - 1))) if others > 1 else "-"
        axes.plot(steps, curves[i], color=COLOURS[i % len(COLOURS)], lw=2, ls=turn)
    _markers(axes, rows[0]["held_out"], 0)
    last = [row["held_out"][count] for row in rows]
    start = min(window, count) - 1
    axes.set(ylabel="loss, nats a byte", xlim=(0, 1.01 * count))
    axes.set_ylim(min(*last, *map(min, curves)) - 0.2, curves[0][start] + 0.1)
    texts = [f"{row['arm']}  {value:.3f}" for row, value in zip(rows, last)]
    _labels(axes, last, texts, joined=False)
    note = f"lines: training loss, running mean of {window}; dots: {rows[0]['arm']}, held out"
    axes.set_title(note, **NOTE)


def _gaps(axes, rows: list[dict]) -> None:
    """Without the first tenth of the steps, where the loss falls steeply and the gap is noise."""
    count = len(rows[0]["train_loss"])
    window, highest, last = max(count // 10, 1), 1.5 * TARGET, []
    axes.axhspan(-TARGET, TARGET, color="#000000", alpha=0.05, lw=0)
    axes.axhline(0, color=COLOURS[0], lw=1.6)
    for i, row in enumerate(rows[1:], 1):
        gap = smooth([a - b for a, b in zip(row["train_loss"], rows[0]["train_loss"])], window)
        held = {step: loss - rows[0]["held_out"][step] for step, loss in row["held_out"].items()}
        held = {step: value for step, value in held.items() if step >= window}
        axes.plot(range(window, count + 1), gap[window - 1 :], color=COLOURS[i % len(COLOURS)])
        _markers(axes, held, i)
        highest = max(highest, *map(abs, gap[window - 1 :]), *map(abs, held.values()))
        last.append(held[count])
    axes.set(xlabel="step", ylabel=f"gap to {rows[0]['arm']}, nats")
    axes.set_ylim(-1.1 * min(highest, 0.15), 1.1 * min(highest, 0.15))
    where = {"transform": axes.get_yaxis_transform(), "ha": "right", "color": "#555555"}
    axes.text(0.99, -1.04 * TARGET, f"band: ±{TARGET} nats", va="top", **where)
    note = f"lines: gap of the training loss, running mean of {window}; dots: of the held-out loss"
    axes.set_title(note, **NOTE)
    _labels(axes, last, [f"{row['arm']}  {gap:+.4f}" for row, gap in zip(rows[1:], last)], first=1)


def _markers(axes, points: dict[int, float], i: int) -> None:
    colour = COLOURS[i % len(COLOURS)]
    axes.plot(*zip(*points.items()), "o", color=colour, mec="white", ms=6, zorder=3)


def _labels(
    axes, values: list[float], texts: list[str], first: int = 0, joined: bool = True
) -> None:
    """Name the curves at their right ends, spread so that no two names overlap.

    ``joined``: a line leads from each curve to its name.
    """
    low, high = axes.get_ylim()
    apart = 22 / (axes.get_window_extent().height * 72 / axes.figure.dpi)  # points, of the axis
    order = sorted(range(len(values)), key=lambda i: values[i])
    at = [(min(max(values[i], low), high) - low) / (high - low) for i in order]
    for i in range(1, len(at)):
        at[i] = max(at[i], at[i - 1] + apart)
    shift = sum(at) / len(at) - sum((values[i] - low) / (high - low) for i in order) / len(at)
    shift = min(max(shift, at[-1] - 1), at[0])  # as near to the curves as the axes allow
    arrow = {"arrowstyle": "-", "lw": 0.8, "relpos": (0, 0.5)}
    for place, i in zip(at, order):
        colour = COLOURS[(i + first) % len(COLOURS)]
        axes.annotate(
            texts[i], (1, (values[i] - low) / (high - low)), (1.04, place - shift),
            xycoords="axes fraction", color=colour, va="center", weight="bold", fontsize=10.5,
            arrowprops={**arrow, "color": colour} if joined else None,
            annotation_clip=False,
        )  # fmt: skip
