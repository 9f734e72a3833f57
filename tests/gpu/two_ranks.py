"""One of two ranks that train on GPUs: through NCCL, or on one GPU through gloo (DDP alone).

    python two_ranks.py RANK FOLDER ddp|fsdp2

Writes to FOLDER the gradients that the ranks agreed on and each rank's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp4compile as fp4

D, WORLD = 256, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def fresh(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6))).to(device)
    fp4.apply(model, fp4.Policy.recipe("fp8-exact"))
    return model


def step(model: nn.Module, call: nn.Module, rank: int, device: torch.device) -> dict:
    """Gradients by name of a step on the rank's own data, with its own noise."""
    torch.manual_seed(5 + rank)
    x = torch.randn(96, D, device=device)
    call(x).square().mean().backward()
    found = {}
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        found[name.removeprefix("module.")] = grad.cpu()
    return found


def main(rank: int, folder: Path, way: str) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    kind = "nccl" if torch.cuda.device_count() >= WORLD else "gloo"
    store = f"file://{folder}/store"
    dist.init_process_group(kind, init_method=store, rank=rank, world_size=WORLD)
    plain = fresh(device)
    alone = step(plain, torch.compile(plain, backend="fp4"), rank, device)
    torch._dynamo.reset()
    model = fresh(device)
    if way == "ddp":
        call = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend="fp4")
    else:
        mesh = init_device_mesh("cuda", (WORLD,))
        for block in model:
            block.compile(backend="fp4")
            fully_shard(block, mesh=mesh)
        call = fully_shard(model, mesh=mesh)
    together = step(model, call, rank, device)
    statuses = [(row.fqn, row.status, row.scheme_name) for row in fp4.explain(model)]
    torch.save({"alone": alone, "together": together, "rows": statuses}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
