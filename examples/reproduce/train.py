"""Train one GPT in several precisions against the clock, one arm after the other.

    python examples/reproduce/train.py --out docs/results/reproduce-train.json
    python examples/reproduce/train.py --peers --seeds 1 --steps 60 --out docs/results/reproduce-peers.json

The article's setup scaled down: 4 blocks, 16 heads, context 256, 32,768 tokens a step, AdamW with
warm-up and decay; the MLPs in the arm's precision, all else BF16 under autocast. Finished arms are
in the JSON, an unfinished one in a checkpoint beside ``--runs``: the same command goes on. Held-out
loss and compilation are not on the clock.
"""  # noqa: E501

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import common
import text_data
import torch
import train_gpt
from arms import ARMS, OURS, PEERS, TRAINING, cross_entropy, policy_of
from torch import Tensor

import fp4compile as fp4

SIZES = {
    "cuda": {"layers": 4, "width": 2048, "heads": 16, "context": 256, "batch": 128, "lr": 3e-4},
    "cpu": {"layers": 2, "width": 64, "heads": 4, "context": 32, "batch": 8, "lr": 2e-3},
}
POINTS, HELD_OUT = 10, 8  # held-out losses on the way, and batches of each
SKIPPED = 3  # first steps, which compile and warm up: not on the clock


class Run:
    """One arm with one seed: what is trained, and what was measured so far."""

    def __init__(self, name: str, seed: int, size: dict, args) -> None:
        self.name, self.seed, self.size, self.args = name, seed, size, args
        torch._dynamo.reset()
        draw = torch.Generator().manual_seed(seed)
        shape = (size["layers"], size["width"], size["context"], draw, size["heads"])
        self.model, self.call = ARMS[name](train_gpt.GPT(*shape).to(args.device))
        fused = {"fused": True} if args.device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), **fused)
        self.draw = torch.Generator().manual_seed(1000 + seed)  # of the batches
        torch.manual_seed(seed)  # of the noise
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.held_out: dict[int, float] = {}
        self.path = args.runs / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}.pt"

    def step(self, text: Tensor, step: int) -> None:
        """One optimizer step, on the clock."""
        size, device = self.size, self.args.device
        starts = text_data.random_starts(text, size["batch"], size["context"], self.draw)
        tokens, targets = text_data.windows(text, starts, size["context"], device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.args.steps, size["lr"])
        synchronize(device)
        began = time.perf_counter()
        with train_gpt.autocast(device):
            loss = cross_entropy(self.call(tokens), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - began)

    def evaluate(self, text: Tensor, call=None) -> float:
        """Mean held-out loss; by ``call`` in the place of the arm's own forward."""
        call = self.call if call is None else call
        size, device = self.size, self.args.device
        starts = text_data.spread_starts(text, HELD_OUT * size["batch"], size["context"])
        parts = text_data.batches(text, starts, size["batch"], size["context"], device)
        losses = []
        with torch.no_grad(), train_gpt.autocast(device):
            for tokens, targets in parts:
                losses.append(cross_entropy(call(tokens), targets).item())
        return statistics.fmean(losses)

    def save(self) -> None:
        """A checkpoint to go on from."""
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "draw": self.draw.get_state(), "noise": random_state(self.args.device),
            "losses": self.losses, "seconds": self.seconds, "held_out": self.held_out,
            "size": self.size,
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.path)

    def load(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if not self.path.exists():
            return
        state = torch.load(self.path, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.draw.set_state(state["draw"].cpu())
        set_random_state(self.args.device, state["noise"])
        self.losses, self.seconds = state["losses"], state["seconds"]
        self.held_out = state["held_out"]

    def sample(self, n: int = 160) -> str:
        """Text that the trained arm writes."""
        arm = train_gpt.Arm("", self.model, self.call, self.call, self.optimizer, self.args.device)
        draw = torch.Generator().manual_seed(0)
        return arm.sample("def ", n, self.size["context"], draw)

    def result(self, text: Tensor) -> dict:
        """What was measured, for the JSON; the held-out loss in other precisions, too."""
        timed = self.seconds[SKIPPED:] or self.seconds
        row = {
            "arm": self.name, "seed": self.seed, "steps": len(self.losses),
            "ms": 1e3 * statistics.median(timed), "train_seconds": sum(timed),
            "first_step_seconds": self.seconds[0], "peak_gib": peak(self.args.device),
            "final_loss": statistics.fmean(self.losses[-20:]),
            "held_out_loss": self.held_out[len(self.losses)],
            "loss": [round(x, 4) for x in self.losses],
            "held_out": {str(k): round(v, 5) for k, v in self.held_out.items()},
            "sample": self.sample(),
        }  # fmt: skip
        if self.name == "bf16":
            row["switched"] = {name: self.switched(name, text) for name in OURS if "," not in name}
        return row

    def switched(self, name: str, text: Tensor) -> float:
        """Held-out loss of the finished weights with the forward pass of another arm."""
        torch._dynamo.reset()
        options = {"policy": policy_of(name)}
        return self.evaluate(text, torch.compile(self.model, backend="fp4", options=options))


def learning_rate(step: int, steps: int, top: float) -> float:
    """A rise over a tenth of the steps, constant, and a straight line to zero over three tenths."""
    return top * min((step + 1) / max(steps // 10, 1), 1.0, (steps - step) / (0.3 * steps))


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def random_state(device: str) -> Tensor:
    """Of the generator that the noise of stochastic rounding comes from."""
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def set_random_state(device: str, state: Tensor) -> None:
    """Set what `random_state` returned."""
    (torch.cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(state.cpu())


def peak(device: str) -> float:
    """The most GiB in use since the run began; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def train(run: Run, text: Tensor, held: Tensor, end: float) -> bool:
    """True once the run is finished; False if the time was over first, with a checkpoint saved."""
    run.load()
    steps = run.args.steps
    if run.args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    while len(run.losses) < steps:
        if time.perf_counter() > end:
            run.save()
            return False
        run.step(text, len(run.losses))
        done = len(run.losses)
        if done % max(steps // POINTS, 1) == 0 or done == steps:
            run.held_out[done] = run.evaluate(held)
            print(f"{run.name} {run.seed}: step {done} {run.held_out[done]:.4f}", flush=True)
    return True


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="NAME", help=", ".join(ARMS))
    parser.add_argument("--peers", action="store_true", help="the peers' arms")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--minutes", type=float, default=9, help="then stop; call again to go on")
    parser.add_argument("--runs", type=Path, default=Path("runs/reproduce"))
    for name in ("layers", "width", "heads", "context", "batch"):
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args(argv)
    end = time.perf_counter() + 60 * args.minutes
    given = {k: getattr(args, k, None) for k in SIZES[args.device]}
    size = {k: given[k] or v for k, v in SIZES[args.device].items()}
    names = args.arms or (PEERS if args.peers else TRAINING)
    args.out = args.out or args.runs / ("peers.json" if args.peers else "train.json")
    text, held = text_data.load(args.data, size["context"])
    old = json.loads(args.out.read_text()) if args.out.exists() else {}
    same = old.get("size") == size and old.get("steps") == args.steps
    rows = old["rows"] if same else []
    for seed in range(args.seeds):
        for name in names:
            if any(row["arm"] == name and row["seed"] == seed for row in rows):
                continue
            run = Run(name, seed, size, args)
            if not train(run, text, held, end):
                print(f"time is over in {name}, seed {seed}: call again to go on")
                return
            rows.append(run.result(held))
            if name == "bf16":
                run.save()
            else:
                run.path.unlink(missing_ok=True)
            parameters = sum(p.numel() for p in run.model.parameters())
            result = {"size": size, "steps": args.steps, "parameters": parameters, "rows": rows}
            write(args, result)
            del run


def write(args, result: dict) -> None:
    """The JSON file so far."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    full = {**common.machine(args.device), "fp4compile": fp4.__version__, **result}
    args.out.write_text(json.dumps(full, indent=1) + "\n")


if __name__ == "__main__":
    main()
