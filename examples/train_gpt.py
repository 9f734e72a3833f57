"""Train one byte-level GPT in several precisions side by side, and show what 4 bits cost.

    python examples/train_gpt.py                            # on Python's own standard library
    python examples/train_gpt.py --data FILE                # on any other text
    python examples/train_gpt.py --arms my-policy.yaml nvidia

Every arm starts from the same weights and takes each step on the same batch as the others. The
first arm is plain `torch.compile`, the others add ``backend="fp4"`` and a policy. The arms share
the time they are given (--seconds-per-arm, compilation included), so all take equally many steps,
as many as fit; --steps fixes the number instead.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads sleep: few cores, many kernels

import loss_plot
import text_data
import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import fp4compile as fp4

HIGH = "high precision"
RECIPES = ("thinking-machines", "fp8-exact", "mxfp8")
# At 2e-3 the small model ends lower, but rounding costs it 0.02 nats instead of 0.01.
SIZES = {
    "cpu": {"layers": 4, "width": 128, "context": 64, "batch": 16, "lr": 1.2e-3},
    "cuda": {"layers": 12, "width": 1024, "context": 1024, "batch": 16, "lr": 3e-4},
}
WARMUP, DECAY = 20, 0.5  # steps; the last part of a run, over which the learning rate falls to zero
EVALUATIONS = 10  # held-out points on the way
CURVE_BATCHES, FINAL_BATCHES = 4, 32  # held-out batches of such a point, and of the last one

console = Console()


# The model ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, heads), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes [batch, context] to logits [batch, context, 256]; initial weights drawn by ``draw``."""

    def __init__(
        self, layers: int, width: int, context: int, draw: torch.Generator, heads: int | None = None
    ):
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.empty(context, width))
        heads = heads or max(width // 64, 1)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:  # as GPT-2: 0.02 at width 1024, less for what adds to the stream
                adds = name.endswith(("attn.proj.weight", "mlp.down.weight"))
                std = 0.64 / width**0.5 / (2 * layers) ** (adds / 2)
                nn.init.normal_(p, 0, std, generator=draw)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Arms ---------------------------------------------------------------------------------------------


@dataclass
class Arm:
    """One precision: a copy of the model, its optimizer, and what was measured."""

    name: str
    model: nn.Module
    compiled: nn.Module
    sampler: nn.Module  # the same precision without Inductor: one quick graph for single windows
    optimizer: torch.optim.Optimizer
    device: str
    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of each step; the first one compiles
    peak_bytes: int = 0

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte."""
        with autocast(self.device):
            logits = self.compiled(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, tokens: Tensor, targets: Tensor, lr: float) -> None:
        """One optimizer step, timed."""
        before, own = start_peak(self.device), self.resident_bytes()
        began = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - began)
        if before:  # the peak without what the other arms hold
            self.peak_bytes = max(self.peak_bytes, peak(self.device) - before + own)

    def evaluate(self, text: Tensor, n: int, size: dict) -> float:
        """Mean loss on ``n`` batches spread over ``text``; the training graph serves here too."""
        starts = text_data.spread_starts(text, n * size["batch"], size["context"])
        parts = text_data.batches(text, starts, size["batch"], size["context"], self.device)
        losses = [self.loss(tokens, targets).item() for tokens, targets in parts]
        return sum(losses) / len(losses)

    @torch.no_grad()
    def sample(self, prompt: str, n: int, context: int, draw: torch.Generator) -> str:
        """``prompt`` and ``n`` bytes after it, drawn at temperature 0.8."""
        text = list(prompt.encode())
        window = torch.zeros(1, context, dtype=torch.long, device=self.device)
        for _ in range(n):
            last = text[-context:]
            window[0, : len(last)] = torch.tensor(last)  # causal: the padding after it is not seen
            with autocast(self.device):
                logits = self.sampler(window)[0, len(last) - 1].float().cpu()
            text.append(int(torch.multinomial((logits / 0.8).softmax(0), 1, generator=draw)))
        return bytes(text).decode(errors="replace")

    def resident_bytes(self) -> int:
        """Of the parameters and the optimizer's state."""
        state = [t for s in self.optimizer.state.values() for t in s.values()]
        return sum(t.nbytes for t in (*self.model.parameters(), *state) if t.device.type != "cpu")

    @property
    def steps_per_second(self) -> float:
        """Without the first step, which compiles."""
        return len(self.seconds[1:]) / sum(self.seconds[1:]) if len(self.seconds) > 1 else 0.0


def make_arm(name: str, model: nn.Module, device: str, compiler: str) -> Arm:
    """The arm ``name``: `HIGH`, a recipe, or a policy file."""
    model = copy.deepcopy(model)
    if name == HIGH:
        compiled, sampler = torch.compile(model, backend=compiler), model
    else:
        # This is all that a training script changes.
        options = {"policy": policy(name), "compiler": compiler}
        compiled = torch.compile(model, backend="fp4", options=options)
        sampler = torch.compile(model, backend="fp4", options={**options, "compiler": "eager"})
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    return Arm(Path(name).stem, model, compiled, sampler, optimizer, device)


def policy(name: str) -> fp4.Policy:
    """A recipe by name, or a policy file."""
    return fp4.Policy.load(name) if name.endswith((".yaml", ".yml")) else fp4.Policy.recipe(name)


def autocast(device: str):
    """BF16 matrix products on a GPU, FP32 on a CPU; the parameters are FP32."""
    return torch.autocast(device, torch.bfloat16) if device == "cuda" else nullcontext()


def start_peak(device: str) -> int:
    """Bytes in use on a GPU now, where its peak is counted from; 0 on a CPU."""
    if device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(device: str) -> int:
    """The most bytes in use since `start_peak`."""
    return torch.cuda.max_memory_allocated()


# Training -----------------------------------------------------------------------------------------


def learning_rate(step: int, steps: int, top: float) -> float:
    """A short rise, constant, then a straight line down to zero."""
    return top * min((step + 1) / WARMUP, 1.0, (steps - step) / (DECAY * steps))


def train(arms: list[Arm], train_text: Tensor, held_text: Tensor, size: dict, args) -> None:
    """Step every arm on one batch after the other.

    Without --steps, their number is set anew from the measured time until the learning rate starts
    to fall: up to there the schedule does not depend on it.
    """
    draw = torch.Generator().manual_seed(args.seed)
    end = time.perf_counter() + len(arms) * args.seconds_per_arm
    steps, step, due, rounds = args.steps or 400, 0, 0, []
    with progress_bars() as bars:
        tasks = [bars.add_task(arm.name, total=steps, loss="", rate="") for arm in arms]
        while step < steps:
            began = time.perf_counter()
            starts = text_data.random_starts(train_text, size["batch"], size["context"], draw)
            batch = text_data.windows(train_text, starts, size["context"], args.device)
            for arm, task in zip(arms, tasks):
                if step == 0:
                    bars.update(task, loss="compiling")
                arm.step(*batch, learning_rate(step, steps, size["lr"]))
                show(bars, task, arm, size, steps)
            step += 1
            if step >= due:
                hold_out(arms, held_text, size, bars.console)
                due = step + max(steps // EVALUATIONS, 1)
            rounds = [*rounds[-100:], time.perf_counter() - began]
            if not args.steps and 1 < step < (1 - DECAY) * steps:
                left = (end - time.perf_counter()) / (sum(rounds[1:]) / len(rounds[1:]))
                steps = max(step + int(left), step + 1, 20)


def hold_out(arms: list[Arm], held_text: Tensor, size: dict, out: Console) -> None:
    """One line with the held-out loss of every arm, under a heading the first time."""
    step = len(arms[0].losses)
    if step == 1:
        out.print("held-out loss  " + "  ".join(arm.name for arm in arms), style="bold")
    for arm in arms:
        arm.held_out[step] = arm.evaluate(held_text, CURVE_BATCHES, size)
    losses = "  ".join(f"{arm.held_out[step]:{len(arm.name)}.3f}" for arm in arms)
    out.print(f"step {step:<8d}  {losses}", highlight=False)


def progress_bars() -> Progress:
    """One bar an arm: steps, loss, bytes a second, time left."""
    columns = ("[bold]{task.description}", "{task.fields[loss]}", "{task.fields[rate]}")
    name, loss, rate = (TextColumn(text) for text in columns)
    left = TimeRemainingColumn(elapsed_when_finished=True)
    return Progress(name, BarColumn(), MofNCompleteColumn(), loss, rate, left, console=console)


def show(bars: Progress, task, arm: Arm, size: dict, steps: int) -> None:
    recent = arm.losses[-20:]
    tokens = size["batch"] * size["context"] * arm.steps_per_second
    fields = {"loss": f"loss {sum(recent) / len(recent):.3f}", "rate": f"{tokens:,.0f} tokens/s"}
    bars.update(task, completed=len(arm.losses), total=steps, **fields)


# Results ------------------------------------------------------------------------------------------


def finish(arm: Arm, first: Arm, held_text: Tensor, size: dict, args) -> dict:
    """The arm's last held-out loss, a sample and what was measured, for table, picture and JSON."""
    step = len(arm.losses)
    loss = arm.held_out[step] = arm.evaluate(held_text, FINAL_BATCHES, size)
    draw = torch.Generator().manual_seed(args.seed)
    report = fp4.Report() if arm is first else fp4.explain(arm.compiled)
    return {
        "arm": arm.name,
        "steps": step,
        "held_out_loss": loss,
        "gap": loss - first.held_out[step],
        "steps_per_second": arm.steps_per_second,
        "compile_seconds": arm.seconds[0],
        "train_seconds": sum(arm.seconds),
        "peak_bytes": arm.peak_bytes,
        "kept_bytes": report.saved_bytes,
        "kept_bytes_original": report.original_bytes,
        "sample": arm.sample("def ", args.sample_bytes, size["context"], draw),
        "train_loss": arm.losses,
        "held_out": arm.held_out,
    }


def print_results(rows: list[dict], device: str) -> None:
    for row in rows:
        console.print(f"\n[bold]{row['arm']}[/] writes:")
        console.print(row["sample"], markup=False, highlight=False, soft_wrap=True)
    memory = "peak memory, MiB" if device == "cuda" else "MiB kept*"
    table = Table(title=f"\nafter {rows[0]['steps']} steps on the same batches", box=SIMPLE_HEAD)
    table.add_column("arm", no_wrap=True)
    for column in ("held-out loss", "gap", "steps/s", "compiled in", memory):
        table.add_column(column, justify="right", no_wrap=column == memory)
    for row in rows:
        table.add_row(
            row["arm"],
            f"{row['held_out_loss']:.4f}",
            f"{row['gap']:+.4f}" if row is not rows[0] else "",
            f"{row['steps_per_second']:.2f}",
            f"{row['compile_seconds']:.0f} s",
            f"{row['peak_bytes'] / 2**20:,.0f}" if device == "cuda" else kept(row),
        )
    console.print(table)
    if device == "cpu":
        console.print("* for backward by the rewritten layers, of the same in high precision")


def kept(row: dict) -> str:
    """MiB that an arm's rewritten layers keep for backward, of those in high precision."""
    if not row["kept_bytes_original"]:
        return ""
    return f"{row['kept_bytes'] / 2**20:.1f} of {row['kept_bytes_original'] / 2**20:.1f}"


# Command line -------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", metavar="FILE", help="text to train on (default: the standard library)")
    add("--arms", nargs="+", default=RECIPES, metavar="NAME", help="recipes or policy files")
    add("--seconds-per-arm", type=float, default=56, help="to compile and to train (default 56)")
    add("--steps", type=int, help="exactly so many steps, however long they take")
    for name in ("layers", "width", "context", "batch"):
        add(f"--{name}", type=int)
    add("--lr", type=float, help="highest learning rate")
    add("--sample-bytes", type=int, default=200, help="length of the samples (default 200)")
    add("--seed", type=int, default=0)
    add("--device", choices=("cpu", "cuda"))
    add("--compiler", choices=("inductor", "aot_eager", "eager"), default="inductor")
    add("--out", type=Path, default=Path("runs/demo"), help="for loss.png and results.json")
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return args


def run(args: argparse.Namespace) -> Path:
    """Train, print, write loss.png and results.json; the picture's path."""
    size = {key: getattr(args, key) or value for key, value in SIZES[args.device].items()}
    train_text, held_text = text_data.load(args.data, size["context"])
    probe = threading.Thread(target=probe_processor)
    if args.compiler == "inductor":
        probe.start()
    draw = torch.Generator().manual_seed(args.seed)
    model = GPT(size["layers"], size["width"], size["context"], draw).to(args.device)
    tokens = torch.zeros(size["batch"], size["context"], dtype=torch.long, device=args.device)
    reports = {name: fp4.explain(model, (tokens,), policy=policy(name)) for name in args.arms}
    for name, report in reports.items():
        text = str(report) if name == args.arms[0] else report.summary()
        console.print(f"\n{name}", style="bold", markup=False, highlight=False)
        console.print(text, markup=False, highlight=False)
    console.print()

    if args.compiler == "inductor":
        probe.join()
    arms = [make_arm(name, model, args.device, args.compiler) for name in (HIGH, *args.arms)]
    # Every arm compiles the one class GPT again, for training and for its sample.
    with torch._dynamo.config.patch(recompile_limit=8 * len(arms)):
        train(arms, train_text, held_text, size, args)
        rows = [finish(arm, arms[0], held_text, size, args) for arm in arms]
    args.out.mkdir(parents=True, exist_ok=True)
    config = {**vars(args), **size, "out": str(args.out), "torch": torch.__version__}
    (args.out / "results.json").write_text(json.dumps({"config": config, "arms": rows}, indent=1))
    loss_plot.draw(rows, subtitle(model, size, args), args.out / "loss.png")
    print_results(rows, args.device)
    return args.out / "loss.png"


def subtitle(model: nn.Module, size: dict, args: argparse.Namespace) -> str:
    """What was trained on what, for the picture."""
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    text = Path(args.data).name if args.data else "Python's standard library"
    batch = size["batch"] * size["context"]
    return f"{parameters:.1f} M parameters, bytes of {text}, {batch:,} a step, on {args.device}"


def probe_processor() -> None:
    """Inductor's trial of the CPU's vector instructions takes seconds of waiting: begun early."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    valid_vec_isa_list()


def main(argv: list[str] | None = None) -> None:
    try:
        picture = run(arguments(argv))
    except (text_data.DataError, fp4.Fp4Error) as error:
        sys.exit(f"train_gpt: {error}")
    console.print(f"\nloss curves: {picture}", soft_wrap=True)


if __name__ == "__main__":
    main()
