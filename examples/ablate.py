"""Train one model many times, each arm under another policy, and show what each one costs.

    python examples/ablate.py                                    # examples/ablations.yaml, 3 seeds
    python examples/ablate.py --arms my-arms.yaml --seeds 5 --steps 1000
    python examples/ablate.py --device cuda --jobs 6 --minutes 8 # call it again to go on
    python examples/ablate.py --draw --out DIR                   # runs that another machine made

Arms of one seed share their initial weights and every batch. A finished run is a line of
OUT/runs.jsonl; runs that are there are not made again. OUT/ablation.png, OUT/table.txt and
OUT/results.json are written from the runs that there are, at the end of every call.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import text_data
import torch
import yaml
from loss_plot import COLOURS, NOTE, smooth
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from train_gpt import GPT, Arm, learning_rate

import fp4compile as fp4

HIGH = "high precision"
SIZES = {
    "cpu": {"layers": 4, "width": 128, "context": 64, "batch": 16, "steps": 300, "lr": 1.2e-3},
    "cuda": {"layers": 6, "width": 384, "context": 256, "batch": 32, "steps": 500, "lr": 1e-3},
}
POINTS = 10  # held-out points of a run, beside the beginnings of phases
CURVE_BATCHES, FINAL_BATCHES = 4, 32
console = Console()

Run = dict[str, Any]


# Arms ---------------------------------------------------------------------------------------------


def load_arms(path: Path) -> list[dict]:
    """The arms of a file, each with ``name``, ``group`` and ``policy`` (None: high precision)."""
    try:
        entries = yaml.safe_load(path.read_text())["arms"]
    except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
        raise text_data.DataError(f"{path}: no list of arms: {error}") from None
    arms = []
    for entry in entries:
        keys = dict(entry)
        name, group, perturb = keys.pop("name"), keys.pop("group", ""), keys.pop("perturb", 0.0)
        policy = {"version": 1, **keys} if keys else None
        if policy is not None:
            fp4.Policy.from_dict(policy)  # what is wrong with it is said now
        arms.append({"name": name, "group": group, "perturb": perturb, "policy": policy})
    names = [arm["name"] for arm in arms]
    if names[:1] != [HIGH] or arms[0]["policy"] or len(set(names)) < len(names):
        raise text_data.DataError(f"{path}: the first arm is {HIGH!r}, and names differ")
    return arms


def asked(arm: dict) -> dict:
    """What decides an arm's runs, for the file of runs."""
    return {"policy": arm["policy"], "perturb": arm["perturb"]}


def evaluations(arms: list[dict], steps: int) -> list[int]:
    """Steps after which every arm is evaluated: even shares, and where a phase begins."""
    points = {round(steps * i / POINTS) for i in range(1, POINTS + 1)}
    for arm in arms:
        points |= set(phase_starts(arm["policy"], steps))
    return sorted(points - {0})


def phase_starts(policy: dict | None, steps: int) -> list[int]:
    """Where a run of ``steps`` steps has to call `fp4.apply` again."""
    if policy is None:
        return []
    return [int(phase.from_step) for phase in fp4.Policy.from_dict(policy).for_steps(steps).phases]


# One run ------------------------------------------------------------------------------------------


def train(arm: dict, seed: int, size: dict, options: dict, points: list[int]) -> Run | None:
    """One arm from one seed; None where the time was over first."""
    torch.set_num_threads(options["threads"])
    text, held = texts(options["data"], size["context"])
    draw = torch.Generator().manual_seed(seed)
    model = GPT(size["layers"], size["width"], size["context"], draw)
    if arm["perturb"]:
        noise = torch.Generator().manual_seed(99)
        with torch.no_grad():
            for p in model.parameters():
                p *= 1 + arm["perturb"] * torch.randn(p.shape, generator=noise)
    model.to(options["device"])
    policy = fp4.Policy.from_dict(arm["policy"]) if arm["policy"] else None
    policy = policy.for_steps(size["steps"]) if policy else None
    compile_blocks(model, policy, options["compiler"])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    run = Arm(arm["name"], model, model, model, optimizer, options["device"])
    batches = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)  # the noise of stochastic rounding
    switches = phase_starts(arm["policy"], size["steps"])
    began, held_out = time.time(), {}
    for step in range(size["steps"]):
        if time.time() > options["deadline"]:
            return None
        if step in switches:
            fp4.apply(model, policy, step=step)
        starts = text_data.random_starts(text, size["batch"], size["context"], batches)
        batch = text_data.windows(text, starts, size["context"], options["device"])
        run.step(*batch, learning_rate(step, size["steps"], size["lr"]))
        if step + 1 in points:
            last = step + 1 == size["steps"]
            held_out[step + 1] = run.evaluate(held, FINAL_BATCHES if last else CURVE_BATCHES, size)
    quantized = fp4.explain(model).rewritten if policy else []
    return {
        "arm": arm["name"], "seed": seed, "asked": asked(arm),
        "held_out": held_out, "train_loss": run.losses,
        "seconds": round(time.time() - began, 1), "steps_per_second": run.steps_per_second,
        "quantized": [row.fqn for row in quantized],
    }  # fmt: skip


texts = functools.cache(text_data.load)  # once a process


def compile_blocks(model: GPT, policy: fp4.Policy | None, compiler: str) -> None:
    """Block by block: blocks of one precision share a graph, so that little is to be compiled."""
    if policy is not None:
        fp4.apply(model, policy, step=0)
    for block in model.blocks:
        if policy is not None:
            block.compile(backend="fp4", options={"compiler": compiler})
        elif compiler != "eager":
            block.compile(backend=compiler)


# All runs -----------------------------------------------------------------------------------------


def make_runs(arms: list[dict], args: argparse.Namespace, size: dict, done: list[Run]) -> None:
    """Make the runs that are missing, seed by seed, and append each to ``done`` and to the file."""
    known = {(run["arm"], run["seed"]) for run in done}
    pairs = [(arm, seed) for seed in range(args.seeds) for arm in arms]
    todo = [(arm, seed) for arm, seed in pairs if (arm["name"], seed) not in known]
    end = time.time() + 60 * args.minutes if args.minutes else math.inf
    options = {
        "data": args.data, "device": args.device, "compiler": args.compiler, "deadline": end,
        "threads": max((os.cpu_count() or 1) // args.jobs, 1) if args.jobs > 1 else
        torch.get_num_threads(),
    }  # fmt: skip
    points = evaluations(arms, size["steps"])
    total, longest = len(pairs), 0.0
    with open(args.out / "runs.jsonl", "a") as file, executor(args.jobs) as pool:
        running: set[Future] = set()
        while todo or running:
            while todo and len(running) < args.jobs and time.time() + longest < end:
                arm, seed = todo.pop(0)
                running.add(pool.submit(train, arm, seed, size, options, points))
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for run in (future.result() for future in finished):
                if run is None:
                    continue
                longest = max(longest, run["seconds"])
                done.append(run)
                file.write(json.dumps(run) + "\n")
                file.flush()
                last = run["held_out"][max(run["held_out"])]
                console.print(
                    f"{len(done):3} of {total}  seed {run['seed']}  {run['arm']}: {last:.4f} after"
                    f" {run['seconds']:.0f} s, {run['steps_per_second']:.1f} steps/s",
                    highlight=False,
                )


class Here:
    """Runs in this process, one after the other."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def submit(self, function: Any, *args: Any) -> Future:
        future: Future = Future()
        future.set_result(function(*args))
        return future


def executor(jobs: int) -> Any:
    """``jobs`` processes that each compile and train for themselves."""
    if jobs == 1:
        return Here()
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


# Results ------------------------------------------------------------------------------------------


def gaps(runs: list[Run], arm: str, step: int | None = None) -> list[float]:
    """Held-out loss above high precision's of the same seed, after ``step`` (None: at the end)."""
    by_seed = {run["seed"]: run["held_out"] for run in runs if run["arm"] == HIGH}
    found = []
    for run in runs:
        if run["arm"] == arm and run["seed"] in by_seed:
            at = step if step is not None else max(map(int, run["held_out"]))
            found.append(_at(run["held_out"], at) - _at(by_seed[run["seed"]], at))
    return found


def _at(held_out: dict, step: int) -> float:
    return held_out[step] if step in held_out else held_out[str(step)]  # as read from JSON


def rows(arms: list[dict], runs: list[Run], steps: int) -> list[dict]:
    """A row for each arm: its gaps by seed, their mean and spread; before its phase, too."""
    found = []
    for arm in arms[1:]:
        final = gaps(runs, arm["name"])
        if not final:
            continue
        starts = phase_starts(arm["policy"], steps)
        before = gaps(runs, arm["name"], starts[0]) if starts else []
        mine = [run for run in runs if run["arm"] == arm["name"]]
        found.append({
            "arm": arm["name"], "group": arm["group"], "policy": arm["policy"], "gaps": final,
            "mean": statistics.mean(final), "sd": spread(final), "before": before,
            "quantized": len(mine[0]["quantized"]),
            "steps_per_second": statistics.median(run["steps_per_second"] for run in mine),
        })  # fmt: skip
    return found


def spread(values: list[float]) -> float | None:
    """The standard deviation over seeds; None for a single one."""
    return statistics.stdev(values) if len(values) > 1 else None


def table(results: list[dict], baseline: list[Run]) -> Table:
    """Gaps in thousandths of a nat."""
    losses = ", ".join(f"{_at(r['held_out'], max(map(int, r['held_out']))):.4f}" for r in baseline)
    title = f"\nheld-out loss above high precision ({losses}), nats x 1000"
    shown = Table(title=title, box=SIMPLE_HEAD)
    for name in ("arm", "mean", "sd", "by seed", "before the phase", "steps/s"):
        shown.add_column(name, justify="left" if name == "arm" else "right")
    for i, row in enumerate(results):
        if i and row["group"] != results[i - 1]["group"]:
            shown.add_section()
        shown.add_row(
            row["arm"], f"{1000 * row['mean']:+.1f}",
            "" if row["sd"] is None else f"{1000 * row['sd']:.1f}",
            " ".join(f"{1000 * g:+.1f}" for g in row["gaps"]),
            " ".join(f"{1000 * g:+.1f}" for g in row["before"]), f"{row['steps_per_second']:.1f}",
        )  # fmt: skip
    return shown


def draw(arms: list[dict], runs: list[Run], about: str, path: Path) -> None:
    """One panel a group: the gap of the training loss, mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    there = {run["arm"] for run in runs}
    groups = dict.fromkeys(arm["group"] for arm in arms[1:] if arm["name"] in there)
    if not groups:
        return
    columns = min(len(groups), 2)
    lines = -(-len(groups) // columns)
    fig, all_axes = plt.subplots(
        lines, columns, figsize=(6.5 * columns, 3.6 * lines + 0.6), squeeze=False, sharex=True,
        layout="constrained",
    )  # fmt: skip
    for axes in all_axes.flat[len(groups) :]:
        axes.remove()
    for axes, group in zip(all_axes.flat, groups):
        of = group.partition("late switch of ")[2]  # an arm that may be in another panel
        mine = [arm for arm in arms[1:] if group == arm["group"] or arm["name"] == of]
        mine = [arm for arm in mine if arm["name"] in there]
        panel(axes, mine, runs)
        axes.set_title(group, **NOTE)
    fig.suptitle(f"Training loss above high precision\n{about}", fontsize=9)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def panel(axes: Any, arms: list[dict], runs: list[Run]) -> None:
    base = {run["seed"]: run["train_loss"] for run in runs if run["arm"] == HIGH}
    top = 0.0
    for i, arm in enumerate(arms):
        curves = []
        for run in runs:
            if run["arm"] == arm["name"] and run["seed"] in base:
                off = [a - b for a, b in zip(run["train_loss"], base[run["seed"]])]
                window = max(len(off) // 10, 1)
                curves.append(smooth(off, window)[window - 1 :])
        if not curves:
            continue
        steps = range(window, window + len(curves[0]))
        colour = COLOURS[i % len(COLOURS)]
        mean = [statistics.mean(values) for values in zip(*curves)]
        axes.plot(steps, mean, color=colour, lw=1.8, label=arm["name"])
        low, high = ([f(values) for values in zip(*curves)] for f in (min, max))
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
        top = max(top, *map(abs, mean[len(mean) // 4 :]))
    axes.axhline(0, color=COLOURS[0], lw=1)
    axes.set(xlabel="step", ylabel="nats", ylim=(-0.6 * top or None, 1.6 * top or None))
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", ncols=2)


# Command line -------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--arms", type=Path, default=Path(__file__).with_name("ablations.yaml"), metavar="FILE")
    add("--only", nargs="+", metavar="NAME", help="these arms (and high precision)")
    add("--seeds", type=int, default=3)
    for name in ("layers", "width", "context", "batch", "steps"):
        add(f"--{name}", type=int)
    add("--lr", type=float, help="highest learning rate")
    add("--data", metavar="FILE", help="text to train on (default: the standard library)")
    add("--device", choices=("cpu", "cuda"))
    add("--compiler", choices=("inductor", "aot_eager", "eager"))
    add("--jobs", type=int, default=1, help="processes that train at a time")
    add("--minutes", type=float, help="begin no run that would not end by then")
    add("--draw", action="store_true", help="make no run: table and figure of what is in OUT")
    add("--out", type=Path, default=Path("runs/ablation"))
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.compiler = args.compiler or ("inductor" if args.device == "cuda" else "eager")
    return args


def resume(args: argparse.Namespace, config: dict) -> list[Run]:
    """The runs of OUT, which have to be of ``config``; with --draw, ``config`` becomes theirs."""
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "config.json"
    if args.draw and path.exists():
        config.update(json.loads(path.read_text()))
    if path.exists() and json.loads(path.read_text()) != config:
        raise text_data.DataError(f"{args.out} holds runs of another configuration; use --out")
    path.write_text(json.dumps(config, indent=1) + "\n")
    file = args.out / "runs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run(args: argparse.Namespace) -> list[dict]:
    """Make what is missing, then the table, the figure and results.json; the table's rows."""
    arms = load_arms(args.arms)
    if args.only:
        unknown = set(args.only) - {arm["name"] for arm in arms}
        if unknown:
            raise text_data.DataError(f"{args.arms}: no arm is called {sorted(unknown)[0]!r}")
        arms = [arm for arm in arms if arm["name"] in (HIGH, *args.only)]
    size = {key: getattr(args, key) or value for key, value in SIZES[args.device].items()}
    gpu = torch.cuda.get_device_name() if args.device == "cuda" and not args.draw else args.device
    config = {**size, "device": gpu, "compiler": args.compiler, "data": args.data}
    config["torch"] = torch.__version__
    done = resume(args, config)
    now = {arm["name"]: asked(arm) for arm in arms}
    for each in done:
        wanted = now.get(each["arm"])  # None: an arm that is not asked for
        if wanted is not None and each.get("asked", wanted) != wanted:
            raise text_data.DataError(
                f"{args.out} holds runs of arm {each['arm']!r} with another policy; use --out"
            )
    size = {key: config[key] for key in size}
    if not args.draw:
        make_runs(arms, args, size, done)
    done = [r for r in done if r["seed"] < args.seeds]
    results = rows(arms, done, size["steps"])
    shown = table(results, [r for r in done if r["arm"] == HIGH])
    console.print(shown)
    with open(args.out / "table.txt", "w") as file:
        Console(file=file, width=120).print(shown)
    seeds = len({r["seed"] for r in done})
    about = (
        f"{size['layers']} blocks of width {size['width']}, {size['batch'] * size['context']:,}"
        f" bytes a step, {config['device']}; mean and range, seeds: {seeds}"
    )
    try:
        draw(arms, done, about, args.out / "ablation.png")
    except ImportError as error:
        console.print(f"no figure: {error}; --draw makes it where matplotlib is")
    seconds = {f"{r['arm']}, {r['seed']}": r["seconds"] for r in done}
    held_out: dict = {}
    for r in done:
        held_out.setdefault(r["arm"], {})[r["seed"]] = r["held_out"]
    summary = {"config": config, "rows": results, "held_out": held_out, "seconds": seconds}
    (args.out / "results.json").write_text(json.dumps(summary, indent=1))
    return results


def main(argv: list[str] | None = None) -> None:
    try:
        run(arguments(argv))
    except (text_data.DataError, fp4.Fp4Error) as error:
        sys.exit(f"ablate: {error}")


if __name__ == "__main__":
    main()
