"""Write the tables of the docs from the JSON files in docs/results, or check that they match.

    python examples/reproduce/tables.py            # rewrite what stands between the markers
    python examples/reproduce/tables.py --check    # exit status 1 where a page differs

A page says ``<!-- table NAME -->`` and ``<!-- end -->``; the lines between are ours.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
PAGES = ("README.md", "docs/results.md", "docs/policy.md")
MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

NAMES = {
    "bf16": "BF16 compile",
    "fp8-exact": "`fp8-exact`",
    "fp8-exact + attention": "`fp8-exact`, attention projections too",
    "thinking-machines": "`thinking-machines`",
    "torchao tensorwise": "torchao float8 tensorwise",
    "nvidia": "`nvidia`",
    "mxfp4": "`mxfp4`",
    "fp8-block": "`fp8-block`",
}


def load(name: str) -> dict:
    """A result by its file's name."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def name_of(arm: str) -> str:
    """An arm as the pages call it."""
    return NAMES.get(arm, arm)


def nats(gaps: list[float]) -> str:
    """Gaps of loss, x 1000."""
    return ", ".join(f"{1000 * gap:.1f}" for gap in gaps)


def percent(x: float) -> str:
    """With as many digits as the sources print."""
    return f"{100 * x:.2f} %" if 0 < x < 0.01 else f"{100 * x:.1f} %"


def times(key: str, file: str, heads: tuple[str, ...], digits: int) -> Callable[[], str]:
    """Milliseconds and memory of arms, with their ratios to BF16."""

    def build() -> str:
        rows = [
            [
                str(row[key]), name_of(row["arm"]), f"{row['ms']:.{digits}f}",
                f"{row['time_ratio']:.3f}", f"{row['peak_gib']:.2f}", f"{row['memory_ratio']:.2f}",
            ]
            for row in load(file)["rows"] if "ms" in row
        ]  # fmt: skip
        return table(heads, rows)

    return build


def readme_mlp() -> str:
    """The newcomer's table."""
    rows = {(row["d"], row["arm"]): row for row in load("h200-mlp")["rows"]}
    arms = ("fp8-exact", "torchao tensorwise", "thinking-machines")
    lines = []
    for d in sorted({d for d, _ in rows}):
        base = rows[d, "bf16"]["ms"]  # rounded once
        ratios = [f"{rows[d, arm]['ms'] / base:.2f} ×" for arm in arms]
        lines.append([str(d), *ratios, f"{rows[d, 'fp8-exact']['memory_ratio']:.2f} ×"])
    heads = ("d", "`fp8-exact` time", "torchao float8", "`thinking-machines` time",
             "`fp8-exact` peak memory")  # fmt: skip
    return table(heads, lines)


def kernels() -> str:
    """Milliseconds and percent of a copy's bandwidth, by width."""
    rows = load("h200-kernels")["rows"]
    widths = sorted({row["k"] for row in rows if row["k"] < 32768})  # that is `article_times`
    cells = {(r["kernel"], r["k"]): f"{r['ms']:.3f}, {r['percent_of_copy']:.0f}" for r in rows}
    found = dict.fromkeys(row["kernel"] for row in rows)
    lines = [[kernel, *(cells.get((kernel, k), "") for k in widths)] for kernel in found]
    return table(["kernel", *(f"K = {k}: ms, %" for k in widths)], lines)


def decode() -> str:
    """Milliseconds a token."""
    rows = [
        [
            str(r["batch"]), name_of(r["arm"]), f"{r['ms']:.3f}", f"{r['time_ratio']:.2f}",
            f"{r['memory_ratio']:.2f}",
        ]
        for r in load("h200-decode")["rows"]
    ]  # fmt: skip
    return table(
        ("batch", "arm", "ms a token", "× BF16 compile", "× BF16's peak memory"), rows
    )


def compile_time() -> str:
    """Seconds of the first step."""
    rows = load("h200-compile")["rows"]
    cells = [[name_of(r["arm"]), r["kernels"], f"{r['seconds']:.1f}", f"{r['ratio']:.2f}"]
             for r in rows]  # fmt: skip
    return table(("arm", "kernels", "seconds", "× BF16"), cells)


# What the article gives for the same tensors; "" where it gives nothing.
ERRORS = {
    "one scale": ("15–19 %", "38–54 %"),
    "NVFP4": ("8–10 %", "8–10 %"),
    "MXFP8": ("2.7 %", "2.7 %"),
    "BF16": ("0.17 %", "0.17 %"),
}
TENSORS = {
    "w1": "weight", "x": "into the MLP", "h": "after GELU", "gz": "gradient", "gaussian": "Gaussian"
}  # fmt: skip


def formats() -> str:
    """Relative errors by format and tensor, the article's beside them."""
    errors = load("reproduce-formats")["errors"]
    rows = []
    for name in errors["w1"]:
        theirs = ERRORS.get(name, ("", ""))
        rows.append([name, *(percent(errors[t][name]) for t in TENSORS), *theirs])
    heads = ("format", *TENSORS.values(), "article: weights", "article: the rest")
    return table(heads, rows)


def zeros() -> str:
    """Shares of values that become 0."""
    found = load("reproduce-formats")["zeros"]
    article = {"w1": ("", "6.8 %", "10.1 %"), "h": ("", "37 %", "63 %"), "gz": ("", "7 %", "23 %")}
    rows = []
    for tensor, label in TENSORS.items():
        ours = [percent(v) for v in found[tensor].values()]
        theirs = article.get(tensor, ("", "", ""))
        rows.append([label, *ours, " / ".join(t for t in theirs if t)])
    heads = ("tensor", *found["w1"], "article: blocks / tiles")
    return table(heads, rows)


def facts() -> str:
    """What the formats are."""
    result = load("reproduce-formats")
    ours, tile = result["facts"], result["worst_tile"]
    rows = [
        ("E2M1's sizes", ", ".join(f"{v:g}" for v in ours["E2M1 sizes"]),
         "0, 0.5, 1, 1.5, 2, 3, 4, 6"),
        ("E4M3's sizes with zero; the largest",
         f"{ours['E4M3 sizes']}; {ours['E4M3 largest']:g}", "127; 448"),
        ("a block whose largest value is −54, decoded; MX's scale",
         f"{ours['block of -54, stored']:g}; {ours['block of -54, MX scale']:g}", "−54; 16"),
        ("bits a value, NVFP4 and MXFP8", f"{ours['NVFP4 bits']:.2f}, {ours['MXFP8 bits']:.2f}",
         "4.5, 8.25"),
        ("most uneven tile: of 256 values, lost by rows, columns, the tile",
         f"{tile['rows']}, {tile['columns']}, {tile['tile']}", "22, 20, 45"),
    ]  # fmt: skip
    return table(("", "here", "article"), rows)


def transposition() -> str:
    """Mismatch of a transposed weight with the forward's copy."""
    result = load("reproduce-transposition")
    article = {
        "quantization": "9.5 %", "nearest": "9.3 %", "mean of 1": "13.7 %", "mean of 16": "3.4 %",
        "mean of 256": "0.9 %",
    }  # fmt: skip
    nvfp4, mxfp8 = result["mismatch"]["NVFP4"], result["mismatch"]["MXFP8"]
    rows = [["quantization error itself", percent(result["quantization"]), "", "9.5 %"]]
    labels = {"mean of 1": "one stochastic draw", "nearest": "to nearest"}
    for key in nvfp4:
        rows.append(
            [labels.get(key, key + " draws"), percent(nvfp4[key]), percent(mxfp8[key]),
             article[key]]
        )  # fmt: skip
    for key, value in result["codes_as_they_are"].items():
        rows.append([f"`{key}`: the same codes", percent(value) if value else "0", "", ""])
    return table(("the copy, quantized again", "NVFP4", "MXFP8", "article, NVFP4"), rows)


def rounding() -> str:
    """Errors of draws and of their means."""
    result = load("reproduce-rounding")
    article = {"nearest": "9.5 %, 2.7 %", "mean of 1": "14.9 %, 3.8 %", "mean of 400": "0.75 %"}
    rows = []
    for key, value in result["gaussian"]["nvfp4"].items():
        mx = percent(result["gaussian"]["mxfp8"][key])
        rows.append([key, percent(value), mx, article.get(key, "")])
    return table(("Gaussian data", "NVFP4", "MXFP8", "article"), rows)


def gradients() -> str:
    """Errors of an MLP's gradients against the exact ones of the quantized forward pass."""
    result = load("reproduce-rounding")["backward"]
    article = {"nearest": "2.6 %", "mean of 1": "3.7 %", "mean of 64": "0.47 %"}
    rows = []
    for recipe, errors in result.items():
        for key, value in errors.items():
            cells = [percent(value[name]) for name in ("dw2", "dw1", "dx")]
            theirs = article[key] if recipe == "thinking-machines" else ""
            rows.append([name_of(recipe), key, *cells, theirs])
    return table(("recipe", "backward", "dW₂", "dW₁", "dx", "article"), rows)


def training() -> str:
    """Loss, seconds, and time to BF16's loss."""
    return _training("reproduce-train")


def peers() -> str:
    """The same of the peers."""
    return _training("reproduce-peers")


def _training(file: str) -> str:
    rows = load(file)["rows"]
    found = dict.fromkeys(row["arm"] for row in rows)
    base = statistics.fmean(r["ms"] for r in rows if r["arm"] == "bf16")
    lines = []
    for arm in found:
        mine = [row for row in rows if row["arm"] == arm]
        ms = statistics.fmean(row["ms"] for row in mine)
        losses = ", ".join(f"{row['held_out_loss']:.4f}" for row in mine)
        reached = [seconds_to(row, rows) for row in mine]
        equal = ", ".join("not reached" if s is None else f"{s:.0f} s" for s in reached)
        lines.append(
            [name_of(arm), f"{ms:.1f}", f"{ms / base:.3f}",
             f"{statistics.fmean(r['train_seconds'] for r in mine):.0f}", losses, equal,
             f"{max(r['peak_gib'] for r in mine):.1f}"]
        )  # fmt: skip
    heads = ("arm", "ms a step", "× BF16", "seconds", "held-out loss, by seed",
             "to BF16's last but one", "peak GiB")  # fmt: skip
    return table(heads, lines)


def seconds_to(row: dict, rows: list[dict]) -> float | None:
    """Seconds until a run's held-out loss is BF16's at its last but one evaluation, same seed."""
    base = next(r for r in rows if r["arm"] == "bf16" and r["seed"] == row["seed"])
    points = sorted((int(step), loss) for step, loss in base["held_out"].items())
    target = points[-2][1]
    each = row["train_seconds"] / row["steps"]
    mine = sorted((int(step), loss) for step, loss in row["held_out"].items())
    before: tuple[int, float] | None = None
    for step, loss in mine:
        if loss <= target:
            if before is None or before[1] == loss:
                return step * each
            part = (before[1] - target) / (before[1] - loss)
            return (before[0] + part * (step - before[0])) * each
        before = step, loss
    return None


def switched() -> str:
    """A finished BF16 model with a 4-bit forward pass, against models trained with it."""
    rows = load("reproduce-train")["rows"]
    lines = []
    for row in (r for r in rows if r["arm"] == "bf16"):
        for arm, loss in row["switched"].items():
            own = next(
                r["held_out_loss"] for r in rows if r["arm"] == arm and r["seed"] == row["seed"]
            )
            cells = (f"{x:.4f}" for x in (row["held_out_loss"], loss, own))
            lines.append([str(row["seed"]), name_of(arm), *cells])
    heads = ("seed", "forward pass", "BF16 model", "switched on", "trained with it")
    return table(heads, lines)


def ablation(file: str) -> Callable[[], str]:
    """Gaps of held-out loss to high precision, nats x 1000, by arm."""

    def build() -> str:
        rows = [
            [row["arm"], nats([row["mean"]]), nats(row["gaps"]), nats(row["before"])]
            for row in load(file)["rows"]
        ]
        return table(("arm", "mean gap", "by seed", "before the switch"), rows)

    return build


def ablated() -> str:
    """The ablation's gaps: mean and spread over seeds."""

    rows = [
        [row["group"], row["arm"], nats([row["mean"]]), nats([row["sd"]]), nats(row["gaps"]),
         nats([statistics.fmean(row["before"])]) if row["before"] else ""]
        for row in load("h200-ablation")["rows"]
    ]  # fmt: skip
    heads = ("group", "arm", "mean gap", "sd", "by seed", "mean before the switch")
    return table(heads, rows)


def calibrated() -> str:
    """Gaps of a switched forward pass by the layers that stay in 8 bits, means of seeds."""
    heads = ("recipe", "kept in MXFP8, of 6 blocks' parameters", "last blocks", "first blocks",
             "calibrated")  # fmt: skip
    gaps: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in load("cpu-calibrate")["rows"]:
        of_choice = gaps.setdefault((row["recipe"], row["kept"]), {})
        of_choice.setdefault(row["choice"], []).append(1000 * row["gap"])
    rows = []
    for (recipe, kept), found in gaps.items():
        chosen = (found.get(head, found.get("none", [])) for head in heads[2:])
        cells = (f"{statistics.fmean(values):.2f}" for values in chosen)
        rows.append([name_of(recipe), str(kept or "none"), *cells])
    return table(heads, rows)


def monitor() -> str:
    """What a monitor adds to a step."""
    rows = [
        [f"{r['layers']} × {r['width']}, {r['tokens']:,} tokens", f"{r['run_off_ms']:.1f}",
         f"{r['run_ms']:.1f}", f"{100 * r['added']:+.1f} %", f"{r['sampled_ms']:.1f}",
         f"{r['between_ms']:.1f}", f"{100 * r['sample_alone']:.1f} %"]
        for r in load("h200-monitor")["rows"]
    ]  # fmt: skip
    heads = ("GPT", "ms a step, off", "with a sample in 50", "added", "a sampled step, waited for",
             "any other, waited for", "a sample's share")  # fmt: skip
    return table(heads, rows)


def article_steps() -> str:
    """MLPs and steps of `fp4compile verify`, predicted and measured, beside the article's."""
    rows = [
        [r["what"], f"{r['ms']:.1f}", f"{r['predicted_ms']:.1f}", times_of(r, "speed"),
         f"{r['article_ms']:g}" if "article_ms" in r else "", times_of(r, "article_speed")]
        for r in load("h200-verify-timings")["timings"]
        if r["table"] in ("mlp", "steps")
    ]  # fmt: skip
    heads = ("what", "ms, H200", "predicted", "speed", "ms, article's B200", "speed there")
    return table(heads, rows)


def times_of(row: dict, key: str) -> str:
    """A speed relative to BF16, where there is one."""
    return f"{row[key]:.2f} ×" if key in row else ""


def article_times() -> str:
    """Times of `fp4compile verify` beside the article's on a B200."""

    def rate(row: dict) -> str:
        if "tflops" in row:
            return f"{row['tflops']} TFLOP/s"
        return f"{row['gb_s']} GB/s" if "gb_s" in row else ""

    rows = [
        [r["what"], f"{r['ms']:.2f}", rate(r), f"{r['article_ms']:g}" if "article_ms" in r else ""]
        for r in load("h200-verify-timings")["timings"]
        if r["table"] in ("gemms", "quantize")
    ]
    heads = ("32,768 × 8192 → 32,768; 32,768²", "ms, H200", "rate", "ms, article's B200")
    return table(heads, rows)


TABLES: dict[str, Callable[[], str]] = {
    "readme-mlp": readme_mlp,
    "mlp": times(
        "d", "h200-mlp",
        ("d", "arm", "ms", "× BF16 compile", "peak GiB", "× BF16's peak"), 2,
    ),
    "gpt": times(
        "width", "h200-gpt",
        ("width", "arm", "ms a step", "× BF16 compile", "peak GiB", "× BF16's peak"), 1,
    ),
    "gpt2-medium": times(
        "width", "h200-gpt2-medium",
        ("width", "arm", "ms a step", "× BF16 compile", "peak GiB", "× BF16's peak"), 1,
    ),
    "kernels": kernels,
    "decode": decode,
    "compile": compile_time,
    "facts": facts,
    "formats": formats,
    "zeros": zeros,
    "transposition": transposition,
    "rounding": rounding,
    "gradients": gradients,
    "training": training,
    "peers": peers,
    "switched": switched,
    "article-times": article_times,
    "article-steps": article_steps,
    "late-switch": ablation("cpu-late-switch"),
    "ablation": ablated,
    "monitor": monitor,
    "calibrated": calibrated,
}  # fmt: skip


def rewritten(text: str) -> str:
    """A page with every marked table made anew."""

    def fill(match: re.Match) -> str:
        name = match[2]
        if name not in TABLES:
            raise SystemExit(f"tables: no table {name!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[name]()}{match[3]}"

    return MARKED.sub(fill, text)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, say what differs")
    args = parser.parse_args()
    different = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        wanted = rewritten(text)
        if text != wanted:
            different.append(page)
            if not args.check:
                path.write_text(wanted, encoding="utf-8")
    if args.check and different:
        sys.exit(f"tables: {', '.join(different)} differ from docs/results; run tables.py")


if __name__ == "__main__":
    main()
