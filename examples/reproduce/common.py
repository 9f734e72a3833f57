"""What the scripts of this folder share: a trained model's tensors, results with their origin."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import text_data  # noqa: E402
import torch  # noqa: E402
import train_gpt  # noqa: E402
from torch import Tensor  # noqa: E402

RESULTS = ROOT / "docs" / "results"
SMALL = {"layers": 4, "width": 128, "context": 64, "batch": 16, "lr": 1.2e-3}


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every script has."""
    found = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    found.add_argument("--model", type=Path, help="weights from train.py; default: trains some")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--out", type=Path, help="the JSON file to write")
    found.add_argument("--data", help="text (default: the standard library)")
    return found


def machine(device: str) -> dict:
    """Where and with what a result was made."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else processor()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": name,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
    }


def processor() -> str:
    """The CPU's name and how many of its cores torch uses."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def write(args: argparse.Namespace, result: dict) -> None:
    """Print a result; write it to ``--out`` with the machine."""
    command = " ".join(["python", *map(str, sys.argv)])
    model = {"model": args.size} if "size" in args else {}
    full = {**machine(args.device), "command": command, **model, **result}
    text = json.dumps(full, indent=1)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    print(text)


def trained(args: argparse.Namespace, steps: int = 200) -> tuple[torch.nn.Module, dict]:
    """A GPT in high precision and its size: from ``--model``, or trained for ``steps`` here."""
    if args.model:
        saved = torch.load(args.model, map_location=args.device, weights_only=True)
        model = train_gpt.GPT(*_shape(saved["size"]), torch.Generator()).to(args.device)
        model.load_state_dict(saved["model"])
        return model, saved["size"]
    draw = torch.Generator().manual_seed(0)
    model = train_gpt.GPT(*_shape(SMALL), draw).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    text, _ = text_data.load(args.data, SMALL["context"])
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = train_gpt.learning_rate(step, steps, SMALL["lr"])
        loss_of(model, text, SMALL, draw, args.device).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, SMALL


def _shape(size: dict) -> tuple[int, int, int]:
    return size["layers"], size["width"], size["context"]


def loss_of(model, text: Tensor, size: dict, draw: torch.Generator, device: str) -> Tensor:
    """The loss of one random batch."""
    starts = text_data.random_starts(text, size["batch"], size["context"], draw)
    tokens, targets = text_data.windows(text, starts, size["context"], device)
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def mlp_tensors(args: argparse.Namespace, block: int = -1) -> dict[str, Tensor]:
    """FP32 matrices of one MLP in a trained model, from one batch of held-out text.

    ``w1`` [4d, d], ``w2`` [d, 4d]; ``x`` [M, d] into the MLP, ``h`` [M, 4d] after GELU; ``g``
    [M, d] and ``gz`` [M, 4d]: gradients of the MLP's output and of the tensor before GELU.
    """
    model, size = trained(args)
    args.size = size
    mlp, found = model.blocks[block].mlp, {}

    def keep(name: str, tensor: Tensor) -> None:
        found[name] = tensor.detach().float().flatten(0, -2)

    hooks = [
        mlp.up.register_forward_hook(lambda m, a, y: keep("x", a[0])),
        mlp.down.register_forward_hook(lambda m, a, y: keep("h", a[0])),
        mlp.down.register_full_backward_hook(lambda m, gx, gy: keep("g", gy[0])),
        mlp.up.register_full_backward_hook(lambda m, gx, gy: keep("gz", gy[0])),
    ]
    _, text = text_data.load(args.data, size["context"])
    loss_of(model, text, size, torch.Generator().manual_seed(7), args.device).backward()
    for hook in hooks:
        hook.remove()
    found["w1"], found["w2"] = mlp.up.weight.detach().float(), mlp.down.weight.detach().float()
    return found


def error(a: Tensor, b: Tensor) -> float:
    """Relative: the norm of a - b over that of b."""
    return float((a - b).norm() / b.norm())
